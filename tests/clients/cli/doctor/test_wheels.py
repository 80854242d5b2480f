"""torch_npu in each state, as a child reports it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvferry.clients.cli.doctor.wheels import TorchFound, check_torch_npu, check_wheel, check_without_npu, probe_torch
from tests.clients.cli.doctor.fake_host import make_host, needs_of, script

NPU_PYTHON = Path(__file__).parents[4] / ".venv-npu/bin/python"
BOTH = 'echo \'{"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}\''


def probe(tmp_path: Path, says: str, timeout_s: float = 60) -> TorchFound:
    return probe_torch(make_host(tmp_path, python=[script(tmp_path / "python", says)]), timeout_s)


def test_not_installed(tmp_path: Path) -> None:
    found = probe(tmp_path, 'echo \'{"torch": "2.13.0+cpu", "torch_npu": "", "step": ""}\'')
    finding = check_torch_npu(found)
    assert finding.state == "missing"
    assert "torch-npu==2.13.0 " in finding.fix
    assert check_without_npu(found) is None


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
    finding = check_torch_npu(found)
    assert (finding.state, finding.fix) == ("ok", "")
    assert finding.found == "2.13.0 beside torch 2.13.0+cpu; torch sees 8 devices"


def test_a_child_that_hangs_in_the_driver(tmp_path: Path) -> None:
    found = probe(tmp_path, f'{BOTH}; echo \'{{"step": "counting devices"}}\'; sleep 600', timeout_s=2)
    assert (found.step, found.reason) == ("counting devices", "no answer within 2 s")
    finding = check_torch_npu(found)
    assert finding.state == "missing"
    assert "dmesg" in finding.fix


def test_a_child_that_dies(tmp_path: Path) -> None:
    found = probe(tmp_path, f'{BOTH}; echo \'{{"step": "importing torch_npu"}}\'; kill -SEGV $$')
    assert found.reason.startswith("the process ended with signal 11")


def test_a_python_that_cannot_be_started(tmp_path: Path) -> None:
    found = probe_torch(make_host(tmp_path, python=[str(tmp_path / "none")]))
    assert (found.torch, found.step) == ("", "starting Python")
    assert "No such file or directory" in found.reason
    assert check_torch_npu(found).state == "unknown"


def test_the_real_torch_npu_without_cann(tmp_path: Path, require: Callable[[object, str], None]) -> None:
    require(NPU_PYTHON.exists(), "the environment .venv-npu with torch_npu")
    found = probe_torch(make_host(tmp_path, environ={"PATH": os.environ["PATH"]}, python=[str(NPU_PYTHON)]))
    assert found.step == "importing torch_npu"
    assert "cannot open shared object file" in found.reason
    assert check_torch_npu(found).state == "missing"


def test_the_real_interpreter_is_asked_for_wheels(tmp_path: Path) -> None:
    finding = check_wheel(make_host(tmp_path, environ={"PATH": os.environ["PATH"]}), needs_of())
    assert finding.found.endswith('not needed, network.transport is "none"')
