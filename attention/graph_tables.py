"""The contents of the graph tables that a captured graph reads, maintained row by row as updates change them.

Sans I/O. The master copy is in numpy; the visible tables (in host memory, on an NPU, in a staging copy) are brought up
to date from what ``apply`` returns. Assigned pages and visible entries are separate: a row may be assigned pages ahead
of its length, and what is visible follows from the lengths alone: the columns below
``ceil((length + extra) / page_size)``, in the window table from the window's first page on. Everything else is 0, also
rows that are not in use, so that a padded batch of any captured size reads the padding page at length 0.

An update is checked as a whole before a table changes. No array is ever replaced: addresses stay.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvferry.attention.row_ranges import NONE, Positions, RowRanges, Spans, expanded, spans_of
from kvferry.attention.table_layout import ITEM_BYTES, Int32s, TableLayout, TableShape, TableViews
from kvferry.attention.table_step import FewMoves, ManyMoves, TouchedEntries, step_of
from kvferry.attention.table_update import TableUpdate, check_update
from kvferry.attention.visible_table import Undo, VisibleTable
from kvferry.attention.window_table import WindowTable
from kvferry.protocol.errors import InvalidFieldError, TableHoleError

# -- what an update changed in the visible tables.
#
# Holds positions only; the contents are in ``GraphTables``. Independent of the device: the caller copies elements with
# ``GraphTables.write``, or byte ranges of the region from a staging copy with ``byte_spans``.


class TableChange(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The elements to copy; everything else in the visible tables is up to date.

    Attributes:
        batch: rows in use from now on.
        replayed_rows: rows that a replay of this batch reads; those from ``batch`` on are all zeros.
        block_tables: flat positions in ``(max_batch, columns)``, ascending, distinct, ``(n,)`` int64.
        block_tables_swa: the same in the window table; empty without a window.
        length_rows: how many elements of ``seq_lens`` to copy, from row 0 on.
    """

    batch: int
    replayed_rows: int
    block_tables: Positions
    length_rows: int
    block_tables_swa: Positions = NONE

    def byte_spans(self, layout: TableLayout) -> Spans:
        """Return the byte ranges of the region to copy, ascending; adjacent ranges are merged."""
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


# -- the assigned pages of each row of the graph tables, visible or not.
#
# A row may be assigned pages ahead of its length: a page that was allocated early, or pages for draft tokens.
# Independent of lengths and windows.


class AssignedPages:
    """``(max_batch, columns)`` int32; 0 where a row has no page."""

    def __init__(self, shape: TableShape) -> None:
        self._pages: Int32s = np.zeros((shape.max_batch, shape.columns), np.int32)
        self._flat = self._pages.reshape(-1)
        self._columns = shape.columns

    def at(self, positions: Positions) -> Int32s:
        """Return the pages at these flat positions, ``(n,)`` int32, a copy."""
        return self._flat[positions]

    def assign(self, update: TableUpdate, entries: Positions, undo: Undo) -> None:
        """Store an update's whole rows, and its entries at these flat positions; both were checked."""
        if len(update.rows):
            undo.by(self._pages.__setitem__, update.rows, self._pages[update.rows])
            self._pages[update.rows] = 0
            starts = update.rows * self._columns
            self._flat[expanded(starts, starts + update.row_pages)] = update.pages
        if len(entries):
            undo.by(self._flat.__setitem__, entries, self._flat[entries])
            self._flat[entries] = update.entry_pages

    def clear(self, first_row: int, end_row: int) -> None:
        """Remove all pages from rows ``[first_row, end_row)``."""
        self._pages[first_row:end_row] = 0


