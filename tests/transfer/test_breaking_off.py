"""Any call may raise, if only for want of memory: both halves still end, every page comes back, and the next one works.

Each test lets one call raise, every one in its turn: a call that the transfer state machine or the allocator makes,
of Python or of C, counted from the first message of a transfer to its last event.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

from kvferry.daemon.transfer import completion, state_machine
from kvferry.pools import allocator
from tests.devices import DEVICE
from tests.transfer.peer_harness import PAGES, WAYS, Transfer, Way

pytestmark = pytest.mark.any_device

STRIDE: Final = 41
"""Every so many calls; all of them where the tests run in full."""
MANY: Final = 500
_GUARDED: Final = (Path(state_machine.__file__).parent.as_posix(), Path(allocator.__file__).as_posix())
_GUARDS: Final = {completion.Completion.whole.__code__, *(
    one.__code__ for one in vars(completion.Whole).values() if hasattr(one, "__code__")
)}  # fmt: skip
"""What catches the fault; a lack of memory there, before anything has changed, is its caller's."""

_CLEANING_UP: Final = {"<genexpr>", "remove", "__del__"}
"""What Python calls where nobody can catch anything: a generator that is closed, a weak reference, ``__del__``."""


class Fault:
    """Raises MemoryError in place of the call of this number, where the caller is code that must stand it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """See ``sys.setprofile``."""
        if event == "call":
            caller = frame.f_back
            if caller is None or frame.f_code in _GUARDS or frame.f_code.co_name in _CLEANING_UP:
                return
        elif event == "c_call":
            caller = frame
        else:
            return
        if caller.f_code.co_filename.startswith(_GUARDED) and caller.f_code not in _GUARDS:
            self.calls += 1
            if self.calls == self.number:
                raise MemoryError(f"in place of call {self.number}")


@contextlib.contextmanager
def fault(number: int) -> Iterator[Fault]:
    """Let the call of this number raise; what it raises may come out of the block."""
    one = Fault(number)
    gc.disable()  # what it calls is called by whatever code it happens to run in
    sys.setprofile(one)
    try:
        yield one
    finally:
        sys.setprofile(None)
        gc.enable()


def ordinary(one: Transfer) -> Iterator[Callable[[], Any]]:
    """Yield the steps of a transfer in two chunks that succeeds."""
    yield one.receive
    yield lambda: one.send(stop=1, last=False)
    yield one.harness.run
    yield lambda: one.send(1)
    yield one.harness.run


def cancelled(one: Transfer) -> Iterator[Callable[[], Any]]:
    """Yield the steps of one that is cancelled while a copy is under way."""
    yield one.send
    yield one.receive
    yield one.harness.deliver_all
    yield lambda: one.decode.cancel("receive")
    yield one.harness.run


def run(way: Way, steps: Callable[[Transfer], Iterator[Callable[[], Any]]], number: int) -> tuple[int, Transfer]:
    """Take the steps, with a fault in the call of this number; return how many calls there were."""
    one, refused = Transfer(way), False
    one.greet()
    with fault(number) as injected:
        for step in steps(one):
            try:
                step()
            except MemoryError:  # the engine gets INTERNAL as the answer, and nothing has changed
                refused = True
                sys.setprofile(None)
            except Exception:
                if not refused and injected.calls < number:  # e.g. a chunk of a SEND that has failed
                    raise
    return injected.calls, one


def check_ended(one: Transfer) -> None:
    """Check that all that was accepted has ended, or waits for a half that was refused; and that the next one works."""
    one.harness.run()
    for engine, direction in ((one.prefill, "send"), (one.decode, "receive")):
        if engine.told in {"", "OK"} and list(engine.harness.state_machine.endpoints):
            with contextlib.suppress(Exception):
                engine.cancel(direction)  # type: ignore[arg-type]
    one.harness.run()
    one.harness.pass_time(0.0)
    assert all(told == "" or told.endswith("settled") for told in one.told), one.told
    for node in one.harness.nodes.values():
        node.check()
        assert not node.leftovers(), (node.name, node.leftovers())
        node.bugs.clear()
    assert one.held == (0, 0)
    for engine, direction in ((one.prefill, "send"), (one.decode, "receive")):
        engine.acknowledge(direction)  # type: ignore[arg-type]
    for node in {one.source, one.home}:
        for session in node.told:
            node.told[session].clear()
    one.receive(request="e" * 32)
    one.send(request="e" * 32)
    one.succeeds()


@pytest.mark.parametrize("steps", [ordinary, cancelled])
@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_raises_ends_the_transfer_and_nothing_else(
    way: Way, steps: Callable[[Transfer], Iterator[Callable[[], Any]]]
) -> None:
    count, _ = run(way, steps, 0)
    assert count > MANY
    wrong: dict[int, str] = {}
    for number in range(1, count + 1, 1 if DEVICE.full else STRIDE):
        _, one = run(way, steps, number)
        try:
            check_ended(one)
        except AssertionError as error:
            wrong[number] = str(error)
    assert not wrong


def test_what_cannot_be_ended_at_once_is_ended_later(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Transfer()
    one.meet()
    release = allocator.PageAllocator.end_write

    def fails(_self: allocator.PageAllocator, _ids: object) -> None:
        raise MemoryError("for as long as the test says")

    monkeypatch.setattr(allocator.PageAllocator, "end_write", fails)
    with pytest.raises(AssertionError, match="has not settled"):  # VERIFY would show it
        one.end_copy()
    assert one.told == ("OK", "OK"), "no page may be used anew yet"
    assert one.held[1] == PAGES
    assert one.home.state_machine.next_deadline() is not None
    monkeypatch.setattr(allocator.PageAllocator, "end_write", release)
    one.harness.pass_time(completion.BREAK_OFF_AGAIN_S)
    assert [detail.partition(":")[0] for detail in one.home.bugs] == [
        "the transfer broke off",
        "a request that broke off could not be ended",
    ]
    one.home.bugs.clear()
    one.check_over("OK", "OK")
    assert one.decode.content == one.prefill.content
