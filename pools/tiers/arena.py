"""The allocator of the host tier's memory: free extents, from which blocks of any size are cut.

A block is contiguous; the blocks of one call are adjacent as far as the holes allow. Holes are kept as two sorted
arrays that are processed as a whole, so a call costs the same for one block as for a thousand. Never accesses the
memory itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.pools.integrity import SHOWN, WALKED, Problem, Walk, check, problem_at
from kvferry.pools.planning.page_ids import FEW

ALLOCATION_UNIT_BYTES = 4096
"""Every block begins at a multiple of this, and takes a multiple of it."""

Offsets: TypeAlias = npt.NDArray[np.int64]
"""``(n,)`` int64, where blocks begin, in bytes from the arena's start."""


class NotEnoughError(Exception):
    """The arena's holes do not hold what was requested; nothing was allocated. The caller decides what to answer."""


class Freed(NamedTuple):
    """Blocks of one size that are no longer used, to be freed: ``arena.free(*freed)``."""

    offsets: Offsets
    """``(n,)`` int64."""
    size_bytes: int
    """Size of one block."""


class Extent(NamedTuple):
    """Blocks of one size that something holds in the arena, as that thing says itself."""

    offsets: Offsets
    """``(n,)`` int64."""
    size_bytes: int
    """Size of one block."""
    holder: str
    """What it is, in words."""
    charged_to: int | None = None
    """The tenant whose account is charged with it; None for blocks, which the index counts."""


