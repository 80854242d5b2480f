"""Gather the bytes of one plan side into contiguous memory, and scatter them back.

The order in contiguous memory is entry by entry, page by page, row by row; both sides compute it independently. A
segment is one page of one entry, numbered ``entry * pages + page``. Whole pages in few runs are copied by ``copies``,
many per call; scattered pages and slices by numpy, one call per entry. Both release the GIL and create no Python object
per page or token. Callers have checked addresses and ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.pools.planning.copies import CopyBlocks, copy_by_size
from kvferry.pools.planning.plan import Blocks, PlanSide, Sizes
from kvferry.pools.planning.runs import PageIds, Runs, coalesce
from kvferry.protocol.errors import BounceBufferTooSmallError

MAX_WORD_BYTES: Final = 8
MANY_RUNS: Final = 8
"""From this many runs on, one numpy call per entry is faster than a memmove per run, each of which retakes the GIL."""


class CopyChunk(NamedTuple):
    """Segments ``[first, stop)``, ``size_bytes`` bytes in all."""

    first: int
    stop: int
    size_bytes: int


class _Rectangle(NamedTuple):
    """Consecutive segments: some entries times some pages.

    Attributes:
        first_entry: index of the entry that the ``(entries,)`` arrays below begin with.
        ids: page ids.
        runs: the runs of ``ids``; pages of the contiguous side count from 0.
        by_row: mask of the entries that numpy copies, by page or by slice.
        sizes: bytes of a segment.
        base: address of the entry.
        flat: address of the entry's first segment in the contiguous memory.
    """

    first_entry: int
    ids: PageIds
    runs: Runs
    by_row: npt.NDArray[np.bool_]
    sizes: Sizes
    base: npt.NDArray[np.uint64]
    flat: npt.NDArray[np.uint64]


def total_segments(side: PlanSide) -> int:
    """Return the number of segments of a side."""
    return len(side.base) * len(side.ids)


def cut_copy_chunks(side: PlanSide, max_bytes: int) -> list[CopyChunk]:
    """Cut all segments, in order, into as few copy chunks of at most ``max_bytes`` as possible.

    Raises:
        BounceBufferTooSmallError: one segment of an entry is larger than ``max_bytes``.
    """
    sizes, pages = side.segment_bytes.tolist(), len(side.ids)
    largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
    if largest is not None and sizes[largest] > max_bytes:
        raise BounceBufferTooSmallError(
            f"entry {largest} sends {sizes[largest]} bytes per page (page_bytes {side.page_bytes[largest]}); a bounce "
            f"buffer has {max_bytes}",
            field="page_bytes",
        )
    copy_chunks: list[CopyChunk] = []
    first, used = 0, 0
    for entry, size in enumerate(sizes):
        segment, stop = entry * pages, (entry + 1) * pages
        while segment < stop:
            taken = min(stop - segment, (max_bytes - used) // size)
            if taken == 0:
                copy_chunks.append(CopyChunk(first, segment, used))
                first, used = segment, 0
            segment, used = segment + taken, used + taken * size
    if used:
        copy_chunks.append(CopyChunk(first, len(sizes) * pages, used))
    return copy_chunks


def gather(
    side: PlanSide, memory_address: int, first: int, stop: int, out_address: int, copy: CopyBlocks = copy_by_size
) -> None:
    """Copy segments ``[first, stop)`` into contiguous memory.

    Args:
        side: the plan side to read.
        memory_address: added to the side's bases; 0 if they are absolute addresses.
        first: the first segment.
        stop: the segment after the last.
        out_address: the contiguous memory; ``cut_copy_chunks`` gives its size.
        copy: copies whole pages in few runs.

    Raises:
        TransferFailedError: an address is not mapped.
    """
    for one in _rectangles(side, first, stop, memory_address, out_address):
        blocks = _whole_blocks(one)
        if len(blocks):
            copy(blocks)
        for slices in _slices_of(side, one):
            slices.gather()


def scatter(
    side: PlanSide, memory_address: int, first: int, stop: int, in_address: int, copy: CopyBlocks = copy_by_size
) -> None:
    """Copy segments ``[first, stop)`` from contiguous memory into the side's pages: the reverse of ``gather``."""
    for one in _rectangles(side, first, stop, memory_address, in_address):
        blocks = _whole_blocks(one)
        if len(blocks):
            copy(blocks[:, [1, 0, 2]])
        for slices in _slices_of(side, one):
            slices.scatter()


def memory_runs(side: PlanSide, memory_address: int, first: int, stop: int) -> list[tuple[int, int]]:
    """Return (address, bytes) of each run of pages in segments ``[first, stop)``, in segment order.

    The side must exchange whole pages only.
    """
    assert not side.sliced.any(), side
    found: list[tuple[int, int]] = []
    while first < stop:
        entry, page = divmod(first, len(side.ids))
        ids = side.ids[page : page + stop - first]
        runs = coalesce(ids, np.arange(len(ids)))
        base, page_bytes = memory_address + int(side.base[entry]), int(side.page_bytes[entry])
        starts, counts = runs.source.tolist(), runs.pages.tolist()
        found += [(base + at * page_bytes, pages * page_bytes) for at, pages in zip(starts, counts, strict=True)]
        first += len(ids)
    return found


