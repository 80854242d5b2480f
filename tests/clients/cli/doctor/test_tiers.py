"""What the tiers need, on hosts that have it and hosts that do not."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.clients.cli.doctor.host import Host, User
from kvferry.clients.cli.doctor.kernel import GIB
from kvferry.clients.cli.doctor.needs import Needs
from kvferry.clients.cli.doctor.tiers import check_disk_tier, check_host_tier, check_master
from kvferry.clients.cli.doctor.wheels import check_store_module
from kvferry.protocol.config.schema import DiskTierConfig, NetworkConfig, PoolsConfig, RemoteTierConfig, TiersConfig
from tests.clients.cli.doctor.fake_host import GIB_IN_KIB, ROOT, WORKER, make_host, needs_of, script

STORE = RemoteTierConfig(transport="mooncake_store", address="10.0.0.3")
MEMORY = {"/proc/meminfo": f"MemTotal: {100 * GIB_IN_KIB} kB\n"}
ME = User("me", os.geteuid(), frozenset({os.getegid()}))


# -- the host tier


@pytest.mark.parametrize(
    ("tiers", "state", "found"),
    [
        (TiersConfig(), "ok", "10.0 GiB for snapshots and cached blocks; with pools 60.0 GiB of 100.0 GiB"),
        (TiersConfig(host_bytes=50 * GIB), "ok", "with pools 100.0 GiB of 100.0 GiB"),
        (TiersConfig(host_bytes=51 * GIB), "warning", "with pools 101.0 GiB of 100.0 GiB"),
        (TiersConfig(host_bytes=101 * GIB), "missing", "of 100.0 GiB of memory"),
        (TiersConfig(host_bytes=47 * GIB, remote=STORE), "warning", "4.0 GiB for the store of all nodes"),
        (TiersConfig(host_bytes=0), "ok", "none"),
        (TiersConfig(host_bytes=0, disk=DiskTierConfig(path="/x")), "missing", "tiers.disk needs it"),
        (TiersConfig(host_bytes=0, remote=STORE), "missing", "tiers.remote needs it"),
    ],
)
def test_host_tier(tmp_path: Path, tiers: TiersConfig, state: str, found: str) -> None:
    finding = check_host_tier(make_host(tmp_path, MEMORY), needs_of(pools=PoolsConfig(max_bytes=50 * GIB), tiers=tiers))
    assert finding.state == state
    assert found in finding.found
    assert bool(finding.fix) is (state != "ok")


@pytest.mark.parametrize("host_bytes", [None, GIB])
def test_a_memory_of_unknown_size(tmp_path: Path, host_bytes: int | None) -> None:
    assert check_host_tier(make_host(tmp_path), needs_of(tiers=TiersConfig(host_bytes=host_bytes))).state == "unknown"


# -- the disk tier


def disk_host(root: Path, mode: int, user: User = ME) -> Host:
    folder = root / "srv/blocks"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    return make_host(root, user=user)


def on_disk(max_bytes: int = 1) -> Needs:
    return needs_of(tiers=TiersConfig(disk=DiskTierConfig(path="/srv/blocks", max_bytes=max_bytes)))


def test_no_disk_tier(tmp_path: Path) -> None:
    assert check_disk_tier(make_host(tmp_path), needs_of(), 0) is None


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
    finding = check_disk_tier(disk_host(tmp_path, 0o700), on_disk(1 << 61), used_bytes)
    assert finding is not None
    assert finding.state == state
    assert "tiers.disk.max_bytes is 2147483648.0 GiB" in finding.found


# -- the remote tier


@pytest.fixture
def master() -> Iterator[int]:
    """Return a port of the loopback that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_no_remote_tier(tmp_path: Path) -> None:
    assert check_store_module(make_host(tmp_path), needs_of()) is None
    assert check_master(needs_of()) is None


def test_the_store_is_imported(tmp_path: Path) -> None:
    python = [script(tmp_path / "python", 'test "$2" = "import mooncake.store"')]
    finding = check_store_module(make_host(tmp_path, python=python), needs_of(tiers=TiersConfig(remote=STORE)))
    assert finding is not None
    assert finding.state == "ok"


def test_a_store_that_cannot_be_imported(tmp_path: Path) -> None:
    failing = "echo 'ImportError: libcurl.so.4: cannot open shared object file' >&2; exit 1"
    host = make_host(tmp_path, python=[script(tmp_path / "python", failing)])
    finding = check_store_module(host, needs_of(tiers=TiersConfig(remote=STORE)))
    assert finding is not None
    assert (finding.state, "libcurl.so.4" in finding.found) == ("missing", True)
    assert "apt-get install libcurl4" in finding.fix


def test_the_store_needs_an_address(tmp_path: Path) -> None:
    host = make_host(tmp_path, python=[script(tmp_path / "python", "exit 0")])
    nowhere = RemoteTierConfig(transport="mooncake_store")
    finding = check_store_module(host, needs_of(tiers=TiersConfig(remote=nowhere)))
    assert finding is not None
    assert (finding.state, "tiers.remote.address" in finding.fix) == ("missing", True)
    network = NetworkConfig(transport="mooncake", address="10.0.0.3")
    found = check_store_module(host, needs_of(network=network, tiers=TiersConfig(remote=nowhere)))
    assert found is not None
    assert found.state == "ok"


def test_the_master_is_reached(master: int) -> None:
    needs = needs_of(
        tiers=TiersConfig(remote=RemoteTierConfig(transport="mooncake_store", master=f"127.0.0.1:{master}"))
    )
    finding = check_master(needs)
    assert finding is not None
    assert (finding.state, finding.found.startswith(f"127.0.0.1:{master} accepts connections")) == ("ok", True)


@pytest.mark.parametrize("master", ["127.0.0.1:0", "[::1]:0", "127.0.0.1:99999"])
def test_a_master_that_is_away(master: str) -> None:
    finding = check_master(
        needs_of(tiers=TiersConfig(remote=RemoteTierConfig(transport="mooncake_store", master=master)))
    )
    assert finding is not None
    assert (finding.state, "mooncake_master" in finding.fix) == ("warning", True)
    assert finding.found.startswith(f"{master}: ")
