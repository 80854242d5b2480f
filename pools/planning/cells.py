"""Segments of a plan's side as cells: numbered rows of one width, for memory that only a device can touch.

A device gathers by taking numbered rows of a two-dimensional view. A whole page is one row; a slice of a page is cut
into rows of the greatest width of which both a row and a slice have a whole number. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvferry.pools.planning.plan import PlanSide
from kvferry.pools.planning.runs import PageIds


class Cells(NamedTuple):
    """Part of one entry: its cells in the order in which they lie in contiguous memory.

    Attributes:
        offset_bytes: where cell 0 begins in the region.
        cell_bytes: the width of a cell.
        numbers: ``(n,)`` int64, ascending only where the pages are.
        flat_bytes: where the first of them lies in the contiguous memory.
    """

    offset_bytes: int
    cell_bytes: int
    numbers: PageIds
    flat_bytes: int

    @property
    def size_bytes(self) -> int:
        """Return how many bytes they are."""
        return self.cell_bytes * len(self.numbers)


def cells_of(side: PlanSide, first: int, stop: int) -> Iterator[Cells]:
    """Yield segments ``[first, stop)`` entry by entry; entries of whole pages on the same pages share one array."""
    pages, flat = len(side.ids), 0
    shared: tuple[int, PageIds] = (-1, side.ids)
    while first < stop:
        entry, page = divmod(first, pages)
        count = min(pages - page, stop - first)
        if shared[0] != page or len(shared[1]) != count:
            shared = (page, side.ids if count == pages else side.ids[page : page + count])
        cells = _of_entry(side, entry, shared[1], flat)
        yield cells
        flat += cells.size_bytes
        first += count


def segments_that_fit(side: PlanSide, first: int, stop: int, max_bytes: int) -> int:
    """Return where to end so that segments ``[first, end)`` have at most ``max_bytes``; one segment at least."""
    pages, sizes = len(side.ids), side.segment_bytes
    end = first
    while end < stop:
        size = int(sizes[end // pages])
        count = min(pages - end % pages, stop - end, max_bytes // size)
        if count == 0:
            break
        end, max_bytes = end + count, max_bytes - count * size
    return max(end, first + 1)


def _of_entry(side: PlanSide, entry: int, ids: PageIds, flat: int) -> Cells:
    base, page_bytes = int(side.base[entry]), int(side.page_bytes[entry])
    if side.slice_bytes[entry] == side.page_bytes[entry]:
        return Cells(base, page_bytes, ids, flat)
    rows, row_bytes, slice_bytes = (int(one[entry]) for one in (side.rows, side.row_bytes, side.slice_bytes))
    cell = int(np.gcd(row_bytes, slice_bytes))
    row_numbers = (ids[:, None] * rows + np.arange(rows)).reshape(-1, 1)
    numbers = (row_numbers * (row_bytes // cell) + np.arange(slice_bytes // cell)).reshape(-1)
    return Cells(base + int(side.slice_offset[entry]), cell, numbers, flat)
