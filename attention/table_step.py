"""One update's way through the rows' ranges: the cells that it touches in each table, and then its taking effect.

Knows no page.
"""

from __future__ import annotations

import numpy as np

from kvferry.attention.row_ranges import RowMove, RowRanges, Shown
from kvferry.attention.spans import FEW, Positions
from kvferry.attention.table_update import TableUpdate
from kvferry.attention.touched_cells import Cells, touched_by_few, touched_by_many


class FewMoves:
    """A step that moves few rows and replaces none."""

    def __init__(
        self, ranges: RowRanges, update: TableUpdate, moves: list[RowMove], cells: list[int], columns: int
    ) -> None:
        self._ranges = ranges
        self._update = update
        self._moves = moves
        self._cells = cells
        self._columns = columns

    def full(self) -> Cells:
        """Return the cells that it touches in the full table."""
        moves = [RowMove(one.row, 0, one.end, 0, one.new_end) for one in self._moves]
        return touched_by_few(moves, self._ranges.full, self._cells, self._columns)

    def window(self) -> Cells:
        """Return the cells that it touches in the window table."""
        return touched_by_few(self._moves, self._ranges.shown, self._cells, self._columns)

    def take(self) -> None:
        """Let the rows show what they do after the step."""
        self._ranges.move(self._moves, self._update.batch)


class ManyMoves:
    """Any step."""

    def __init__(self, ranges: RowRanges, update: TableUpdate, after: Shown, cells: Positions, columns: int) -> None:
        self._ranges = ranges
        self._update = update
        self._after = after
        self._cells = cells
        self._columns = columns

    def full(self) -> Cells:
        """Return the cells that it touches in the full table."""
        after = Shown(np.zeros_like(self._after.first), self._after.end)
        return touched_by_many(self._ranges.full, after, self._update.rows, self._cells, self._columns)

    def window(self) -> Cells:
        """Return the cells that it touches in the window table."""
        return touched_by_many(self._ranges.shown, self._after, self._update.rows, self._cells, self._columns)

    def take(self) -> None:
        """Let the rows show what they do after the step."""
        self._ranges.show(self._after, self._update.batch, self._update.extra_tokens)


def step_of(update: TableUpdate, cells: Positions, ranges: RowRanges, columns: int) -> FewMoves | ManyMoves:
    """Return the update's step.

    Args:
        update: checked.
        cells: the flat positions of its cells.
        ranges: what the rows show before.
        columns: of the tables.

    Raises:
        TableOverflowError: a length needs more columns than there are; row, length and columns are named.
        InvalidFieldError: a negative length.
    """
    if not len(update.rows) and len(cells) <= FEW:
        moves = ranges.moves(update.lengths, update.extra_tokens)
        if moves is not None:
            return FewMoves(ranges, update, moves, cells.tolist(), columns)
    return ManyMoves(ranges, update, ranges.after(update.lengths, update.extra_tokens), cells, columns)
