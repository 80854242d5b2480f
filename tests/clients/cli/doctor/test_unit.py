"""The systemd unit: the project's own, and ones that somebody changed."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvferry.clients.cli.doctor.needs import Needs
from kvferry.clients.cli.doctor.unit import check_unit, check_unit_environment, read_unit
from tests.clients.cli.doctor.fake_host import make_host, needs_of, npu_files

FOLDER: Final = Path(__file__).parents[4] / "systemd"
OWN: Final = (FOLDER / "kvferry@.service").read_text()
HOSTS: Final = (FOLDER / "hosts.conf").read_text()
PLACE: Final = "/etc/systemd/system/kvferry@.service"
HERE: Final = needs_of()
ACROSS: Final = needs_of('[peers]\nlisten = "tcp://127.0.0.1:7801"')
STORE: Final = needs_of('[tiers.remote]\ntransport = "mooncake_store"\naddress = "10.0.0.3"')
ACROSS_V6: Final = needs_of('[peers]\nlisten = "tcp://[fd00::3]:7801"')
MEMORY: Final = needs_of('[pools]\nmax_bytes = "8GiB"\n[tiers]\nhost_bytes = "4GiB"')
DRAINS: Final = needs_of("[service]\ndrain_timeout_s = 60")
FORBIDS: Final = "forbids the daemon to reach other hosts"
MORE: Final = "[Service]\nExecStart=kvferry daemon\nLimitMEMLOCK=infinity\n"


class Case(NamedTuple):
    """What must be found of a unit with a drop-in, on a host with NPUs or without."""

    state: str
    found: str = ""
    fix: str = ""
    drop_in: str = ""
    needs: Needs = HERE
    npus: int = 0
    unit: str = OWN


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
    "a private folder": on_disk("/tmp/blocks", fix="a persistent tiers.disk.path"),  # noqa: S108  a name only
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
    found = [check_unit_environment(make_host(tmp_path, files)) for files in ({}, {PLACE: OWN}, given)]
    assert [one and one.state for one in found] == [None, "warning", "ok"]
