"""Which columns each row of the graph tables shows, and which rows a step moves.

The full table shows the columns ``[0, end)`` of a row with ``end = ceil((length + extra) / page_size)``, the window
table ``[first, end)`` with ``first = max(length - window, 0) // page_size``. Both follow from the lengths alone. A step
adds a token to every row and moves the ends of few of them, so each row keeps the lengths between which nothing moves.
Knows no page.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import numpy as np

from kvferry.attention.spans import FEW, Positions
from kvferry.attention.table_shape import TableShape
from kvferry.protocol.errors import InvalidFieldError, TableOverflowError

ENDLESS = 1 << 62


class Shown(NamedTuple):
    """The columns ``[first, end)`` of each row, ``(max_batch,)`` int64 each; 0 and 0 in a row that is not in use."""

    first: Positions
    end: Positions


class RowMove(NamedTuple):
    """A row whose columns change."""

    row: int
    first: int
    end: int
    new_first: int
    new_end: int


class RowRanges:
    """What the rows show now.

    Attributes:
        shown: the columns of each row, in the window table where there is one; changed by ``move`` and ``show`` only.
        full: the same of the full table.
        batch: rows in use.
    """

    def __init__(self, shape: TableShape) -> None:
        """Show nothing."""
        self._shape = shape
        self._window = ENDLESS if shape.window is None else shape.window
        self._extra = 0
        self.batch = 0
        self.shown = Shown(np.zeros(shape.max_batch, np.int64), np.zeros(shape.max_batch, np.int64))
        self.full = Shown(np.zeros(shape.max_batch, np.int64), self.shown.end)
        self._calm_from = np.zeros(shape.max_batch, np.int64)  # a row does not move while its length is at least this
        self._calm_to = np.ones(shape.max_batch, np.int64)  # and less than this

    def moves(self, lengths: Positions, extra_tokens: int) -> list[RowMove] | None:
        """Return the rows that these lengths move; None if they are many: then ask ``after``.

        Raises:
            TableOverflowError: see ``after``.
            InvalidFieldError: see ``after``.
        """
        batch = len(lengths)
        if extra_tokens != self._extra or batch < self.batch:
            return None
        rows = ((lengths < self._calm_from[:batch]) | (lengths >= self._calm_to[:batch])).nonzero()[0]
        if len(rows) > FEW:
            return None
        return [self._move_of(*one) for one in zip(rows.tolist(), lengths[rows].tolist(), strict=True)]

    def after(self, lengths: Positions, extra_tokens: int) -> Shown:
        """Return what the rows will show: new arrays.

        Raises:
            TableOverflowError: a length needs more columns than there are; row, length and columns are named.
            InvalidFieldError: a negative length.
        """
        shape, batch = self._shape, len(lengths)
        for row in (int(lengths.argmin()), int(lengths.argmax())) if batch else ():
            self._check(row, int(lengths[row]), extra_tokens)
        shown = Shown(np.zeros(shape.max_batch, np.int64), np.zeros(shape.max_batch, np.int64))
        shown.first[:batch] = np.maximum(lengths - self._window, 0) // shape.page_size
        shown.end[:batch] = (lengths + (extra_tokens + shape.page_size - 1)) // shape.page_size * (lengths > 0)
        return shown

    def move(self, moves: list[RowMove], batch: int) -> None:
        """Show what ``moves`` returned for a batch of so many rows."""
        for one in moves:
            self.shown.first[one.row], self.shown.end[one.row] = one.new_first, one.new_end
            self._calm_from[one.row], self._calm_to[one.row] = self._calm(one.new_first, one.new_end)
        self.batch = batch

    def show(self, shown: Shown, batch: int, extra_tokens: int) -> None:
        """Show what ``after`` returned for a batch of so many rows and these extra tokens."""
        first, end = shown
        page_size, window = self._shape.page_size, self._window
        self.shown.first[:], self.shown.end[:] = first, end
        self.batch, self._extra = batch, extra_tokens
        least = np.maximum(np.where(first > 0, first * page_size + window, 1), (end - 1) * page_size - extra_tokens + 1)
        most = np.minimum((first + 1) * page_size + window, end * page_size - extra_tokens + 1)
        self._calm_from[:] = np.where(end > 0, least, 0)
        self._calm_to[:] = np.where(end > 0, most, 1)

    def _move_of(self, row: int, length: int) -> RowMove:
        self._check(row, length, self._extra)
        page_size = self._shape.page_size
        end = (length + self._extra + page_size - 1) // page_size if length else 0
        first = max(length - self._window, 0) // page_size
        return RowMove(row, int(self.shown.first[row]), int(self.shown.end[row]), first, end)

    def _calm(self, first: int, end: int) -> tuple[int, int]:
        """Return from which length on, and up to which, a row shows these columns."""
        if not end:
            return 0, 1
        page_size = self._shape.page_size
        least = max(first * page_size + self._window if first else 1, (end - 1) * page_size - self._extra + 1)
        return least, min((first + 1) * page_size + self._window, end * page_size - self._extra + 1)

    def _check(self, row: int, length: int, extra_tokens: int) -> None:
        if length < 0:
            raise InvalidFieldError(f"row {row} has {length} tokens", field="lengths")
        if length and length + extra_tokens > self._shape.row_tokens:
            self._overflow(row, length, extra_tokens)

    def _overflow(self, row: int, length: int, extra_tokens: int) -> NoReturn:
        shape = self._shape
        raise TableOverflowError(
            f"row {row}: {length} tokens{f' and {extra_tokens} extra' if extra_tokens else ''} need "
            f"{-(-(length + extra_tokens) // shape.page_size)} pages, the tables have W = {shape.columns} columns of "
            f"{shape.page_size} tokens",
            field="lengths",
        )
