"""Copies of planned bytes: blocks between addresses of this process, plan sides to and from contiguous memory.

Where the native copy kernel is not built, small blocks are copied by ``process_vm_readv`` on this process, up to 1024
per call: no Python object or call per block. Larger blocks use one memmove each, because the kernel pins every 4 KiB
page that ``process_vm_readv`` copies, which costs more than the calls. Where a sandbox forbids ``process_vm_readv``,
memmove copies everything. Callers have checked every address.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies
from kvferry.pools.planning.page_ids import coalesce
from kvferry.pools.planning.plan import Blocks
from kvferry.pools.planning.sides import PlanSide, Sizes
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import BounceBufferTooSmallError, TransferFailedError

MAX_VECTOR: Final = 1024
"""Blocks per system call (IOV_MAX)."""

SMALL_BLOCK_BYTES: Final = 8 << 10
"""Below this mean size, ``process_vm_readv`` is faster than one memmove per block."""

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class CopyBlocks(Protocol):
    """Copies blocks at absolute addresses, in any order: none may overlap another one, but sources may be the same."""

    def __call__(self, blocks: Blocks, /) -> None:
        """Copy ``(n, 3)`` blocks; n may be 0.

        Raises:
            TransferFailedError: an address is not mapped; earlier blocks may have been copied.
        """


def copy_vectored(blocks: Blocks) -> None:
    """Copy with ``process_vm_readv``; see ``CopyBlocks``."""
    local, remote = _vectors(blocks[:, 1], blocks[:, 2]), _vectors(blocks[:, 0], blocks[:, 2])
    pid = os.getpid()
    for start in range(0, len(blocks), MAX_VECTOR):
        count = min(MAX_VECTOR, len(blocks) - start)
        expected = int(blocks[start : start + count, 2].sum())
        offset = start * local.itemsize * 2
        copied = _readv(pid, local.ctypes.data + offset, count, remote.ctypes.data + offset, count, 0)
        if copied != expected:
            reason = os.strerror(ctypes.get_errno()) if copied < 0 else f"{copied} of {expected} bytes"
            raise TransferFailedError(f"copying {count} blocks: {reason}")


def copy_one_by_one(blocks: Blocks) -> None:
    """Copy with one memmove per block; see ``CopyBlocks``. An unmapped address crashes the process."""
    for source, destination, size in blocks.tolist():
        ctypes.memmove(destination, source, size)


def copy_by_size(blocks: Blocks) -> None:
    """Choose between ``copy_vectored`` and ``copy_one_by_one`` by the mean block size; see ``CopyBlocks``."""
    if int(blocks[:, 2].sum()) < SMALL_BLOCK_BYTES * len(blocks):
        copy_vectored(blocks)
    else:
        copy_one_by_one(blocks)


def vectored_copy_works() -> bool:
    """Return whether ``copy_vectored`` works in this process: some container sandboxes forbid ``process_vm_readv``."""
    source, destination = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    blocks = np.array([[source.ctypes.data, destination.ctypes.data, 64]], np.uint64)
    try:
        copy_vectored(blocks)
    except TransferFailedError:
        return False
    return bool((source == destination).all())


def split_blocks(blocks: Blocks, max_bytes: int) -> Blocks:
    """Return the same copies, in order, as blocks of at most ``max_bytes``."""
    parts = (blocks[:, 2] + np.uint64(max_bytes - 1)) // np.uint64(max_bytes)
    if len(parts) == int(parts.sum()):
        return blocks
    split = np.repeat(blocks, parts.astype(np.int64), axis=0)
    first_part = np.repeat(np.cumsum(parts) - parts, parts.astype(np.int64))
    offset = (np.arange(len(split), dtype=np.uint64) - first_part) * np.uint64(max_bytes)
    split[:, 0] += offset
    split[:, 1] += offset
    split[:, 2] = np.minimum(split[:, 2] - offset, np.uint64(max_bytes))
    return split


def chunk_bounds(blocks: Blocks, chunk_bytes: int) -> npt.NDArray[np.int64]:
    """Return the block indices at which to cut into chunks of about ``chunk_bytes``: ascending, with 0 and n.

    A chunk holds at least one block and exceeds ``chunk_bytes`` by less than one block.
    """
    before = np.cumsum(blocks[:, 2]) - blocks[:, 2]
    number = before // np.uint64(chunk_bytes)
    starts = np.flatnonzero(number[1:] != number[:-1]) + 1
    return np.concatenate(([0], starts, [len(blocks)])).astype(np.int64)


def _vectors(addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return an array of C ``struct iovec``: ``(n, 2)`` uint64."""
    return np.ascontiguousarray(np.stack((addresses, sizes), axis=1))


# -- the segments of one plan side: a segment is one page of one entry, numbered ``entry * pages + page``.
#
# The order in contiguous memory is entry by entry, page by page, row by row; both sides compute it independently. Whole
# pages are copied as blocks, a run each; slices as the rows of a page each. No Python object per page or token is made.
# Callers have checked addresses and ids.


class CopyChunk(NamedTuple):
    """Segments ``[first, stop)``, ``size_bytes`` bytes in all."""

    first: int
    stop: int
    size_bytes: int


def total_segments(side: PlanSide) -> int:
    """Return the number of segments of a side."""
    return len(side.base) * len(side.ids)


