"""What the configuration asks for, and what the tiers need of a host."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients.cli.doctor.host import Host, User
from kvferry.clients.cli.doctor.kernel import GIB
from kvferry.clients.cli.doctor.needs import Needs, read_needs
from kvferry.clients.cli.doctor.tiers import check_disk_tier, check_master
from tests.clients.cli.doctor.fake_host import GIB_IN_KIB, ROOT, WORKER, make_host, needs_of

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


ME = User("me", os.geteuid(), frozenset({os.getegid()}))


def disk_host(root: Path, mode: int, user: User = ME) -> Host:
    folder = root / "srv/blocks"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    return make_host(root, user=user)


def on_disk(max_bytes: int = 1 << 20) -> Needs:
    return needs_of(f'[tiers.disk]\npath = "/srv/blocks"\nmax_bytes = {max_bytes}')


@pytest.mark.parametrize(
    ("mode", "state", "found"),
    [
        (0o700, "ok", "/srv/blocks: "),
        (0o750, "warning", "mode 0750"),
        (0o770, "missing", "mode 0770"),
        (0o707, "missing", "mode 0707"),
    ],
)
def test_whose_the_folder_is(tmp_path: Path, mode: int, state: str, found: str) -> None:
    finding = check_disk_tier(disk_host(tmp_path, mode), on_disk(), 0)
    assert finding is not None
    assert (finding.state, finding.found.find(found) >= 0) == (state, True)
    assert ("chmod 0700" in finding.fix) is (state != "ok")


def test_a_folder_in_one_that_others_write_is_refused_as_the_daemon_does(tmp_path: Path) -> None:
    (tmp_path / "open" / "blocks").mkdir(parents=True)
    (tmp_path / "open" / "blocks").chmod(0o700)
    (tmp_path / "open").chmod(0o777)
    needs = needs_of(f'[tiers.disk]\npath = "{tmp_path}/open/blocks"\nmax_bytes = "1MiB"')
    finding = check_disk_tier(Host.this_one(), needs, 0)
    assert finding is not None
    assert (finding.state, "could put another folder" in finding.found) == ("missing", True)


def test_another_users_folder(tmp_path: Path) -> None:
    finding = check_disk_tier(disk_host(tmp_path, 0o700, WORKER), on_disk(), 0)
    assert finding is not None
    assert (finding.state, "not to worker" in finding.found) == ("missing", True)
    assert finding.fix == "chown worker /srv/blocks; chmod 0700 /srv/blocks"


def test_root_asks_for_whom(tmp_path: Path, require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root alone may give a folder away")
    host = disk_host(tmp_path, 0o700, ROOT)
    os.chown(tmp_path / "srv/blocks", WORKER.uid, -1)
    finding = check_disk_tier(host, on_disk(), 0)
    assert finding is not None
    assert (finding.state, "--user" in finding.fix) == ("warning", True)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    lacking = check_disk_tier(make_host(tmp_path), on_disk(), 0)
    file = check_disk_tier(make_host(tmp_path, {"/srv/blocks": ""}, user=ME), on_disk(), 0)
    assert lacking is not None
    assert file is not None
    assert (lacking.state, lacking.found) == ("missing", "/srv/blocks: No such file or directory")
    assert "install -d -m 0700 -o root /srv/blocks" in lacking.fix
    assert (file.state, file.found) == ("missing", "/srv/blocks is not a directory")


@pytest.mark.parametrize(("used_bytes", "state"), [(0, "warning"), (1 << 61, "ok")])
def test_space(tmp_path: Path, used_bytes: int, state: str) -> None:
    finding = check_disk_tier(disk_host(tmp_path, 0o700), on_disk(1 << 50), used_bytes)
    assert finding is not None
    assert finding.state == state
    assert "tiers.disk.max_bytes is 1048576.0 GiB" in finding.found


def test_the_master_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
        finding = check_master(needs_of(f'[tiers.remote]\ntransport = "mooncake_store"\nmaster = "{master}"'))
    assert finding is not None
    assert (finding.state, finding.found.startswith(f"{master} accepts connections")) == ("ok", True)
