"""One block table as a captured graph sees it: of each row a range of columns, zeros elsewhere.

Knows nothing of where its contents come from.
"""

from __future__ import annotations

import numpy as np

from kvferry.attention.table_layout import Int32s
from kvferry.attention.table_shape import TableShape
from kvferry.attention.touched_entries import TouchedEntries
from kvferry.protocol.errors import DuplicatePageError


class VisibleTable:
    """``entries (max_batch, columns)`` int32, all zeros at first; the array is never replaced."""

    def __init__(self, shape: TableShape) -> None:
        self.entries: Int32s = np.zeros((shape.max_batch, shape.columns), np.int32)
        self._flat = self.entries.reshape(-1)
        self._columns = shape.columns

    def contents(self, entries: TouchedEntries) -> Int32s:
        """Return what these entries hold, ``(n,)``, a copy."""
        return self._flat[entries.positions]

    def check_distinct(self, entries: TouchedEntries, contents: Int32s) -> None:
        """Check that no row has a page twice once these entries have these contents: padding, page 0, is no such page.

        Raises:
            DuplicatePageError: one has; names row and page.
        """
        if not contents.any():
            return
        rows = entries.positions // self._columns
        touched = np.bincount(rows) > 0
        changed = np.flatnonzero(touched)
        after = self.entries[changed]
        skipped = np.cumsum(~touched) * self._columns  # entries of the rows before that are not looked at
        after.reshape(-1)[entries.positions - skipped[rows]] = contents
        after.sort(axis=1)
        again = (after[:, 1:] == after[:, :-1]) & (after[:, 1:] > 0)
        if again.any():
            at, place = np.argwhere(again)[0]
            raise DuplicatePageError(
                f"row {changed[at]} has page {after[at, place]} in more than one column", field="rows"
            )

    def show(self, entries: TouchedEntries, contents: Int32s) -> None:
        """Write the contents of these entries."""
        self._flat[entries.positions] = contents
