"""Blocks: the bytes of one page of a page space, all its entries back to back, as the lower tiers keep them.

Copies of blocks are divided into steps: a number of whole blocks, or an extent of one large block. A step is what a
thread copies at a time. Independent of devices, and of where and what for blocks are kept.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.pools.planning.manifest import each_array, key_of
from kvferry.pools.planning.page_ids import bounds
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import InternalError
from kvferry.protocol.manifests import Entry, Manifest

BLOCK_ALIGNMENT: Final = 64
CUT_BYTES: Final = 4096
"""If an entry of a page is cut, the size of its first extent is a multiple of this."""

CUTS_KEPT: Final = 1000


class Stack(NamedTuple):
    """Extents of evenly spaced entries of one page size, which are adjacent in a block.

    Attributes:
        base: where the first one begins in the region, for page 0.
        spacing_bytes: distance from one to the next in the region; above 0.
        entries: how many.
        page_bytes: distance from one page to the next in the region.
        size_bytes: of one extent: a whole page, except for an entry that is cut, which forms a stack by itself.
        offset: where the first one begins in the block.
    """

    base: int
    spacing_bytes: int
    entries: int
    page_bytes: int
    size_bytes: int
    offset: int


class BlockLayout:
    """The offset of each entry in a block.

    Attributes:
        space: the page space.
        entries: its entries by component, role and layer, only the first of several in one array: the same ones in the
            same order wherever the layout digest is the same.
        pages: of the space, the padding page included.
        bases: ``(entries,)`` int64, where each begins in the region.
        page_bytes: ``(entries,)`` int64.
        offsets: ``(entries,)`` int64, where each begins in a block.
        content_bytes: total of all entries.
        block_bytes: ``content_bytes`` rounded up to a multiple of 64; the padding is zero.
        stacks: all entries, in as few stacks as possible.
    """

    def __init__(self, manifest: Manifest, space: str) -> None:
        """Collect the entries of the components of ``space``, one of the manifest's page spaces."""
        inside = {one.name for one in manifest.components if one.space == space}
        self.space = space
        mine = (one for one in manifest.entries if one.component in inside)
        self.entries: tuple[Entry, ...] = tuple(sorted(each_array(mine), key=key_of))
        self.pages = min(one.pages for one in self.entries)
        self.bases = np.array([one.base for one in self.entries], np.int64)
        self.page_bytes = np.array([one.page_bytes for one in self.entries], np.int64)
        self.offsets = np.concatenate(([0], np.cumsum(self.page_bytes)[:-1])).astype(np.int64)
        self.content_bytes = int(self.page_bytes.sum())
        self.block_bytes = -(-self.content_bytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
        self.stacks = tuple(self._stacks(0, len(self.entries)))
        self._offsets: list[int] = self.offsets.tolist()
        self._found: dict[tuple[int, int], Sequence[Stack]] = {}

    def __repr__(self) -> str:
        """Show the size."""
        return f"<BlockLayout {self.space} entries={len(self.entries)} block_bytes={self.block_bytes}>"

    def stacks_of(self, first_byte: int, stop_byte: int) -> Sequence[Stack]:
        """Return the stacks of bytes ``[first_byte, stop_byte)`` of a block; entries at the ends may be cut."""
        if (first_byte, stop_byte) == (0, self.content_bytes):
            return self.stacks
        found = self._found.get((first_byte, stop_byte))
        if found is None:
            if len(self._found) > CUTS_KEPT:  # the step size has changed often
                self._found.clear()
            found = self._found[first_byte, stop_byte] = self._between(first_byte, stop_byte)
        return found

    def cut(self, first_byte: int, limit: int) -> int:
        """Return where to cut a block after ``first_byte``: at most at ``limit``, between entries if possible.

        Inside an entry it is a multiple of CUT_BYTES after the entry's start, at least CUT_BYTES after ``first_byte``,
        even if that is beyond ``limit``.
        """
        entry = self._number_at(limit)
        begin, end = self._offsets[entry], self._end(entry)
        if begin > first_byte:
            return begin
        return min(begin + max((limit - begin) // CUT_BYTES * CUT_BYTES, first_byte - begin + CUT_BYTES), end)

    def _between(self, first_byte: int, stop_byte: int) -> Sequence[Stack]:
        first, found = self._number_at(first_byte), []
        last = self._number_at(stop_byte - 1)
        if first_byte > self._offsets[first] or first == last:
            found.append(self._cut(first, first_byte, stop_byte))
            first += 1
        whole = last + 1 if first <= last and self._end(last) <= stop_byte else last
        if first < whole:
            found += self._stacks(first, whole)
        if whole <= last and first <= last:
            found.append(self._cut(last, self._offsets[last], stop_byte))
        return found

    def _number_at(self, byte: int) -> int:
        return bisect.bisect_right(self._offsets, byte) - 1

    def _end(self, entry: int) -> int:
        return self._offsets[entry] + self.entries[entry].page_bytes

    def _cut(self, entry: int, first_byte: int, stop_byte: int) -> Stack:
        page_bytes, offset = self.entries[entry].page_bytes, self._offsets[entry]
        size = min(stop_byte, offset + page_bytes) - first_byte
        return Stack(self.entries[entry].base + first_byte - offset, page_bytes, 1, page_bytes, size, first_byte)

    def _stacks(self, first: int, stop: int) -> Iterator[Stack]:
        """Yield whole entries ``[first, stop)``."""
        bases, sizes = self.bases[first:stop].tolist(), self.page_bytes[first:stop].tolist()
        offsets = self.offsets[first:stop].tolist()
        at = 0
        while at < len(bases):
            end = at + 1
            spacing = bases[end] - bases[at] if end < len(bases) else 0
            while end < len(bases) and sizes[end] == sizes[at] and bases[end] - bases[end - 1] == spacing > 0:
                end += 1
            if end == at + 1:
                spacing = sizes[at]
            yield Stack(bases[at], spacing, end - at, sizes[at], sizes[at], offsets[at])
            at = end


class BlockPages(NamedTuple):
    """Pages of a pool and their blocks.

    Attributes:
        layout: of a block.
        ids: ``(n,)`` int64, pages of the pool; in range, and distinct for a restore.
        offsets: ``(n,)`` int64, where each page's block begins in the arena; blocks do not overlap.
    """

    layout: BlockLayout
    ids: PageIds
    offsets: npt.NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        """Return the total size of the blocks in the arena."""
        return len(self.ids) * self.layout.block_bytes

    def check(self, arena_bytes: int) -> None:
        """Check what the caller must already have ensured.

        Raises:
            InternalError: the lists differ in length, a page is outside the space, or a block is outside the arena.
        """
        if len(self.ids) != len(self.offsets):
            raise InternalError(f"{len(self.ids)} pages have {len(self.offsets)} blocks")
        if not len(self.ids):
            return
        smallest, largest = bounds(self.ids)
        if smallest < 1 or largest >= self.layout.pages:
            raise InternalError(f"a page is not in 1..{self.layout.pages - 1} of space {self.layout.space!r}")
        first_byte, last_byte = bounds(self.offsets)
        if first_byte < 0 or last_byte + self.layout.block_bytes > arena_bytes:
            raise InternalError(f"a block of space {self.layout.space!r} is not within the arena's {arena_bytes} bytes")


class BlockStep(NamedTuple):
    """Bytes ``[first_byte, stop_byte)`` of the content of blocks ``[first, stop)``; several blocks are always whole."""

    first: int
    stop: int
    first_byte: int
    stop_byte: int

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes to copy."""
        return (self.stop - self.first) * (self.stop_byte - self.first_byte)

    def staged_bytes(self, layout: BlockLayout) -> int:
        """Return the bytes that the step takes contiguously: with the padding of blocks whose end is in the step."""
        end = layout.block_bytes if self.stop_byte == layout.content_bytes else self.stop_byte
        return (self.stop - self.first) * (end - self.first_byte)


class BlockSteps:
    """Divides blocks ``[first, stop)`` into steps, in order, each of the size that is asked for at that time."""

    def __init__(self, layout: BlockLayout, first: int, stop: int) -> None:
        self._layout = layout
        self._at, self._stop, self._byte = min(first, stop), stop, 0

    @property
    def exhausted(self) -> bool:
        """Return whether all steps were taken."""
        return self._at == self._stop

    @property
    def left_bytes(self) -> int:
        """Return the bytes of all steps that were not taken yet."""
        return (self._stop - self._at) * self._layout.content_bytes - self._byte

    def take(self, step_bytes: int, most_blocks: int) -> BlockStep | None:
        """Return the next step, of at most about ``step_bytes`` and so many blocks; None after the last one.

        A larger block is cut between entries, or inside an entry that alone is larger.
        """
        if self.exhausted:
            return None
        content, at, byte = self._layout.content_bytes, self._at, self._byte
        if byte or content > step_bytes:
            end = content if content - byte <= step_bytes else self._layout.cut(byte, byte + step_bytes)
            self._at, self._byte = (at + 1, 0) if end == content else (at, end)
            return BlockStep(at, at + 1, byte, end)
        self._at = min(self._stop, at + min(step_bytes // content, most_blocks))
        return BlockStep(at, self._at, 0, content)


class StepRun(NamedTuple):
    """Bytes of a step that are contiguous in the arena.

    Attributes:
        at: their offset in a buffer that holds the whole step contiguously.
        offset: their offset in the arena.
        size_bytes: how many, including a block's padding if the step ends with the block.
    """

    at: int
    offset: int
    size_bytes: int


def step_runs(pages: BlockPages, step: BlockStep) -> Iterator[StepRun]:
    """Yield a step's runs, in order; as few as possible."""
    size = step.staged_bytes(pages.layout) // (step.stop - step.first)
    offsets = pages.offsets[step.first : step.stop] + step.first_byte
    starts = np.concatenate(([0], np.flatnonzero(np.diff(offsets) != size) + 1)).tolist()
    for first, stop in pairwise([*starts, len(offsets)]):
        yield StepRun(first * size, int(offsets[first]), (stop - first) * size)


def zero_padding(pages: BlockPages, step: BlockStep, arena: npt.NDArray[np.uint8]) -> None:
    """Zero the padding of the blocks whose end is in a step: it may hold data of an earlier owner."""
    layout = pages.layout
    if step.stop_byte < layout.content_bytes or layout.block_bytes == layout.content_bytes:
        return
    beyond = np.arange(layout.content_bytes, layout.block_bytes)
    arena[pages.offsets[step.first : step.stop, None] + beyond] = 0
