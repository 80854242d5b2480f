"""Ascend's own on the simulator: who may map a pool, what remains of one that is killed, and registered host memory.

Also what an operator is told where torch_npu or CANN is missing; that runs wherever the wheel is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.protocol.errors import DeviceUnavailableError
from tests.cann_simulator.child import Child, ChildError
from tests.cann_simulator.simulator import NPU_PYTHON, Simulator

MIB = 1 << 20
SIZE = 4 * MIB
WAIT_S = 240.0

pytestmark = pytest.mark.device_only  # it starts processes of its own on the simulator

PREPARED = """
from kvferry.pools.devices.npu import NpuVendor
from kvferry.protocol.session_stream import TorchShare, VmmShare
import msgspec
vendor = NpuVendor(); vendor.load()
def filled(value):
    torch.npu.synchronize(); return set(mapped.tensor.cpu().tolist()) == {value}
"""


@pytest.fixture(scope="module")
def simulator(require: Callable[[object, str], None], tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    """Return a simulated host."""
    require(NPU_PYTHON.exists() and shutil.which("g++"), "the environment .venv-npu, and g++")
    return Simulator(tmp_path_factory.mktemp("npu"), memory_bytes=256 * MIB)


@pytest.fixture(scope="module")
def allocating(simulator: Simulator) -> Iterator[Child]:
    """Return a process on a device."""
    with Child(simulator) as one:
        one.do(PREPARED)
        yield one


@pytest.fixture
def owner(allocating: Child) -> Child:
    """Return the process that allocates; new memory of its own, in ``mapped``, holds 7."""
    owner = allocating
    owner.do(f"mapped = vendor.allocate(0, {SIZE}); mapped.tensor.fill_(7); torch.npu.synchronize()")
    return owner


@pytest.fixture(scope="module")
def other(simulator: Simulator) -> Iterator[Child]:
    """Return another process."""
    with Child(simulator) as one:
        one.do(PREPARED)
        yield one


def shared(owner: Child, process: int) -> int:
    """Let the owner share its memory with a process; return the handle."""
    return int(owner.do(f"result = vendor.share(mapped, {process}).handle"))


def map_in(child: Child, handle: int) -> None:
    child.do(f"mapped = vendor.map(VmmShare(handle={handle}, size_bytes={SIZE}), 0, {SIZE})")


def test_a_process_that_was_named_maps_the_same_memory(owner: Child, other: Child, simulator: Simulator) -> None:
    before = simulator.memory_used(0)
    map_in(other, shared(owner, other.process.pid))
    assert other.do("result = filled(7)")
    other.do("mapped.tensor.fill_(9); torch.npu.synchronize()")
    assert owner.do("result = filled(9)")
    assert simulator.memory_used(0) == before, "nothing was copied"
    other.do("vendor.unmap(mapped)")


def test_another_process_may_not_and_none_can_have_more_than_there_is(owner: Child, other: Child) -> None:
    with pytest.raises(ChildError, match="has too little free memory") as refused:
        owner.do(f"vendor.allocate(0, {512 * MIB})")
    assert refused.value.kind == "OutOfMemoryError"
    handle = shared(owner, owner.process.pid)
    with pytest.raises(ChildError, match="shared with another process") as refused:
        map_in(other, handle)
    assert refused.value.kind == "DeviceUnavailableError"


def test_memory_goes_with_its_last_holder(owner: Child, other: Child, simulator: Simulator) -> None:
    before = simulator.memory_used(0)
    handle = shared(owner, other.process.pid)
    map_in(other, handle)
    other.do("first = mapped")
    map_in(other, handle)
    other.do("result = first.tensor.data_ptr() == mapped.tensor.data_ptr(); vendor.unmap(first)")
    owner.do("vendor.unmap(mapped)")
    assert other.do("result = filled(7)"), "one that mapped it twice still has it"
    assert simulator.memory_used(0) == before
    other.do("vendor.unmap(mapped)")
    assert simulator.memory_used(0) == before - SIZE


@pytest.mark.full  # the next one is killed, too
def test_memory_survives_its_owners_death(simulator: Simulator, other: Child) -> None:
    before = simulator.memory_used(0)
    with Child(simulator) as owner:
        owner.do(PREPARED + f"mapped = vendor.allocate(0, {SIZE}); mapped.tensor.fill_(5); torch.npu.synchronize()")
        map_in(other, shared(owner, other.process.pid))
        owner.process.kill()
        owner.process.wait(WAIT_S)
    assert other.do("result = filled(5)")
    assert simulator.memory_used(0) == before + SIZE
    other.do("vendor.unmap(mapped)")
    assert simulator.memory_used(0) == before


def test_a_registered_tensor_is_the_engines_own_memory(owner: Child, other: Child) -> None:
    fields = owner.do(
        "mine = torch.zeros(1000, dtype=torch.int32, device='npu'); mine[3:5] = 0x01010101; torch.npu.synchronize()\n"
        "result = msgspec.json.encode(vendor.export(mine[3:5])).decode()"
    )
    other.do(f"share = msgspec.json.decode({fields!r}, type=TorchShare); mapped = vendor.map(share, 0, 8)")
    assert other.do("result = filled(1)")
    other.do("mapped.tensor.fill_(2); torch.npu.synchronize()")
    assert owner.do("torch.npu.synchronize(); result = mine[2:6].cpu().tolist()") == [0, 0x02020202, 0x02020202, 0]


# -- where something is missing

LOAD = """
from kvferry.pools.devices.npu import NpuVendor
from kvferry.protocol.errors import DeviceUnavailableError
try:
    NpuVendor().load()
