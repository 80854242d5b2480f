"""One update applied to the rows' ranges: the entries that it touches in each table, then the new ranges.

Independent of page ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.attention.row_ranges import FEW, Positions, RowMove, RowRanges, Shown, distinct, expanded
from kvferry.attention.table_update import TableUpdate

# -- the entries of a table that a step can change: at the ends of rows' ranges, and new contents within them.
#
# Two ways to compute the same entries: row by row where few rows move, as in nearly every decode step, and all rows at
# once where that is faster.


Mask: TypeAlias = npt.NDArray[np.bool_]


class TouchedEntries(NamedTuple):
    """Entries of a table.

    Attributes:
        positions: flat, ascending, distinct, ``(n,)`` int64.
        visible: whether each is visible after the step, ``(n,)`` bool.
    """

    positions: Positions
    visible: Mask


def touched_by_few(moves: Sequence[RowMove], now: Shown, entries: Sequence[int], columns: int) -> TouchedEntries:
    """Return the entries that these moves touch, and those of ``entries`` that stay visible.

    Args:
        moves: of rows, each once.
        now: what the rows show before the step.
        entries: flat positions with new contents.
        columns: of the table.
    """
    visible: dict[int, bool] = {}
    moved = {}
    for one in moves:
        moved[one.row] = (one.new_first, one.new_end)
        base = one.row * columns
        for column in _between(one):
            visible[base + column] = one.new_first <= column < one.new_end
    for position in entries:
        row, column = divmod(position, columns)
        if now.first[row] <= column < now.end[row]:
            first, end = moved.get(row, (0, columns))
            if first <= column < end:
                visible[position] = True
    positions = sorted(visible)
    return TouchedEntries(np.array(positions, np.int64), np.array([visible[one] for one in positions], np.bool_))


def touched_by_many(now: Shown, after: Shown, rows: Positions, entries: Positions, columns: int) -> TouchedEntries:
    """Return the entries between what rows show now and after, and those of ``rows`` and ``entries`` that are visible.

    Args:
        now: what the rows show before the step.
        after: what they show after it.
        rows: rows with new contents, ``(n,)``.
        entries: flat positions with new contents, ``(n,)``.
        columns: of the table.
    """
    parts = []
    for old, new in zip(now, after, strict=True):
        moved = np.flatnonzero(old != new)
        base, before, then = moved * columns, old[moved], new[moved]
        parts.append(expanded(base + np.minimum(before, then), base + np.maximum(before, then)))
    whole = np.sort(rows)
    base = whole * columns
    first, end = np.minimum(now.first[whole], after.first[whole]), np.maximum(now.end[whole], after.end[whole])
    parts.append(expanded(base + first, base + end))
    parts.append(np.sort(entries[_visible(entries, now, columns) & _visible(entries, after, columns)]))
    positions = distinct([part for part in parts if len(part)])
    return TouchedEntries(positions, _visible(positions, after, columns))


def _between(move: RowMove) -> Sequence[int]:
    first, then_first = sorted((move.first, move.new_first))
    end, then_end = sorted((move.end, move.new_end))
    return [*range(first, then_first), *range(end, then_end)]


def _visible(positions: Positions, shown: Shown, columns: int) -> Mask:
    rows, column = np.divmod(positions, columns)
    return (shown.first[rows] <= column) & (column < shown.end[rows])


class FewMoves:
    """A step that moves few rows' ranges and replaces no whole row."""

    def __init__(
        self, ranges: RowRanges, update: TableUpdate, moves: list[RowMove], entries: list[int], columns: int
    ) -> None:
        self._ranges = ranges
        self._update = update
        self._moves = moves
        self._entries = entries
        self._columns = columns

    def full(self) -> TouchedEntries:
        """Return the entries that the step touches in the full table."""
        moves = [RowMove(one.row, 0, one.end, 0, one.new_end) for one in self._moves]
        return touched_by_few(moves, self._ranges.full, self._entries, self._columns)

    def window(self) -> TouchedEntries:
        """Return the entries that the step touches in the window table."""
        return touched_by_few(self._moves, self._ranges.shown, self._entries, self._columns)

    def commit(self) -> None:
        """Change the rows' ranges to those after the step."""
        self._ranges.move(self._moves, self._update.batch)


class ManyMoves:
    """Any step, computed for all rows at once."""

    def __init__(self, ranges: RowRanges, update: TableUpdate, after: Shown, entries: Positions, columns: int) -> None:
        self._ranges = ranges
        self._update = update
        self._after = after
        self._entries = entries
        self._columns = columns

    def full(self) -> TouchedEntries:
        """Return the entries that the step touches in the full table."""
        after = Shown(np.zeros_like(self._after.first), self._after.end)
        return touched_by_many(self._ranges.full, after, self._update.rows, self._entries, self._columns)

    def window(self) -> TouchedEntries:
        """Return the entries that the step touches in the window table."""
        return touched_by_many(self._ranges.shown, self._after, self._update.rows, self._entries, self._columns)

    def commit(self) -> None:
        """Change the rows' ranges to those after the step."""
        self._ranges.show(self._after, self._update.batch, self._update.extra_tokens)


def step_of(update: TableUpdate, entries: Positions, ranges: RowRanges, columns: int) -> FewMoves | ManyMoves:
    """Return the update's step.

    Args:
        update: checked.
        entries: the flat positions of its entries.
        ranges: what the rows show before the step.
        columns: of the tables.

    Raises:
        TableOverflowError: a length needs more columns than there are; row, length and columns are named.
        InvalidFieldError: a negative length.
    """
    if not len(update.rows) and len(entries) <= FEW:
        moves = ranges.moves(update.lengths, update.extra_tokens)
        if moves is not None:
            return FewMoves(ranges, update, moves, entries.tolist(), columns)
    return ManyMoves(ranges, update, ranges.after(update.lengths, update.extra_tokens), entries, columns)
