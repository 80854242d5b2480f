"""The driver's version and the devices' health."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.clients.cli.doctor.host import Outcome
from kvferry.clients.cli.doctor.npus import check_driver, check_health, read_npu_smi
from tests.clients.cli.doctor.fake_host import make_host, npu_files, script

SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.1        46                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3351 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | {health:<13} | 93.1        46                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3351 / 65536         |
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 4711          | python                   | 210                     |
+===========================+===============+====================================================+
"""


@pytest.mark.parametrize(
    ("version", "state"),
    [("25.5.0", "ok"), ("26.0.rc1", "ok"), ("25.5.rc1", "warning"), ("24.1.rc3", "warning"), ("what", "unknown")],
)
def test_version(tmp_path: Path, version: str, state: str) -> None:
    host = make_host(tmp_path, {"/usr/local/Ascend/driver/version.info": f"Version={version}\n"})
    finding = check_driver(host, None)
    assert finding.state == state
    assert finding.found.startswith(version)
    assert bool(finding.fix) is (state != "ok")


def test_version_from_npu_smi_where_the_file_is_not_mounted(tmp_path: Path) -> None:
    finding = check_driver(make_host(tmp_path), Outcome(0, SMI.format(health="OK"), ""))
    assert (finding.state, finding.found) == ("ok", "25.5.0")


def test_no_driver(tmp_path: Path) -> None:
    finding = check_driver(make_host(tmp_path), None)
    assert finding.state == "missing"
    assert finding.fix


def test_devices_without_a_driver(tmp_path: Path) -> None:
    files = {name: text for name, text in npu_files(2).items() if name.startswith("/sys")}
    finding = check_driver(make_host(tmp_path, files), None)
    assert finding.state == "missing"
    assert "the PCI bus has 2 NPUs" in finding.found


def test_npu_smi_is_run(tmp_path: Path) -> None:
    script(tmp_path / "usr/local/bin/npu-smi", 'echo "asked for $1"')
    assert read_npu_smi(make_host(tmp_path)) == Outcome(0, "asked for info\n", "")


def test_npu_smi_is_not_there(tmp_path: Path) -> None:
    assert read_npu_smi(make_host(tmp_path)) is None
    assert check_health(None).state == "unknown"


def test_healthy() -> None:
    finding = check_health(Outcome(0, SMI.format(health="OK"), ""))
    assert (finding.state, finding.found) == ("ok", "2 x 910B3")


def test_a_device_is_ill() -> None:
    finding = check_health(Outcome(0, SMI.format(health="Alarm"), ""))
    assert (finding.state, finding.found) == ("warning", "NPU 1: Alarm")


def test_the_driver_hangs() -> None:
    finding = check_health(Outcome(None, "", ""))
    assert finding.state == "missing"
    assert "dmesg" in finding.fix


def test_npu_smi_fails() -> None:
    finding = check_health(Outcome(255, "dcmi module initialize failed. ret is -8005\n", ""))
    assert finding.state == "missing"
    assert "ret is -8005" in finding.found
