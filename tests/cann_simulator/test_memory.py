"""Device memory is counted on the device, across processes; host memory is pinned, registered or neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cann_simulator.child import Child, ChildError
from tests.cann_simulator.simulator import Race, Simulator

pytestmark = pytest.mark.full


MIB = 1 << 20
SLOW_US = 300_000

REGISTER = """
import mmap, time
shared = mmap.mmap(-1, 1 << 20)
view = torch.frombuffer(shared, dtype=torch.uint8)
register = torch.npu.npurt().npuHostRegister(view.data_ptr(), 1 << 20, 0x10000000)
page = torch.full((1 << 20,), 7, dtype=torch.uint8, device="npu"); torch.npu.synchronize()
"""
# Result: the status of the registration, a byte when the call came back, and when all was done.
COPY_OUT = """
view.zero_(); view.copy_(page, non_blocking=True); now = view[0].item()
torch.npu.synchronize(); result = int(register), now, view[0].item()
"""


@pytest.fixture
def slow_copies(simulator: Simulator) -> Iterator[None]:
    simulator.slow_copies(to_host_us=SLOW_US)
    yield
    simulator.slow_copies()


def test_memory_is_counted_across_processes(simulator: Simulator, child: Child) -> None:
    free_here = "result = torch.npu.mem_get_info()[0]"
    before = child.do(free_here)
    with Child(simulator) as other:
        other.do("block = torch.empty(64 << 20, dtype=torch.uint8, device='npu')")
        assert before - child.do(free_here) >= 64 * MIB
        assert other.do(free_here) == child.do(free_here)
        assert child.do("result = torch.npu.mem_get_info(1)") == [1 << 30, 1 << 30]
        used = simulator.memory_used(0)
        other.kill()
    assert used - simulator.memory_used(0) >= 64 * MIB
    assert child.do(free_here) == before


def test_memory_comes_in_pages_of_2_mib(simulator: Simulator, child: Child) -> None:
    before = simulator.memory_used(0)
    assert child.do("one = ctypes.c_void_p(); result = acl.aclrtMalloc(ctypes.byref(one), ctypes.c_size_t(1), 0)") == 0
    assert simulator.memory_used(0) - before == 2 * MIB
    exact = "two = ctypes.c_void_p(); result = acl.aclrtMalloc(ctypes.byref(two), ctypes.c_size_t(2 << 20), 0)"
    assert child.do(exact) == 0  # 32 bytes go on top of what is asked for
    assert simulator.memory_used(0) - before == 6 * MIB
    assert child.do("result = acl.aclrtFree(one), acl.aclrtFree(two), acl.aclrtFree(two)") == [0, 0, 107000]
    assert simulator.memory_used(0) == before


def test_a_full_device_is_out_of_memory(child: Child) -> None:
    with pytest.raises(ChildError) as raised:
        child.do("torch.empty(2 << 30, dtype=torch.uint8, device='npu')")
    assert raised.value.kind == "OutOfMemoryError"


def test_out_of_memory_on_demand(simulator: Simulator, child: Child) -> None:
    simulator.out_of_memory()
    with pytest.raises(ChildError) as raised:
        child.do("torch.empty(30 << 20, dtype=torch.uint8, device='npu')")
    assert raised.value.kind == "OutOfMemoryError"
    simulator.out_of_memory(0)
    assert child.do("result = torch.empty(30 << 20, dtype=torch.uint8, device='npu').numel()") == 30 * MIB


def test_the_cpu_cannot_touch_device_memory(simulator: Simulator) -> None:
    with Child(simulator) as process:
        address = process.do("block = torch.zeros(4, device='npu'); result = block.data_ptr()")
        with pytest.raises(EOFError):
            process.do(f"ctypes.string_at({address}, 4)")
        assert process.process.returncode == -11


@pytest.mark.usefixtures("slow_copies")
def test_a_copy_to_pageable_memory_is_over_when_it_returns(child: Child) -> None:
    child.do(REGISTER.replace("register = ", "register = 0 #"))
    assert child.do(COPY_OUT) == [0, 7, 7]


@pytest.mark.usefixtures("slow_copies")
def test_a_copy_to_pinned_memory_is_not(child: Child) -> None:
    child.do(
        REGISTER.replace("register = ", "register = 0; view = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory() #")
    )
    assert child.do(COPY_OUT) == [0, 0, 7]


@pytest.mark.usefixtures("slow_copies")
def test_a_copy_to_registered_memory_is_not(child: Child) -> None:
    child.do(REGISTER)
    assert child.do(COPY_OUT) == [0, 0, 7]
    assert child.do("result = int(torch.npu.npurt().npuHostUnregister(view.data_ptr()))") == 0


def test_registered_memory_is_aligned_to_4_kib(child: Child) -> None:
    child.do("import mmap; shared = mmap.mmap(-1, 1 << 16); view = torch.frombuffer(shared, dtype=torch.uint8)")
    call = "result = acl.aclrtHostRegisterV2(ctypes.c_void_p(view.data_ptr() + {}), ctypes.c_uint64(8192), 2)"
    assert child.do(call.format(64)) == 107000
    assert child.do(call.format(0)) == 0
    assert child.do(call.format(4096)) == 507910
    unregister = "result = acl.aclrtHostUnregister(ctypes.c_void_p(view.data_ptr()))"
    assert [child.do(unregister), child.do(unregister)] == [0, 507911]


def test_an_old_driver_does_not_know_registered_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    old = Simulator(tmp_path_factory.mktemp("old"), driver="25.3.0")
    old.slow_copies(to_host_us=SLOW_US)
    with Child(old) as process:
        process.do(REGISTER)
        assert process.do(COPY_OUT) == [0, 7, 7]
        raw = """
            view.zero_(); stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream); n = ctypes.c_size_t(1 << 20)
            to, source = ctypes.c_void_p(view.data_ptr()), ctypes.c_void_p(page.data_ptr())
            status = acl.aclrtMemcpyAsync(to, n, source, n, 2, stream)
            now = view[0].item(); torch.npu.synchronize(); result = status, now, view[0].item()
        """
        assert process.do(raw) == [0, 0, 7]


def test_the_host_reading_too_early_is_a_race(child: Child, new_races: Callable[[], list[Race]]) -> None:
    program = """
        host = torch.zeros(4096, pin_memory=True); page = torch.ones(4096, device="npu"); torch.npu.synchronize()
        side = torch.npu.Stream()
        with torch.npu.stream(side): host.copy_(page, non_blocking=True)
        while not {seen}: pass
        acl.cann_simulator_host_access(ctypes.c_void_p(host.data_ptr()), ctypes.c_size_t(host.nbytes), 0)
        side.synchronize()
    """
    child.do(program.format(seen="side.query()"))
    assert new_races() == []
    child.do(program.format(seen="host[-1].item()"))
    assert [(race.memory, race.second.operation) for race in new_races()] == [("host", "host read")]


def test_freed_memory_that_a_stream_still_uses_is_a_race(
    simulator: Simulator, child: Child, new_races: Callable[[], list[Race]]
) -> None:
    child.do("block = ctypes.c_void_p(); acl.aclrtMalloc(ctypes.byref(block), ctypes.c_size_t(4096), 0)")
    count = simulator.submitted(child.pid)
    child.do(
        """
        stream, n = ctypes.c_void_p(torch.npu.current_stream().npu_stream), ctypes.c_size_t(4096)
        acl.aclrtMemsetAsync(block, n, 1, n, stream)
        """
    )
    simulator.wait_until_done(count + 1, child.pid)
    assert child.do("result = acl.aclrtFree(block)") == 0
    assert [race.second.operation for race in new_races()] == ["aclrtFree"]
