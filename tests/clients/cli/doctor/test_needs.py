"""What the configuration asks for, of the tiers' folders and of the unit; and no advice harms a host."""

# ruff: noqa: S108  temporary folders are named, of hosts that are folders

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvferry.clients.cli.doctor.host import Host, User
from kvferry.clients.cli.doctor.kernel import GIB
from kvferry.clients.cli.doctor.needs import Needs, read_needs
from kvferry.clients.cli.doctor.tiers import check_disk_tier, check_master
from kvferry.clients.cli.doctor.unit import check_unit, check_unit_environment, read_unit
from kvferry.pools.tiers.block_file import LOCK_FILE
from tests.clients.cli.doctor.fake_host import GIB_IN_KIB, WORKER, make_host, needs_of, npu_files

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


def tier_of(max_bytes: int = 1 << 20) -> Needs:
    return needs_of(f'[tiers.disk]\npath = "/srv/blocks"\nmax_bytes = {max_bytes}')


@pytest.mark.parametrize(("used_bytes", "state"), [(0, "warning"), (1 << 61, "ok")])
def test_space(tmp_path: Path, used_bytes: int, state: str) -> None:
    finding = check_disk_tier(disk_host(tmp_path, 0o700), tier_of(1 << 50), used_bytes)
    assert finding is not None
    assert finding.state == state
    assert "tiers.disk.max_bytes is 1048576.0 GiB" in finding.found


def test_the_master_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
        finding = check_master(needs_of(f'[tiers.remote]\ntransport = "mooncake_store"\nmaster = "{master}"'))
    assert finding is not None
    assert (finding.state, finding.found.startswith(f"{master} accepts connections")) == ("ok", True)


OWN: Final = "/var/lib/kvferry"
ACCOUNTS: Final = "worker:x:1:1::/srv/worker:/bin/sh\nother:x:2:2::/srv/homes/other:/bin/sh\n"


def me(name: str = "worker") -> User:
    """Return who runs this, under a name that stands in the advice."""
    return User(name, os.geteuid(), frozenset({os.getegid()}))


def advice(root: Path, path: str, mode: int, *, holds: tuple[str, ...] = (), parent_mode: int = 0o755) -> list[str]:
    """Return the commands that are advised for a disk tier in a folder, and the whole text at the end."""
    host = make_host(root, {"/etc/passwd": ACCOUNTS}, user=me())
    folder = host.path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for name in holds:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir(exist_ok=True) if name.endswith("/") else (folder / name).touch()
    for parent in folder.parents:
        if parent.is_relative_to(root):
            parent.chmod(parent_mode)
    folder.chmod(mode)
    finding = check_disk_tier(host, needs_of(f'[tiers.disk]\npath = "{path}"'), 0)
    assert finding is not None
    assert finding.state != "ok"
    return [*re.findall(r"(?:chown|chmod|install) [^;,]*", finding.fix), finding.fix]


@pytest.mark.parametrize(
    ("path", "mode", "holds", "instead"),
    [
        ("/tmp", 0o1777, (), "/tmp/kvferry"),
        ("/tmp", 0o1777, (LOCK_FILE,), "/tmp/kvferry"),
        ("/", 0o755, (), OWN),
        ("/var/lib", 0o755, (), "/var/lib/kvferry"),
        ("/usr/local/blocks", 0o755, (), OWN),
        ("/run/user/7", 0o755, (), OWN),
        ("/dev/shm", 0o1777, (), OWN),
        ("/srv", 0o755, (), "/srv/kvferry"),
        ("/home/worker", 0o755, (), "/home/worker/kvferry"),
        ("/mnt/nvme", 0o755, ("lost+found",), "/mnt/nvme/kvferry"),
        ("/srv/homes", 0o755, (), "/srv/homes/kvferry"),
        ("/srv/homes/other", 0o755, (), "/srv/homes/other/kvferry"),
        ("/srv/blocks", 0o755, ("somebody's file",), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o1777, (LOCK_FILE,), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o755, (LOCK_FILE, "somebody's file"), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o755, (LOCK_FILE, "0/", "2024/holidays.jpg"), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o755, (LOCK_FILE, "0"), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o755, ("0/",), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o775, ("somebody's file",), OWN),
    ],
)
def test_a_folder_of_others_stays_as_it_is(
    tmp_path: Path, path: str, mode: int, holds: tuple[str, ...], instead: str
) -> None:
    *commands, text = advice(tmp_path, path, mode, holds=holds)
    assert commands == [f"install -d -m 0700 -o worker {instead}"]
    assert f'tiers.disk.path = "{instead}"' in text
    assert "leave it as it is" in text


