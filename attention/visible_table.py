"""One block table as a captured graph sees it: of each row a range of columns, zeros elsewhere.

Knows nothing of where its contents come from.
"""

from __future__ import annotations

import numpy as np

from kvferry.attention.table_layout import Int32s
from kvferry.attention.table_shape import TableShape
from kvferry.attention.touched_cells import Cells
from kvferry.protocol.errors import DuplicatePageError


class VisibleTable:
    """``cells (max_batch, columns)`` int32, all zeros at first; the array is never replaced."""

    def __init__(self, shape: TableShape) -> None:
        self.cells: Int32s = np.zeros((shape.max_batch, shape.columns), np.int32)
        self._flat = self.cells.reshape(-1)
        self._columns = shape.columns

    def contents(self, cells: Cells) -> Int32s:
        """Return what these cells hold, ``(n,)``, a copy."""
        return self._flat[cells.positions]

    def check_distinct(self, cells: Cells, contents: Int32s) -> None:
        """Check that no row has a page twice once these cells have these contents: padding, page 0, is no such page.

        Raises:
            DuplicatePageError: one has; names row and page.
        """
        if not contents.any():
            return
        rows = cells.positions // self._columns
        touched = np.bincount(rows) > 0
        changed = np.flatnonzero(touched)
        after = self.cells[changed]
        skipped = np.cumsum(~touched) * self._columns  # cells of the rows before that are not looked at
        after.reshape(-1)[cells.positions - skipped[rows]] = contents
        after.sort(axis=1)
        again = (after[:, 1:] == after[:, :-1]) & (after[:, 1:] > 0)
        if again.any():
            at, place = np.argwhere(again)[0]
            raise DuplicatePageError(
                f"row {changed[at]} has page {after[at, place]} in more than one column", field="rows"
            )

    def show(self, cells: Cells, contents: Int32s) -> None:
        """Write the contents of these cells."""
        self._flat[cells.positions] = contents
