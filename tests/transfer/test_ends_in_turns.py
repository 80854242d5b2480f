"""Many endpoints that end for one reason do so a few at a time: others go on in between."""

from __future__ import annotations

import pytest

from kvferry.daemon.transfer import state_machine
from kvferry.daemon.transfer.transitions import State
from tests.transfer.transfer_harness import TransferHarness

MANY = 5


@pytest.fixture(autouse=True)
def _two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_machine, "ENDED_AT_ONCE", 2)


def waiting(harness: TransferHarness) -> tuple[int, int]:
    """Return two sessions of one pool, of which the first one has MANY receive requests, and the other one another."""
    pool = harness.pool("decode")
    first, other = harness.session(), harness.session()
    for number in range(MANY):
        harness.receive(first, pool, harness.filled(pool, first, 1), request=f"{number:032x}")
    harness.receive(other, pool, harness.filled(pool, other, 1), request=f"{MANY:032x}")
    return first, other


def is_open(harness: TransferHarness) -> list[int]:
    """Return which requests are open, by number."""
    endpoints = harness.state_machine.endpoints
    return sorted(int(one.request_id, 16) for one in endpoints if one.state is State.OPEN)


def test_a_session_with_many_ends_in_turns() -> None:
    harness = TransferHarness()
    first, _ = waiting(harness)
    steps = harness.state_machine.losing_session(first, harness.now)
    seen = [is_open(harness) for _ in steps]
    assert seen == [[2, 3, 4, 5], [4, 5]]
    assert is_open(harness) == [5]
    assert harness.state_machine.results.count(first) == 0


def test_what_ends_by_itself_meanwhile_is_left_out() -> None:
    harness = TransferHarness()
    first, other = waiting(harness)
    steps = harness.state_machine.losing_session(first, harness.now)
    next(steps)
    source = harness.pool("prefill")
    harness.send(other, source, harness.filled(source, other, 1), request=f"{2:032x}")
    harness.transport.finish_all()
    assert len(list(steps)) == 1
    assert is_open(harness) == [5]


def test_deadlines_that_come_together_do_so_in_turns() -> None:
    harness = TransferHarness()
    waiting(harness)
    now, seen = harness.now + 30.0, list[list[int]]()
    while (due_at := harness.state_machine.next_deadline()) is not None:
        assert due_at <= now
        harness.state_machine.expire(now)
        seen.append(is_open(harness))
    assert seen == [[2, 3, 4, 5], [4, 5], []]
