"""Device memory and events between processes: rights, lifetimes, and races across them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cann_simulator.child import Child, ChildError
from tests.cann_simulator.simulator import Race, Simulator

pytestmark = pytest.mark.full


MIB = 1 << 20
NOT_ALLOWED = 207006
WAIT_TIMED_OUT = 507047
OVER_LIMIT = 207012
LONGEST_LIST = 65535
NO_PROCESS = 1 << 23  # above what the kernel gives out

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
def export_key():
    memory, key = ctypes.c_void_p(), ctypes.create_string_buffer(65)
    check(acl.aclrtMalloc(ctypes.byref(memory), SIZE, 0))
    check(acl.aclrtIpcMemGetExportKey(memory, SIZE, key, ctypes.c_size_t(65), ctypes.c_uint64(0)))
    return memory, key.value.decode()
def allow_key(key, process):
    return acl.aclrtIpcMemSetImportPid(key.encode(), (ctypes.c_int32 * 1)(process), ctypes.c_size_t(1))
def import_key(key):
    memory = ctypes.c_void_p()
    return memory, acl.aclrtIpcMemImportByKey(ctypes.byref(memory), key.encode(), ctypes.c_uint64(0))
def names(first, count, *more): return (ctypes.c_int32 * (count + len(more)))(*range(first, first + count), *more)
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


def test_a_list_names_many_and_each_once(owner: Child, engine: Child) -> None:
    shareable = owner.do("handle, result = export(0)")
    name = (
        f"result = acl.aclrtMemSetPidToShareableHandle(ctypes.c_uint64({shareable}), many, ctypes.c_size_t(len(many)))"
    )
    owner.do(f"many = names({NO_PROCESS}, {LONGEST_LIST - 1}, {engine.pid})")
    assert [owner.do(name), owner.do(name)] == [0, 0]
    assert owner.do(f"result = allow({shareable}, 1)") == OVER_LIMIT
    assert engine.do(f"handle, result = import_({shareable})") == 0


def test_a_handles_list_forgets_importers_that_have_ended(simulator: Simulator, owner: Child) -> None:
    shareable = owner.do("handle, result = export(0)")
    owner.do(f"many = names({NO_PROCESS}, {LONGEST_LIST - 1})")
    owner.do(f"acl.aclrtMemSetPidToShareableHandle(ctypes.c_uint64({shareable}), many, ctypes.c_size_t(len(many)))")
    for _ in range(3):
        with Child(simulator) as importer:
            importer.do(VMM)
            assert owner.do(f"result = allow({shareable}, {importer.pid})") == 0
            assert importer.do(f"handle, result = import_({shareable})") == 0
            assert owner.do(f"result = allow({shareable}, 1)") == OVER_LIMIT


def test_a_keys_list_forgets_importers_that_have_ended(simulator: Simulator, owner: Child) -> None:
    key = owner.do("memory, result = export_key()")
    owner.do(f"many = names({NO_PROCESS}, {LONGEST_LIST - 1})")
    owner.do(f"acl.aclrtIpcMemSetImportPid({key!r}.encode(), many, ctypes.c_size_t(len(many)))")
    for _ in range(3):
        with Child(simulator) as importer:
            importer.do(VMM)
            assert owner.do(f"result = allow_key({key!r}, {importer.pid})") == 0
            assert importer.do(f"memory, result = import_key({key!r})") == 0
            assert owner.do(f"result = allow_key({key!r}, 1)") == OVER_LIMIT


def test_a_number_that_was_named_before_its_process_began_is_refused(simulator: Simulator, owner: Child) -> None:
    shareable, key = owner.do("handle, one = export(0); memory, two = export_key(); result = one, two")
    first = 1 if int(Path("/proc/sys/kernel/pid_max").read_text()) < LONGEST_LIST else owner.pid
    owner.do(f"many = names({first}, {LONGEST_LIST})")  # the next process is among them
    owner.do(f"acl.aclrtMemSetPidToShareableHandle(ctypes.c_uint64({shareable}), many, ctypes.c_size_t(len(many)))")
    owner.do(f"acl.aclrtIpcMemSetImportPid({key!r}.encode(), many, ctypes.c_size_t(len(many)))")
    with Child(simulator) as importer:
        importer.do(VMM)
        assert owner.do(f"result = {importer.pid} in list(many)")
        assert importer.do(f"result = import_({shareable})[1], import_key({key!r})[1]") == [NOT_ALLOWED, NOT_ALLOWED]
        assert owner.do(f"result = allow({shareable}, {importer.pid}), allow_key({key!r}, {importer.pid})") == [0, 0]
        assert importer.do(f"result = import_({shareable})[1], import_key({key!r})[1]") == [0, 0]


def test_many_processes_hold_one_memory(owner: Child, simulator: Simulator) -> None:
    shareable = owner.do("handle, result = export(1)")
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            importer = stack.enter_context(Child(simulator))
            importer.do(VMM)
            assert importer.do(f"handle, result = import_({shareable})") == 0


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


@pytest.mark.parametrize("wait", ["side.wait_event(event); side.synchronize()", "event.synchronize()"])
def test_waiting_for_the_event_of_a_killed_process_never_ends(
    wait: str, simulator: Simulator, owner: Child, engine: Child
) -> None:
    engine.do(TAKE.format(owner.do(SHARE)))
    overdue = len(simulator.overdue())
    with simulator.held(owner.pid):
        owner.do("pool.fill_(3); event.record()")
        simulator.wait_until_pending(2, owner.pid)
        owner.kill()
    assert engine.do("result = event.query()") is False
    simulator.limit_waits(500)
    with pytest.raises(ChildError) as raised:
        engine.do(wait)
    simulator.limit_waits()
    assert f"error code is {WAIT_TIMED_OUT}" in raised.value.text
    assert len(simulator.overdue()) == overdue + 1


VALUES = """
def stream_of(stream):  # launches what torch_npu has queued before it returns the handle
    return ctypes.c_void_p((stream or torch.npu.current_stream()).npu_stream)
