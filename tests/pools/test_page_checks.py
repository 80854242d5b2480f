"""Checks of page lists: exactly which error, and which page it names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.planning.page_ids import check_distinct, check_equal_length, check_range
from kvferry.protocol.errors import (
    DuplicatePageError,
    EmptyPagesError,
    KvferryError,
    LengthMismatchError,
    PageOutOfRangeError,
)

POOL_PAGES = 8
IDS = st.lists(st.integers(-3, POOL_PAGES + 3) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=8)


def ids_of(pages: list[int]) -> np.typing.NDArray[np.int64]:
    return np.array(pages, np.int64)


@given(IDS)
@example([0])
@example([POOL_PAGES])
@example([1, POOL_PAGES - 1])
def test_range(pages: list[int]) -> None:
    wrong = [at for at, page in enumerate(pages) if not 1 <= page < POOL_PAGES]
    if pages and not wrong:
        check_range(ids_of(pages), POOL_PAGES, "lists[3].pages")
        return
    with pytest.raises(PageOutOfRangeError if pages else EmptyPagesError) as refused:
        check_range(ids_of(pages), POOL_PAGES, "lists[3].pages")
    assert refused.value.field == "lists[3].pages"
    if wrong:
        assert refused.value.detail == f"page {pages[wrong[0]]} at position {wrong[0]}; the pool has 1..7"


@given(st.lists(st.integers(1, POOL_PAGES), max_size=8))
def test_distinct(pages: list[int]) -> None:
    again = sorted(page for page in set(pages) if pages.count(page) > 1)
    if not again:
        check_distinct(ids_of(pages), "pages")
        return
    with pytest.raises(DuplicatePageError, match=f"page {again[0]} is named more than once") as refused:
        check_distinct(ids_of(pages), "pages")
    assert refused.value.field == "pages"


@pytest.mark.parametrize(("source", "destination"), [(0, 1), (1, 0), (3, 2)])
def test_equal_length(source: int, destination: int) -> None:
    with pytest.raises(LengthMismatchError, match=f"{source} source pages for {destination} destination pages"):
        check_equal_length(ids_of([1] * source), ids_of([1] * destination), "destination_pages")
    check_equal_length(ids_of([1] * source), ids_of([2] * source), "destination_pages")


def test_every_check_is_the_callers_fault_and_final() -> None:
    for kind in (EmptyPagesError, PageOutOfRangeError, DuplicatePageError, LengthMismatchError):
        error: KvferryError = kind("")
        assert not error.retryable
