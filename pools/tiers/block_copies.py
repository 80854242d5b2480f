"""Steps between pages and blocks in host memory: lists of copies, one for each entry of each page.

The caller has checked the lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies, Digests, Ends, HashState
from kvferry.pools.planning.copies import Cells
from kvferry.pools.tiers.blocks import BLOCK_ALIGNMENT, BlockLayout, BlockPages, BlockStep
from kvferry.protocol.codec import PageIds

Bytes = npt.NDArray[np.uint8]

_ZEROS: Final = np.zeros(BLOCK_ALIGNMENT, np.uint8)
_NONE: Final[Ends] = np.zeros(0, np.int64)


class StepCopies(NamedTuple):
    """The copies of a step, as the copy kernel takes them.

    Attributes:
        copies: ``(n, 3)`` uint64.
        ends: ``(m,)`` int64: where in ``copies`` the digests of the blocks end that end in the step.
    """

    copies: Copies
    ends: Ends


def offload_copies(memory: int, pages: BlockPages, step: BlockStep, arena: int) -> StepCopies:
    """Return a step's copies from pages in memory at one address to blocks in an arena at the other.

    The padding of blocks whose end is in the step becomes zero.
    """
    return _with_ends(_copies(memory, pages, step, arena, padded=True), pages, step)


def restore_copies(memory: int, pages: BlockPages, step: BlockStep, arena: int, *, hashed: bool) -> StepCopies:
    """Return a step's copies from blocks to pages; those that are ``hashed`` have the padding, too, to no place."""
    return _with_ends(_copies(memory, pages, step, arena, back=True, padded=hashed), pages, step)


def offload_step(memory: Bytes, pages: BlockPages, step: BlockStep, arena: Bytes) -> None:
    """Copy a step from pages to blocks; see ``offload_copies``."""
    copy_kernel.copy(offload_copies(memory.ctypes.data, pages, step, arena.ctypes.data).copies)


def offload_step_hashed(memory: Bytes, pages: BlockPages, step: BlockStep, arena: Bytes, state: HashState) -> Digests:
    """Copy as ``offload_step`` does, and return the digest of each block that ends in the step, in the same pass.

    Args:
        memory: of the pages.
        pages: what the step is of.
        step: the one after that of the last call with the same state.
        arena: of the blocks.
        state: of ``copy_kernel.new_hash``: what it has of a block that began in an earlier step.
    """
    return copy_kernel.copy_hashed(*offload_copies(memory.ctypes.data, pages, step, arena.ctypes.data), state)


def restore_step(memory: Bytes, pages: BlockPages, step: BlockStep, arena: Bytes) -> None:
    """Copy a step from blocks to pages: the reverse of ``offload_step``."""
    copy_kernel.copy(restore_copies(memory.ctypes.data, pages, step, arena.ctypes.data, hashed=False).copies)


def restore_step_hashed(memory: Bytes, pages: BlockPages, step: BlockStep, arena: Bytes, state: HashState) -> Digests:
    """Copy as ``restore_step`` does, and return the digests of blocks in the same pass; see ``offload_step_hashed``."""
    copies = restore_copies(memory.ctypes.data, pages, step, arena.ctypes.data, hashed=True)
    return copy_kernel.copy_hashed(*copies, state)


def hash_step(pages: BlockPages, step: BlockStep, arena: Bytes, state: HashState) -> Digests:
    """Return the digests of the blocks that end in a step; see ``offload_step_hashed``."""
    hashed = np.zeros((step.stop - step.first, 1, 3), np.uint64)  # to nowhere: the bytes are where they belong
    hashed[:, 0, 0] = pages.offsets[step.first : step.stop] + (arena.ctypes.data + step.first_byte)
    hashed[:, 0, 2] = step.staged_bytes(pages.layout) // len(hashed)
    return copy_kernel.copy_hashed(*_with_ends(hashed, pages, step), state)


def _with_ends(copies: Copies, pages: BlockPages, step: BlockStep) -> StepCopies:
    """Return copies, ``(blocks, copies of a block, 3)``, with where their blocks end."""
    blocks, rows = copies.shape[:2]
    ends = np.arange(rows, (blocks + 1) * rows, rows) if step.stop_byte == pages.layout.content_bytes else _NONE
    return StepCopies(copies.reshape(-1, 3), ends)


def _copies(
    memory: int, pages: BlockPages, step: BlockStep, arena: int, *, back: bool = False, padded: bool = False
) -> Copies:
    """Return a step's copies from pages to blocks, or ``back``: ``(blocks, copies of a block, 3)``.

    Those that are ``padded`` have one more where the step ends blocks that have padding: of zeros to it, or of it to no
    place.
    """
    layout, ids, offsets = (
        pages.layout,
        pages.ids[step.first : step.stop, None],
        pages.offsets[step.first : step.stop, None],
    )
    page, block = (1, 0) if back else (0, 1)
    whole = step.stop_byte - step.first_byte == layout.content_bytes  # as most are: all entries of each block
    stacks = () if whole else layout.stacks_of(step.first_byte, step.stop_byte)
    rows = len(layout.entries) if whole else sum([one.entries for one in stacks])
    padded = padded and step.stop_byte == layout.content_bytes < layout.block_bytes
    copies = np.empty((len(ids), rows + padded, 3), np.uint64)
    if whole:
        copies[:, :rows, page] = ids * layout.page_bytes + (layout.bases + memory)
        copies[:, :rows, block] = offsets + (layout.offsets + arena)
        copies[:, :rows, 2] = layout.page_bytes
    at = 0
    for one in stacks:
        entries, part = np.arange(one.entries), slice(at, at + one.entries)
        copies[:, part, page] = ids * one.page_bytes + (entries * one.spacing_bytes + (one.base + memory))
        copies[:, part, block] = offsets + (entries * one.size_bytes + (one.offset + arena))
        copies[:, part, 2] = one.size_bytes
        at += one.entries
    if padded:
        copies[:, rows, page] = 0 if back else _ZEROS.ctypes.data
        copies[:, rows:, block] = offsets + (layout.content_bytes + arena)
        copies[:, rows, 2] = layout.block_bytes - layout.content_bytes
    return copies


