"""What device nodes, the PCI bus and groups say of NPUs; and torch_npu in each state, as a child reports it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.clients.cli.doctor import npus
from kvferry.clients.cli.doctor.host import Outcome, User
from kvferry.clients.cli.doctor.wheels import TorchFound, check_torch_npu, probe_torch
from tests.clients.cli.doctor.fake_host import WORKER, make_host, npu_files, script


@pytest.mark.parametrize("file", ["/dev/davinci3", "/dev/davinci_manager", "/usr/local/Ascend/driver/version.info"])
def test_each_sign_counts(tmp_path: Path, file: str) -> None:
    assert npus.has_npu_sign(make_host(tmp_path, {file: ""}))


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


def test_npu_smi_is_run_where_it_is_there(tmp_path: Path) -> None:
    assert npus.read_npu_smi(make_host(tmp_path)) is None
    script(tmp_path / "usr/local/bin/npu-smi", 'echo "asked for $1"')
    assert npus.read_npu_smi(make_host(tmp_path)) == Outcome(0, "asked for info\n", "")


def test_a_library_is_really_loaded(tmp_path: Path) -> None:
    assert npus.loading_problem(make_host(tmp_path), "libc.so.6") == ""
    assert npus.loading_problem(make_host(tmp_path), "libnone.so").startswith("libnone.so: cannot open shared object")


NPU_PYTHON = Path(__file__).parents[4] / ".venv-npu/bin/python"
BOTH = 'echo \'{"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}\''


def probe(tmp_path: Path, says: str, timeout_s: float = 60) -> TorchFound:
    return probe_torch(make_host(tmp_path, python=[script(tmp_path / "python", says)]), timeout_s)


def test_the_real_child_here(tmp_path: Path) -> None:
    found = probe_torch(make_host(tmp_path, environ={"PATH": os.environ["PATH"]}))
    assert found.torch.startswith("2.")
    assert found.torch_npu or not found.reason


def test_backends_do_not_load_themselves(tmp_path: Path) -> None:
    says = 'echo "{\\"torch\\": \\"$TORCH_DEVICE_BACKEND_AUTOLOAD\\", \\"step\\": \\"\\"}"'
    assert probe(tmp_path, says).torch == "0"


def test_all_is_well(tmp_path: Path) -> None:
    found = probe(tmp_path, f'echo CANN says hello; echo 1; {BOTH}; echo \'{{"step": "", "devices": 8}}\'')
    assert found == TorchFound("2.13.0+cpu", "2.13.0", devices=8)


def test_a_child_that_hangs_in_the_driver(tmp_path: Path) -> None:
    found = probe(tmp_path, f'{BOTH}; echo \'{{"step": "counting devices"}}\'; sleep 600', timeout_s=2)
    assert (found.step, found.reason) == ("counting devices", "no answer within 2 s")


def test_a_child_that_dies(tmp_path: Path) -> None:
    found = probe(tmp_path, f'{BOTH}; echo \'{{"step": "importing torch_npu"}}\'; kill -SEGV $$')
    assert found.reason.startswith("the process ended with signal 11")


def test_a_python_that_cannot_be_started(tmp_path: Path) -> None:
    found = probe_torch(make_host(tmp_path, python=[str(tmp_path / "none")]))
    assert (found.torch, found.step) == ("", "starting Python")
    assert "No such file or directory" in found.reason


def test_the_real_torch_npu_without_cann(tmp_path: Path, require: Callable[[object, str], None]) -> None:
    require(NPU_PYTHON.exists(), "the environment .venv-npu with torch_npu")
    found = probe_torch(make_host(tmp_path, environ={"PATH": os.environ["PATH"]}, python=[str(NPU_PYTHON)]))
    assert found.step == "importing torch_npu"
    assert "cannot open shared object file" in found.reason
    assert check_torch_npu(found).state == "missing"
