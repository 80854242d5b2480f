"""The contents of the graph tables that a captured graph reads, maintained row by row as updates change them.

Sans I/O. The master copy is in numpy; the visible tables (in host memory, on an NPU, in a staging copy) are brought up
to date from what ``apply`` returns. Assigned pages and visible entries are separate: a row may be assigned pages ahead
of its length, and what is visible follows from the lengths alone: the columns below
``ceil((length + extra) / page_size)``, in the window table from the window's first page on. Everything else is 0, also
rows that are not in use, so that a padded batch of any captured size reads the padding page at length 0.

A step adds a token to every row but changes few of them: the rows that it changes are computed as a whole, and what
differs then is what has to be copied. An update is checked completely before a table changes. No array is ever
replaced: addresses stay.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.attention.table_layout import (
    ITEM_BYTES,
    Int32s,
    Int64s,
    TableLayout,
    TableShape,
    TableViews,
)
from kvferry.attention.table_update import NONE, TableUpdate, check_update
from kvferry.attention.window_table import Mask, WindowTable, put_rows
from kvferry.protocol.errors import (
    DuplicatePageError,
    InvalidFieldError,
    KvferryError,
    TableHoleError,
    TableOverflowError,
)


class Spans(NamedTuple):
    """The extents ``[starts[i], ends[i])``: ascending, not empty, not adjacent to each other.

    Attributes:
        starts: ``(n,)`` int64; n may be 0.
        ends: ``(n,)`` int64.
    """

    starts: Int64s
    ends: Int64s

    def pairs(self) -> list[tuple[int, int]]:
        """Return ``(start, end)`` of each, as plain ints."""
        return list(zip(self.starts.tolist(), self.ends.tolist(), strict=True))


def spans_of(positions: Int64s) -> Spans:
    """Return the extents that distinct, ascending positions form."""
    if not len(positions):
        return Spans(NONE, NONE)
    cuts = np.flatnonzero(positions[1:] != positions[:-1] + 1)
    return Spans(positions[np.concatenate(([0], cuts + 1))], positions[np.concatenate((cuts, [-1]))] + 1)


class TableChange(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The elements to copy; everything else in the visible tables is up to date.

    It has positions only; the contents are in ``GraphTables``. Copy elements with ``GraphTables.write``, or byte ranges
    of the region from a staging copy with ``byte_spans``.

    Attributes:
        batch: rows in use from now on.
        replayed_rows: rows that a replay of this batch reads; those from ``batch`` on are all zeros.
        block_tables: flat positions in ``(max_batch, columns)``, ascending, distinct, ``(n,)`` int64.
        block_tables_swa: the same in the window table; empty without a window.
        length_rows: how many elements of ``seq_lens`` to copy, from row 0 on.
    """

    batch: int
    replayed_rows: int
    block_tables: Int64s
    length_rows: int
    block_tables_swa: Int64s = NONE

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


