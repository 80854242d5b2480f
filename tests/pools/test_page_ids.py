"""Coalescing: runs give the lists back, cannot be longer, and keep the order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.planning import page_ids
from kvferry.pools.planning.page_ids import FEW, Runs, check_distinct, check_range, coalesce
from kvferry.protocol.errors import (
    DuplicatePageError,
    EmptyPagesError,
    PageOutOfRangeError,
)

NEARBY = st.integers(1, 12)
PAIRS = st.lists(st.tuples(NEARBY, NEARBY), max_size=40)


BOTH_WAYS = pytest.mark.parametrize("few", [0, FEW])
"""As if all lists were long, and as if all were short."""


@contextmanager
def looked_at_as(few: int) -> Iterator[None]:
    """Have lists of more than so many ids looked at as long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_ids, "FEW", few)
        yield


def runs_of(pairs: list[tuple[int, int]], few: int) -> Runs:
    lists = np.array(pairs, np.int64).reshape(-1, 2)
    lists.flags.writeable = False
    with looked_at_as(few):
        return coalesce(lists[:, 0], lists[:, 1])


def expanded(runs: Runs) -> list[tuple[int, int]]:
    return [
        (source + i, destination + i)
        for source, destination, pages in zip(*(one.tolist() for one in runs), strict=True)
        for i in range(pages)
    ]


@BOTH_WAYS
@given(pairs=PAIRS)
@example(pairs=[(1, 5), (2, 7), (3, 8)])  # contiguous at the source alone
@example(pairs=[(1, 5), (3, 6), (4, 7)])  # contiguous at the destination alone
@example(pairs=[(3, 3), (2, 2), (1, 1)])  # descending
@example(pairs=[(1, 1), (1, 2), (1, 3)])  # one page again and again
@example(pairs=[(1 << 40, 7), ((1 << 40) + 1, 8)])
def test_runs_give_the_lists_back_and_are_maximal(few: int, pairs: list[tuple[int, int]]) -> None:
    runs = runs_of(pairs, few)
    assert expanded(runs) == pairs
    assert (runs.pages >= 1).all()
    ends = zip(runs.source + runs.pages, runs.destination + runs.pages, strict=True)
    starts = zip(runs.source[1:], runs.destination[1:], strict=True)
    assert not any(end == start for end, start in zip(ends, starts, strict=False))


# -- checks of page lists: exactly which error, and which page it names.


POOL_PAGES = 8
IDS = st.lists(st.integers(-3, POOL_PAGES + 3) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=8)


def ids_of(pages: list[int]) -> np.typing.NDArray[np.int64]:
    return np.array(pages, np.int64)


@BOTH_WAYS
@given(pages=IDS)
@example(pages=[0])
@example(pages=[POOL_PAGES])
@example(pages=[1, POOL_PAGES - 1])
def test_range(few: int, pages: list[int]) -> None:
    wrong = [at for at, page in enumerate(pages) if not 1 <= page < POOL_PAGES]
    if pages and not wrong:
        with looked_at_as(few):
            check_range(ids_of(pages), POOL_PAGES, "lists[3].pages")
        return
    with looked_at_as(few), pytest.raises(PageOutOfRangeError if pages else EmptyPagesError) as refused:
        check_range(ids_of(pages), POOL_PAGES, "lists[3].pages")
    assert refused.value.field == "lists[3].pages"
    if wrong:
        assert refused.value.detail == f"page {pages[wrong[0]]} at position {wrong[0]}; the pool has 1..7"


@BOTH_WAYS
@given(pages=st.lists(st.integers(1, POOL_PAGES), max_size=8))
def test_distinct(few: int, pages: list[int]) -> None:
    again = sorted(page for page in set(pages) if pages.count(page) > 1)
    if not again:
        with looked_at_as(few):
            check_distinct(ids_of(pages), "pages")
        return
    with (
        looked_at_as(few),
        pytest.raises(DuplicatePageError, match=f"page {again[0]} is named more than once") as refused,
    ):
        check_distinct(ids_of(pages), "pages")
    assert refused.value.field == "pages"
