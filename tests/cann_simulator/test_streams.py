"""Streams defer, events order, and an order that is missing is reported."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Race, Simulator
from tests.kit.daemons import soon

pytestmark = pytest.mark.full


# A page is filled on the compute stream and copied to pinned memory on another one, as a daemon does.
PAGE_OUT = """
page = torch.zeros(4096, device="npu")
host = torch.zeros(4096, pin_memory=True)
copies = torch.npu.Stream()
compute = torch.npu.current_stream()
torch.npu.synchronize()
"""
COPY_OUT = """
with torch.npu.stream(copies):
    host.copy_(page, non_blocking=True)
copies.synchronize()
result = host[0].item()
"""


def test_what_is_queued_runs_later(simulator: Simulator, child: Child) -> None:
    child.do(PAGE_OUT)
    with simulator.held():
        child.do("with torch.npu.stream(copies): host.copy_(page.fill_(5), non_blocking=True)")
        simulator.wait_until_pending(1)
        assert child.do("result = host[0].item(), copies.query()") == [0.0, False]
    assert child.do("copies.synchronize(); result = host[0].item(), copies.query()") == [5.0, True]


def test_a_wait_may_be_longer_while_a_test_holds_tasks(simulator: Simulator, child: Child) -> None:
    limit_ms = 50
    child.do("here, there = torch.npu.Stream(), torch.npu.Stream(); event = torch.npu.Event()")
    simulator.limit_waits(limit_ms)
    with simulator.held(child.pid, child.do("result = there.npu_stream")):
        began = time.monotonic()
        child.do("event.record(there); here.wait_event(event); here.npu_stream")
        assert soon(lambda: time.monotonic() - began > 10 * limit_ms / 1000)
        assert child.do("result = here.query()") is False
    child.do("here.synchronize()")
    simulator.limit_waits()


def test_a_missing_wait_is_a_race(child: Child, new_races: Callable[[], list[Race]]) -> None:
    child.do(PAGE_OUT)
    child.do("page.fill_(7)")
    child.do(COPY_OUT)
    child.do("torch.npu.synchronize()")  # whichever of the two runs last has run now
    [race] = new_races()
    assert {race.first.operation, race.second.operation} == {"aclnnInplaceFillScalar", "aclrtMemcpyAsync"}
    assert {race.first.writes, race.second.writes} == {True, False}
    assert race.first.stream != race.second.stream
    assert (race.memory, race.device, race.first.process) == ("device", 0, child.pid)


@pytest.mark.parametrize(
    "order",
    [
        "copies.wait_stream(compute)",
        "event = torch.npu.Event(); event.record(compute); copies.wait_event(event)",
        "event = torch.npu.Event(); event.record(compute); event.synchronize()",
        "compute.synchronize()",
        "torch.npu.synchronize()",
        "event = torch.npu.Event(); event.record(compute)\nwhile not event.query(): pass",
        "\nwhile not compute.query(): pass",
        "page.cpu()",
    ],
)
def test_no_race_with(order: str, child: Child, new_races: Callable[[], list[Race]]) -> None:
    child.do(PAGE_OUT)
    child.do(f"page.fill_(7); {order}")
    assert child.do(COPY_OUT) == 7.0
    assert new_races() == []


def test_an_event_orders_what_came_before_it_only(child: Child, new_races: Callable[[], list[Race]]) -> None:
    child.do(PAGE_OUT)
    child.do("event = torch.npu.Event(); event.record(compute); page.fill_(7); copies.wait_event(event)")
    child.do(COPY_OUT)
    child.do("torch.npu.synchronize()")
    [race] = new_races()
    assert {race.first.operation, race.second.operation} == {"aclnnInplaceFillScalar", "aclrtMemcpyAsync"}


def test_a_wait_keeps_the_record_that_it_saw(child: Child, new_races: Callable[[], list[Race]]) -> None:
    child.do(PAGE_OUT)
    child.do(
        """
        event = torch.npu.Event(); event.record(compute); copies.wait_event(event)
        page.fill_(7); event.record(compute)
        """
    )
    child.do(COPY_OUT)
    assert len(new_races()) == 1


def test_disjoint_rows_of_one_tensor_are_no_race(child: Child, new_races: Callable[[], list[Race]]) -> None:
    child.do(
        """
        pool = torch.zeros(64, 256, device="npu"); side = torch.npu.Stream()
        odd, even = torch.arange(1, 64, 2, device="npu"), torch.arange(0, 64, 2, device="npu")
        rows = torch.ones(32, 256, device="npu"); torch.npu.synchronize()
        pool.index_copy_(0, odd, rows)
        with torch.npu.stream(side): taken = pool.index_select(0, even)
        torch.npu.synchronize()
        """
    )
    assert new_races() == []
    child.do(
        """
        pool.index_copy_(0, odd, rows)
        with torch.npu.stream(side): taken = pool.index_select(0, torch.cat([even[:3], odd[:1]]))
        torch.npu.synchronize()
        """
    )
    assert {race.second.operation for race in new_races()} <= {"aclnnIndexSelect", "aclnnInplaceIndexCopy"}
    assert new_races()


def test_memory_used_again_without_record_stream_is_a_race(child: Child, new_races: Callable[[], list[Race]]) -> None:
    program = """
        side = torch.npu.Stream(); keep = torch.zeros(1 << 16, device="npu"); torch.npu.synchronize()
        block = torch.full((1 << 16,), 3.0, device="npu"); side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side): keep.copy_(block)
        {record}
        address = block.data_ptr(); del block
        again = torch.full((1 << 16,), 4.0, device="npu"); same = again.data_ptr() == address
        torch.npu.synchronize(); result = same
    """
    assert child.do(program.format(record="block.record_stream(side)")) in (True, False)
    assert new_races() == []
    assert child.do(program.format(record=""))
    [race] = new_races()
    assert {race.first.operation, race.second.operation} == {"aclnnInplaceFillScalar", "aclnnInplaceCopy"}


def test_a_slow_stream_is_overtaken(simulator: Simulator, child: Child) -> None:
    child.do("slow, quick = torch.npu.Stream(), torch.npu.Stream(); a = torch.zeros(4, device='npu'); b = a.clone()")
    handle = child.do("torch.npu.synchronize(); result = slow.npu_stream")
    simulator.slow_stream(child.pid, handle, 50_000)
    order = child.do(
        """
        with torch.npu.stream(slow): a.fill_(1)
        with torch.npu.stream(quick): b.fill_(1)
        quick.synchronize(); result = slow.query(); slow.synchronize()
        """
    )
    simulator.release()
    assert order is False
