"""What device nodes, the PCI bus and groups say of NPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.clients.cli.doctor import npus
from kvferry.clients.cli.doctor.host import Outcome, User
from tests.clients.cli.doctor.fake_host import WORKER, make_host, npu_files, script


def test_a_host_without() -> None:
    assert not npus.has_npu_sign(make_host(Path("/nonexistent")))


@pytest.mark.parametrize("file", ["/dev/davinci3", "/dev/davinci_manager", "/usr/local/Ascend/driver/version.info"])
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


def test_npu_smi_is_run_where_it_is_there(tmp_path: Path) -> None:
    assert npus.read_npu_smi(make_host(tmp_path)) is None
    script(tmp_path / "usr/local/bin/npu-smi", 'echo "asked for $1"')
    assert npus.read_npu_smi(make_host(tmp_path)) == Outcome(0, "asked for info\n", "")


def test_a_library_is_really_loaded(tmp_path: Path) -> None:
    assert npus.loading_problem(make_host(tmp_path), "libc.so.6") == ""
    assert npus.loading_problem(make_host(tmp_path), "libnone.so").startswith("libnone.so: cannot open shared object")
