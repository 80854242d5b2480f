"""Checks of page lists, made before any byte is copied."""

from __future__ import annotations

import numpy as np

from kvferry.pools.planning.runs import PageIds
from kvferry.protocol.errors import (
    DuplicatePageError,
    EmptyPagesError,
    LengthMismatchError,
    PageOutOfRangeError,
)


def check_range(ids: PageIds, pages: int, field: str) -> None:
    """Check that every id is in 1..pages-1; page 0 is the padding page.

    Raises:
        EmptyPagesError: the list is empty.
        PageOutOfRangeError: names the first id out of range and its position.
    """
    if len(ids) == 0:
        raise EmptyPagesError("the list names no page", field=field)
    if int(ids.min()) < 1 or int(ids.max()) >= pages:
        at = int(np.flatnonzero((ids < 1) | (ids >= pages))[0])
        raise PageOutOfRangeError(f"page {ids[at]} at position {at}; the pool has 1..{pages - 1}", field=field)


def check_distinct(ids: PageIds, field: str) -> None:
    """Check that no id occurs twice.

    Raises:
        DuplicatePageError: names the smallest id that does.
    """
    ordered = np.sort(ids)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(again):
        raise DuplicatePageError(f"page {ordered[again[0]]} is named more than once", field=field)


def check_equal_length(source: PageIds, destination: PageIds, field: str) -> None:
    """Check that both lists have the same length.

    Raises:
        LengthMismatchError: names both lengths.
    """
    if len(source) != len(destination):
        raise LengthMismatchError(f"{len(source)} source pages for {len(destination)} destination pages", field=field)
