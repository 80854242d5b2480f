"""Device memory and events between processes: rights, lifetimes, and races across them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Race, Simulator

pytestmark = pytest.mark.full


MIB = 1 << 20
NOT_ALLOWED = 207006

VMM = """
class Location(ctypes.Structure): _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int)]
class Property(ctypes.Structure): _fields_ = [("handle_type", ctypes.c_int), ("allocation_type", ctypes.c_int),
    ("attribute", ctypes.c_int), ("location", Location), ("reserved", ctypes.c_uint64)]
SIZE = ctypes.c_size_t(4 << 20)
def check(status):
    if status: raise OSError(status)
def pool_of(handle, device=0):
    address = ctypes.c_void_p()
    check(acl.aclrtReserveMemAddress(ctypes.byref(address), SIZE, ctypes.c_size_t(0), None, ctypes.c_uint64(0)))
    check(acl.aclrtMapMem(address, SIZE, ctypes.c_size_t(0), handle, ctypes.c_uint64(0)))
    storage = torch._C._construct_storage_from_data_pointer(address.value, torch.device("npu", device), SIZE.value)
    return torch.empty(0, dtype=torch.uint8, device=f"npu:{device}").set_(storage, 0, (SIZE.value,), (1,))
def export(flags):
    handle = ctypes.c_void_p(); prop = Property(0, 0, 4, Location(0, 1), 0)
    check(acl.aclrtMallocPhysical(ctypes.byref(handle), SIZE, ctypes.byref(prop), ctypes.c_uint64(0)))
    shareable = ctypes.c_uint64()
    check(acl.aclrtMemExportToShareableHandle(handle, 0, ctypes.c_uint64(flags), ctypes.byref(shareable)))
    return handle, shareable.value
def allow(shareable, process):
    processes = (ctypes.c_int32 * 1)(process)
    return acl.aclrtMemSetPidToShareableHandle(ctypes.c_uint64(shareable), processes, ctypes.c_size_t(1))
def import_(shareable, device=0):
    handle = ctypes.c_void_p()
    status = acl.aclrtMemImportFromShareableHandle(ctypes.c_uint64(shareable), device, ctypes.byref(handle))
    return handle, status
def free(pool, handle):
    torch.npu.synchronize()
    return [acl.aclrtUnmapMem(ctypes.c_void_p(pool.data_ptr())), acl.aclrtFreePhysical(handle)]
