"""How many threads copy: each number is tried, and the fewest that are about as fast as the best are taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.process.thread_count import AGAIN_S, MIN_BYTES, TRIES, TRIES_AGAIN, WORTH, ThreadCount

KIND = "short"


class Machine:
    """Copies at the speeds that it was given for each number of threads, by a clock of its own."""

    def __init__(self, speeds: dict[int, float], most: int) -> None:
        self.now_s = 0.0
        self.speeds = speeds
        self.count = ThreadCount(most, clock=lambda: self.now_s)

    def copy(self, size_bytes: int = MIN_BYTES, *, alone: bool = True) -> int:
        """Copy so much, and return on how many threads."""
        trial = self.count.begin(KIND, size_bytes, alone=alone)
        self.now_s += size_bytes / self.speeds[trial.threads]
        self.count.end(trial)
        return trial.threads

    def settle(self) -> set[int]:
        """Copy until every number was tried; return what was."""
        return {self.copy() for _ in range(TRIES * len(self.speeds))}


@pytest.mark.parametrize(("most", "counts"), [(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (8, {1, 2, 4, 8})])
def test_each_number_is_tried_and_no_other(most: int, counts: set[int]) -> None:
    assert Machine(dict.fromkeys(range(1, most + 1), 1e9), most).count.best(KIND) == most
    assert Machine(dict.fromkeys(counts, 1e9), most).settle() == counts


@given(st.lists(st.floats(1e8, 1e11), min_size=4, max_size=4))
def test_the_fewest_that_are_about_as_fast_are_taken(speeds: list[float]) -> None:
    machine = Machine(dict(zip((1, 2, 4, 8), speeds, strict=True)), 8)
    machine.settle()
    assert machine.count.best("another kind") == 8, "kinds have numbers of their own"
    chosen = machine.copy()
    assert all(machine.speeds[more] < WORTH * machine.speeds[chosen] for more in machine.speeds if more > chosen)
    for fewer in (one for one in machine.speeds if one < chosen):
        assert machine.speeds[chosen] > machine.speeds[fewer], "more threads that bring nothing"


def test_a_disturbed_moment_does_not_decide_for_ever() -> None:
    machine = Machine({1: 9e9, 2: 4e9}, 2)  # somebody else has the second core
    machine.settle()
    assert machine.copy() == 1
    machine.speeds = {1: 9e9, 2: 17e9}
    assert machine.copy() == 1, "what is known holds for a while"
    machine.now_s += AGAIN_S
    assert sorted(machine.copy() for _ in range(2 * TRIES_AGAIN)) == [1] * TRIES_AGAIN + [2] * TRIES_AGAIN
    assert {machine.copy() for _ in range(TRIES)} == {2}


@pytest.mark.parametrize(("size_bytes", "alone"), [(MIN_BYTES - 1, True), (MIN_BYTES, False)])
def test_what_is_small_or_not_alone_is_no_trial(size_bytes: int, *, alone: bool) -> None:
    machine = Machine({1: 1e9, 2: 1e9}, 2)
    assert {machine.copy(size_bytes, alone=alone) for _ in range(2 * TRIES)} == {2}
    assert machine.settle() == {1, 2}


def test_who_is_never_alone_for_long_does_not_try_one_number_for_ever() -> None:
    machine = Machine({1: 1e9, 2: 2e9}, 2)
    begun = [machine.count.begin(KIND, MIN_BYTES, alone=True).threads for _ in range(2 * TRIES)]  # none ends alone
    assert sorted(begun) == [1] * TRIES + [2] * TRIES
    assert {machine.copy() for _ in range(4)} == {2}, "nothing is known: all"
