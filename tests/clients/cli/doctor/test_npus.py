"""What device nodes, the PCI bus and groups say of NPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.clients.cli.doctor import npus
from kvferry.clients.cli.doctor.host import User
from tests.clients.cli.doctor.fake_host import ROOT, WORKER, make_host, npu_files


def test_a_host_without() -> None:
    assert not npus.has_npu_sign(make_host(Path("/nonexistent")))


@pytest.mark.parametrize(
    "file",
    ["/dev/davinci3", "/dev/davinci_manager", "/usr/local/Ascend/driver/version.info"],
)
def test_each_sign_counts(tmp_path: Path, file: str) -> None:
    assert npus.has_npu_sign(make_host(tmp_path, {file: ""}))


def test_a_device_without_a_driver_is_a_sign(tmp_path: Path) -> None:
    device = "/sys/bus/pci/devices/0000:c1:00.0"
    host = make_host(tmp_path, {f"{device}/vendor": "0x19e5\n", f"{device}/class": "0x120000\n"})
    assert npus.pci_npus(host) == [npus.PciNpu("0000:c1:00.0", None, -1)]
    assert npus.has_npu_sign(host)


@pytest.mark.parametrize(("vendor", "kind"), [("0x19e5", "0x020000"), ("0x10de", "0x120000")])
def test_other_devices_are_none(tmp_path: Path, vendor: str, kind: str) -> None:
    device = "/sys/bus/pci/devices/0000:c1:00.0"
    host = make_host(tmp_path, {f"{device}/vendor": vendor, f"{device}/class": kind, "/dev/davinci_x": ""})
    assert not npus.has_npu_sign(host)


def test_nodes_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    host = make_host(tmp_path, npu_files(12))
    assert npus.davinci_nodes(host)[-2:] == ["davinci10", "davinci11"]
    finding = npus.check_nodes(host)
    assert (finding.state, finding.fix) == ("ok", "")
    assert finding.found == "/dev/davinci0 to davinci11 (12) and their managers, open to root"


def test_no_nodes(tmp_path: Path) -> None:
    finding = npus.check_nodes(make_host(tmp_path))
    assert finding.state == "missing"
    assert "--device /dev/davinci0 --device /dev/davinci_manager" in finding.fix


def test_a_manager_is_not_there(tmp_path: Path) -> None:
    files = npu_files()
    del files["/dev/hisi_hdc"]
    finding = npus.check_nodes(make_host(tmp_path, files))
    assert finding.state == "missing"
    assert finding.found == "/dev/davinci0 to davinci1 (2), but no /dev/hisi_hdc"


@pytest.mark.parametrize(("mode", "state"), [(0o660, "ok"), (0o600, "missing"), (0o640, "missing"), (0o606, "missing")])
def test_a_member_of_the_nodes_group(tmp_path: Path, mode: int, state: str) -> None:
    host = make_host(tmp_path, npu_files())
    (tmp_path / "dev/davinci1").chmod(mode)
    for name in ("davinci0", "davinci_manager", "devmm_svm", "hisi_hdc"):
        (tmp_path / "dev" / name).chmod(0o660)
    group = (tmp_path / "dev/davinci0").stat().st_gid
    member = make_host(tmp_path, user=User("worker", WORKER.uid, frozenset({group})))
    finding = npus.check_nodes(member)
    assert finding.state == state
    if state == "missing":
        assert finding.found == "worker may not read and write /dev/davinci1"
        assert "usermod -aG HwHiAiUser worker" in finding.fix
    assert npus.check_nodes(host).state == "ok"  # root


def test_a_stranger(tmp_path: Path) -> None:
    make_host(tmp_path, npu_files())
    for node in (tmp_path / "dev").iterdir():
        node.chmod(0o660)
    assert npus.check_nodes(make_host(tmp_path, user=WORKER)).state == "missing"


@pytest.mark.parametrize(
    ("user", "state"),
    [(User("worker", 7, frozenset({1000})), "ok"), (User("worker", 7, frozenset({7})), "warning"), (ROOT, "ok")],
)
def test_group(tmp_path: Path, user: User, state: str) -> None:
    assert npus.check_group(make_host(tmp_path, npu_files(), user=user)).state == state


def test_the_group_that_the_driver_was_installed_for(tmp_path: Path) -> None:
    files = {"/etc/ascend_install.info": "UserGroup=npu\n", "/etc/group": "npu:x:77:\nHwHiAiUser:x:1000:\n"}
    host = make_host(tmp_path, files, user=User("worker", 7, frozenset({77})))
    assert npus.check_group(host).found == "worker is in npu"


def test_no_such_group(tmp_path: Path) -> None:
    assert npus.check_group(make_host(tmp_path, {"/etc/group": "root:x:0:\n"})).state == "warning"


def test_numa_by_the_drivers_numbers(tmp_path: Path) -> None:
    finding = npus.check_numa(make_host(tmp_path, npu_files(4)))
    assert finding.state == "ok"
    assert finding.found == (
        "NPU 0: node 0 (cores 0-7); NPU 1: node 0 (cores 0-7); NPU 2: node 1 (cores 8-15); NPU 3: node 1 (cores 8-15)"
    )


def test_a_topology_that_is_hidden(tmp_path: Path) -> None:
    files = npu_files(4) | {"/sys/bus/pci/devices/0000:01:00.0/numa_node": "-1\n"}
    finding = npus.check_numa(make_host(tmp_path, files))
    assert finding.state == "warning"
    assert "NPU 3: no node" in finding.found


def test_no_pci_bus(tmp_path: Path) -> None:
    assert npus.check_numa(make_host(tmp_path)).state == "unknown"


def test_a_driver_elsewhere(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/etc/ascend_install.info": "Driver_Install_Path_Param=/opt/Ascend\n"})
    assert str(npus.driver_folder(host)) == "/opt/Ascend/driver"