class GraphTables:
    """The tables of one captured model, and the full-to-window page map behind its window table.

    Attributes:
        shape: of the tables.
        batch: how many rows are in use.
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
        self.batch = 0
        self._pages = pages
        self._columns = np.arange(shape.columns)
        self._assigned: Int32s = np.zeros((shape.max_batch, shape.columns), np.int32)
        self._block_tables = np.zeros_like(self._assigned)
        self._swa = None if window_pages is None else WindowTable(shape, pages, window_pages)
        self._seq_lens: Int32s = np.zeros(shape.max_batch, np.int32)
        # Row r shows the columns [0, end[r]) in the full table and [first[r], end[r]) in the window table.
        self._end: Int64s = np.zeros(shape.max_batch, np.int64)
        self._first = np.zeros_like(self._end)
        self.visible = TableViews(
            block_tables=_read_only(self._block_tables),
            block_tables_swa=None if self._swa is None else _read_only(self._swa.entries),
            seq_lens=_read_only(self._seq_lens),
        )

    def __repr__(self) -> str:
        """Show the rows in use and the shape."""
        return f"<GraphTables {self.batch} of {self.shape.max_batch} rows, {self.shape.columns} columns>"

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
        check_update(update, self.shape, self._pages)
        self._check_lengths(update)
        first, end = self._shown_after(update)
        rows = self._touched(update, first, end)
        in_full = in_window = NONE
        if len(rows) or len(update.released) or len(update.bound_full):
            in_full, in_window = self._show(update, rows, first[rows, None], end[rows, None])
        self._first, self._end = first, end
        self._set_lengths(update)
        before, self.batch = self.batch, update.batch
        return TableChange(
            batch=update.batch,
            replayed_rows=self.shape.replayed_rows(update.batch),
            block_tables=in_full,
            block_tables_swa=in_window,
            length_rows=max(update.batch, before),
        )

    def adopt(self, shown: TableViews, batch: int, extra_tokens: int) -> None:
        """Go on with what tables show that an earlier daemon has written; these are empty still.

        Pages that a row was assigned ahead of its length are not known any more, nor are window pages of pages that no
        row shows. Nothing changes if an error is raised.

        Args:
            shown: the contents of the memory that graphs read, which anybody may have written.
            batch: rows in use.
            extra_tokens: of the last update.

        Raises:
            InvalidFieldError: these are no contents that updates could have led to; says what is wrong where.
        """
        update = self._update_to(shown, batch, extra_tokens)
        try:
            self.apply(update)
        except KvferryError as error:
            raise InvalidFieldError(f"the tables' contents: {error.detail}", field="shown") from None

    def _update_to(self, shown: TableViews, batch: int, extra_tokens: int) -> TableUpdate:
        """Return the update that leads from empty tables to these contents, checked as far as ``apply`` does not."""
        shape = self.shape
        if not 0 <= batch <= shape.max_batch or not 0 <= extra_tokens <= shape.draft_tokens:
            raise InvalidFieldError(f"{batch} rows, {extra_tokens} extra tokens", field="shown")
        tokens = shown.seq_lens.astype(np.int64)
        lengths = tokens - extra_tokens * (tokens > 0)
        if tokens[batch:].any() or (lengths < (tokens > 0)).any() or (tokens > shape.row_tokens).any():
            raise InvalidFieldError("the tables' lengths are not those of an update", field="shown")
        end = -(-tokens // shape.page_size)
        visible = self._columns < end[:, None]
        _check_filled(shown.block_tables, visible, "block_tables")
        bound = np.empty((0, 2), np.int64)
        if self._swa is not None and shown.block_tables_swa is not None:
            first = np.maximum(lengths - (shape.window or 0), 0) // shape.page_size
            in_window = visible & (self._columns >= first[:, None])
            _check_filled(shown.block_tables_swa, in_window, "block_tables_swa")
            both = np.stack((shown.block_tables[in_window], shown.block_tables_swa[in_window]), axis=1)
            bound = np.unique(both.astype(np.int64), axis=0)
        return TableUpdate(
            lengths=lengths[:batch],
            extra_tokens=extra_tokens,
            rows=np.arange(batch),
            row_pages=end[:batch],
            pages=shown.block_tables[visible].astype(np.int64),
            bound_full=bound[:, 0],
            bound_window=bound[:, 1],
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
        assert not self._assigned[self.batch :].any()
        below_end = self._columns < self._end[:, None]
        assert np.array_equal(self._block_tables > 0, below_end)
        if self._swa is not None:
            assert np.array_equal(self._swa.entries > 0, below_end & (self._columns >= self._first[:, None]))
            self._swa.check()

    def _check_lengths(self, update: TableUpdate) -> None:
        lengths, shape = update.lengths, self.shape
        if not update.batch:
            return
        if np.minimum.reduce(lengths) < 0:
            row = int(lengths.argmin())
            raise InvalidFieldError(f"row {row} has {lengths[row]} tokens", field="lengths")
        if np.maximum.reduce(lengths) > shape.row_tokens - update.extra_tokens:
            row = int(lengths.argmax())
            length, extra = int(lengths[row]), update.extra_tokens
            raise TableOverflowError(
                f"row {row}: {length} tokens{f' and {extra} extra' if extra else ''} need "
                f"{-(-(length + extra) // shape.page_size)} pages, the tables have W = {shape.columns} columns of "
                f"{shape.page_size} tokens",
                field="lengths",
            )

    def _shown_after(self, update: TableUpdate) -> tuple[Int64s, Int64s]:
        """Return the first and the end of each row's visible columns after an update; first is 0 without a window."""
        batch, page_size = update.batch, self.shape.page_size
        first, end = self._first, np.zeros_like(self._end)
        end[:batch] = (update.lengths + (update.extra_tokens + page_size - 1)) // page_size
        if update.extra_tokens:
            end[:batch] *= update.lengths > 0
        if self.shape.window is not None:
            first = np.zeros_like(first)
            first[:batch] = np.maximum(update.lengths - self.shape.window, 0) // page_size
        return first, end

    def _touched(self, update: TableUpdate, first: Int64s, end: Int64s) -> Int64s:
        """Return the rows in which an update may change an entry, ascending."""
        touched = end != self._end
        if first is not self._first:
            touched |= first != self._first
        touched[update.entry_rows] = True
        touched[update.rows] = True
        touched[update.batch : self.batch] = True
        return np.flatnonzero(touched)

    def _show(self, update: TableUpdate, rows: Int64s, first: Int64s, end: Int64s) -> tuple[Int64s, Int64s]:
        """Change these rows, and the window's page map; return the positions that change in the two tables.

        Args:
            update: checked, also its lengths.
            rows: ascending, ``(n,)``.
            first: the first column that each of them shows in the window table, ``(n, 1)``.
            end: where the columns that each of them shows end, ``(n, 1)``.
        """
        assigned = self._assigned_after(update, rows)
        visible = self._columns < end
        full: Int32s = assigned * visible
        self._check_full(rows, full, visible)
        in_window = NONE
        if self._swa is not None:
            in_window = self._swa.apply(update, rows, assigned, visible & (self._columns >= first))
        self._assigned[rows] = assigned
        return put_rows(self._block_tables, rows, full), in_window

    def _assigned_after(self, update: TableUpdate, rows: Int64s) -> Int32s:
        """Return the pages that these rows are assigned after an update, ``(len(rows), columns)``."""
        pages = self._assigned[rows]
        if len(update.rows):
            whole = np.zeros((len(update.rows), self.shape.columns), np.int32)
            whole[self._columns < update.row_pages[:, None]] = update.pages
            pages[rows.searchsorted(update.rows)] = whole
        if len(update.entry_rows):
            pages[rows.searchsorted(update.entry_rows), update.entry_columns] = update.entry_pages
        if update.batch < self.batch:
            pages[rows.searchsorted(update.batch) :] = 0
        return pages

    def _check_full(self, rows: Int64s, pages: Int32s, visible: Mask) -> None:
        """Check that these rows show a page in each visible column, and none of them twice."""
        if np.count_nonzero(pages) != np.count_nonzero(visible):
            row, column = np.argwhere(visible & (pages == 0))[0]
            raise TableHoleError(
                f"row {rows[row]} has no page in column {column}, which its length needs", field="lengths"
            )
        ordered = np.sort(pages, axis=1)
        again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > 0)
        if again.any():
            row, place = np.argwhere(again)[0]
            raise DuplicatePageError(
                f"row {rows[row]} has page {ordered[row, place]} in more than one column", field="rows"
            )

    def _set_lengths(self, update: TableUpdate) -> None:
        self._seq_lens[: update.batch] = update.lengths
        self._seq_lens[update.batch :] = 0
        if update.extra_tokens:
            self._seq_lens[: update.batch] += update.extra_tokens * (update.lengths > 0)


def _copy(positions: Int64s, source: Int32s, destination: Int32s) -> None:
    flat = destination.reshape(-1)
    assert flat.base is not None, "a table that is not contiguous would be copied to nowhere"
    flat[positions] = source.reshape(-1)[positions]


def _check_filled(table: Int32s, visible: Mask, name: str) -> None:
    """Check that a table has entries exactly where it shows some."""
    wrong = (table != 0) != visible
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise InvalidFieldError(f"{name}: row {row} column {column} has {table[row, column]}", field="shown")


def _read_only(table: Int32s) -> Int32s:
    view = table.view()
    view.flags.writeable = False
    return view