class GraphTables:
    """The tables of one captured model, and the full-to-window page map behind its window table.

    Attributes:
        shape: of the tables.
        visible: the tables as a graph should see them, read-only; see ``TableViews``.
    """

    def __init__(self, shape: TableShape, pages: int, window_pages: int | None = None) -> None:
        """Make empty tables: all zeros, no row in use.

        Args:
            shape: see ``table_layout``.
            pages: number of pages of the pool that ``block_tables`` refers to, the padding page included.
            window_pages: the same for the window layers' pool; None without a window.

        Raises:
            InvalidFieldError: a window without ``window_pages``, or the reverse.
        """
        if (shape.window is None) != (window_pages is None):
            raise InvalidFieldError(f"{window_pages} for a window of {shape.window} tokens", field="window_pages")
        self.shape = shape
        self._pages = pages
        self._assigned = AssignedPages(shape)
        self._ranges = RowRanges(shape)
        self._full = VisibleTable(shape)
        self._swa = None if window_pages is None else WindowTable(shape, pages, window_pages)
        self._seq_lens: Int32s = np.zeros(shape.max_batch, np.int32)
        self.visible = TableViews(
            block_tables=_read_only(self._full.entries),
            block_tables_swa=None if self._swa is None else _read_only(self._swa.entries),
            seq_lens=_read_only(self._seq_lens),
        )

    def __repr__(self) -> str:
        """Show the rows in use and the shape."""
        return f"<GraphTables {self.batch} of {self.shape.max_batch} rows, {self.shape.columns} columns>"

    @property
    def batch(self) -> int:
        """Return how many rows are in use."""
        return self._ranges.batch

    def apply(self, update: TableUpdate) -> TableChange:
        """Apply an update and return what has to be copied to the visible tables; the batch may be empty.

        Nothing changes if an error is raised.

        Raises:
            TableHoleError: a row's length needs a page that the row does not have; row and column are named.
            DuplicatePageError: a row's length needs one page in two columns; row and page are named.
            WindowMismatchError: a visible page has no window page, or one that is released; row and column are named.
            TableOverflowError: a length needs more columns than there are; row, length and columns are named.
            KvferryError: what ``check_update`` and the full-to-window map raise.
        """
        entries = check_update(update, self.shape, self._pages)
        step = step_of(update, entries, self._ranges, self.shape.columns)
        with Undo() as undo:
            self._assigned.assign(update, entries, undo)
            touched = step.full()
            pages = self._filled(touched)
            self._full.check_distinct(touched, pages)
            touched_swa = self._apply_window(update, step, undo)
        before = self.batch
        self._full.show(touched, pages)
        self._assigned.clear(update.batch, before)
        step.commit()
        self._set_lengths(update)
        return TableChange(
            batch=update.batch,
            replayed_rows=self.shape.replayed_rows(update.batch),
            block_tables=touched.positions,
            block_tables_swa=touched_swa,
            length_rows=max(update.batch, before),
        )

    def everything(self) -> TableChange:
        """Return a change that covers all tables, for visible tables that are new or whose contents are unknown."""
        entries = np.arange(self.shape.max_batch * self.shape.columns)
        return TableChange(
            batch=self.batch,
            replayed_rows=self.shape.replayed_rows(self.batch),
            block_tables=entries,
            block_tables_swa=NONE if self._swa is None else entries,
            length_rows=self.shape.max_batch,
        )

    def write(self, change: TableChange, views: TableViews) -> None:
        """Copy the current contents of a change's positions into tables that the CPU can access.

        Args:
            change: of these tables; if an error kept an earlier one from being copied, pass ``everything()``.
            views: writable, of the same shape.
        """
        _copy(change.block_tables, self.visible.block_tables, views.block_tables)
        if self.visible.block_tables_swa is not None and views.block_tables_swa is not None:
            _copy(change.block_tables_swa, self.visible.block_tables_swa, views.block_tables_swa)
        views.seq_lens[: change.length_rows] = self._seq_lens[: change.length_rows]

    def check(self) -> None:
        """Check the invariants; a failure is a bug."""
        assert not self._seq_lens[self.batch :].any()
        columns = np.arange(self.shape.columns)
        for table, shown in ((self._full, self._ranges.full), (self._swa, self._ranges.shown)):
            if table is not None:
                visible = (shown.first[:, None] <= columns) & (columns < shown.end[:, None])
                assert np.array_equal(table.entries > 0, visible)
        if self._swa is not None:
            self._swa.check()

    def _apply_window(self, update: TableUpdate, step: FewMoves | ManyMoves, undo: Undo) -> Positions:
        if self._swa is None:
            return NONE
        released = self._swa.rebind(update, undo)
        entries = step.window()
        pages = self._swa.translated(entries, self._assigned.at(entries.positions), released, undo)
        self._swa.show(entries, pages)
        return entries.positions

    def _filled(self, entries: TouchedEntries) -> Int32s:
        pages: Int32s = self._assigned.at(entries.positions) * entries.visible
        if np.count_nonzero(pages) != np.count_nonzero(entries.visible):
            hole = np.flatnonzero(entries.visible & (pages == 0))[0]
            row, column = divmod(int(entries.positions[hole]), self.shape.columns)
            raise TableHoleError(f"row {row} has no page in column {column}, which its length needs", field="lengths")
        return pages

    def _set_lengths(self, update: TableUpdate) -> None:
        self._seq_lens[: update.batch] = update.lengths
        self._seq_lens[update.batch :] = 0
        if update.extra_tokens:
            self._seq_lens[: update.batch] += update.extra_tokens * (update.lengths > 0)


def _copy(positions: Positions, source: Int32s, destination: Int32s) -> None:
    flat = destination.reshape(-1)
    assert flat.base is not None, "a table that is not contiguous would be copied to nowhere"
    flat[positions] = source.reshape(-1)[positions]


def _read_only(table: Int32s) -> Int32s:
    view = table.view()
    view.flags.writeable = False
    return view
