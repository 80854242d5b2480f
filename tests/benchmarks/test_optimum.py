"""Belady's MIN against every other choice there is, on traces small enough to try them all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations, takewhile
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.optimum import NEVER, next_use_times, optimal_hits
from benchmarks.traces import TracedRequest

Prompts = tuple[tuple[int, ...], ...]
TREE: Final = {0: None, 1: 0, 2: 1, 3: 0, 4: None, 5: 4}
"""Each block's predecessor."""


def prompt_to(block: int | None) -> tuple[int, ...]:
    return () if block is None else (*prompt_to(TREE[block]), block)


PROMPTS: Final = st.lists(st.sampled_from(sorted(TREE)).map(prompt_to), min_size=1, max_size=6).map(tuple)


def best_by_trying(prompts: Prompts, capacity: int) -> int:
    """Return the most prefix hits over every choice of what to keep after every request."""

    @cache
    def best(number: int, kept: frozenset[int]) -> int:
        if number == len(prompts):
            return 0
        hits = len(list(takewhile(kept.__contains__, prompts[number])))
        known = kept.union(prompts[number])
        size = min(capacity, len(known))
        return hits + max(best(number + 1, frozenset(one)) for one in combinations(sorted(known), size))

    return best(0, frozenset())


def as_requests(prompts: Sequence[tuple[int, ...]]) -> list[TracedRequest]:
    return [TracedRequest(0, blocks) for blocks in prompts]


@given(PROMPTS, st.integers(1, 5))
def test_no_choice_of_what_to_keep_has_more_prefix_hits(prompts: Prompts, capacity: int) -> None:
    assert optimal_hits(as_requests(prompts), capacity) == best_by_trying(prompts, capacity)


def test_next_uses() -> None:
    assert next_use_times([1, 2, 1, 1]).tolist() == [2, NEVER, 3, NEVER]