def _rectangles(side: PlanSide, first: int, stop: int, memory_address: int, flat_address: int) -> Iterator[_Rectangle]:
    """Yield at most three rectangles: the rest of the first entry, whole entries, the beginning of the last entry."""
    pages, sizes, sliced = len(side.ids), side.segment_bytes, side.sliced
    while first < stop:
        entry, page = divmod(first, pages)
        if page == 0 and stop - first >= pages:
            entries, ids = slice(entry, stop // pages), side.ids
        else:
            entries, ids = slice(entry, entry + 1), side.ids[page : page + stop - first]
        held = sizes[entries] * np.uint64(len(ids))
        ends = np.cumsum(held) + np.uint64(flat_address)
        base = side.base[entries] + np.uint64(memory_address)
        runs = coalesce(ids, np.arange(len(ids)))
        by_row = sliced[entries] | (len(runs.pages) >= MANY_RUNS)
        yield _Rectangle(entry, ids, runs, by_row, sizes[entries], base, ends - held)
        flat_address = int(ends[-1])
        first += (entries.stop - entry) * len(ids)


def _whole_blocks(part: _Rectangle) -> Blocks:
    """Return the blocks of the entries not in ``by_row``, from the pages to the contiguous memory."""
    if part.by_row.all():
        return np.empty((0, 3), np.uint64)
    whole = ~part.by_row
    columns = np.empty((3, np.count_nonzero(whole), len(part.runs.pages)), np.uint64)
    for column, numbers in zip(columns, part.runs, strict=True):
        np.multiply(part.sizes[whole, None], numbers.astype(np.uint64), out=column)
    columns[0] += part.base[whole, None]
    columns[1] += part.flat[whole, None]
    return columns.reshape(3, -1).T


def _slices_of(side: PlanSide, part: _Rectangle) -> Iterator[_Slices]:
    """Yield the slices of each entry in ``by_row``."""
    for at in part.by_row.nonzero()[0].tolist():
        yield _Slices(side, part.first_entry + at, part.ids, int(part.base[at]), int(part.flat[at]))


class _Slices:
    """The slices of one entry on some pages, and their contiguous memory. A whole page is one row and one slice."""

    def __init__(self, side: PlanSide, entry: int, ids: PageIds, base: int, flat: int) -> None:
        self.ids = ids
        self.start = base + int(side.slice_offset[entry])
        self.flat = flat
        self.page_bytes = int(side.page_bytes[entry])
        whole = not side.sliced[entry]
        self.rows = 1 if whole else int(side.rows[entry])
        self.row_bytes = self.page_bytes if whole else int(side.row_bytes[entry])
        self.slice_bytes = self.page_bytes if whole else int(side.slice_bytes[entry])

    def gather(self) -> None:
        """Gather cells of gcd(row bytes, slice bytes) bytes.

        numpy's ``take`` copies each cell with one memcpy to its destination; indexing a strided view would copy
        everything twice.
        """
        cell = int(np.gcd(self.row_bytes, self.slice_bytes))
        a_row, a_slice = self.row_bytes // cell, self.slice_bytes // cell
        rows = self.ids[:, None] * self.rows + np.arange(self.rows)
        cells = (rows.reshape(-1, 1) * a_row + np.arange(a_slice)).reshape(-1)
        # The view ends with the last slice: the rest of its row may lie beyond the end of the memory.
        memory = _at(self.start, (int(cells.max()) + 1, cell), (cell, 1), 1)
        out = _at(self.flat, (len(cells), cell), (cell, 1), 1)
        np.take(memory, cells, axis=0, out=out, mode="clip")  # "raise" would buffer all of out

    def scatter(self) -> None:
        """Assign to a strided view in the widest words that fit: faster than cells in this direction."""
        word = self._word_bytes()
        words = self.slice_bytes // word
        memory = _at(
            self.start, (int(self.ids.max()) + 1, self.rows, words), (self.page_bytes, self.row_bytes, word), word
        )
        shape = (len(self.ids), self.rows, words)
        memory[self.ids] = _at(self.flat, shape, (self.rows * self.slice_bytes, self.slice_bytes, word), word)

    def _word_bytes(self) -> int:
        """Return the widest word, in bytes, that all addresses and sizes are multiples of."""
        together = self.start | self.flat | self.page_bytes | self.row_bytes | self.slice_bytes
        return min(MAX_WORD_BYTES, together & -together)


class _Memory:
    """Memory at an address, for numpy's array interface."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], word: int) -> npt.NDArray[Any]:
    """Return a view of ``word``-byte unsigned integers; the memory must outlive it."""
    return np.asarray(
        _Memory({"data": (address, False), "shape": shape, "strides": strides, "typestr": f"<u{word}", "version": 3})
    )
