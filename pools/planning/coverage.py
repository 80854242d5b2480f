"""Coverage: which cells (entry, heads, logical page) of a transfer are required, planned by a SEND, and have arrived.

Each cell is counted once: a second planned copy of it is an overlap, unless its sender is one of several replicas; then
the first accepted replica sends the cell, whatever its rank, and the others send what is left (docs/architecture.md,
"Formulas"). A page of an entry is one cell until the first planned copy that has only some of the entry's heads; from
then on each head is counted separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.pools.planning.geometry import Heads
from kvferry.pools.planning.pairing import Pairing
from kvferry.protocol.errors import GeometryMismatchError, IncompleteError, PageOverlapError, UncoveredEntryError
from kvferry.protocol.manifests import Entry

Rows: TypeAlias = npt.NDArray[np.bool_]
"""``(rows,)`` bool mask over the rows of ``Cells``."""

_Grid: TypeAlias = npt.NDArray[np.bool_]
"""``(entries, heads, pages)`` bool."""


class Cells(NamedTuple):
    """The cells of some entries (rows) on one range of a transfer's pages.

    Attributes:
        entries: ``(rows,)`` indices of entries, each once.
        start: first page, counted from the transfer's first page.
        stop: page after the last.
        heads: the heads of each row, counted within the entry; None in a row, or for all rows, means all heads.
        units: into how many units the transfer's pages are cut, and how many of these a page has; then ``start`` and
            ``stop`` count units. None: pages are not cut.
    """

    entries: npt.NDArray[np.intp]
    start: int
    stop: int
    heads: tuple[Heads | None, ...] | None = None
    units: tuple[int, int] | None = None

    def of(self, rows: Rows) -> Cells:
        """Return the cells of the selected rows."""
        heads = None if self.heads is None else tuple(itertools.compress(self.heads, rows.tolist()))
        return self._replace(entries=self.entries[rows], heads=heads)


class Extent(NamedTuple):
    """Rows of ``Cells``, and a range of pages on which none of them has a sender."""

    rows: Rows
    start: int
    stop: int


def cells_of(pairing: Pairing, start: int, stop: int, units: tuple[int, int] | None = None) -> Cells:
    """Return the cells that the pairs fill on pages, or units, ``[start, stop)``, one row per pair."""
    return Cells(pairing.destination_entries, start, stop, pairing.destination_heads, units)


class Coverage:
    """The cells of one component of one transfer.

    The head axis of its grids has length 1 until heads are counted separately, then the largest number of heads of any
    entry; an entry with fewer heads uses its last head for the rest of the axis. The page axis counts units, those that
    hold tokens, once a source has pages of another size.
    """

    def __init__(self, entries: Sequence[Entry], pages: int, optional_components: Collection[str]) -> None:
        """Require every entry of a component that is not optional.

        Args:
            entries: the destination's entries of this component, in their order.
            pages: number of logical pages of the transfer.
            optional_components: components that no source has to cover.
        """
        self._entries = entries
        self._pages = pages
        self._units: tuple[int, int] | None = None
        self._required = np.array([entry.component not in optional_components for entry in entries], np.bool_)
        self._planned, self._arrived, self._waived = (np.zeros((len(entries), 1, pages), np.bool_) for _ in range(3))

    def free_extents(self, cells: Cells, replicated: Rows) -> tuple[Extent, ...]:
        """Return the extents that have no sender yet; each row is in at most one.

        Chunks of one source never overlap: admission checks that.

        Args:
            cells: what a source could send.
            replicated: rows that other sources hold too. Some of their pages may have a sender already, if those have
                one for all heads and the pages left are contiguous.

        Raises:
            PageOverlapError: names the first cell that already has a sender and must not.
            GeometryMismatchError: pages of an earlier source are cut in another way.
        """
        self._check_units(cells)
        parts = self._parts(cells) if np.count_nonzero(self._planned) else ()
        taken_parts = [
            (rows, heads, taken)
            for rows, heads in parts
            if (taken := self._planned[cells.entries[rows], heads, cells.start : cells.stop]).any()
        ]
        if not taken_parts and len(cells.entries) and cells.start < cells.stop:  # as for most: it is the first
            return (Extent(np.ones(len(cells.entries), np.bool_), cells.start, cells.stop),)
        bounds = np.tile([cells.start, cells.stop], (len(cells.entries), 1))
        for rows, heads, taken in taken_parts:
            pages: npt.NDArray[np.bool_] = np.any(taken, axis=1)
            left = cells.stop - cells.start - pages.sum(axis=1)
            first, behind = pages.argmin(axis=1), pages[:, ::-1].argmin(axis=1)
            in_one = (left == 0) | (first + left + behind == cells.stop - cells.start)
            whole = np.all(taken.all(axis=1) == pages, axis=1)
            wrong = np.flatnonzero(pages.any(axis=1) & ~(replicated[rows] & in_one & whole))
            if len(wrong):
                raise self._overlap(cells, int(rows[wrong[0]]), heads.start or 0, taken[wrong[0]])
            bounds[rows] = cells.start + np.stack([first, first + left], axis=1)
        found = np.unique(bounds, axis=0) if (bounds != bounds[:1]).any() else bounds[:1]
        return tuple(
            Extent((bounds == (start, stop)).all(axis=1), start, stop) for start, stop in found.tolist() if start < stop
        )

    def plan(self, cells: Cells) -> None:
        """Mark the cells as planned; ``free_extents`` has returned all of them."""
        self._separate_units(cells)
        self._separate_heads(cells)
        self._set(self._planned, cells, value=True)

    def withdraw(self, cells: Cells) -> None:
        """Undo ``plan``."""
        self._set(self._planned, cells, value=False)

    def arrive(self, cells: Cells) -> None:
        """Mark the cells as arrived."""
        self._set(self._arrived, cells, value=True)

    def waive(self, cells: Cells) -> None:
        """Stop requiring these cells: no source has them, and both sides have agreed to that."""
        self._separate_heads(cells)
        self._set(self._waived, cells, value=True)

    def check_planned(self, waived: Iterable[Cells] = ()) -> None:
        """Check that every required cell has a sender or is waived.

        Args:
            waived: cells to treat as waived in this check only.

        Raises:
            UncoveredEntryError: names the first entry without a sender for any page.
            IncompleteError: names the first cell without a sender and gives their number.
        """
        if _are_all(self._planned):
            return
        extra = tuple(waived)
        for cells in extra:
            self._separate_heads(cells)
        settled = self._planned | self._waived
        for cells in extra:
            self._set(settled, cells, value=True)
        bare = np.flatnonzero(self._required & ~settled.any(axis=(1, 2)))
        if len(bare) and settled.shape[2]:
            raise UncoveredEntryError(
                f"no source entry for {self._entries[bare[0]].name} ({len(bare)} entries uncovered)", field="lists"
            )
        missing = ~settled & (self._counted() & self._required[:, None])[:, :, None]
        count = int(np.count_nonzero(missing))
        if count:
            entry, head, page = (int(one) for one in np.argwhere(missing)[0])
            heads = self._head_range(entry, head, missing[entry, head:, page])
            raise IncompleteError(
                f"{self._entries[entry].name}: transfer page {page}{heads} has no sender ({count} cells missing)",
                field="lists",
            )

    @property
    def complete(self) -> bool:
        """Return whether every required and every planned cell has arrived."""
        if _are_all(self._arrived):
            return True
        required = self._required[:, None, None] & ~self._waived
        return not ((self._planned | required) & ~self._arrived).any()

    @property
    def arrived_pages(self) -> int:
        """Return how many pages have arrived in every required entry with all heads; waived pages do not count."""
        arrived = np.logical_and.reduce(self._arrived | ~self._required[:, None, None], axis=(0, 1))
        if self._units is not None:
            each = self._units[1]
            arrived = np.append(arrived, np.ones(self._pages * each - len(arrived), np.bool_))
            arrived = arrived.reshape(self._pages, each).all(axis=1)
        return int(arrived.sum())

    def _parts(self, cells: Cells) -> Iterator[tuple[npt.NDArray[np.intp], slice]]:
        """Yield each part of the head axis, preceded by the rows that use it."""
        if cells.heads is None:
            yield np.arange(len(cells.entries)), slice(None)
            return
        parts: dict[tuple[int, int], list[int]] = {}
        for row, (entry, heads) in enumerate(zip(cells.entries.tolist(), cells.heads, strict=True)):
            held = self._heads_of(entry)
            part = (0, -1) if heads is None else (heads.start, -1 if heads.stop >= held else heads.stop)
            parts.setdefault(part, []).append(row)
        for (start, stop), rows in parts.items():
            yield np.array(rows, np.intp), self._on_axis(start, stop)

    def _on_axis(self, start: int, stop: int) -> slice:
        """Return the slice of the head axis; a stop of -1 is its end."""
        if self._planned.shape[1] == 1:
            return slice(None)
        return slice(start, None if stop < 0 else stop)

    def _set(self, grid: _Grid, cells: Cells, *, value: bool) -> None:
        if cells.heads is None and len(cells.entries) == len(grid):  # all of them: none has two rows
            grid[:, :, cells.start : cells.stop] = value
            return
        for rows, heads in self._parts(cells):
            grid[cells.entries[rows], heads, cells.start : cells.stop] = value

    def _check_units(self, cells: Cells) -> None:
        if cells.units != self._units and np.count_nonzero(self._planned):
            raise GeometryMismatchError(
                "the pages of this source hold another number of tokens than those of an earlier one", field="lists"
            )

    def _separate_units(self, cells: Cells) -> None:
        """Count pages, or units, as the cells do."""
        self._check_units(cells)
        if cells.units != self._units:
            self._units = cells.units
            count = self._pages if cells.units is None else cells.units[0]
            self._planned, self._arrived, self._waived = (
                np.zeros((len(self._entries), 1, count), np.bool_) for _ in range(3)
            )

    def _separate_heads(self, cells: Cells) -> None:
        """Expand the head axis of the grids if any of the cells has only some of its entry's heads."""
        if cells.heads is None or self._planned.shape[1] > 1:
            return
        held = [self._heads_of(entry) for entry in cells.entries.tolist()]
        if any(heads and heads.count < most for heads, most in zip(cells.heads, held, strict=True)):
            most = max(self._heads_of(entry) for entry in range(len(self._entries)))
            self._planned, self._arrived, self._waived = (
                np.repeat(grid, most, axis=1) for grid in (self._planned, self._arrived, self._waived)
            )

    def _heads_of(self, entry: int) -> int:
        return self._entries[entry].heads or 1

    def _counted(self) -> npt.NDArray[np.bool_]:
        """Return which positions on the head axis are real heads of each entry: ``(entries, heads)`` bool."""
        axis = self._planned.shape[1]
        if axis == 1:
            return np.ones((len(self._entries), 1), np.bool_)
        held = [self._heads_of(entry) for entry in range(len(self._entries))]
        return np.arange(axis) < np.array(held)[:, None]

    def _overlap(self, cells: Cells, row: int, start: int, taken: npt.NDArray[np.bool_]) -> PageOverlapError:
        """Return the error that names the first cell of a row in ``taken``, ``(heads, pages)`` bool."""
        entry = int(cells.entries[row])
        head, page = (int(one) for one in np.argwhere(taken)[0])
        heads = self._head_range(entry, start + head, taken[head:, page])
        return PageOverlapError(
            f"{self._entries[entry].name}: transfer page {cells.start + page}{heads} has a sender already",
            field="lists",
        )

    def _head_range(self, entry: int, first: int, wrong: Rows) -> str:
        """Return the heads at fault as text, in the model's numbering: from ``first`` on while ``wrong`` is true."""
        one = self._entries[entry]
        held = self._heads_of(entry)
        if self._planned.shape[1] == 1 or held == 1:
            return ""
        stop = first + (len(wrong) if wrong.all() else int(np.argmin(wrong)))
        start = one.head_start or 0
        return f", heads {start + first}..{start + min(stop, held) - 1},"


def _are_all(grid: _Grid) -> bool:
    """Return whether all cells of a grid are set; of few, numpy counts sooner than it asks."""
    return bool(np.count_nonzero(grid) == grid.size)
