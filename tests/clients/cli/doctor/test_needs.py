"""What the configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from kvferry.clients.cli.doctor.kernel import GIB
from kvferry.clients.cli.doctor.needs import Needs, read_needs
from tests.clients.cli.doctor.fake_host import GIB_IN_KIB, make_host

FULL: Final = """
[pools]
max_bytes = "1.5GiB"
[peers]
listen = "tcp://127.0.0.1:7801"
[network]
transport = "mooncake"
protocol = "ascend"
[tiers]
host_bytes = "1 GiB"
[tiers.remote]
transport = "mooncake_store"
"""
FILE: Final = Path("/etc/kvferry/a.toml")


def test_none_given(tmp_path: Path) -> None:
    needs, finding = read_needs(make_host(tmp_path), None, npu=True)
    assert needs == Needs(npu_asked=True)
    assert (finding.state, finding.found) == ("ok", "none given, defaults")
    _, finding = read_needs(make_host(tmp_path, {"/etc/kvferry/main.toml": ""}), None, npu=False)
    assert "/etc/kvferry/main.toml" in finding.found


def test_a_file_that_the_daemon_accepts(tmp_path: Path) -> None:
    host = make_host(tmp_path, {str(FILE): FULL})
    needs, finding = read_needs(host, FILE, npu=False)
    assert (finding.state, finding.found) == ("ok", str(FILE))
    assert (needs.mooncake, needs.store, needs.asks_for_npu) == (True, True, True)  # ascend works on nothing else
    assert (needs.pool_bytes(host), needs.host_tier_bytes(host)) == (3 << 29, 1 << 30)
    assert needs.config.peers.listen == "tcp://127.0.0.1:7801"


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("[pools]\nmax_byte = 1\n", ("max_byte",)),
        ("[network]\ndirect = true\n", ("network.direct",)),
        ("[limits]\nmax_transfers_per_session = 0\n", ("max_transfers_per_session = 0: must be a whole number",)),
        ("[tiers]\npolicy = 'fifo'\n", ('tiers.policy = "fifo": must be "lru" or "reuse"',)),
        ("[tiers]\npolicy = 'fifo'\n[pools]\nmax_bytes = '1TB'\n[transfers]\nthreads = 4\n",
         ("tiers.policy", "transfers: unknown key", "pools.max_bytes")),
        ("[pools\n", ("",)),
        (None, ("No such file",)),
    ],
)  # fmt: skip
def test_a_file_that_the_daemon_refuses(tmp_path: Path, text: str | None, reasons: tuple[str, ...]) -> None:
    _, finding = read_needs(make_host(tmp_path, {} if text is None else {str(FILE): text}), FILE, npu=False)
    assert finding.state == "missing"
    assert finding.found.startswith(f"{FILE}: the daemon refuses it: ")
    assert all(reason in finding.found for reason in ("CONFIG", *reasons))


def test_of_a_file_with_mistakes_the_rest_counts(tmp_path: Path) -> None:
    host = make_host(tmp_path, {str(FILE): "[tiers]\npolicy = 'fifo'\nhost_bytes = 4096\n"})
    assert read_needs(host, FILE, npu=False)[0].host_tier_bytes(host) == 4096


def test_pools_take_four_fifths_by_default_and_the_host_tier_a_tenth(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/proc/meminfo": f"MemTotal: {10 * GIB_IN_KIB} kB\n"})
    assert (Needs().pool_bytes(host), Needs().host_tier_bytes(host)) == (8 * GIB, GIB)
    assert Needs().pool_bytes(make_host(tmp_path / "other")) == 0
