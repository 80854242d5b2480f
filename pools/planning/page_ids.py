"""Lists of page ids: the checks made before any byte is copied, and the runs that two lists form together."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    DuplicatePageError,
    EmptyPagesError,
    LengthMismatchError,
    PageOutOfRangeError,
)

FEW: Final = 256
"""So many ids Python looks at sooner than numpy, each of whose calls takes 20 to 70 us where its code was not used of
late; where it was, Python takes some microseconds longer."""


class Runs(NamedTuple):
    """Maximal sequences of pages that are consecutive both at the source and at the destination.

    First source page, first destination page and number of pages of each run: three ``(runs,)`` int64 arrays.
    """

    source: PageIds
    destination: PageIds
    pages: PageIds


def coalesce(source: PageIds, destination: PageIds) -> Runs:
    """Return the runs of two page lists of equal length, in list order; see docs/architecture.md, "Formulas"."""
    count = len(source)
    if count <= FEW:
        return _few_runs(source, destination)
    cut = np.empty(count, np.bool_)
    cut[0] = True
    step = source[1:] - source[:-1]
    np.not_equal(step, 1, out=cut[1:])
    np.subtract(destination[1:], destination[:-1], out=step)
    cut[1:] |= step != 1
    starts = np.flatnonzero(cut)
    pages = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=pages[:-1])
    pages[-1] = count - starts[-1]
    return Runs(source.take(starts, mode="clip"), destination.take(starts, mode="clip"), pages)


def _few_runs(source: PageIds, destination: PageIds) -> Runs:
    """Return what ``coalesce`` does, of few pages."""
    count, ours, theirs = len(source), source.tolist(), destination.tolist()
    starts = [at for at in range(count) if not at or ours[at] - ours[at - 1] != 1 or theirs[at] - theirs[at - 1] != 1]
    if len(starts) == count:  # as where pages are random
        return Runs(source, destination, np.ones(count, np.int64))
    firsts = [ours[at] for at in starts], [theirs[at] for at in starts]
    pages = [stop - at for at, stop in pairwise([*starts, count])]
    return Runs(*np.array([*firsts, pages], np.int64))


def bounds(ids: PageIds) -> tuple[int, int]:
    """Return the smallest and the largest of at least one id."""
    if len(ids) <= FEW:
        few = ids.tolist()
        return min(few), max(few)
    return int(ids.min()), int(ids.max())


def check_range(ids: PageIds, pages: int, field: str) -> None:
    """Check that every id is in 1..pages-1; page 0 is the padding page.

    Raises:
        EmptyPagesError: the list is empty.
        PageOutOfRangeError: names the first id out of range and its position.
    """
    if len(ids) == 0:
        raise EmptyPagesError("the list names no page", field=field)
    smallest, largest = bounds(ids)
    if smallest < 1 or largest >= pages:
        at = int(np.flatnonzero((ids < 1) | (ids >= pages))[0])
        raise PageOutOfRangeError(f"page {ids[at]} at position {at}; the pool has 1..{pages - 1}", field=field)


def check_distinct(ids: PageIds, field: str) -> None:
    """Check that no id occurs twice.

    Raises:
        DuplicatePageError: names the smallest id that does.
    """
    if len(ids) <= FEW and len(set(ids.tolist())) == len(ids):
        return
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