def word(tensor, index): return ctypes.c_void_p(tensor.data_ptr() + 8 * index)
def write(tensor, value, index=0, stream=None):
    return acl.aclrtValueWrite(word(tensor, index), ctypes.c_uint64(value), 0, stream_of(stream))
def wait(tensor, value, index=0, stream=None):
    return acl.aclrtValueWait(word(tensor, index), ctypes.c_uint64(value), 0, stream_of(stream))
page, side, other = pool[4096:], torch.npu.Stream(), torch.npu.Stream()
own = torch.full((1,), 5, dtype=torch.int64, device="npu"); torch.npu.synchronize()
"""
TAKE_PAGE = "with torch.npu.stream(side): taken = page + 1\nside.synchronize(); result = taken[0].item()"


@pytest.fixture(params=["key", "shareable handle"])
def _shared(request: pytest.FixtureRequest, owner: Child, engine: Child) -> None:
    """Let both have ``pool`` in common, whose first bytes are words, and ``page``, the rest of it."""
    if request.param == "key":
        engine.do(TAKE.format(owner.do(SHARE)))
    else:
        shareable = owner.do(
            "handle, result = export(1); pool = pool_of(handle); pool.zero_(); torch.npu.synchronize()"
        )
        engine.do(f"handle, status = import_({shareable}); check(status); pool = pool_of(handle)")
    for process in (owner, engine):
        process.do(VALUES)


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize(
    "behind",
    [
        "wait(pool, 4, 0, side)",
        "wait(pool, 4, 0, other); event = torch.npu.Event(); event.record(other); side.wait_event(event)",
        "wait(pool, 4, 0, other); write(pool, 1, 1, other); wait(pool, 1, 1, side)",
    ],
)
def test_a_value_that_a_wait_finds_orders_two_processes(
    behind: str, simulator: Simulator, owner: Child, engine: Child, new_races: Callable[[], list[Race]]
) -> None:
    with simulator.held(owner.pid):
        assert owner.do("page.fill_(3); result = write(pool, 5)") == 0
        engine.do(f"{behind}\nwith torch.npu.stream(side): taken = page + 1\nside.npu_stream")
        assert engine.do("result = side.query()") is False
    assert engine.do("side.synchronize(); result = taken[0].item()") == 4
    assert new_races() == []


@pytest.mark.usefixtures("_shared")
def test_what_a_host_sees_after_a_wait_for_a_value_is_ordered(
    owner: Child, engine: Child, new_races: Callable[[], list[Race]]
) -> None:
    owner.do("page.fill_(3); write(pool, 5)")
    engine.do("wait(pool, 5, 0, other); other.synchronize()")
    assert engine.do(TAKE_PAGE) == 4
    assert new_races() == []


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize(
    ("owners", "engines"),
    [
        ("page.fill_(3); write(pool, 5)", "pass"),
        ("page.fill_(3); write(pool, 5)", "wait(pool, 0, 1, side)"),  # another word
        ("page.fill_(3); write(pool, 5)", "wait(own, 5, 0, side)"),  # the same value, of nobody's write
        ("page.fill_(3); write(pool, 5)", "wait(pool, 5, 0, other)"),  # another stream
        ("page.fill_(3); write(pool, 5)", "assert pool[:8].view(torch.int64).item() == 5"),  # a host has read the word
        ("write(pool, 5); page.fill_(3)", "wait(pool, 5, 0, side)"),  # written before
        ("page.fill_(3); write(pool, 4); pool[:8].fill_(5)", "wait(pool, 5, 0, side)"),  # of an operator
    ],
)
def test_without_the_wait_for_a_value_it_is_a_race(
    owners: str,
    engines: str,
    simulator: Simulator,
    owner: Child,
    engine: Child,
    new_races: Callable[[], list[Race]],
) -> None:
    before = simulator.submitted(owner.pid)
    owner.do(f"{owners}\ntorch.npu.current_stream().npu_stream")
    simulator.wait_until_done(before + 2, owner.pid)
    engine.do(engines)
    assert engine.do(TAKE_PAGE) == 4
    [race] = new_races()
    assert {race.first.process, race.second.process} == {owner.pid, engine.pid}
    assert race.first.operation == "aclnnInplaceFillScalar"


@pytest.mark.usefixtures("_shared")
def test_waiting_for_the_value_of_a_killed_process_never_ends(
    simulator: Simulator, owner: Child, engine: Child
) -> None:
    overdue = len(simulator.overdue())
    with simulator.held(owner.pid):
        owner.do("write(pool, 5)")
        owner.kill()
    simulator.limit_waits(500)
    with pytest.raises(ChildError) as raised:
        engine.do("wait(pool, 5, 0, side); side.synchronize()")
    simulator.limit_waits()
    assert f"error code is {WAIT_TIMED_OUT}" in raised.value.text
    assert len(simulator.overdue()) == overdue + 1


@pytest.mark.usefixtures("_shared")
def test_another_process_writes_a_value_in_a_dead_ones_place(simulator: Simulator, owner: Child, engine: Child) -> None:
    with simulator.held(owner.pid):
        owner.do("write(pool, 5)")
        owner.kill()
    engine.do("wait(pool, 5, 0, side); write(pool, 5, 0, other); side.synchronize()")
