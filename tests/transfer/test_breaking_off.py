"""Any call may raise, if only for want of memory: both halves end once, and no page is free that may still be written.

Each test lets one call raise, every one in its turn: a call that the transfer state machine or the allocator makes,
of Python or of C, counted from the first message of a transfer to its last event. Where the end of a side raises, its
pages are quarantined; all others come back, and the next transfer works.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

from kvferry.daemon.transfer import completion, state_machine
from kvferry.daemon.transfer.endpoints import Endpoint
from kvferry.pools import allocator
from tests.kit.devices import DEVICE
from tests.kit.peers import PAGES, WAYS, Transfer, Way
from tests.kit.transfers import Direction, Engine

STRIDE: Final = 61
"""Every so many calls; all of them where the tests run in full."""
MANY: Final = 500
_GUARDED: Final = (Path(state_machine.__file__).parent.as_posix(), Path(allocator.__file__).as_posix())
_GUARD: Final = inspect.unwrap(completion.Completion.ending).__code__
"""What catches the fault; a lack of memory there, before anything has changed, is its caller's."""

_CLEANING_UP: Final = {"<genexpr>", "remove", "__del__"}
"""What Python calls where nobody can catch anything: a generator that is closed, a weak reference, ``__del__``."""


class Fault:
    """Raises MemoryError in place of the call of this number, where the caller is code that must stand it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            caller = frame.f_back
            cleans_up = frame.f_code.co_name in _CLEANING_UP or frame.f_code.co_filename == contextlib.__file__
            if caller is None or cleans_up:
                return
        elif event == "c_call":
            caller = frame
        else:
            return
        if caller.f_code.co_filename.startswith(_GUARDED) and caller.f_code is not _GUARD:
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


def run_all(one: Transfer) -> None:
    one.harness.run()


STEPS: Final[dict[str, tuple[Callable[[Transfer], object], ...]]] = {
    "a transfer in two chunks": (
        Transfer.receive, lambda one: one.send(stop=1, last=False), run_all, lambda one: one.send(1), run_all
    ),
    "cancelled while a copy is under way": (
        Transfer.send, Transfer.receive, lambda one: one.harness.deliver_all(),
        lambda one: one.decode.cancel("receive"), run_all,
    ),
}  # fmt: skip


def run(way: Way, steps: str, number: int) -> tuple[int, Transfer]:
    """Take the steps, with a fault in the call of this number; return how many calls there were."""
    one, refused = Transfer(way), False
    one.greet()
    with fault(number) as injected:
        for step in STEPS[steps]:
            try:
                step(one)
            except MemoryError:  # the engine gets INTERNAL as the answer, and nothing has changed
                refused = True
                sys.setprofile(None)
            except Exception:
                if not refused and injected.calls < number:  # e.g. a chunk of a SEND that has failed
                    raise
    return injected.calls, one


def check_ended(one: Transfer) -> bool:
    """Check that all that was accepted has ended, or waits for a half that was refused; and that the next one works.

    Return whether pages are quarantined.
    """
    one.harness.run()
    sides: list[tuple[Engine, Direction]] = [(one.prefill, "send"), (one.decode, "receive")]
    for engine, direction in sides:
        if engine.told in {"", "OK"} and list(engine.harness.state_machine.endpoints):
            with contextlib.suppress(Exception):
                engine.cancel(direction)
    one.harness.run()
    one.harness.pass_time(1000.0)
    quarantined = 0
    for engine, direction in sides:
        kept = engine.harness.quarantined_pages(engine.pool, "main")
        quarantined += len(kept)
        assert engine.held == len(kept)
        outcome, _, settled = engine.told.partition(" ")
        assert settled == "settled" or not outcome or engine.harness.bugs, "only an end that raised is not told"
        engine.acknowledge(direction)
    for node in one.harness.nodes.values():
        node.check()
        assert not node.leftovers(), (node.name, node.leftovers())
        node.bugs.clear()
        for session in node.told:
            node.told[session].clear()
    for engine, _ in sides if quarantined else ():
        engine.pages = engine.harness.filled(engine.pool, engine.session, PAGES)
    one.receive(request="e" * 32)
    one.send(request="e" * 32)
    one.harness.run()
    assert one.told == ("OK settled", "OK settled")
    assert one.decode.content == one.prefill.content
    return bool(quarantined)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_raises_ends_the_transfer_and_nothing_else(way: Way, steps: str) -> None:
    count, _ = run(way, steps, 0)
    assert count > MANY
    wrong: dict[int, str] = {}
    quarantined = 0
    numbers = range(1, count + 1, 1 if DEVICE.full else STRIDE)
    for number in numbers:
        _, one = run(way, steps, number)
        try:
            quarantined += check_ended(one)
        except AssertionError as error:
            wrong[number] = str(error)
    assert not wrong
    assert 0 < quarantined < len(numbers) / 6, "only where an end itself raised"


def test_pages_that_cannot_be_given_back_are_quarantined_and_nothing_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Transfer()
    one.meet()
    calls = list[object]()

    def fails(_self: allocator.PageAllocator, ids: object) -> None:
        calls.append(ids)
        raise MemoryError("for as long as the test says")

    monkeypatch.setattr(allocator.PageAllocator, "end_write", fails)
    one.end_copy()
    one.harness.pass_time(1000.0)
    assert len(calls) == 1
    assert one.told == ("OK", "OK"), "no page may be used anew"
    assert one.held == (PAGES, PAGES), "those of the SEND may be read still, for all that is known"
    assert one.home.bugs == ["the transfer broke off: MemoryError: for as long as the test says"]
    [problem] = [found for found in one.home.state_machine.endpoints.problems(one.harness.now) if found is not None]
    assert (problem.what, problem.total) == ("a quarantined request, whose end raised, holds its pages", 2)
    assert not one.home.leftovers()
    for engine in (one.prefill, one.decode):
        engine.lose()
        assert len(one.home.free_pages(engine.pool)) == engine.pool.allocator.capacity - PAGES, "for ever"


def test_a_session_hears_of_an_end_that_cannot_be_told_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Transfer()
    one.meet()

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Endpoint, "finished_event", fails)
    one.decode.cancel("receive")
    assert one.told == ("INTERNAL", "INTERNAL")
    one.end_copy()
    assert one.told == ("INTERNAL", "INTERNAL"), "each of them once"
    assert one.held == (PAGES, PAGES)
