"""Gathering what a plan's side exchanges into contiguous memory, and scattering it from there.

Bytes there are in one order that both sides compute alone: entry by entry, page by page, row by row. One entry's page
is a segment; segment ``entry * pages + page``. Whole pages in a few runs go by the copies of ``copies``, a call for
many; scattered pages and slices of pages by numpy, a call an entry, with the GIL released all the while: no Python
object for each page or token. Knows nothing of transports; whoever calls has checked addresses and ids.
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
"""With so many runs, one call of numpy's an entry costs less than a memmove a run, each of which takes the GIL anew."""


class CopyChunk(NamedTuple):
    """Segments ``[first, stop)``, which have so many bytes."""

    first: int
    stop: int
    size_bytes: int


class _Rectangle(NamedTuple):
    """Some entries by some pages: segments that follow each other.

    Attributes:
        first_entry: its number; the arrays, ``(entries,)``, begin with it.
        ids: the pages.
        runs: the pages in runs, numbered from 0 on the contiguous side.
        by_row: which entries numpy copies, page by page or slice by slice.
        sizes: bytes of a segment.
        base: where the entry lies in memory.
        flat: where its first segment lies in the contiguous memory.
    """

    first_entry: int
    ids: PageIds
    runs: Runs
    by_row: npt.NDArray[np.bool_]
    sizes: Sizes
    base: npt.NDArray[np.uint64]
    flat: npt.NDArray[np.uint64]


def total_segments(side: PlanSide) -> int:
    """Return how many segments a side has."""
    return len(side.base) * len(side.ids)


def cut_copy_chunks(side: PlanSide, max_bytes: int) -> list[CopyChunk]:
    """Cut all segments, in order, into copy chunks of at most ``max_bytes``: as few as can be.

    Raises:
        BounceBufferTooSmallError: an entry's segment alone is larger.
    """
    sizes, pages = side.segment_bytes.tolist(), len(side.ids)
    largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
    if largest is not None and sizes[largest] > max_bytes:
        raise BounceBufferTooSmallError(
            f"entry {largest} sends {sizes[largest]} bytes a page, of page_bytes {side.page_bytes[largest]}; one slot "
            f"has {max_bytes}",
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
        side: whose bytes.
        memory_address: what its bases count from; 0 where they are addresses.
        first: a segment's number.
        stop: the one after the last.
        out_address: where to; ``cut_copy_chunks`` says how much.
        copy: for whole pages in few runs.

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
    """Copy segments ``[first, stop)`` from contiguous memory to where they belong: the reverse of ``gather``."""
    for one in _rectangles(side, first, stop, memory_address, in_address):
        blocks = _whole_blocks(one)
        if len(blocks):
            copy(blocks[:, [1, 0, 2]])
        for slices in _slices_of(side, one):
            slices.scatter()


def memory_runs(side: PlanSide, memory_address: int, first: int, stop: int) -> list[tuple[int, int]]:
    """Return where segments ``[first, stop)`` lie, one after another: (address, bytes) of each run of pages.

    Only of a side that exchanges whole pages.
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
    """Yield at most three: the rest of the first entry, whole entries, the beginning of the last one."""
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
    """Return the copies of whole pages that do not go row by row, from memory to flat."""
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
    """Yield the entries that go row by row, one by one."""
    for at in part.by_row.nonzero()[0].tolist():
        yield _Slices(side, part.first_entry + at, part.ids, int(part.base[at]), int(part.flat[at]))


class _Slices:
    """The slices of one entry on some pages, and the contiguous memory they go to or come from.

    A whole page is one row, and its own slice.
    """

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
        """Take cells of the greatest size of which both a row and a slice have a whole number.

        numpy's ``take`` copies such a cell with one memcpy straight to where it belongs; indexing a strided view would
        copy everything twice.
        """
        cell = int(np.gcd(self.row_bytes, self.slice_bytes))
        a_row, a_slice = self.row_bytes // cell, self.slice_bytes // cell
        rows = self.ids[:, None] * self.rows + np.arange(self.rows)
        cells = (rows.reshape(-1, 1) * a_row + np.arange(a_slice)).reshape(-1)
        # The view ends with the last slice, not with its row, which may be the last of the memory.
        memory = _at(self.start, (int(cells.max()) + 1, cell), (cell, 1), 1)
        out = _at(self.flat, (len(cells), cell), (cell, 1), 1)
        np.take(memory, cells, axis=0, out=out, mode="clip")  # "raise" would buffer all of out

    def scatter(self) -> None:
        """Assign to a strided view, in the widest words that fit: faster here than cells."""
        word = self._word_bytes()
        words = self.slice_bytes // word
        memory = _at(
            self.start, (int(self.ids.max()) + 1, self.rows, words), (self.page_bytes, self.row_bytes, word), word
        )
        shape = (len(self.ids), self.rows, words)
        memory[self.ids] = _at(self.flat, shape, (self.rows * self.slice_bytes, self.slice_bytes, word), word)

    def _word_bytes(self) -> int:
        """Return the widest word at multiples of which everything lies."""
        together = self.start | self.flat | self.page_bytes | self.row_bytes | self.slice_bytes
        return min(MAX_WORD_BYTES, together & -together)


class _Memory:
    """Memory at an address, as numpy wants to be told of it."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], word: int) -> npt.NDArray[Any]:
    """Return an array of ``word``-byte unsigned integers over memory that outlives it."""
    return np.asarray(
        _Memory({"data": (address, False), "shape": shape, "strides": strides, "typestr": f"<u{word}", "version": 3})
    )
