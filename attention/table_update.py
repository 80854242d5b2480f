"""What one decode step changes in the graph tables, and the checks that do not depend on the tables' contents.

An update contains only what changed: the lengths of all rows, new block-table entries, and rows that now belong to
another request.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvferry.attention.table_layout import Int64s, TableShape
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    InvalidFieldError,
    LengthMismatchError,
    PageOutOfRangeError,
    TooLargeError,
)

NONE: Int64s = np.empty(0, np.int64)
NONE.flags.writeable = False


class TableUpdate(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One step's changes; all arrays ``(n,)`` int64.

    A row of length 0 is idle: it needs no page, and extra tokens are not added to it.

    Attributes:
        lengths: ``(batch,)`` tokens of each row, without the extra ones; rows from ``batch`` on are no longer in use
            and lose their pages. ``(0,)`` for an empty batch.
        extra_tokens: what this step adds to every length: 0 to decode, the draft tokens to verify.
        entry_rows: the row of each entry that is assigned a page, none of them in ``rows``.
        entry_columns: its column, the logical page.
        entry_pages: the page.
        rows: rows whose pages are replaced as a whole, each once.
        row_pages: the new number of pages of each of them; 0 empties the row.
        pages: their pages, one row after the other, ``(sum(row_pages),)``.
        released: full pages whose window pages are released, before ``bound_full`` is processed.
        bound_full: full pages that are bound to a window page.
        bound_window: the window page of each.
    """

    lengths: Int64s
    extra_tokens: int = 0
    entry_rows: Int64s = NONE
    entry_columns: Int64s = NONE
    entry_pages: PageIds = NONE
    rows: Int64s = NONE
    row_pages: Int64s = NONE
    pages: PageIds = NONE
    released: PageIds = NONE
    bound_full: PageIds = NONE
    bound_window: PageIds = NONE

    @property
    def batch(self) -> int:
        """Return how many rows are in use."""
        return len(self.lengths)


def check_update(update: TableUpdate, shape: TableShape, pages: int) -> None:
    """Check everything of an update that depends neither on the tables' contents nor on the values of its lengths.

    Args:
        update: the step's changes.
        shape: of the tables.
        pages: number of pages of the pool that the tables refer to, the padding page included.

    Raises:
        TooLargeError: more rows than the tables have.
        InvalidFieldError: a row or column outside the tables, or given twice; more extra tokens than the tables were
            created for; window pages without window tables.
        LengthMismatchError: arrays of unequal length.
        PageOutOfRangeError: page 0, or beyond the pool's end.
    """
    if update.batch > shape.max_batch:
        raise TooLargeError(f"{update.batch} rows, the tables have {shape.max_batch}", field="lengths")
    if not 0 <= update.extra_tokens <= shape.draft_tokens:
        raise InvalidFieldError(
            f"{update.extra_tokens}; the tables were made for 0..{shape.draft_tokens}", field="extra_tokens"
        )
    if len(update.entry_rows) or len(update.entry_columns) or len(update.entry_pages):
        _check_entries(update, shape, pages)
    if len(update.rows) or len(update.row_pages) or len(update.pages):
        _check_rows(update, shape, pages)
    if shape.window is None and (len(update.released) or len(update.bound_full) or len(update.bound_window)):
        raise InvalidFieldError("the tables have no window", field="bound_full")


def check_pages(ids: PageIds, pages: int, field: str) -> None:
    """Check that page ids are in ``1..pages - 1``.

    Raises:
        PageOutOfRangeError: names the first that is not.
    """
    at = _outside(ids, 1, pages)
    if at is not None:
        raise PageOutOfRangeError(f"page {ids[at]} at position {at}; the pool has 1..{pages - 1}", field=field)


def named_twice(numbers: Int64s) -> int | None:
    """Return the lowest number that is there more than once, or None."""
    if len(numbers) <= 1:
        return None
    ordered = np.sort(numbers)
    again = ordered[1:] == ordered[:-1]
    return int(ordered[again.argmax()]) if again.any() else None


def _check_entries(update: TableUpdate, shape: TableShape, pages: int) -> None:
    rows, columns = update.entry_rows, update.entry_columns
    if not len(rows) == len(columns) == len(update.entry_pages):
        raise LengthMismatchError(
            f"{len(rows)} rows, {len(columns)} columns, {len(update.entry_pages)} pages", field="entry_pages"
        )
    _check_within(rows, update.batch, "entry_rows", "a batch of")
    _check_within(columns, shape.columns, "entry_columns", "columns:")
    check_pages(update.entry_pages, pages, "entry_pages")
    again = named_twice(rows * shape.columns + columns)
    if again is not None:
        row, column = divmod(again, shape.columns)
        raise InvalidFieldError(f"row {row} column {column} is named more than once", field="entry_rows")


def _check_rows(update: TableUpdate, shape: TableShape, pages: int) -> None:
    rows, counts = update.rows, update.row_pages
    if len(rows) != len(counts):
        raise LengthMismatchError(f"{len(rows)} rows, {len(counts)} page counts", field="row_pages")
    _check_within(rows, update.batch, "rows", "a batch of")
    _check_within(counts, shape.columns + 1, "row_pages", "0..W pages, W + 1 =")
    if int(counts.sum()) != len(update.pages):
        raise LengthMismatchError(f"{len(update.pages)} pages for counts of {counts.sum()}", field="pages")
    check_pages(update.pages, pages, "pages")
    again = named_twice(rows)
    if again is not None:
        raise InvalidFieldError(f"row {again} is named more than once", field="rows")
    whole = np.zeros(shape.max_batch, np.bool_)
    whole[rows] = True
    both = np.flatnonzero(whole[update.entry_rows])
    if len(both):
        raise InvalidFieldError(
            f"row {update.entry_rows[both[0]]} is sent as a whole and in entries", field="entry_rows"
        )


def _check_within(numbers: Int64s, end: int, field: str, what: str) -> None:
    at = _outside(numbers, 0, end)
    if at is not None:
        raise InvalidFieldError(f"{numbers[at]} at position {at}; {what} {end}", field=field)


def _outside(numbers: Int64s, first: int, end: int) -> int | None:
    """Return the position of the first number outside ``first..end - 1``, or None."""
    wrong = (numbers < first) | (numbers >= end)
    return int(wrong.argmax()) if wrong.any() else None
