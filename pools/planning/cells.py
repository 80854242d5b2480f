"""Segments of a plan side as gather cells: equal-width rows of a 2-D view, for memory that only a device can access.

A device gathers by row index from a two-dimensional view. A whole page is one cell; a slice of a page is cut into cells
of gcd(row bytes, slice bytes). Contains no device code. Not the coverage cells of docs/architecture.md, "Words".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvferry.pools.planning.plan import PlanSide
from kvferry.pools.planning.runs import PageIds


class Cells(NamedTuple):
    """Some cells of one entry, in their order in contiguous memory.

    Attributes:
        offset_bytes: byte offset of cell 0 in the region.
        cell_bytes: width of a cell in bytes.
        numbers: ``(n,)`` int64 cell indices; ascending only if the pages are.
        flat_bytes: byte offset of the first of these cells in the contiguous memory.
    """

    offset_bytes: int
    cell_bytes: int
    numbers: PageIds
    flat_bytes: int

    @property
    def size_bytes(self) -> int:
        """Return the total size of the cells in bytes."""
        return self.cell_bytes * len(self.numbers)


def cells_of(side: PlanSide, first: int, stop: int) -> Iterator[Cells]:
    """Yield the cells of segments ``[first, stop)``, entry by entry; whole-page entries share one array of ids."""
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
    """Return the largest ``end`` such that segments ``[first, end)`` fit in ``max_bytes``; at least ``first + 1``."""
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