@pytest.mark.parametrize(
    ("path", "mode", "holds"),
    [
        ("/srv/blocks", 0o777, ()),
        ("/srv/blocks", 0o755, (LOCK_FILE, "0/")),
        ("/srv/blocks", 0o755, (LOCK_FILE, f"1001/{'0' * 32}-{'1' * 32}/", f"1001/{'0' * 32}/")),
        ("/mnt/nvme/blocks", 0o770, ()),
        ("/var/lib/kvferry", 0o750, (LOCK_FILE,)),
    ],
)
def test_a_folder_of_its_own_is_closed(tmp_path: Path, path: str, mode: int, holds: tuple[str, ...]) -> None:
    *commands, _ = advice(tmp_path, path, mode, holds=holds)
    assert commands == [f"chmod 0700 {path}"]


def test_a_link_is_as_shared_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv/blocks").symlink_to(tmp_path / "var")
    *commands, _ = advice(tmp_path, "/srv/blocks", 0o755)
    assert not any(one.startswith(("chown", "chmod")) for one in commands)


def test_a_block_folder_of_another_user_is_his(tmp_path: Path, require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root alone may give a folder away")
    theirs = make_host(tmp_path, user=WORKER).path("/srv/blocks/7")
    theirs.mkdir(parents=True)
    os.chown(theirs, WORKER.uid + 1, -1)
    *commands, _ = advice(tmp_path, "/srv/blocks", 0o755, holds=(LOCK_FILE,))
    assert commands == ["install -d -m 0700 -o worker /srv/blocks/kvferry"]


def test_a_device_or_a_file_is_not_to_be_removed(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/dev/nvme0n1": ""}, user=me())
    finding = check_disk_tier(host, needs_of('[tiers.disk]\npath = "/dev/nvme0n1"'), 0)
    assert finding is not None
    assert (finding.state, "rm " in finding.fix, OWN in finding.fix) == ("missing", False, True)


FOLDER: Final = Path(__file__).parents[4] / "systemd"
OURS: Final = (FOLDER / "kvferry@.service").read_text()
PLACE: Final = "/etc/systemd/system/kvferry@.service"
HERE: Final = needs_of()
ACROSS: Final = needs_of('[peers]\nlisten = "tcp://127.0.0.1:7801"')
STORE: Final = needs_of('[tiers.remote]\ntransport = "mooncake_store"\naddress = "10.0.0.3"')
MEMORY: Final = needs_of('[pools]\nmax_bytes = "8GiB"\n[tiers]\nhost_bytes = "4GiB"')
DRAINS: Final = needs_of("[service]\ndrain_timeout_s = 60")
FORBIDS: Final = "forbids the daemon to reach other hosts"


class Case(NamedTuple):
    """What must be found of a unit with a drop-in, on a host with NPUs or without."""

    state: str
    found: str = ""
    fix: str = ""
    drop_in: str = ""
    needs: Needs = HERE
    npus: int = 0
    unit: str = OURS


def on_disk(path: str, drop_in: str = "", *, fix: str = "") -> Case:
    return Case("missing" if fix else "ok", "", fix, drop_in, needs_of(f'[tiers.disk]\npath = "{path}"'), npus=2)


CASES: Final = {
    "the project's own": Case("ok", npus=16),
    "other hosts": Case("missing", FORBIDS, "hosts.conf", needs=ACROSS, npus=16),
    "a store": Case("missing", FORBIDS, "hosts.conf", needs=STORE),
    "the state folder": on_disk("/var/lib/kvferry/main"),
    "above it": on_disk("/var/lib/kvferry", fix="ReadWritePaths=/var/lib/kvferry"),
    "a mount": on_disk("/mnt/blocks", fix="ReadWritePaths=/mnt/blocks"),
    "a mount that is given": on_disk("/mnt/blocks", "ReadWritePaths=/srv /mnt"),
    "a private folder": on_disk("/tmp/blocks", fix="a persistent tiers.disk.path"),
    "a home": on_disk("/home/worker/blocks", fix="outside of /home"),
    "more NPUs than named": Case(
        "missing", "DeviceAllow leaves out davinci16, davinci17", "DeviceAllow=/dev/davinci16 rw", npus=18
    ),
    "too little memory": Case(
        "missing", "MemoryMax=13G is less than the 14.0 GiB", "MemoryMax=14G", "MemoryMax=13G", MEMORY
    ),
    "too little time to drain": Case(
        "missing", "after 60 s, while transfers have 60 s", "TimeoutStopSec=80s", "TimeoutStopSec=1min", DRAINS
    ),
}
TAKES_AWAY: Final = {
    "LimitMEMLOCK=64M": "LimitMEMLOCK is 64M",
    "LimitMEMLOCK=": "LimitMEMLOCK is not set",
    "DeviceAllow=\nDeviceAllow=/dev/davinci0 rw": "leaves out davinci1, davinci_manager",
    "DeviceAllow=\nDevicePolicy=closed": "leaves out davinci0",
    "DeviceAllow=\nDeviceAllow=char-davinci r": "leaves out davinci0",
}
CASES.update({f"drop-in {one!r}": Case("missing", said, "", one, npus=2) for one, said in TAKES_AWAY.items()})
CASES.update({f"drop-in {one!r} without NPUs": Case("ok", drop_in=one) for one in TAKES_AWAY})


@pytest.mark.parametrize("name", CASES)
def test_what_a_unit_permits(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    files = {PLACE: case.unit, f"{PLACE}.d/x.conf": f"[Service]\n{case.drop_in}\n"}
    host = make_host(tmp_path, files | (npu_files(case.npus) if case.npus else {}))
    finding = check_unit(host, case.needs, npu=bool(case.npus))
    assert finding.state == case.state
    assert case.found in finding.found
    assert case.fix in finding.fix
    assert bool(finding.fix) is (case.state != "ok")


def test_not_installed(tmp_path: Path) -> None:
    assert check_unit(make_host(tmp_path), HERE, npu=False).found == "systemd is not running here"
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    finding = check_unit(make_host(tmp_path), HERE, npu=False)
    assert (finding.state, "kvferry systemd --install" in finding.fix) == ("warning", True)


def test_drop_ins_in_systemds_order(tmp_path: Path) -> None:
    files = {
        "/usr/lib/systemd/system/kvferry@.service": "[Service]\n# a comment = 1\nUser=a\nExecStart=x \\\n  y\n",
        "/usr/lib/systemd/system/kvferry@.service.d/10.conf": "User=b\n",
        "/etc/systemd/system/kvferry@.service.d/20.conf": "User=c\n",
        "/usr/lib/systemd/system/kvferry@.service.d/20.conf": "User=hidden\nGroup=hidden\n",
        "/etc/systemd/system/kvferry@.service.d/30.conf.off": "User=d\n",
    }
    unit = read_unit(make_host(tmp_path, files))
    assert unit is not None
    assert unit.path == "/usr/lib/systemd/system/kvferry@.service"
    assert unit.settings == {"User": ["a", "b", "c"], "ExecStart": ["x    y"]}


def test_no_service_reads_set_env(tmp_path: Path) -> None:
    given = {f"{PLACE}.d/cann.conf": "[Service]\nEnvironmentFile=/etc/kvferry/cann.env\n"}
    found = [check_unit_environment(make_host(tmp_path, files)) for files in ({}, {PLACE: OURS}, given)]
    assert [one and one.state for one in found] == [None, "warning", "ok"]
