"""The pages that each row of the graph tables was given, visible or not.

A row may be assigned pages ahead of its length: a page that was allocated early, pages for draft tokens. Knows nothing
of lengths and of windows.
"""

from __future__ import annotations

import numpy as np

from kvferry.attention.spans import Positions, expanded
from kvferry.attention.table_layout import Int32s
from kvferry.attention.table_shape import TableShape
from kvferry.attention.table_update import TableUpdate
from kvferry.attention.undo import Undo


class AssignedPages:
    """``(max_batch, columns)`` int32; 0 where a row was given no page."""

    def __init__(self, shape: TableShape) -> None:
        self._pages: Int32s = np.zeros((shape.max_batch, shape.columns), np.int32)
        self._flat = self._pages.reshape(-1)
        self._columns = shape.columns

    def at(self, positions: Positions) -> Int32s:
        """Return the pages at these flat positions, ``(n,)`` int32, a copy."""
        return self._flat[positions]

    def give(self, update: TableUpdate, entries: Positions, undo: Undo) -> None:
        """Take an update's whole rows and its entries at these flat positions, which were checked."""
        if len(update.rows):
            undo.by(self._pages.__setitem__, update.rows, self._pages[update.rows])
            self._pages[update.rows] = 0
            starts = update.rows * self._columns
            self._flat[expanded(starts, starts + update.row_pages)] = update.pages
        if len(entries):
            undo.by(self._flat.__setitem__, entries, self._flat[entries])
            self._flat[entries] = update.entry_pages

    def forget(self, first_row: int, end_row: int) -> None:
        """Take all pages of these rows."""
        self._pages[first_row:end_row] = 0
