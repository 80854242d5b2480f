"""Plans: checked copies between two sides, as arrays.

A plan stores entries and runs separately, since every entry has the same runs; ``blocks`` multiplies them out. Each
side is independent of the other, so that a source on another host can build its own. Addresses are offsets or absolute,
like the entries' bases.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies, Entries
from kvferry.pools.planning.geometry import Tokens, Units
from kvferry.pools.planning.page_ids import Runs, bounds, check_distinct, check_equal_length, check_range, coalesce
from kvferry.pools.planning.pairing import Pairing
from kvferry.pools.planning.sides import PlanSide
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import UncoveredEntryError

Blocks: TypeAlias = npt.NDArray[np.uint64]
"""``(n, 3)`` uint64: source address, destination address, size in bytes."""


class Plan(msgspec.Struct, frozen=True, dict=True):
    """The copies of one SEND into one transfer; entries in the destination's order.

    ``entries`` is what ``entries_between`` returns for both sides: it is the same for all plans of two pools.
    """

    source: PlanSide
    destination: PlanSide
    runs: Runs
    entries: Entries

    @property
    def pages(self) -> int:
        """Return the number of pages copied per entry."""
        return len(self.source.ids)

    @cached_property
    def total_bytes(self) -> int:
        """Return the number of bytes copied."""
        side = self.source
        sizes = side.slice_bytes if side.is_whole else side.segment_bytes
        bytes_a_page: int = sum(sizes.tolist())
        return self.pages * bytes_a_page

    @property
    def largest_block_bytes(self) -> int:
        """Return the size that no block of whole pages exceeds."""
        page_bytes: int = max(self.source.page_bytes.tolist())
        return page_bytes * bounds(self.runs.pages)[1]

    @property
    def sliced(self) -> npt.NDArray[np.bool_]:
        """Return which entries exchange less than whole pages on either side: ``(entries,)`` bool."""
        return self.source.sliced | self.destination.sliced

    @property
    def is_whole(self) -> bool:
        """Return whether all entries exchange whole pages on both sides."""
        return self.source.is_whole and self.destination.is_whole

    def of(self, entries: npt.NDArray[np.bool_]) -> Plan:
        """Return the plan with some of the entries only, by a mask."""
        return Plan(self.source.of(entries), self.destination.of(entries), self.runs, self.entries[entries])

    def listed(self, first: int, stop: int, at: tuple[int, int]) -> Copies:
        """Return the copies of segments ``[first, stop)``; ``at``: added to the source's addresses, the destination's.

        A segment is one page of one entry, numbered ``entry * pages + page``. Whole pages that adjoin share rows.
        """
        ids = self.source.ids, self.destination.ids
        return copy_kernel.list_segments(self.entries, *ids, (first, stop), at, with_rows=not self.is_whole)

    def blocks(self) -> Blocks:
        """Return all copies, entry by entry, runs in order: ``(n, 3)`` uint64.

        Whole pages have a block a run. A slice has one for each token, which is right but slow: see ``gather``.
        """
        if self.is_whole:
            return whole_blocks(self)
        sliced = self.sliced
        parts = []
        for entry, cut in enumerate(sliced.tolist()):
            alone = self.of(np.arange(len(sliced)) == entry)
            parts.append(_token_blocks(alone) if cut else whole_blocks(alone))
        return np.concatenate(parts)


class BlockParts:
    """The blocks of a plan of whole pages, a part at a time: ``Plan.blocks`` in the same order, but never all at once.

    Pages that lie apart have a block each in every entry, which is many times what their ids take.
    """

    def __init__(self, plan: Plan, at: tuple[int, int] = (0, 0)) -> None:
        """Begin with the first block; ``plan`` exchanges whole pages only. ``at``: see ``whole_blocks``."""
        self._plan = plan
        self._at = at
        self._runs = len(plan.runs.pages)
        self._count = self._runs * len(plan.source.base)
        self._total_bytes = plan.total_bytes
        self._first = 0
        self._taken_bytes = 0
        self._page_bytes = self._run_starts = self._entry_ends = np.empty(0, np.int64)

    @property
    def mean_bytes(self) -> int:
        """Return the mean size of a block."""
        return self._total_bytes // self._count

    @property
    def is_over(self) -> bool:
        """Return whether all blocks were taken."""
        return self._first == self._count

    def take(self, max_bytes: int, max_blocks: int) -> Blocks:
        """Return the next blocks, at least one: ``max_bytes`` or less than one block more, at most ``max_blocks``."""
        first = self._first
        if not first:
            if self._count <= max_blocks and self._total_bytes <= max_bytes:
                self._first = self._count
                return whole_blocks(self._plan, at=self._at)
            self._measure()
        stop = min(self._from(self._taken_bytes + max_bytes), first + max_blocks)
        self._first = stop = max(stop, first + 1)
        self._taken_bytes = self._offset(stop)
        return _listed_runs(self._plan, first, stop, self._at)

    def _measure(self) -> None:
        runs = self._plan.runs
        self._page_bytes = self._plan.source.page_bytes.astype(np.int64)
        self._run_starts = np.cumsum(runs.pages) - runs.pages
        self._entry_ends = np.cumsum(self._page_bytes * self._plan.pages)

    def _from(self, offset_bytes: int) -> int:
        """Return the first block that begins at or behind an offset among the bytes of all blocks."""
        entry = int(np.searchsorted(self._entry_ends, offset_bytes, "right"))
        if entry == len(self._entry_ends):
            return self._count
        within = offset_bytes - (int(self._entry_ends[entry - 1]) if entry else 0)
        pages = -(-within // int(self._page_bytes[entry]))
        return entry * self._runs + int(np.searchsorted(self._run_starts, pages))

    def _offset(self, block: int) -> int:
        entry, run = divmod(block, self._runs)
        before = int(self._entry_ends[entry - 1]) if entry else 0
        return before + (int(self._run_starts[run] * self._page_bytes[entry]) if run else 0)


class Cut(NamedTuple):
    """Which pages of two lists exchange the same parts: every ``step``-th, so many ``pages``.

    ``source`` and ``destination`` are the parts; None: whole pages.
    """

    source_start: int
    source_step: int
    destination_start: int
    destination_step: int
    pages: int
    source: Tokens | None = None
    destination: Tokens | None = None


def cuts_of(units: Units | None, source_at: int, destination_at: int, count: int) -> Iterator[Cut]:
    """Yield the cuts of so many consecutive units, which begin at these places of both lists; None: of pages."""
    if units is None:
        yield Cut(source_at, 1, destination_at, 1, count)
        return
    steps = units.phases // units.source, units.phases // units.destination
    for first in range(min(units.phases, count)):
        ours, our_part = divmod(source_at + first, units.source)
        theirs, their_part = divmod(destination_at + first, units.destination)
        parts = [Tokens(part * units.tokens, units.tokens) for part in (our_part, their_part)]
        yield Cut(ours, steps[0], theirs, steps[1], -(-(count - first) // units.phases), *parts)


def every(ids: PageIds, start: int, step: int, count: int) -> PageIds:
    """Return every ``step``-th of a list's pages from ``start`` on, at most ``count`` of them."""
    return np.ascontiguousarray(ids[start : start + (count - 1) * step + 1 : step])


