"""Processes that are taken apart later than they end, as a driver does: what stays until then, and what still lands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Race, Simulator
from tests.cann_simulator.test_sharing import NOT_ALLOWED, VMM
from tests.kit.daemons import soon

pytestmark = pytest.mark.full

LATE_MS = 1000
FINISHED_S = 10.0  # on a busy machine
NO_SUCH_HANDLE = 107000

CANARY = """
canary, result = export(0)
check(allow(result, {engine}))
"""
# The pool is the engine's own, as one that it has registered; the owner queues copies to it.
POOL = "handle, result = export(1); pool = pool_of(handle); pool.zero_(); torch.npu.synchronize()"
QUEUE = """
handle, status = import_({pool}); check(status); pool = pool_of(handle); torch.npu.synchronize()
mine = torch.full((1 << 20,), 7, dtype=torch.uint8).pin_memory()
side, other = torch.npu.Stream(), torch.npu.Stream()
def copy(index, stream=side):
    with torch.npu.stream(stream): pool[index << 20 : (index + 1) << 20].copy_(mine, non_blocking=True)
    stream.npu_stream  # launches it
def write(word, value, stream=side):
    check(acl.aclrtValueWrite(ctypes.c_void_p(pool.data_ptr() + (3 << 20) + 8 * word), ctypes.c_uint64(value), 0,
                              ctypes.c_void_p(stream.npu_stream)))
def wait(word, value, stream=side):
    check(acl.aclrtValueWait(ctypes.c_void_p(pool.data_ptr() + (3 << 20) + 8 * word), ctypes.c_uint64(value), 0,
                             ctypes.c_void_p(stream.npu_stream)))