"""


@pytest.fixture
def owner(simulator: Simulator) -> Iterator[Child]:
    with Child(simulator) as process:
        process.do(VMM)
        yield process


@pytest.fixture
def engine(simulator: Simulator) -> Iterator[Child]:
    with Child(simulator) as process:
        process.do(VMM)
        yield process


def test_vmm_memory_lives_as_long_as_one_holder(simulator: Simulator, owner: Child, engine: Child) -> None:
    before = simulator.memory_used(0)
    shareable = owner.do("handle, result = export(0); pool = pool_of(handle); pool.fill_(5); torch.npu.synchronize()")
    assert engine.do(f"result = import_({shareable})[1]") == NOT_ALLOWED
    assert owner.do(f"result = allow({shareable}, {engine.pid})") == 0
    assert (
        engine.do(f"handle, status = import_({shareable}); pool = pool_of(handle); result = pool[:3].tolist()")
        == [5] * 3
    )
    engine.do("pool[0] = 9; torch.npu.synchronize()")
    assert owner.do("result = pool[:3].tolist()") == [9, 5, 5]
    assert simulator.memory_used(0) - before >= 4 * MIB
    owner.kill()
    assert engine.do("result = pool[:3].tolist()") == [9, 5, 5]
    used = simulator.memory_used(0)
    assert engine.do("result = free(pool, handle)") == [0, 0]
    assert used - simulator.memory_used(0) == 4 * MIB


def test_imported_memory_is_on_its_owners_device_and_as_large_as_there(owner: Child, engine: Child) -> None:
    shareable = owner.do("handle, result = export(0)")
    owner.do(f"allow({shareable}, {engine.pid})")
    looked = f"""
        torch.npu.set_device(1)
        handle, status = import_({shareable}, 1)
        pool = pool_of(handle, 1)
        class Attributes(ctypes.Structure): _fields_ = [("location", Location), ("rest", ctypes.c_uint32 * 5)]
        found, base, size = Attributes(), ctypes.c_void_p(), ctypes.c_size_t()
        inside = ctypes.c_void_p(pool.data_ptr() + 100)
        check(acl.aclrtPointerGetAttributes(inside, ctypes.byref(found)))
        check(acl.aclrtMemGetAddressRange(inside, ctypes.byref(base), ctypes.byref(size)))
        result = [status, found.location.id, base.value == pool.data_ptr(), size.value]
    """
    assert engine.do(looked) == [0, 0, True, 4 * MIB]


def test_a_killed_importer_lets_go(simulator: Simulator, owner: Child, engine: Child) -> None:
    shareable = owner.do("handle, result = export(1); pool = pool_of(handle); pool.fill_(5); torch.npu.synchronize()")
    engine.do(f"handle, status = import_({shareable}); pool = pool_of(handle)")
    engine.kill()
    assert owner.do("result = pool[:2].tolist()") == [5, 5]
    used = simulator.memory_used(0)
    assert owner.do("result = free(pool, handle)") == [0, 0]
    assert used - simulator.memory_used(0) == 4 * MIB


def test_handles_are_one_to_one(owner: Child, engine: Child) -> None:
    shareable = owner.do("handle, result = export(1)")
    again = (
        "result = acl.aclrtMemExportToShareableHandle(handle, 0, ctypes.c_uint64(1), ctypes.byref(ctypes.c_uint64()))"
    )
    assert owner.do(again) == 107000
    assert owner.do(f"result = import_({shareable})[1]") == 107000
    assert engine.do(f"handle, result = import_({shareable})") == 0
    assert engine.do(f"result = import_({shareable})[1]") == 107000
    owner.kill()
    assert engine.do("result = acl.aclrtFreePhysical(handle)") == 0
    assert engine.do(f"result = import_({shareable})[1]") == 107000


def test_another_device_allows_copies_on_the_device_only(owner: Child, engine: Child) -> None:
    shareable = owner.do("handle, result = export(1); pool = pool_of(handle); pool.fill_(5); torch.npu.synchronize()")
    engine.do(f"torch.npu.set_device(1); handle, status = import_({shareable}, 1); pool = pool_of(handle, 1)")
    copy = """
        host, here = torch.zeros(64, dtype=torch.uint8).pin_memory(), torch.zeros(64, dtype=torch.uint8, device="npu:1")
        stream = ctypes.c_void_p(torch.npu.current_stream(1).npu_stream); n = ctypes.c_size_t(64)
        source = ctypes.c_void_p(pool.data_ptr())
        def copy(to, kind): return acl.aclrtMemcpyAsync(ctypes.c_void_p(to.data_ptr()), n, source, n, kind, stream)
        result = copy(host, 2), copy(here, 3), copy(here, 4); torch.npu.synchronize()
    """
    assert engine.do(copy) == [107000, 0, 107000]
    assert engine.do("result = here[:2].tolist()") == [5, 5]


SHARE = """
import base64, pickle, torch.multiprocessing
from multiprocessing.reduction import ForkingPickler
pool = torch.zeros(1 << 20, dtype=torch.uint8, device="npu"); torch.npu.synchronize()
event = torch.npu.Event(interprocess=True); event.record(); torch.npu.synchronize()
result = base64.b64encode(bytes(ForkingPickler.dumps((pool, event)))).decode()
"""
TAKE = """
import base64, pickle, torch.multiprocessing
pool, event = pickle.loads(base64.b64decode({!r})); side = torch.npu.Stream()
"""


def test_torch_npu_shares_tensors(owner: Child, engine: Child) -> None:
    engine.do(TAKE.format(owner.do(SHARE)))
    owner.do("pool[7] = 3; torch.npu.synchronize()")
    assert engine.do("result = pool[6:9].tolist()") == [0, 3, 0]
    engine.do("pool[8] = 4; torch.npu.synchronize()")
    assert owner.do("result = pool[6:9].tolist()") == [0, 3, 4]


def test_a_missing_wait_between_processes_is_a_race(
    simulator: Simulator, owner: Child, engine: Child, new_races: Callable[[], list[Race]]
) -> None:
    engine.do(TAKE.format(owner.do(SHARE)))
    before = simulator.submitted(owner.pid)
    owner.do("pool.fill_(3)")
    simulator.wait_until_done(before + 1, owner.pid)
    assert engine.do("with torch.npu.stream(side): taken = pool + 1\nside.synchronize(); result = taken[0].item()") == 4
    [race] = new_races()
    assert {race.first.process, race.second.process} == {owner.pid, engine.pid}


def test_an_event_orders_two_processes(
    simulator: Simulator, owner: Child, engine: Child, new_races: Callable[[], list[Race]]
) -> None:
    engine.do(TAKE.format(owner.do(SHARE)))
    with simulator.held(owner.pid):
        owner.do("pool.fill_(3); event.record()")
        simulator.wait_until_pending(2, owner.pid)  # torch_npu submits on a thread of its own
        engine.do("side.wait_event(event)\nwith torch.npu.stream(side): taken = pool + 1")
        assert engine.do("result = side.query()") is False
    assert engine.do("side.synchronize(); result = taken[0].item()") == 4
    assert new_races() == []


def test_what_the_host_has_seen_orders_two_processes(
    owner: Child, engine: Child, new_races: Callable[[], list[Race]]
) -> None:
    engine.do(TAKE.format(owner.do(SHARE)))
    owner.do("pool.fill_(3); torch.npu.synchronize()")
    assert engine.do("with torch.npu.stream(side): taken = pool + 1\nside.synchronize(); result = taken[0].item()") == 4
    assert new_races() == []


def test_waiting_for_the_event_of_a_killed_process_ends(simulator: Simulator, owner: Child, engine: Child) -> None:
    engine.do(TAKE.format(owner.do(SHARE)))
    with simulator.held(owner.pid):
        owner.do("pool.fill_(3); event.record()")
        simulator.wait_until_pending(2, owner.pid)
        engine.do("side.wait_event(event)\nwith torch.npu.stream(side): taken = pool + 1")
        owner.kill()
        engine.do("side.synchronize()")