def offset_of(side: PlanSide, segment: int) -> int:
    """Return how many bytes all segments before one have."""
    entry, page = divmod(segment, len(side.ids))
    sizes: list[int] = side.segment_bytes.tolist()
    return sum(sizes[:entry]) * len(side.ids) + (page * sizes[entry] if page else 0)


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


class FlatCopies:
    """Lists the copies between a side's pages and contiguous memory, of any segments; for any thread."""

    def __init__(
        self, columns: tuple[Sizes, ...], from_ids: PageIds | None, to_ids: PageIds | None, *, with_rows: bool
    ) -> None:
        """Use ``gathering`` or ``scattering``. ``columns``: those of the entries, see ``copy_kernel.list_segments``."""
        self._entries = np.stack(columns, axis=1)
        self._ids = from_ids, to_ids
        self._with_rows = with_rows

    @classmethod
    def gathering(cls, side: PlanSide) -> FlatCopies:
        """Copy from a side's pages into contiguous memory."""
        rows = side.rows, side.row_bytes, side.slice_bytes
        columns = *_pages_of(side), *_flat_of(side), side.slice_bytes, *rows
        return cls(columns, side.ids, None, with_rows=not side.is_whole)

    @classmethod
    def scattering(cls, side: PlanSide) -> FlatCopies:
        """Copy from contiguous memory into a side's pages."""
        rows = side.rows, side.slice_bytes, side.row_bytes
        columns = *_flat_of(side), *_pages_of(side), side.slice_bytes, *rows
        return cls(columns, None, side.ids, with_rows=not side.is_whole)

    def listed(self, first: int, stop: int, memory_address: int, flat_address: int) -> Copies:
        """Return the copies of segments ``[first, stop)``; whole pages that adjoin share rows.

        Args:
            first: the first segment.
            stop: the segment after the last.
            memory_address: added to the side's bases; 0 if they are absolute addresses.
            flat_address: where segment 0 is, or would be, in the contiguous memory; see ``offset_of``.
        """
        at = (flat_address, memory_address) if self._ids[0] is None else (memory_address, flat_address)
        return copy_kernel.list_segments(self._entries, *self._ids, (first, stop), at, with_rows=self._with_rows)


def _pages_of(side: PlanSide) -> tuple[Sizes, Sizes]:
    """Return the address of each entry's page 0, or of its slice, and the distance from page to page."""
    return side.base + side.slice_offset, side.page_bytes


def _flat_of(side: PlanSide) -> tuple[Sizes, Sizes]:
    """Return the same for contiguous memory that holds all segments."""
    sizes = side.segment_bytes
    held = sizes * np.uint64(len(side.ids))
    return np.cumsum(held) - held, sizes


def gather(
    side: PlanSide, memory_address: int, first: int, stop: int, out_address: int, copy: CopyBlocks = copy_kernel.copy
) -> None:
    """Copy segments ``[first, stop)`` into contiguous memory.

    Args:
        side: the plan side to read.
        memory_address: added to the side's bases; 0 if they are absolute addresses.
        first: the first segment.
        stop: the segment after the last.
        out_address: the contiguous memory; ``cut_copy_chunks`` gives its size.
        copy: copies whole pages.

    Raises:
        TransferFailedError: an address is not mapped.
    """
    flat_address = out_address - offset_of(side, first)
    copies = FlatCopies.gathering(side).listed(first, stop, memory_address, flat_address)
    (copy if side.is_whole else copy_kernel.copy)(copies)


def scatter(
    side: PlanSide, memory_address: int, first: int, stop: int, in_address: int, copy: CopyBlocks = copy_kernel.copy
) -> None:
    """Copy segments ``[first, stop)`` from contiguous memory into the side's pages: the reverse of ``gather``."""
    flat_address = in_address - offset_of(side, first)
    copies = FlatCopies.scattering(side).listed(first, stop, memory_address, flat_address)
    (copy if side.is_whole else copy_kernel.copy)(copies)


def digest_of(side: PlanSide, memory_address: int, first: int, stop: int) -> int:
    """Return the XXH3-64 of what ``gather`` would gather, read where it is."""
    copies = FlatCopies.gathering(side).listed(first, stop, memory_address, 0)
    copies[:, 1] = 0  # hashed alone
    return copy_kernel.copy_with_digest(copies)


def memory_runs(side: PlanSide, memory_address: int, first: int, stop: int) -> list[tuple[int, int]]:
    """Return (address, bytes) of each run of pages in segments ``[first, stop)``, in segment order.

    The side must exchange whole pages only.
    """
    assert side.is_whole, side
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


# -- segments as gather cells: equal-width rows of a two-dimensional view, from which a device gathers by row index.
#
# A whole page is one cell; a slice of a page is cut into cells of gcd(page, row, slice bytes). Contains no device code.
# Not the coverage cells of docs/architecture.md, "Words".


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
    cell = math.gcd(page_bytes, row_bytes, slice_bytes)
    row_numbers = ids[:, None] * (page_bytes // cell) + np.arange(rows) * (row_bytes // cell)
    numbers = (row_numbers.reshape(-1, 1) + np.arange(slice_bytes // cell)).reshape(-1)
    return Cells(base + int(side.slice_offset[entry]), cell, numbers, flat)