"""
PAGES = "result = [pool[i << 20].item() for i in range(3)], pool[3 << 20 :][:32].view(torch.int64).tolist()"


@pytest.fixture(scope="module", autouse=True)
def _late(simulator: Simulator) -> Iterator[None]:
    simulator.late_teardown(LATE_MS)
    yield
    simulator.late_teardown(0)


@pytest.fixture
def owner(simulator: Simulator) -> Iterator[Child]:
    with Child(simulator) as process:
        process.do(VMM)
        yield process


@pytest.fixture(scope="module")
def engine(simulator: Simulator) -> Iterator[Child]:
    with Child(simulator) as process:
        process.do(VMM)
        yield process


def look(engine: Child, canary: int) -> bool:
    """Return whether the canary can still be imported; the import holds it, so let it go."""
    looked = f"handle, result = import_({canary})\nif not result: check(acl.aclrtFreePhysical(handle))"
    status = engine.do(looked)
    assert status in {0, NO_SUCH_HANDLE}
    return bool(status == 0)


def wait_until_taken_apart(engine: Child, canary: int) -> None:
    assert soon(lambda: not look(engine, canary))


def test_memory_and_handles_of_a_killed_process_stay_for_a_while(
    simulator: Simulator, owner: Child, engine: Child
) -> None:
    before = simulator.memory_used(0)
    canary = owner.do(CANARY.format(engine=engine.pid))
    unnamed = owner.do("_, result = export(0)")
    assert look(engine, canary)
    began = time.monotonic()
    owner.kill()
    assert look(engine, canary)
    assert engine.do(f"_, result = import_({unnamed})") == NOT_ALLOWED
    assert simulator.memory_used(0) >= before + (8 << 20)
    wait_until_taken_apart(engine, canary)
    assert time.monotonic() - began >= LATE_MS / 1000
    assert engine.do(f"_, result = import_({unnamed})") == NO_SUCH_HANDLE
    assert simulator.memory_used(0) == before


def test_what_was_imported_in_time_stays(owner: Child, engine: Child) -> None:
    kept = owner.do("handle, result = export(1); pool = pool_of(handle).fill_(5); torch.npu.synchronize()")
    canary = owner.do(CANARY.format(engine=engine.pid))
    owner.kill()
    engine.do(f"kept, status = import_({kept}); check(status); kept_pool = pool_of(kept)")
    wait_until_taken_apart(engine, canary)
    assert engine.do("result = kept_pool[:2].tolist()") == [5, 5]
    assert engine.do("result = free(kept_pool, kept)") == [0, 0]
    assert engine.do(f"_, result = import_({kept})") == NO_SUCH_HANDLE


def test_sockets_of_a_killed_process_close_at_once(owner: Child) -> None:
    began = time.monotonic()
    owner.process.kill()
    with pytest.raises(EOFError):
        owner.receive(timeout_s=FINISHED_S)
    assert time.monotonic() - began < LATE_MS / 1000 / 2


def test_queued_copies_land_before_the_process_is_taken_apart(
    simulator: Simulator, owner: Child, engine: Child, new_races: Callable[[], list[Race]]
) -> None:
    pool = engine.do(POOL)
    canary = owner.do(CANARY.format(engine=engine.pid))
    owner.do(QUEUE.format(pool=pool))
    with simulator.held(owner.pid):
        owner.do("copy(0); copy(1); write(0, 1); wait(0, 1, other); copy(2, other); write(1, 2, other)")
        owner.kill()
        assert engine.do(PAGES) == [[0, 0, 0], [0] * 4]
        wait_until_taken_apart(engine, canary)
    assert engine.do(PAGES) == [[7, 7, 7], [1, 2, 0, 0]]
    assert {race.second.process for race in new_races()} == {owner.pid}  # the engine has looked too early


def test_who_waits_until_the_process_is_taken_apart_is_in_no_race(
    simulator: Simulator, owner: Child, engine: Child, new_races: Callable[[], list[Race]]
) -> None:
    pool = engine.do(POOL)
    canary = owner.do(CANARY.format(engine=engine.pid))
    owner.do(QUEUE.format(pool=pool))
    with simulator.held(owner.pid):
        owner.do("copy(0)")
        owner.kill()
        wait_until_taken_apart(engine, canary)
    engine.do("pool.fill_(3); torch.npu.synchronize()")
    assert engine.do(PAGES)[0] == [3, 3, 3]
    assert new_races() == []


@pytest.mark.parametrize("first", ["wait(0, 1)", "with torch.npu.stream(side): mine_there = pool[:4] + 1"])
def test_what_waits_for_ever_or_is_behind_a_kernel_does_not_land(
    first: str, simulator: Simulator, owner: Child, engine: Child
) -> None:
    pool = engine.do(POOL)
    canary = owner.do(CANARY.format(engine=engine.pid))
    owner.do(QUEUE.format(pool=pool))
    with simulator.held(owner.pid):
        owner.do(f"{first}\nside.npu_stream; copy(0); write(1, 1); copy(1, other)")
        owner.kill()
        wait_until_taken_apart(engine, canary)
    assert engine.do(PAGES) == [[0, 7, 0], [0] * 4]


def test_a_copy_that_was_cut_short_is_whole_in_the_end(simulator: Simulator, owner: Child, engine: Child) -> None:
    pool = engine.do(POOL)
    canary = owner.do(CANARY.format(engine=engine.pid))
    owner.do(QUEUE.format(pool=pool))
    simulator.slow_copies(to_device_us=400_000)
    try:
        owner.do("copy(0); copy(1)")
        simulator.wait_until_pending(2, owner.pid)
        owner.kill()
        wait_until_taken_apart(engine, canary)
    finally:
        simulator.slow_copies()
    assert engine.do(PAGES)[0] == [7, 7, 0]


def test_at_once_where_no_test_asks_for_more(simulator: Simulator, owner: Child, engine: Child) -> None:
    canary = owner.do(CANARY.format(engine=engine.pid))
    simulator.late_teardown(0)
    owner.kill()
    began = time.monotonic()
    wait_until_taken_apart(engine, canary)
    simulator.late_teardown(LATE_MS)
    assert time.monotonic() - began < LATE_MS / 1000 / 2
