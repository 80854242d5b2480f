"""One update's way through the rows' ranges: the entries that it touches in each table, and then its taking effect.

Knows no page.
"""

from __future__ import annotations

import numpy as np

from kvferry.attention.row_ranges import RowMove, RowRanges, Shown
from kvferry.attention.spans import FEW, Positions
from kvferry.attention.table_update import TableUpdate
from kvferry.attention.touched_entries import TouchedEntries, touched_by_few, touched_by_many


class FewMoves:
    """A step that moves few rows and replaces none."""

    def __init__(
        self, ranges: RowRanges, update: TableUpdate, moves: list[RowMove], entries: list[int], columns: int
    ) -> None:
        self._ranges = ranges
        self._update = update
        self._moves = moves
        self._entries = entries
        self._columns = columns

    def full(self) -> TouchedEntries:
        """Return the entries that it touches in the full table."""
        moves = [RowMove(one.row, 0, one.end, 0, one.new_end) for one in self._moves]
        return touched_by_few(moves, self._ranges.full, self._entries, self._columns)

    def window(self) -> TouchedEntries:
        """Return the entries that it touches in the window table."""
        return touched_by_few(self._moves, self._ranges.shown, self._entries, self._columns)

    def take(self) -> None:
        """Let the rows show what they do after the step."""
        self._ranges.move(self._moves, self._update.batch)


class ManyMoves:
    """Any step."""

    def __init__(self, ranges: RowRanges, update: TableUpdate, after: Shown, entries: Positions, columns: int) -> None:
        self._ranges = ranges
        self._update = update
        self._after = after
        self._entries = entries
        self._columns = columns

    def full(self) -> TouchedEntries:
        """Return the entries that it touches in the full table."""
        after = Shown(np.zeros_like(self._after.first), self._after.end)
        return touched_by_many(self._ranges.full, after, self._update.rows, self._entries, self._columns)

    def window(self) -> TouchedEntries:
        """Return the entries that it touches in the window table."""
        return touched_by_many(self._ranges.shown, self._after, self._update.rows, self._entries, self._columns)

    def take(self) -> None:
        """Let the rows show what they do after the step."""
        self._ranges.show(self._after, self._update.batch, self._update.extra_tokens)


def step_of(update: TableUpdate, entries: Positions, ranges: RowRanges, columns: int) -> FewMoves | ManyMoves:
    """Return the update's step.

    Args:
        update: checked.
        entries: the flat positions of its entries.
        ranges: what the rows show before.
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
