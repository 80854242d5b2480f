"""Blocks: the bytes of one page of a page space, all its entries one after another, as the tiers below keep them.

Work on blocks is cut into steps: some whole blocks, or an extent of one that is large. A step is what one turn of a
thread copies. Knows nothing of devices, of where blocks lie, or of what they are kept for.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.pools.planning.manifest import each_array, key_of
from kvferry.pools.planning.plan import Blocks
from kvferry.pools.planning.runs import PageIds
from kvferry.protocol.errors import InternalError
from kvferry.protocol.manifests import Entry, Manifest

BLOCK_ALIGNMENT: Final = 64
CUT_BYTES: Final = 4096
"""Where an entry of a page is cut, its first extent has a multiple of these."""

CUTS_KEPT: Final = 1000


class Stack(NamedTuple):
    """Extents of evenly spaced entries of one page size, which follow each other in a block.

    Attributes:
        base: where the first one begins in the region, for page 0.
        spacing_bytes: from one to the next in the region; above 0.
        entries: how many.
        page_bytes: from one page to the next in the region.
        size_bytes: of one extent; all of a page, unless an entry is cut, which then is alone.
        offset: where the first one begins in the block.
    """

    base: int
    spacing_bytes: int
    entries: int
    page_bytes: int
    size_bytes: int
    offset: int


class BlockLayout:
    """Where each entry lies inside a block.

    Attributes:
        space: the page space.
        entries: its entries by component, role and layer, of several in one array the first: the same ones in the same
            order wherever the layout digest is the same.
        pages: of the space, the padding page included.
        bases: ``(entries,)`` int64, where each begins in the region.
        page_bytes: ``(entries,)`` int64.
        offsets: ``(entries,)`` int64, where each begins in a block.
        content_bytes: of all entries.
        block_bytes: those, rounded up to a multiple of 64; what is beyond the content is zero.
        stacks: all entries, as few stacks as can be.
    """

    def __init__(self, manifest: Manifest, space: str) -> None:
        """Take the entries of the space's components; the space is the manifest's."""
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

    def entry_at(self, byte: int) -> Entry | None:
        """Return the entry that a byte of a block belongs to; None for the padding."""
        return self.entries[self._number_at(byte)] if byte < self.content_bytes else None

    def stacks_of(self, first_byte: int, stop_byte: int) -> Sequence[Stack]:
        """Return what bytes ``[first_byte, stop_byte)`` of a block are: whole entries, and cut ones at the ends."""
        if (first_byte, stop_byte) == (0, self.content_bytes):
            return self.stacks
        found = self._found.get((first_byte, stop_byte))
        if found is None:
            if len(self._found) > CUTS_KEPT:  # the size of steps has changed often
                self._found.clear()
            found = self._found[first_byte, stop_byte] = self._between(first_byte, stop_byte)
        return found

    def cut(self, first_byte: int, limit: int) -> int:
        """Return where to cut a block after ``first_byte``: at ``limit`` at the latest, between entries if it can be.

        Inside an entry it is some CUT_BYTES after its begin or ``first_byte``, and beyond ``limit`` if that is nearer.
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
        layout: what a block is.
        ids: ``(n,)`` int64, pages of the pool; in range, and a restore's are distinct.
        offsets: ``(n,)`` int64, where each page's block begins in the arena; blocks do not overlap.
    """

    layout: BlockLayout
    ids: PageIds
    offsets: npt.NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        """Return how many bytes of the arena the blocks have."""
        return len(self.ids) * self.layout.block_bytes

    def check(self, arena_bytes: int) -> None:
        """Look for what whoever made this must have ruled out.

        Raises:
            InternalError: the lists have other lengths, a page is not the space's, or a block leaves the arena.
        """
        if len(self.ids) != len(self.offsets):
            raise InternalError(f"{len(self.ids)} pages have {len(self.offsets)} blocks")
        if not len(self.ids):
            return
        if self.ids.min() < 1 or self.ids.max() >= self.layout.pages:
            raise InternalError(f"a page is not in 1..{self.layout.pages - 1} of space {self.layout.space!r}")
        if self.offsets.min() < 0 or self.offsets.max() + self.layout.block_bytes > arena_bytes:
            raise InternalError(f"a block of space {self.layout.space!r} is not within the arena's {arena_bytes} bytes")

    def copies(self) -> Blocks:
        """Return all copies from pages to blocks, block by block: ``(n, 3)`` uint64, where both go on in one.

        Sources are offsets in the region, destinations in the arena. For those who want plain lists; regions copy
        without.
        """
        layout = self.layout
        copies = np.empty((len(self.ids), len(layout.entries), 3), np.uint64)
        copies[:, :, 0] = layout.bases + self.ids[:, None] * layout.page_bytes
        copies[:, :, 1] = self.offsets[:, None] + layout.offsets
        copies[:, :, 2] = layout.page_bytes
        return _coalesced(copies.reshape(-1, 3))


class BlockStep(NamedTuple):
    """Bytes ``[first_byte, stop_byte)`` of the content of blocks ``[first, stop)``; of several blocks, all bytes."""

    first: int
    stop: int
    first_byte: int
    stop_byte: int

    @property
    def size_bytes(self) -> int:
        """Return how many bytes it copies."""
        return (self.stop - self.first) * (self.stop_byte - self.first_byte)

    def staged_bytes(self, layout: BlockLayout) -> int:
        """Return how many bytes its blocks have in a row: with the padding of those that it ends."""
        end = layout.block_bytes if self.stop_byte == layout.content_bytes else self.stop_byte
        return (self.stop - self.first) * (end - self.first_byte)


class BlockSteps:
    """Cuts blocks ``[first, stop)`` into steps, in order, each as large as is asked for then."""

    def __init__(self, layout: BlockLayout, first: int, stop: int) -> None:
        self._layout = layout
        self._at, self._stop, self._byte = min(first, stop), stop, 0

    @property
    def exhausted(self) -> bool:
        """Return whether all have been taken."""
        return self._at == self._stop

    def take(self, step_bytes: int) -> BlockStep | None:
        """Return the next step, of about ``step_bytes`` at most; None after the last one.

        A block that is larger is cut between entries, or inside an entry where that alone is larger.
        """
        if self.exhausted:
            return None
        content, at, byte = self._layout.content_bytes, self._at, self._byte
        if byte or content > step_bytes:
            end = content if content - byte <= step_bytes else self._layout.cut(byte, byte + step_bytes)
            self._at, self._byte = (at + 1, 0) if end == content else (at, end)
            return BlockStep(at, at + 1, byte, end)
        self._at = min(self._stop, at + step_bytes // content)
        return BlockStep(at, self._at, 0, content)


class StepRun(NamedTuple):
    """Bytes of a step that adjoin in the arena.

    Attributes:
        at: where they lie where all of the step lies in a row.
        offset: where they lie in the arena.
        size_bytes: how many; a block's padding counts to it where the step ends with the block.
    """

    at: int
    offset: int
    size_bytes: int


def step_runs(pages: BlockPages, step: BlockStep) -> Iterator[StepRun]:
    """Yield a step's runs, in order; as few as can be."""
    size = step.staged_bytes(pages.layout) // (step.stop - step.first)
    offsets = pages.offsets[step.first : step.stop] + step.first_byte
    starts = np.concatenate(([0], np.flatnonzero(np.diff(offsets) != size) + 1)).tolist()
    for first, stop in pairwise([*starts, len(offsets)]):
        yield StepRun(first * size, int(offsets[first]), (stop - first) * size)


def zero_padding(pages: BlockPages, step: BlockStep, arena: npt.NDArray[np.uint8]) -> None:
    """Zero what lies beyond the content of the blocks that a step ends: it was somebody else's."""
    layout = pages.layout
    if step.stop_byte < layout.content_bytes or layout.block_bytes == layout.content_bytes:
        return
    beyond = np.arange(layout.content_bytes, layout.block_bytes)
    arena[pages.offsets[step.first : step.stop, None] + beyond] = 0


def _coalesced(copies: Blocks) -> Blocks:
    if len(copies) < 2:  # noqa: PLR2004  nothing to join
        return copies
    ends = copies[:-1, :2] + copies[:-1, 2:]
    starts = np.concatenate(([0], np.flatnonzero((ends != copies[1:, :2]).any(axis=1)) + 1))
    joined = copies[starts]
    joined[:, 2] = np.add.reduceat(copies[:, 2], starts)
    return joined
