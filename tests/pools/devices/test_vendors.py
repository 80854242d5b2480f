"""What vendors refuse before they ask a device, what an operator is told where something is missing, and Ascend's own.

What only a device can do is on the simulator, in processes of its own; pools on it are in ``tests/npu``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.pools.devices.cuda import CudaVendor
from kvferry.pools.devices.npu import NpuVendor
from kvferry.protocol.errors import DeviceUnavailableError, InvalidFieldError
from kvferry.protocol.session_stream import TorchShare, VmmShare
from tests.cann_simulator.child import Child, ChildError
from tests.cann_simulator.simulator import NPU_PYTHON, Simulator

WAIT_S = 240.0


def test_a_device_without_torch_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # what an import of it finds
    with pytest.raises(DeviceUnavailableError, match="need torch"):
        CudaVendor().load()


def test_a_share_of_less_than_is_needed() -> None:
    with pytest.raises(InvalidFieldError, match="1 bytes are shared, 2 are needed"):
        NpuVendor().map(VmmShare(handle=1, size_bytes=1), 0, 2)
    registered = TorchShare(
        handle=b"", storage_bytes=8, storage_offset_bytes=0, ref_counter=b"", ref_counter_offset=0, event=b"",
        event_sync=False, offset_bytes=4,
    )  # fmt: skip
    with pytest.raises(InvalidFieldError, match="5 bytes from byte 4 of a storage of 8"):
        NpuVendor().map(registered, 0, 5)


# -- where something is missing

LOAD = """
from kvferry.pools.devices.npu import NpuVendor
from kvferry.protocol.errors import DeviceUnavailableError
try:
    NpuVendor().load()
except DeviceUnavailableError as error:
    print(error)
"""


@pytest.mark.full
@pytest.mark.device_only
@pytest.mark.parametrize(
    ("environment", "said", "remedy"),
    [
        (".venv", "this Python has no torch_npu: install torch-npu", "kvferry doctor"),
        (".venv-npu", "torch_npu is installed, but CANN's lib", "is not found: source the toolkit's set_env.sh"),
    ],
)
def test_what_is_missing_is_explained(
    require: Callable[[object, str], None], environment: str, said: str, remedy: str
) -> None:
    python = NPU_PYTHON.parents[2] / environment / "bin" / "python"
    require(python.exists(), f"the environment {environment}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "ASCEND"))}
    clean["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run([python, "-c", LOAD], env=clean, capture_output=True, text=True, timeout=WAIT_S, check=True)
    told = done.stdout.splitlines()[-1]  # the wheel warns on standard output where CANN's variables are not set
    assert told.startswith(f"{DeviceUnavailableError.code} [device]: {said}")
    assert remedy in told


# -- on the simulator


@pytest.fixture
def make_simulator(require: Callable[[object, str], None], tmp_path: Path) -> Callable[..., Simulator]:
    require(NPU_PYTHON.exists() and shutil.which("g++"), "the environment .venv-npu, and g++")
    return lambda **driver: Simulator(tmp_path, memory_bytes=256 << 20, **driver)


VENDOR = """
from kvferry.pools.devices.npu import NpuVendor
from kvferry.protocol.session_stream import VmmShare
vendor = NpuVendor()
vendor.load()
"""


@pytest.mark.device_only
def test_memory_is_shared_with_the_process_that_was_named_alone(make_simulator: Callable[..., Simulator]) -> None:
    simulator = make_simulator()
    with Child(simulator) as owner, Child(simulator) as other:
        owner.do(VENDOR + "mapped = vendor.allocate(0, 4 << 20)")
        other.do(VENDOR)
        for named in (owner, other):
            handle = owner.do(f"result = vendor.share(mapped, {named.process.pid}).handle")
            mapping = f"vendor.map(VmmShare(handle={handle}, size_bytes=4 << 20), 0, 4 << 20)"
            if named is other:
                other.do(mapping)
                continue
            with pytest.raises(ChildError, match="shared with another process") as refused:
                other.do(mapping)
            assert refused.value.kind == "DeviceUnavailableError"


REGISTERED = """
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.host import HostRegion
device = Accelerator("npu:0"); device.open()
host = HostRegion.create("registered", 1 << 20)
with device.calling():
    mapped = device.allocate(1 << 20)
    mapped.tensor.fill_(7); torch.npu.synchronize()
device.register_host(host)
there = device.registered(host.address + 4096, 8192)
stream = device.streams.device_to_host
"""
COPIED = """
with device.calling():
    device.copy(there, mapped.tensor[:8192], stream)
    done = stream.record_event(); stream.npu_stream
    result = (done.query(), int(host.view()[4096]))
"""


@pytest.mark.device_only
@pytest.mark.parametrize(
    ("driver", "known_to_torch"), [("24.1.0", False), pytest.param("25.5.0", True, marks=pytest.mark.full)]
)
def test_a_copy_returns_at_once(make_simulator: Callable[..., Simulator], driver: str, *, known_to_torch: bool) -> None:
    simulator = make_simulator(driver=driver)
    with Child(simulator) as child:
        child.do(REGISTERED)
        assert child.do("result = there.is_pinned()") is known_to_torch
        with simulator.held():
            assert child.do(COPIED) == [False, 0], "the copy waited, or was done while all work is held"
        assert child.do("device.wait(done); result = host.view()[4096:12288].min().item()") == 7
        assert child.do("result = host.view()[:4096].max().item()") == 0
        assert child.do("result = device.registered(host.address + (1 << 20) - 1, 2) is None")
        assert child.do("device.unregister_host(host); result = device.registered(host.address, 1) is None")
    assert not simulator.races()


TIMED = """
import time
from kvferry.pools.devices.accelerator import REGISTERING_S_PER_BYTE, VENDORS, Accelerator
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.devices.npu import NpuVendor
lost = []

class SlowVendor(NpuVendor):
    def register_host(self, address, size_bytes):
        may_take_s = 5.0 + size_bytes * REGISTERING_S_PER_BYTE
        for late_s in (may_take_s - 1, may_take_s + 1):
            device.check(time.monotonic() + late_s)
            lost.append(device.lost is not None)

VENDORS["npu"] = SlowVendor
device = Accelerator("npu:0", stuck_after_s=5.0); device.open()
host = HostRegion.create("registered", 1 << 30)
"""


@pytest.mark.full
@pytest.mark.device_only
def test_a_device_has_more_time_for_more_memory_but_not_for_ever(make_simulator: Callable[..., Simulator]) -> None:
    with Child(make_simulator()) as child:
        child.do(TIMED)
        assert child.do("device.register_host(host); result = lost") == [False, True]