# -- a layout's blocks as cells: numbered rows of one width, for memory that only a device can access.
#
# If the sizes of the entries in one part of a region, and the distances between them, are multiples of a cell, one list
# of cell numbers covers a whole step, whatever entries it has: one kernel. Entries in separate parts get separate
# lists, one page at a time.


MIN_CELL_BYTES: Final = 512
"""Narrower cells do not pay for their numbers: entries are then copied one by one."""


class _Extent(NamedTuple):
    """Consecutive entries as cells.

    Attributes:
        base: byte of the region at which cell 0 begins.
        cell_bytes: the width of a cell.
        numbers: ``(cells,)`` int64, the cell numbers of page 0, in the block's order.
        page_cells: ``(cells,)`` int64, the distance in cells from one page to the next.
        offset: where the first cell begins in a block, in bytes.
    """

    base: int
    cell_bytes: int
    numbers: PageIds
    page_cells: PageIds
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + len(self.numbers) * self.cell_bytes


class BlockCells:
    """The cells of one layout in one region."""

    def __init__(self, layout: BlockLayout, part_starts: Sequence[int]) -> None:
        """Join entries that lie in one part; ``part_starts``: where the parts of the region begin, ascending."""
        self._layout = layout
        parts = np.searchsorted(np.array(part_starts, np.int64), layout.bases, side="right")
        cuts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
        self._extents = [extent for first, stop in pairwise(cuts) for extent in self._join(first, stop)]

    @property
    def copies_of_block(self) -> int:
        """Return how many copies each whole block of a step adds; 0 where one kernel copies them all."""
        return len(self._extents) if len(self._extents) > 1 else 0

    def of(self, step: BlockStep, ids: PageIds) -> Iterator[Cells]:
        """Yield a step's cells for these pages, ``(step.stop - step.first,)`` int64.

        In contiguous memory they are laid out as in the step's blocks, back to back with their padding, from the step's
        first byte on.
        """
        [only, *more] = self._extents
        if not more and step.stop_byte - step.first_byte == self._layout.block_bytes:
            numbers = only.numbers + ids[:, None] * only.page_cells
            yield Cells(only.base, only.cell_bytes, numbers.reshape(-1), 0)
            return
        for at, page in enumerate(ids.tolist()):
            for extent in self._extents:
                yield from _of_page(extent, page, step, at * self._layout.block_bytes - step.first_byte)

    def _join(self, first: int, stop: int) -> list[_Extent]:
        """Return entries ``[first, stop)`` of one part as one extent, or one extent each if cells would be narrow."""
        layout, entries = self._layout, slice(first, stop)
        base = int(layout.bases[entries].min())
        apart, sizes = layout.bases[entries] - base, layout.page_bytes[entries]
        cell = math.gcd(*apart.tolist(), *sizes.tolist())
        if cell < MIN_CELL_BYTES and stop - first > 1 and cell < sizes.max():
            return [one for entry in range(first, stop) for one in self._join(entry, entry + 1)]
        cells = sizes // cell
        begins = np.repeat(np.cumsum(cells) - cells, cells)
        numbers = np.repeat(apart // cell, cells) + np.arange(int(cells.sum())) - begins
        return [_Extent(base, cell, numbers, np.repeat(cells, cells), int(layout.offsets[first]))]


def _of_page(extent: _Extent, page: int, step: BlockStep, flat: int) -> Iterator[Cells]:
    """Yield the part of one page's extent that is in the step: whole cells, and partial ones at the ends."""
    first_byte, stop_byte = max(step.first_byte, extent.offset), min(step.stop_byte, extent.stop)
    if first_byte >= stop_byte:
        return
    cell = extent.cell_bytes
    first, skipped = divmod(first_byte - extent.offset, cell)
    last, rest = divmod(stop_byte - extent.offset, cell)

    def cut(number: int, begin: int, end: int) -> Cells:
        at = int(extent.numbers[number]) + page * int(extent.page_cells[number])
        flat_bytes = flat + extent.offset + number * cell + begin
        return Cells(extent.base + at * cell + begin, end - begin, _ONE, flat_bytes)

    if skipped:
        yield cut(first, skipped, rest if first == last else cell)
        first += 1
    if first < last:
        numbers = extent.numbers[first:last] + page * extent.page_cells[first:last]
        yield Cells(extent.base, cell, numbers, flat + extent.offset + first * cell)
    if rest and first <= last:
        yield cut(last, 0, rest)


_ONE: Final[npt.NDArray[np.int64]] = np.zeros(1, np.int64)
