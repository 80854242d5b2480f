"""What the configuration asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.clients.cli.doctor.kernel import GIB
from kvferry.clients.cli.doctor.needs import Needs, read_needs
from tests.clients.cli.doctor.fake_host import GIB_IN_KIB, make_host

FULL = """
runtime_dir = "/run/other"
[pools]
max_bytes = "1.5GiB"
[peers]
listen = "tcp://127.0.0.1:7801"
[network]
transport = "mooncake"
protocol = "ascend"
[tiers]
host_bytes = "1 GiB"
[tiers.disk]
path = "/srv/blocks"
max_bytes = 2000000
[tiers.remote]
transport = "mooncake_store"
master = "10.0.0.9:50051"
segment_bytes = "16MiB"
address = "10.0.0.3"
"""


def test_none_given(tmp_path: Path) -> None:
    needs, finding = read_needs(make_host(tmp_path), None, npu=True)
    assert needs == Needs(npu_asked=True)
    assert (finding.state, finding.found) == ("ok", "none given, defaults")


def test_none_given_where_there_is_one(tmp_path: Path) -> None:
    _, finding = read_needs(make_host(tmp_path, {"/etc/kvferry/main.toml": ""}), None, npu=False)
    assert "/etc/kvferry/main.toml" in finding.found


def test_a_file_that_the_daemon_accepts(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/etc/kvferry/a.toml": FULL})
    needs, finding = read_needs(host, Path("/etc/kvferry/a.toml"), npu=False)
    assert (finding.state, finding.found) == ("ok", "/etc/kvferry/a.toml")
    assert (needs.config.runtime_dir, needs.config.peers.listen) == ("/run/other", "tcp://127.0.0.1:7801")
    assert needs.mooncake
    assert needs.asks_for_npu  # ascend works on nothing else
    assert needs.pool_bytes(host) == 3 << 29
    assert (needs.host_tier_bytes(host), needs.config.tiers.disk.path, needs.config.tiers.disk.max_bytes) == (
        1 << 30,
        "/srv/blocks",
        2_000_000,
    )
    assert needs.store
    assert (needs.config.tiers.remote.master, needs.config.tiers.remote.segment_bytes) == ("10.0.0.9:50051", 16 << 20)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[pools]\nmax_byte = 1\n", "max_byte"),
        ("[network]\ndirect = true\n", "network.direct"),
        (
            "[limits]\nmax_transfers_per_session = 0\n",
            "max_transfers_per_session = 0: must be a whole number from 1",
        ),
        ("[tiers]\npolicy = 'fifo'\n", 'tiers.policy = "fifo": must be "lru" or "sieve"'),
        ("[pools]\nmax_bytes = 'x'\n", "max_bytes"),
        ("[pools\n", ""),
    ],
)
def test_a_file_that_the_daemon_refuses(tmp_path: Path, text: str, reason: str) -> None:
    host = make_host(tmp_path, {"/a.toml": text})
    _, finding = read_needs(host, Path("/a.toml"), npu=False)
    assert finding.state == "missing"
    assert finding.found.startswith("/a.toml: the daemon refuses it: ")
    assert reason in finding.found
    assert "CONFIG" in finding.found


def test_of_a_file_with_mistakes_all_are_named_and_the_rest_counts(tmp_path: Path) -> None:
    text = "[tiers]\npolicy = 'fifo'\nhost_bytes = 4096\n[transfers]\nthreads = 4\n[pools]\nmax_bytes = '1TB'\n"
    host = make_host(tmp_path, {"/a.toml": text})
    needs, finding = read_needs(host, Path("/a.toml"), npu=False)
    assert needs.host_tier_bytes(host) == 4096
    assert all(key in finding.found for key in ("tiers.policy", "transfers: unknown key", "pools.max_bytes"))


def test_no_such_file(tmp_path: Path) -> None:
    needs, finding = read_needs(make_host(tmp_path), Path("/none.toml"), npu=False)
    assert needs == Needs()
    assert finding.state == "missing"
    assert "No such file" in finding.found


def test_pools_take_four_fifths_by_default_and_the_host_tier_a_tenth(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/proc/meminfo": f"MemTotal: {10 * GIB_IN_KIB} kB\n"})
    assert Needs().pool_bytes(host) == 8 * GIB
    assert Needs().host_tier_bytes(host) == GIB
    assert Needs().pool_bytes(make_host(tmp_path / "other")) == 0
