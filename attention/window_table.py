"""The block table of the window layers: the window pool's page for each page in a row's window.

Keeps the full-to-window page map and how often each window page is visible; a page that is visible somewhere cannot
lose its window page. Independent of lengths.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.attention.table_layout import Int32s, Int64s, TableShape
from kvferry.attention.table_update import NONE, TableUpdate, check_pages, named_twice
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    DuplicatePageError,
    LengthMismatchError,
    WindowMismatchError,
)

PADDING = 0
Mask: TypeAlias = npt.NDArray[np.bool_]


def put_rows(table: Int32s, rows: Int64s, contents: Int32s) -> Int64s:
    """Write these contents to the rows of a table; return the flat positions that they change, ascending."""
    changed = np.flatnonzero(table[rows] != contents)
    table[rows] = contents
    row, column = np.divmod(changed, table.shape[1])
    positions: Int64s = rows[row] * table.shape[1] + column
    return positions


class SwaMap:
    """The full-to-window page map of a hybrid sliding-window model; works on ids only.

    Such a model has two pools: its full layers keep every page of a request, its window layers only the last ones, in
    separate pages. Requests refer to full pages; the map gives the page of the window pool for each, 0 (the padding
    page) where it has none. No window page is ever bound to two full pages.

    Attributes:
        pages: the map, ``(full_pages,)`` int64, read-only; page 0 stays 0.
    """

    def __init__(self, full_pages: int, window_pages: int) -> None:
        """Make an empty map between two pools of these sizes, the padding pages included."""
        self._map = np.zeros(full_pages, np.int64)
        self._holders = np.zeros(window_pages, np.int64)  # the full page of each window page
        self.pages = self._map.view()
        self.pages.flags.writeable = False

    def __repr__(self) -> str:
        """Show how many pages are bound."""
        return f"<SwaMap {np.count_nonzero(self._map)} of {len(self._map) - 1} full pages bound>"

    def bind(self, full_ids: PageIds, window_ids: PageIds) -> None:
        """Bind each full page to the window page at the same position; all of them or none.

        Args:
            full_ids: ``(n,)`` int64, not bound yet; n may be 0.
            window_ids: ``(n,)`` int64, not bound to any full page.

        Raises:
            LengthMismatchError: the lists differ in length.
            PageOutOfRangeError: page 0, or beyond the pool's end.
            DuplicatePageError: a page is given twice, or already bound.
        """
        if len(full_ids) != len(window_ids):
            raise LengthMismatchError(f"{len(full_ids)} full pages, {len(window_ids)} window pages", field="window_ids")
        for field, ids, taken in (("full_ids", full_ids, self._map), ("window_ids", window_ids, self._holders)):
            _check_ids(ids, len(taken), field)
            bound = np.flatnonzero(taken[ids])
            if len(bound):
                raise DuplicatePageError(
                    f"page {ids[bound[0]]} is already bound to page {taken[ids[bound[0]]]}", field=field
                )
        self._map[full_ids] = window_ids
        self._holders[window_ids] = full_ids

    def release(self, full_ids: PageIds) -> PageIds:
        """Unbind these full pages, all or none, and return their window pages, ``(n,)`` int64, to be freed.

        Raises:
            PageOutOfRangeError: page 0, or beyond the pool's end.
            DuplicatePageError: a page is given twice.
            WindowMismatchError: a page has no window page.
        """
        _check_ids(full_ids, len(self._map), "full_ids")
        released = self._map[full_ids]
        missing = np.flatnonzero(released == PADDING)
        if len(missing):
            at = int(missing[0])
            raise WindowMismatchError(
                f"full page {full_ids[at]}, at position {at} of {len(full_ids)}, has no page in the window pool, and "
                f"neither have {len(missing) - 1} after it",
                field="full_ids",
            )
        self._map[full_ids] = PADDING
        self._holders[released] = PADDING
        return released

    def check(self) -> None:
        """Check that both directions of the map agree; a failure is a bug."""
        full_ids = np.flatnonzero(self._map)
        assert self._map[0] == PADDING
        assert np.array_equal(self._holders[self._map[full_ids]], full_ids), repr(self)
        assert np.count_nonzero(self._holders) == len(full_ids), repr(self)


class WindowTable:
    """The window pages that a graph sees: ``entries (max_batch, columns)`` int32, all zeros at first, never replaced.

    Attributes:
        entries: the table.
        swa: the full-to-window map, which only updates change.
    """

    def __init__(self, shape: TableShape, pages: int, window_pages: int) -> None:
        self.entries: Int32s = np.zeros((shape.max_batch, shape.columns), np.int32)
        self.swa = SwaMap(pages, window_pages)
        self._uses = np.zeros(window_pages, np.int64)  # in how many entries each window page is visible

    def apply(self, update: TableUpdate, rows: Int64s, full_ids: Int32s, visible: Mask) -> Int64s:
        """Release and bind an update's pages, and show the window pages of these rows; all of it or nothing.

        Args:
            update: checked.
            rows: in which entries may change, ascending.
            full_ids: the full pages that they are assigned then, ``(len(rows), columns)``.
            visible: which entries they show then, of the same shape.

        Returns:
            The flat positions of the entries that changed, ascending.

        Raises:
            WindowMismatchError: a visible page has no window page, or it was released; row, column and page are named.
            KvferryError: what ``SwaMap.release`` and ``SwaMap.bind`` raise.
        """
        with ExitStack() as undo:
            released = self._rebind(update, undo)
            before = self.entries[rows]
            pages: Int32s = (self.swa.pages[full_ids] * visible).astype(np.int32)
            again = before != pages
            if len(released):  # what stays visible keeps its window page
                shown = before > 0
                kept = shown & visible & ~_given(update, rows, pages)
                pages, again = np.where(kept, before, pages), (shown | visible) & ~kept
            missing = visible & (pages == 0)
            if missing.any():
                row, column = np.argwhere(missing)[0]
                raise WindowMismatchError(
                    f"row {rows[row]} column {column}: full page {full_ids[row, column]} is visible in the window and "
                    "has no page in the window pool",
                    field="bound_full",
                )
            hidden = before[again]
            np.subtract.at(self._uses, hidden, 1)
            undo.callback(np.add.at, self._uses, hidden, 1)
            self._check_unused(released, rows, again)
            undo.pop_all()
        np.add.at(self._uses, pages[again], 1)
        return put_rows(self.entries, rows, pages)

    def check(self) -> None:
        """Check the map and the counts; a failure is a bug."""
        self.swa.check()
        uses = np.bincount(self.entries.reshape(-1), minlength=len(self._uses))
        assert np.array_equal(uses[1:], self._uses[1:])

    def _rebind(self, update: TableUpdate, undo: ExitStack) -> PageIds:
        """Release and bind the pages of an update; return the released window pages, ``(n,)`` int64."""
        released: PageIds = NONE
        if len(update.released):
            released = self.swa.release(update.released)
            undo.callback(self.swa.bind, update.released, released)
        if len(update.bound_full) or len(update.bound_window):
            self.swa.bind(update.bound_full, update.bound_window)
            undo.callback(self.swa.release, update.bound_full)
        return released

    def _check_unused(self, released: PageIds, rows: Int64s, again: Mask) -> None:
        used = np.flatnonzero(self._uses[released]) if len(released) else released
        if not len(used):
            return
        page = released[used[0]]
        elsewhere = self.entries == page
        elsewhere[rows] &= ~again
        row, column = np.argwhere(elsewhere)[0]
        raise WindowMismatchError(
            f"row {row} column {column}: window page {page} is visible and cannot be released", field="released"
        )


def _given(update: TableUpdate, rows: Int64s, like: Int32s) -> Mask:
    """Return which entries of these rows an update gives anew."""
    given = np.zeros(like.shape, np.bool_)
    given[rows.searchsorted(update.rows)] = True
    given[rows.searchsorted(update.entry_rows), update.entry_columns] = True
    return given


def _check_ids(ids: PageIds, pages: int, field: str) -> None:
    check_pages(ids, pages, field)
    again = named_twice(ids)
    if again is not None:
        raise DuplicatePageError(f"page {again} is named more than once", field=field)
