"""What an update changed in the visible tables, for whoever copies it there.

A value of places only; the contents are in ``GraphTables``. Knows no device: a shell copies elements with
``GraphTables.write``, or bytes of the region from a staging copy by ``byte_spans``.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvferry.attention.spans import NONE, Positions, Spans, spans_of
from kvferry.attention.table_layout import ITEM_BYTES, TableLayout


class TableChange(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The elements to copy; everything else in the visible tables is as it has to be.

    Attributes:
        batch: rows in use from now on.
        replayed_rows: rows that a replay of this batch reads; those from ``batch`` on are all zeros.
        block_tables: flat positions in ``(max_batch, columns)``, ascending, distinct, ``(n,)`` int64.
        block_tables_swa: the same in the window table; none without a window.
        length_rows: how many of ``seq_lens``, from row 0 on.
    """

    batch: int
    replayed_rows: int
    block_tables: Positions
    length_rows: int
    block_tables_swa: Positions = NONE

    def byte_spans(self, layout: TableLayout) -> Spans:
        """Return the bytes of the region to copy, ascending; extents that touch are one."""
        parts = [self.block_tables * ITEM_BYTES + layout.block_tables]
        if layout.block_tables_swa is not None:
            parts.append(self.block_tables_swa * ITEM_BYTES + layout.block_tables_swa)
        tables = spans_of(np.concatenate(parts) // ITEM_BYTES)
        starts, ends = tables.starts * ITEM_BYTES, tables.ends * ITEM_BYTES
        lengths_end = layout.seq_lens + self.length_rows * ITEM_BYTES
        if len(ends) and ends[-1] == layout.seq_lens:
            return Spans(starts, np.append(ends[:-1], lengths_end))
        if not self.length_rows:
            return Spans(starts, ends)
        return Spans(np.append(starts, layout.seq_lens), np.append(ends, lengths_end))