def whole_units(size_bytes: int) -> int:
    """Return the bytes of the arena that a block of ``size_bytes`` (at least 1) takes."""
    return -(-size_bytes // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES


class Arena:
    """Allocates extents by best fit, and merges freed ones with their neighbours."""

    def __init__(self, size_bytes: int, max_bytes: int | None = None) -> None:
        """Start with all bytes free; bytes beyond the last whole allocation unit are never used.

        ``max_bytes`` is what it may ``grow`` to, by default ``size_bytes``.
        """
        self._size = size_bytes // ALLOCATION_UNIT_BYTES * ALLOCATION_UNIT_BYTES
        self.max_bytes = self._size if max_bytes is None else max_bytes // ALLOCATION_UNIT_BYTES * ALLOCATION_UNIT_BYTES
        self._starts: Offsets = np.zeros(1 if self._size else 0, np.int64)
        self._sizes: Offsets = np.full(len(self._starts), self._size, np.int64)
        self._free = self._size
        self.changes = 0
        """Grows with each allocation and each release; for walks."""

    def __repr__(self) -> str:
        """Show the current counts."""
        return f"<Arena bytes={self._size} free={self._free} holes={len(self._starts)}>"

    @property
    def size_bytes(self) -> int:
        """Return the bytes that can be allocated without growing."""
        return self._size

    @property
    def used_bytes(self) -> int:
        """Return the allocated bytes, in whole allocation units."""
        return self._size - self._free

    @property
    def free_bytes(self) -> int:
        """Return the bytes in all holes."""
        return self._free

    def fitting(self, size_bytes: int) -> int:
        """Return how many blocks of ``size_bytes`` (at least 1) could be allocated now."""
        step = whole_units(size_bytes)
        if len(self._sizes) > FEW:
            return int((self._sizes // step).sum())
        return sum([size // step for size in self._sizes.tolist()])

    def allocate(self, count: int, size_bytes: int) -> Offsets:
        """Allocate ``count`` blocks of ``size_bytes`` (at least 1) each.

        They come from the smallest hole that holds all of them; otherwise from the largest holes, so that few are
        needed, and the rest from the smallest hole that holds it.

        Returns:
            ``(count,)`` offsets, ascending; adjacent blocks are ``whole_units(size_bytes)`` apart.

        Raises:
            NotEnoughError: nothing was allocated.
        """
        step = whole_units(size_bytes)
        if not count:
            return np.empty(0, np.int64)
        hole = self._smallest_for(count * step)
        if hole is not None:
            start = int(self._starts[hole])
            self._cut_one(hole, count * step)
            return np.arange(start, start + count * step, step)
        capacity = self._sizes // step
        if int(capacity.sum()) < count:
            raise NotEnoughError(f"{count * step} bytes requested, {self._free} free")
        holes, counts = self._choose(capacity, count)
        before = np.cumsum(counts) - counts
        offsets = np.repeat(self._starts[holes] - step * before, counts) + step * np.arange(count, dtype=np.int64)
        self._cut(holes, step * counts)
        return offsets

    def free(self, offsets: Offsets, size_bytes: int) -> None:
        """Free blocks of ``size_bytes`` each, the size they were allocated with; in any order.

        Raises:
            AssertionError: a block is already free, given twice, or outside the arena.
        """
        step = whole_units(size_bytes)
        if not len(offsets):
            return
        starts = np.concatenate((self._starts, offsets), dtype=np.int64)
        order = starts.argsort(kind="stable")  # of two that are in order, as the blocks mostly are: merges them
        starts = starts[order]
        sizes = np.concatenate((self._sizes, np.full(len(offsets), step)))[order]
        ends = starts + sizes
        apart = starts[1:] - ends[:-1]
        assert starts[0] >= 0, "a block before the arena"
        assert starts[-1] < self._size, "a block past the arena"  # else its end may be past 64 bits
        assert ends[-1] <= self._size, "a block past the arena"
        assert not len(apart) or apart.min() >= 0, "a block is freed that is free"
        first = np.concatenate(([0], apart.nonzero()[0] + 1))
        self.changes += 1
        self._starts, self._sizes = starts[first], np.add.reduceat(sizes, first)
        self._free += step * len(offsets)

    def occupy(self, starts: Offsets, sizes: Offsets) -> None:
        """Take extents that were allocated in an earlier life, of an arena of which nothing is.

        Args:
            starts: ``(n,)``, in any order, where each begins; they do not overlap, and are within the arena.
            sizes: ``(n,)`` int64, in whole allocation units.
        """
        assert self._free == self._size, "an arena in use"
        order = starts.argsort()
        begins = np.concatenate((np.zeros(1, np.int64), starts[order] + sizes[order]))
        sizes_free = np.concatenate((starts[order], [self._size])) - begins
        assert sizes_free.min() >= 0, "extents overlap, or are past the arena"
        self.changes += 1
        self._starts, self._sizes = begins[sizes_free > 0], sizes_free[sizes_free > 0]
        self._free = int(self._sizes.sum())

    def grow(self, size_bytes: int) -> None:
        """Make it larger, up to ``max_bytes``: the new bytes are free."""
        self.changes += 1
        before, self._size = self._size, size_bytes // ALLOCATION_UNIT_BYTES * ALLOCATION_UNIT_BYTES
        assert before < self._size <= self.max_bytes, "an arena grows, within its bound"
        self._starts, self._sizes = np.append(self._starts, before), np.append(self._sizes, 0)
        self._free += self._size - before
        if len(self._starts) > 1 and int(self._starts[-2] + self._sizes[-2]) == before:
            self._starts, self._sizes = self._starts[:-1], self._sizes[:-1]
        self._sizes[-1] += self._size - before

    def check_integrity(self) -> None:
        """Check that the holes are sorted, not adjacent, inside the arena, and counted correctly.

        Raises:
            AssertionError: they are not; says what is wrong.
        """
        check(self.problems())

    def problems(self) -> Walk:
        """Yield what is wrong with the holes."""
        ends = self._starts + self._sizes
        late = np.zeros(len(ends), np.bool_)
        late[:-1] = ends[:-1] >= self._starts[1:]
        for what, wrong in (
            ("an empty hole", self._sizes <= 0),
            ("holes overlap, touch or are out of order", late),
            ("a hole begins inside an allocation unit", self._starts % ALLOCATION_UNIT_BYTES != 0),
            ("a hole outside the arena", (self._starts < 0) | (ends > self._size)),
        ):
            if wrong.any():
                yield problem_at(what, self._starts[wrong])
        if int(self._sizes.sum()) != self._free:
            yield Problem(f"the holes have {int(self._sizes.sum())} bytes, {self._free} are counted as free")
        yield None

    def extent_problems(self, extents: Iterable[Extent]) -> Walk:
        """Yield where holes and ``extents``, all that are allocated, do not make up the arena, each byte once."""
        taken: dict[int, tuple[int, str]] = {}  # by start: the end, and the holder
        for number, one in enumerate(itertools.chain(extents, self._holes())):
            step = whole_units(one.size_bytes)
            for start in one.offsets.tolist():
                if start in taken:
                    yield problem_at(f"it is held twice, also by {taken[start][1]}", [start], one.holder)
                taken[start] = (start + step, one.holder)
            if number % WALKED == 0:
                yield None
        yield from self._tile_problems(taken)

    def _holes(self) -> Iterator[Extent]:
        for start, size_bytes in zip(self._starts, self._sizes.tolist(), strict=True):
            yield Extent(np.array([start]), size_bytes, "a hole: it is free")

    def _tile_problems(self, taken: dict[int, tuple[int, str]]) -> Walk:
        """Yield where these parts, by start, do not follow each other from the arena's start to its end."""
        at = number = leaks = 0
        while at < self._size and leaks < SHOWN:
            end = taken.pop(at, (at, ""))[0]
            if end == at:
                end = min((start for start in taken if start > at), default=self._size)
                leaks += 1
                yield problem_at(f"{end - at} bytes are allocated, and nothing holds them", [at])
            at, number = end, number + 1
            if number % WALKED == 0:
                yield None
        for start, (_, holder) in itertools.islice(taken.items() if leaks < SHOWN else (), SHOWN):
            yield problem_at("it begins inside another block, or beyond the arena", [start], holder)

    def _smallest_for(self, size_bytes: int) -> int | None:
        """Return the smallest hole of at least so many bytes, the first of several; None where there is none."""
        if len(self._sizes) <= FEW:
            sizes = self._sizes.tolist()
            return min(
                [one for one, size in enumerate(sizes) if size >= size_bytes], key=sizes.__getitem__, default=None
            )
        holds_all = (self._sizes >= size_bytes).nonzero()[0]
        return int(holds_all[self._sizes[holds_all].argmin()]) if len(holds_all) else None

    def _choose(self, capacity: Offsets, count: int) -> tuple[npt.NDArray[np.intp], Offsets]:
        """Return the holes to cut, ascending, and how many blocks to cut from each, where no hole holds all of them.

        Args:
            capacity: ``(holes,)``, how many blocks each hole holds, at least ``count`` in total.
            count: at least 1.
        """
        order = np.argsort(-capacity, kind="stable")
        filled = np.cumsum(capacity[order])
        whole = int(np.searchsorted(filled, count))  # this many of the largest are filled
        rest = count - int(filled[whole - 1])
        others = order[whole:]
        fits = others[capacity[others] >= rest]
        holes = np.append(order[:whole], fits[np.argmin(self._sizes[fits])])
        counts = np.append(capacity[order[:whole]], rest)
        ascending = np.argsort(holes)
        return holes[ascending], counts[ascending]

    def _cut_one(self, hole: int, taken_bytes: int) -> None:
        """Remove bytes from the front of one hole."""
        if taken_bytes == self._sizes[hole]:
            self._cut(np.array([hole]), np.array([taken_bytes]))
            return
        self.changes += 1
        self._starts[hole] += taken_bytes
        self._sizes[hole] -= taken_bytes
        self._free -= taken_bytes

    def _cut(self, holes: npt.NDArray[np.intp], taken_bytes: Offsets) -> None:
        """Remove bytes from the front of holes."""
        self.changes += 1
        self._starts[holes] += taken_bytes
        self._sizes[holes] -= taken_bytes
        self._free -= int(taken_bytes.sum())
        left = self._sizes > 0
        if not left.all():
            self._starts, self._sizes = self._starts[left], self._sizes[left]