except DeviceUnavailableError as error:
    print(error)
"""


def explained(python: Path, **environment: str) -> str:
    """Return what loading says in a process without CANN."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "ASCEND"))}
    clean["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run(
        [python, "-c", LOAD], env=clean | environment, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    return done.stdout.splitlines()[-1]  # the wheel warns on standard output where CANN's variables are not set


@pytest.mark.full
def test_a_missing_wheel_is_explained(require: Callable[[object, str], None]) -> None:
    host_python = NPU_PYTHON.parents[2] / ".venv" / "bin" / "python"
    require(host_python.exists(), "the environment .venv")
    said = explained(host_python)
    assert said.startswith(f"{DeviceUnavailableError.code} [device]: this Python has no torch_npu: install torch-npu")
    assert "kvferry doctor" in said


@pytest.mark.full
def test_a_missing_cann_is_explained(require: Callable[[object, str], None]) -> None:
    require(NPU_PYTHON.exists(), "the environment .venv-npu")
    said = explained(NPU_PYTHON)
    assert said.startswith(f"{DeviceUnavailableError.code} [device]: torch_npu is installed, but CANN's lib")
    assert "is not found: source the toolkit's set_env.sh" in said


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


@pytest.mark.parametrize(
    ("driver", "known_to_torch"), [("24.1.0", False), pytest.param("25.5.0", True, marks=pytest.mark.full)]
)
def test_a_copy_returns_at_once(
    require: Callable[[object, str], None], tmp_path: Path, driver: str, *, known_to_torch: bool
) -> None:
    require(NPU_PYTHON.exists() and shutil.which("g++"), "the environment .venv-npu, and g++")
    simulator = Simulator(tmp_path, memory_bytes=256 << 20, driver=driver)
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
def test_a_device_has_more_time_for_more_memory_but_not_for_ever(
    require: Callable[[object, str], None], tmp_path: Path
) -> None:
    require(NPU_PYTHON.exists() and shutil.which("g++"), "the environment .venv-npu, and g++")
    with Child(Simulator(tmp_path, memory_bytes=256 << 20)) as child:
        child.do(TIMED)
        assert child.do("device.register_host(host); result = lost") == [False, True]
