"""The graph tables' contents: what a captured graph shall read, kept row by row as updates change it.

Sans I/O. The master copy is numpy's; the visible tables (host memory, an NPU's, a staging copy) follow by what
``apply`` returns. Two things are kept apart: the pages that a row was given, which may run ahead of its length, and
what is visible of them, which follows from the lengths alone: columns below ``ceil((length + extra) / page_size)``, in
the window table from the window's first page on. Everything else is 0, also the rows that are not in use, so that a
padded batch of any captured size reads the padding page at length 0.

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

# -- what an update changed in the visible tables, for whoever copies it there.
#
# A value of places only; the contents are in ``GraphTables``. Knows no device: a shell copies elements with
# ``GraphTables.write``, or bytes of the region from a staging copy by ``byte_spans``.


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


# -- the pages that each row of the graph tables was given, visible or not.
#
# A row may be assigned pages ahead of its length: a page that was allocated early, pages for draft tokens. Knows
# nothing of lengths and of windows.


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


class GraphTables:
    """The tables of one captured model, and the full-to-window map that its window table goes by.

    Attributes:
        shape: of the tables.
        visible: the tables as they are to be visible, to read only; see ``TableViews``.
    """

    def __init__(self, shape: TableShape, pages: int, window_pages: int | None = None) -> None:
        """Make empty tables: all zeros, no row in use.

        Args:
            shape: see ``table_layout``.
            pages: of the pool that ``block_tables`` names, the padding page included.
            window_pages: of the window layers' pool, the padding page included; None without a window.

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
        """Take an update, and return what is to be copied to the visible tables; an empty batch is fine.

        Nothing changes if anything is wrong.

        Raises:
            TableHoleError: a row's length needs a page that the row was not given; row and column are named.
            DuplicatePageError: a row's length needs one page in two columns; row and page are named.
            WindowMismatchError: a visible page has no window page, or one that is released; row and column are named.
            TableOverflowError: a length needs more columns than there are; row, length and columns are named.
            KvferryError: what ``check_update`` and the full-to-window map raise.
        """
        entries = check_update(update, self.shape, self._pages)
        step = step_of(update, entries, self._ranges, self.shape.columns)
        with Undo() as undo:
            self._assigned.give(update, entries, undo)
            touched = step.full()
            pages = self._filled(touched)
            self._full.check_distinct(touched, pages)
            touched_swa = self._apply_window(update, step, undo)
        before = self.batch
        self._full.show(touched, pages)
        self._assigned.forget(update.batch, before)
        step.take()
        self._set_lengths(update)
        return TableChange(
            batch=update.batch,
            replayed_rows=self.shape.replayed_rows(update.batch),
            block_tables=touched.positions,
            block_tables_swa=touched_swa,
            length_rows=max(update.batch, before),
        )

    def everything(self) -> TableChange:
        """Return a change that covers all tables, for visible tables that are new or of unknown contents."""
        entries = np.arange(self.shape.max_batch * self.shape.columns)
        return TableChange(
            batch=self.batch,
            replayed_rows=self.shape.replayed_rows(self.batch),
            block_tables=entries,
            block_tables_swa=NONE if self._swa is None else entries,
            length_rows=self.shape.max_batch,
        )

    def write(self, change: TableChange, views: TableViews) -> None:
        """Copy the places that a change names, with their contents of now, into tables that the CPU can touch.

        Args:
            change: of these tables; one that an error kept from being copied may be followed by ``everything()``.
            views: writable, of the same shape.
        """
        _copy(change.block_tables, self.visible.block_tables, views.block_tables)
        if self.visible.block_tables_swa is not None and views.block_tables_swa is not None:
            _copy(change.block_tables_swa, self.visible.block_tables_swa, views.block_tables_swa)
        views.seq_lens[: change.length_rows] = self._seq_lens[: change.length_rows]

    def check(self) -> None:
        """Check what must always hold; a failure is a bug."""
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
