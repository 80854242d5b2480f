"""Copies that fail, devices that are lost, and what is slower than usual."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cann_simulator.child import Child, ChildError
from tests.cann_simulator.simulator import LOST_HEARTBEAT, Simulator

pytestmark = pytest.mark.full


COPY_FAILED = 507052
KERNEL_FAILED = 507015

PAGE_OUT = """
import time
page, host = torch.ones(1 << 20, dtype=torch.uint8, device="npu"), torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()
side = torch.npu.Stream(); torch.npu.synchronize()
def copy():
    begin = time.monotonic()
    with torch.npu.stream(side): host.copy_(page, non_blocking=True)
    side.synchronize()
    return time.monotonic() - begin
"""


@pytest.fixture
def victim(simulator: Simulator) -> Iterator[Child]:
    """Return a process that a fault may spoil."""
    with Child(simulator) as process:
        process.do(PAGE_OUT)
        yield process


def test_a_failed_copy_raises_at_the_next_synchronisation(simulator: Simulator, victim: Child) -> None:
    simulator.fail_copies(1)
    victim.do("with torch.npu.stream(side): host.copy_(page, non_blocking=True)")
    with pytest.raises(ChildError) as raised:
        victim.do("side.synchronize()")
    assert raised.value.kind == "RuntimeError"
    assert f"error code is {COPY_FAILED}" in raised.value.text
    assert victim.do("result = host[0].item()") == 0
    assert victim.do("torch.npu.current_stream().synchronize(); result = page.cpu()[0].item()") == 1


def test_an_event_after_a_failed_copy_raises_too(simulator: Simulator, victim: Child) -> None:
    simulator.fail_copies(1)
    with pytest.raises(ChildError) as raised:
        victim.do(
            """
            done = torch.npu.Event()
            with torch.npu.stream(side): host.copy_(page, non_blocking=True)
            done.record(side)
            while not done.query(): pass
            """
        )
    assert f"error code is {COPY_FAILED}" in raised.value.text


def test_a_failed_operator_raises(simulator: Simulator, victim: Child) -> None:
    simulator.fail_kernels(1)
    with pytest.raises(ChildError) as raised:
        victim.do("page.add_(1); torch.npu.synchronize()")
    assert f"error code is {KERNEL_FAILED}" in raised.value.text


def test_an_operator_that_is_missing_fails_with_its_name(victim: Child) -> None:
    with pytest.raises(ChildError) as raised:
        victim.do("for _ in range(10): torch.erfinv(page.float()).cpu()")  # one may just miss it: a thread fails
    assert "erfinv" in raised.value.text.lower()


@pytest.mark.parametrize("call", ["torch.npu.synchronize()", "torch.empty(40 << 20, device='npu')", "page.cpu()"])
def test_every_call_on_a_lost_device_fails(call: str, simulator: Simulator, victim: Child) -> None:
    simulator.lose_device(0)
    try:
        with pytest.raises(ChildError) as raised:
            victim.do(call, timeout_s=20)
    finally:
        simulator.lose_device(0, 0)
    assert f"error code is {LOST_HEARTBEAT}" in raised.value.text


def test_torch_npu_hides_the_code_of_a_copy_that_it_cannot_submit(simulator: Simulator, victim: Child) -> None:
    simulator.lose_device(0)
    try:
        failed = _failed_copy(victim)
        while "Synchronize" in failed.text:  # now and then the wait for the copy sees the loss first
            failed = _failed_copy(victim)
    finally:
        simulator.lose_device(0, 0)
    assert failed.kind == "RuntimeError"
    assert "PTA call acl api failed" in failed.text
    assert str(LOST_HEARTBEAT) not in failed.text


def _failed_copy(victim: Child) -> ChildError:
    with pytest.raises(ChildError) as raised:
        victim.do("copy()", timeout_s=20)
    return raised.value


def test_a_lost_device_ends_what_was_queued(simulator: Simulator, victim: Child) -> None:
    simulator.hold(victim.pid)
    victim.do("with torch.npu.stream(side): host.copy_(page, non_blocking=True)")
    simulator.wait_until_pending(1, victim.pid)
    simulator.lose_device(0)
    try:
        with pytest.raises(ChildError) as raised:
            victim.do("side.synchronize()", timeout_s=20)
        simulator.wait_until_done(1, victim.pid)  # its stream has seen the loss too
    finally:
        simulator.lose_device(0, 0)
        simulator.release()
    assert f"error code is {LOST_HEARTBEAT}" in raised.value.text
    assert victim.do("result = host[0].item()") == 0


def test_the_other_device_is_not_lost(simulator: Simulator, victim: Child) -> None:
    simulator.lose_device(1)
    try:
        assert victim.do("result = page.cpu()[0].item()") == 1
    finally:
        simulator.lose_device(1, 0)


def test_slow_copies_and_limits(simulator: Simulator, child: Child) -> None:
    child.do(PAGE_OUT)
    simulator.slow_copies(to_host_us=50_000)
    assert child.do("result = copy()") >= 0.05
    simulator.slow_copies()
    simulator.limit_copies(to_host=10)
    assert child.do("result = copy()") >= (1 << 20) / 10e6
    simulator.limit_copies()


def test_slow_operators(simulator: Simulator, child: Child) -> None:
    child.do(PAGE_OUT)
    simulator.slow_kernels(50_000)
    assert (
        child.do("b = time.monotonic(); page.add_(1); torch.npu.synchronize(); result = time.monotonic() - b") >= 0.05
    )
    simulator.slow_kernels(0)
