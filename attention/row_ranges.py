"""The visible column range of each row of the graph tables, and which rows' ranges a step changes.

The full table shows the columns ``[0, end)`` of a row with ``end = ceil((length + extra) / page_size)``, the window
table ``[first, end)`` with ``first = max(length - window, 0) // page_size``. Both follow from the lengths alone. A step
adds a token to every row but moves the range of few of them, so each row keeps the interval of lengths within which its
range stays the same. Independent of page ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.attention.table_layout import TableShape
from kvferry.protocol.errors import InvalidFieldError, TableOverflowError

# -- positions in a flat array that have to be copied, and the extents that they form.
#
# Pure arithmetic, independent of tables and bytes. Optimised for few positions, the usual case, where each call into
# numpy costs more than the positions do.


Positions: TypeAlias = npt.NDArray[np.int64]
"""Flat positions in an array, or other numbers, ``(n,)`` int64."""

FEW = 16  # up to this many numbers, plain Python is faster than calls into numpy
NONE: Positions = np.empty(0, np.int64)
NONE.flags.writeable = False


class Spans(NamedTuple):
    """The extents ``[starts[i], ends[i])``: ascending, not empty, not adjacent to each other.

    Attributes:
        starts: ``(n,)`` int64; n may be 0.
        ends: ``(n,)`` int64.
    """

    starts: Positions
    ends: Positions

    def pairs(self) -> list[tuple[int, int]]:
        """Return ``(start, end)`` of each, as plain ints."""
        return list(zip(self.starts.tolist(), self.ends.tolist(), strict=True))


def expanded(starts: Positions, ends: Positions) -> Positions:
    """Return the positions in the extents ``[starts[i], ends[i])``, concatenated; extents may be empty."""
    lengths = ends - starts
    reached = lengths.cumsum()
    return np.repeat(starts - reached + lengths, lengths) + np.arange(reached[-1] if len(reached) else 0)


def distinct(parts: Sequence[Positions]) -> Positions:
    """Return the positions that are in any part, ascending, each once. A single part must already be so."""
    if len(parts) <= 1:
        return parts[0] if parts else NONE
    ordered = np.concatenate(parts)
    ordered.sort()
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def spans_of(positions: Positions) -> Spans:
    """Return the extents that distinct, ascending positions form."""
    if not len(positions):
        return Spans(NONE, NONE)
    cuts = np.flatnonzero(positions[1:] != positions[:-1] + 1)
    return Spans(positions[np.concatenate(([0], cuts + 1))], positions[np.concatenate((cuts, [-1]))] + 1)


ENDLESS = 1 << 62


class Shown(NamedTuple):
    """The columns ``[first, end)`` of each row, ``(max_batch,)`` int64 each; 0 and 0 in a row that is not in use."""

    first: Positions
    end: Positions


class RowMove(NamedTuple):
    """A row whose visible columns change from ``[first, end)`` to ``[new_first, new_end)``."""

    row: int
    first: int
    end: int
    new_first: int
    new_end: int


class RowRanges:
    """The current column range of each row.

    Attributes:
        shown: the columns of each row, in the window table where there is one; changed by ``move`` and ``show`` only.
        full: the same for the full table.
        batch: rows in use.
    """

    def __init__(self, shape: TableShape) -> None:
        """Start with empty ranges."""
        self._shape = shape
        self._window = ENDLESS if shape.window is None else shape.window
        self._extra = 0
        self.batch = 0
        self.shown = Shown(np.zeros(shape.max_batch, np.int64), np.zeros(shape.max_batch, np.int64))
        self.full = Shown(np.zeros(shape.max_batch, np.int64), self.shown.end)
        # A row's range stays the same while its length is in [stable_from, stable_to).
        self._stable_from = np.zeros(shape.max_batch, np.int64)
        self._stable_to = np.ones(shape.max_batch, np.int64)

    def moves(self, lengths: Positions, extra_tokens: int) -> list[RowMove] | None:
        """Return the rows whose ranges these lengths move; None if there are many of them: call ``after`` then.

        Raises:
            TableOverflowError: see ``after``.
            InvalidFieldError: see ``after``.
        """
        batch = len(lengths)
        if extra_tokens != self._extra or batch < self.batch:
            return None
        rows = ((lengths < self._stable_from[:batch]) | (lengths >= self._stable_to[:batch])).nonzero()[0]
        if len(rows) > FEW:
            return None
        return [self._move_of(*one) for one in zip(rows.tolist(), lengths[rows].tolist(), strict=True)]

    def after(self, lengths: Positions, extra_tokens: int) -> Shown:
        """Return the ranges that the rows will have with these lengths, in new arrays.

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
        """Apply what ``moves`` returned, for a batch of ``batch`` rows."""
        for one in moves:
            self.shown.first[one.row], self.shown.end[one.row] = one.new_first, one.new_end
            self._stable_from[one.row], self._stable_to[one.row] = self._stable_lengths(one.new_first, one.new_end)
        self.batch = batch

    def show(self, shown: Shown, batch: int, extra_tokens: int) -> None:
        """Apply what ``after`` returned, for a batch of ``batch`` rows and these extra tokens."""
        first, end = shown
        page_size, window = self._shape.page_size, self._window
        self.shown.first[:], self.shown.end[:] = first, end
        self.batch, self._extra = batch, extra_tokens
        least = np.maximum(np.where(first > 0, first * page_size + window, 1), (end - 1) * page_size - extra_tokens + 1)
        most = np.minimum((first + 1) * page_size + window, end * page_size - extra_tokens + 1)
        self._stable_from[:] = np.where(end > 0, least, 0)
        self._stable_to[:] = np.where(end > 0, most, 1)

    def _move_of(self, row: int, length: int) -> RowMove:
        self._check(row, length, self._extra)
        page_size = self._shape.page_size
        end = (length + self._extra + page_size - 1) // page_size if length else 0
        first = max(length - self._window, 0) // page_size
        return RowMove(row, int(self.shown.first[row]), int(self.shown.end[row]), first, end)

    def _stable_lengths(self, first: int, end: int) -> tuple[int, int]:
        """Return the lengths ``[from, to)`` for which a row shows these columns."""
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
