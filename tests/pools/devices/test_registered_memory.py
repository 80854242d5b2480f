"""Host memory that is registered with a device: copies to and from it return at once, whatever the driver's version.

torch_npu asks drivers before 25.5.0 nothing about memory that it did not allocate: its own copy would wait then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import NPU_PYTHON, Simulator

pytestmark = pytest.mark.device_only  # it starts processes of its own on the simulator

PREPARED = """
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


@pytest.mark.parametrize(
    ("driver", "known_to_torch"), [("24.1.0", False), pytest.param("25.5.0", True, marks=pytest.mark.full)]
)
def test_a_copy_returns_at_once(
    require: Callable[[object, str], None], tmp_path: Path, driver: str, *, known_to_torch: bool
) -> None:
    require(NPU_PYTHON.exists() and shutil.which("g++"), "the environment .venv-npu, and g++")
    simulator = Simulator(tmp_path, memory_bytes=256 << 20, driver=driver)
    with Child(simulator) as child:
        child.do(PREPARED)
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
def test_a_device_has_more_time_for_more_memory_but_not_for_ever(
    require: Callable[[object, str], None], tmp_path: Path
) -> None:
    require(NPU_PYTHON.exists() and shutil.which("g++"), "the environment .venv-npu, and g++")
    with Child(Simulator(tmp_path, memory_bytes=256 << 20)) as child:
        child.do(TIMED)
        assert child.do("device.register_host(host); result = lost") == [False, True]
