"""Deadlines against a plain dict."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.transfer import state_machine
from kvferry.daemon.transfer.registry import FEW, Deadlines
from kvferry.daemon.transfer.transitions import State
from tests.kit.transfers import TransferHarness

NAMES = st.sampled_from("abcdef")
TIMES = st.integers(0, 20).map(float)
STEPS = st.one_of(
    st.tuples(st.just("set"), NAMES, TIMES),
    st.tuples(st.just("drop"), NAMES, st.none()),
    st.tuples(st.just("due"), st.none(), TIMES),
)


@given(st.lists(STEPS, max_size=60))
def test_each_has_one_deadline(steps: list[tuple[str, str, float]]) -> None:
    deadlines, known = Deadlines[str](), dict[str, float]()
    for what, name, at in steps:
        if what == "set":
            deadlines.set(name, at)
            known[name] = at
        elif what == "drop":
            deadlines.drop(name)
            known.pop(name, None)
        else:
            due = list(deadlines.due(at))
            assert sorted(due) == sorted(one for one, its in known.items() if its <= at)
            times = [known.pop(one) for one in due]
            assert times == sorted(times)
        assert deadlines.next() == min(known.values(), default=None)
        assert repr(deadlines) == f"<Deadlines {len(known)}>"


def test_what_is_dropped_while_others_are_due_is_not() -> None:
    deadlines = Deadlines[str]()
    for name in "abc":
        deadlines.set(name, 1.0)
    found = []
    for name in deadlines.due(1.0):
        found.append(name)
        deadlines.drop("b")
    assert found == ["a", "c"]


class Thing:
    """Something that can be seen to be gone."""


def test_nothing_is_kept_for_what_is_dropped() -> None:
    deadlines = Deadlines[Thing]()
    first = Thing()
    deadlines.set(first, 0.0)
    gone = []
    for number in range(1000):
        thing = Thing()
        deadlines.set(thing, 3600.0 + number)
        deadlines.set(thing, 7200.0)
        gone.append(weakref.ref(thing))
        deadlines.drop(thing)
        del thing
    gc.collect()
    assert not any(one() for one in gone)
    assert len(deadlines.__dict__["_heap"]) <= FEW + 4
    assert list(deadlines.due(0.0)) == [first]


def test_deadlines_that_pass_together_end_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_machine, "EXPIRED_AT_ONCE", 2)
    harness = TransferHarness()
    pool, session = harness.pool("decode"), harness.session()
    for number in range(5):
        harness.receive(session, pool, harness.filled(pool, session, 1), request=f"{number:032x}")
    now, left = harness.now + 30.0, list[int]()
    while (due_at := harness.state_machine.next_deadline()) is not None:
        assert due_at <= now
        harness.state_machine.expire(now)
        left.append(sum(one.state is State.OPEN for one in harness.state_machine.endpoints))
    assert left == [3, 1, 0]
