"""The systemd unit: the project's own, and ones that somebody changed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from kvferry.clients.cli.doctor.host import Finding
from kvferry.clients.cli.doctor.needs import Needs
from kvferry.clients.cli.doctor.unit import check_unit, check_unit_environment, read_unit
from tests.clients.cli.doctor.fake_host import make_host, needs_of, npu_files

FOLDER: Final = Path(__file__).parents[4] / "systemd"
OWN: Final = (FOLDER / "kvferry@.service").read_text()
HOSTS: Final = (FOLDER / "hosts.conf").read_text()
PLACE: Final = "/etc/systemd/system/kvferry@.service"
ACROSS: Final = needs_of('[peers]\nlisten = "tcp://127.0.0.1:7801"')


def check(root: Path, files: dict[str, str], needs: Needs = ACROSS, *, npu: bool = True, npus: int = 16) -> Finding:
    return check_unit(make_host(root, files | (npu_files(npus) if npu else {})), needs, npu=npu)


def test_the_projects_own_with_its_drop_in(tmp_path: Path) -> None:
    finding = check(tmp_path, {PLACE: OWN, f"{PLACE}.d/hosts.conf": HOSTS})
    assert (finding.state, finding.found) == ("ok", f"{PLACE}, user HwHiAiUser")


def test_the_projects_own_alone(tmp_path: Path) -> None:
    assert check(tmp_path / "one", {PLACE: OWN}, needs_of()).state == "ok"
    finding = check(tmp_path / "two", {PLACE: OWN})
    assert finding.state == "missing"
    assert "forbids the daemon to reach other hosts" in finding.found
    assert "hosts.conf" in finding.fix


def test_a_store_is_on_other_hosts_too(tmp_path: Path) -> None:
    needs = needs_of('[tiers.remote]\ntransport = "mooncake_store"')
    finding = check(tmp_path / "one", {PLACE: OWN}, needs)
    assert (finding.state, "forbids the daemon to reach other hosts" in finding.found) == ("missing", True)
    assert check(tmp_path / "two", {PLACE: OWN, f"{PLACE}.d/hosts.conf": HOSTS}, needs).state == "ok"


@pytest.mark.parametrize(
    ("path", "drop_in", "state"),
    [
        ("/var/lib/kvferry", "", "ok"),
        ("/var/lib/kvferry/blocks", "", "ok"),
        ("/var/lib/other", "", "missing"),
        ("/mnt/blocks", "", "missing"),
        ("/mnt/blocks", "ReadWritePaths=/srv /mnt", "ok"),
        ("/mnt/blocks", "ReadWritePaths=-/mnt/blocks", "ok"),
        ("/mnt/blocks", "ProtectSystem=full", "ok"),
        ("/var/cache/blocks", "CacheDirectory=blocks", "ok"),
    ],
)
def test_where_the_disk_tier_may_write(tmp_path: Path, path: str, drop_in: str, state: str) -> None:
    files = {PLACE: OWN, f"{PLACE}.d/x.conf": f"[Service]\n{drop_in}\n"}
    finding = check(tmp_path, files, needs_of(f'[tiers.disk]\npath = "{path}"'))
    assert finding.state == state
    assert (f"ReadWritePaths={path}" in finding.fix) is (state == "missing")


def test_more_npus_than_the_unit_names(tmp_path: Path) -> None:
    finding = check(tmp_path, {PLACE: OWN}, needs_of(), npus=18)
    assert finding.state == "missing"
    assert "DeviceAllow leaves out davinci16, davinci17" in finding.found
    assert "DeviceAllow=/dev/davinci16 rw" in finding.fix


@pytest.mark.parametrize(
    ("drop_in", "said"),
    [
        ("LimitMEMLOCK=64M", "LimitMEMLOCK is 64M"),
        ("LimitMEMLOCK=", "LimitMEMLOCK is not set"),
        ("DeviceAllow=\nDeviceAllow=/dev/davinci0 rw", "leaves out davinci1, davinci_manager"),
        ("DeviceAllow=\nDevicePolicy=closed", "leaves out davinci0"),
        ("DeviceAllow=\nDeviceAllow=char-davinci r", "leaves out davinci0"),
    ],
)
def test_drop_ins_that_take_something_away(tmp_path: Path, drop_in: str, said: str) -> None:
    files = {PLACE: OWN, f"{PLACE}.d/x.conf": f"[Service]\n{drop_in}\n"}
    finding = check(tmp_path, files, needs_of(), npus=2)
    assert finding.state == "missing"
    assert said in finding.found
    assert check(tmp_path / "none", files, needs_of(), npu=False).state == "ok"


@pytest.mark.parametrize("allow", ["DeviceAllow=char-* rw", "DevicePolicy=auto"])
def test_units_that_allow_more(tmp_path: Path, allow: str) -> None:
    unit = f"[Service]\nExecStart=kvferry daemon\nLimitMEMLOCK=infinity\n{allow}\n"
    assert check(tmp_path, {PLACE: unit}).state == "ok"


def test_not_installed(tmp_path: Path) -> None:
    assert check(tmp_path, {}).found == "systemd is not running here"
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    finding = check(tmp_path, {})
    assert finding.state == "warning"
    assert "daemon-reload" in finding.fix


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
    assert check_unit_environment(make_host(tmp_path)) is None
    finding = check_unit_environment(make_host(tmp_path, {PLACE: OWN}))
    assert finding is not None
    assert finding.state == "warning"
    given = "[Service]\nEnvironmentFile=/etc/kvferry/cann.env\n"
    finding = check_unit_environment(make_host(tmp_path, {PLACE: OWN, f"{PLACE}.d/cann.conf": given}))
    assert finding is not None
    assert finding.state == "ok"
