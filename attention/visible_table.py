"""One block table as a captured graph sees it: of each row a range of columns, zeros elsewhere.

Knows nothing of where its contents come from.
"""

from __future__ import annotations

import numpy as np

from kvferry.attention.table_layout import Int32s
from kvferry.attention.table_shape import TableShape
from kvferry.attention.touched_cells import Cells


class VisibleTable:
    """``cells (max_batch, columns)`` int32, all zeros at first; the array is never replaced."""

    def __init__(self, shape: TableShape) -> None:
        self.cells: Int32s = np.zeros((shape.max_batch, shape.columns), np.int32)
        self._flat = self.cells.reshape(-1)
        self._columns = shape.columns

    def contents(self, cells: Cells) -> Int32s:
        """Return what these cells hold, ``(n,)``, a copy."""
        return self._flat[cells.positions]

    def show(self, cells: Cells, contents: Int32s) -> None:
        """Write the contents of these cells."""
        self._flat[cells.positions] = contents