def plan_of_cut(pairing: Pairing, source_pages: PageIds, destination_pages: PageIds, cut: Cut) -> Plan:
    """Return the plan of a cut of two lists; see ``make_plan``."""
    ours = every(source_pages, cut.source_start, cut.source_step, cut.pages)
    theirs = every(destination_pages, cut.destination_start, cut.destination_step, cut.pages)
    return make_plan(pairing, ours, theirs, parts=(cut.source, cut.destination))


def make_plan(
    pairing: Pairing,
    source_pages: PageIds,
    destination_pages: PageIds,
    *,
    parts: tuple[Tokens | None, Tokens | None] = (None, None),
) -> Plan:
    """Check the page lists against every pair and return the plan.

    A source page may be listed twice (it is only read), a destination page may not. ``parts``: of each page of either
    side; None: whole pages.

    Raises:
        UncoveredEntryError: no source entry has a destination entry.
        LengthMismatchError, EmptyPagesError, PageOutOfRangeError, DuplicatePageError: see ``page_ids``.
    """
    if not pairing.pairs:
        raise UncoveredEntryError("no source entry has a destination", field="source.entries")
    check_equal_length(source_pages, destination_pages, "destination_pages")
    source_has, destination_has = pairing.pages
    check_range(source_pages, source_has, "source_pages")
    check_range(destination_pages, destination_has, "destination_pages")
    check_distinct(destination_pages, "destination_pages")
    source, destination, entries = pairing.sides_of(parts)
    return Plan(
        msgspec.structs.replace(source, ids=source_pages),
        msgspec.structs.replace(destination, ids=destination_pages),
        coalesce(source_pages, destination_pages),
        entries,
    )


def whole_blocks(plan: Plan, at: tuple[int, int] = (0, 0)) -> Blocks:
    """Return the copies of a plan of whole pages: ``(n, 3)`` uint64.

    ``at``: what is added to the addresses of the source, and of the destination.
    """
    return _listed_runs(plan, 0, len(plan.runs.pages) * len(plan.entries), at)


def _listed_runs(plan: Plan, first: int, stop: int, at: tuple[int, int]) -> Blocks:
    """Return the copies of runs ``[first, stop)`` of a plan of whole pages, numbered entry by entry."""
    runs = plan.runs
    ids = runs.source, runs.destination
    return copy_kernel.list_segments(plan.entries, *ids, (first, stop), at, counts=runs.pages)


def _token_blocks(plan: Plan) -> Blocks:
    """Return a block for each token of each page; the plan has one entry."""
    rows = max(int(plan.source.rows[0]), int(plan.destination.rows[0]))
    size = int(plan.source.segment_bytes[0]) // rows
    tokens = np.arange(rows, dtype=np.uint64)
    blocks = np.empty((len(plan.source.ids), rows, 3), np.uint64)
    for column, side in enumerate((plan.source, plan.destination)):
        row_bytes = int(side.row_bytes[0]) if side.sliced[0] else size  # whole page: tokens are adjacent
        pages = side.base + side.slice_offset + side.ids.astype(np.uint64) * side.page_bytes
        blocks[:, :, column] = pages[:, None] + tokens * np.uint64(row_bytes)
    blocks[:, :, 2] = size
    return blocks.reshape(-1, 3)
