"""The block table of the window layers: the window pool's page for each page in a row's window.

Keeps the full-to-window page map and how often each window page is visible; a page that is visible somewhere cannot
lose its window page. Independent of lengths.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.attention.row_ranges import NONE
from kvferry.attention.state_windows import PageWindow, StateIds
from kvferry.attention.table_layout import Int32s, TableShape
from kvferry.attention.table_step import TouchedEntries
from kvferry.attention.table_update import TableUpdate
from kvferry.attention.visible_table import Undo, VisibleTable
from kvferry.protocol.errors import (
    DuplicatePageError,
    LengthMismatchError,
    PageOutOfRangeError,
    WindowMismatchError,
)

# -- the full-to-window page map of hybrid sliding-window models.
#
# Such a model has two pools: its full layers keep every page of a request, its window layers only the last ones, in
# separate pages. Requests refer to full pages; the map gives the page of the window pool for each. Works on ids only.


PADDING = 0
PageMap: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""``(full_pages,)`` integers: the window pool's page of each full page, 0 (the padding page) where it has none."""


class SwaMap:
    """A page map under change: no window page is ever bound to two full pages.

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

    def bind(self, full_ids: StateIds, window_ids: StateIds) -> None:
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
            _check_range(ids, len(taken), field)
            _check_distinct(ids, field)
            bound = np.flatnonzero(taken[ids])
            if len(bound):
                raise DuplicatePageError(
                    f"page {ids[bound[0]]} is already bound to page {taken[ids[bound[0]]]}", field=field
                )
        self._map[full_ids] = window_ids
        self._holders[window_ids] = full_ids

    def release(self, full_ids: StateIds) -> StateIds:
        """Unbind these full pages, all or none, and return their window pages, ``(n,)`` int64, to be freed.

        Raises:
            PageOutOfRangeError: page 0, or beyond the pool's end.
            DuplicatePageError: a page is given twice.
            WindowMismatchError: a page has no window page.
        """
        _check_range(full_ids, len(self._map), "full_ids")
        _check_distinct(full_ids, "full_ids")
        released = _looked_up(self._map, full_ids)
        self._map[full_ids] = PADDING
        self._holders[released] = PADDING
        return released

    def check(self) -> None:
        """Check that both directions of the map agree; a failure is a bug."""
        full_ids = np.flatnonzero(self._map)
        assert self._map[0] == PADDING
        assert np.array_equal(self._holders[self._map[full_ids]], full_ids), repr(self)
        assert np.count_nonzero(self._holders) == len(full_ids), repr(self)


def window_pages(page_map: PageMap, full_ids: StateIds, first_page: int, window: PageWindow) -> StateIds:
    """Return the window pool's pages for a request's window, in logical order: ``(window.pages,)`` int64, a copy.

    Args:
        page_map: ``(full_pages,)``, an engine's own or ``SwaMap.pages``.
        full_ids: ``(n,)`` int64, the request's full pages from logical page ``first_page`` on.
        first_page: the logical page of the first one.
        window: the logical pages that are wanted; an empty window gives an empty list.

    Raises:
        WindowMismatchError: the window reaches outside the request's pages, or one of them has no window page.
        PageOutOfRangeError: a full page of the window is page 0 or beyond the map.
    """
    given = PageWindow(first_page, first_page + len(full_ids))
    if window.pages <= 0:
        return np.empty(0, np.int64)
    if window.first_page < given.first_page or window.end_page > given.end_page:
        raise WindowMismatchError(f"the window is pages {window}, the list has {given}", field="full_ids")
    wanted = full_ids[window.first_page - first_page : window.end_page - first_page]
    _check_range(wanted, len(page_map), "full_ids")
    return _looked_up(page_map, wanted)


def _looked_up(page_map: PageMap, full_ids: StateIds) -> StateIds:
    found = page_map[full_ids].astype(np.int64)
    missing = np.flatnonzero(found <= PADDING)
    if len(missing):
        at = int(missing[0])
        raise WindowMismatchError(
            f"full page {full_ids[at]}, at position {at} of {len(full_ids)}, has no page in the window pool, and "
            f"neither have {len(missing) - 1} after it",
            field="full_ids",
        )
    return found


def _check_range(ids: StateIds, pages: int, field: str) -> None:
    wrong = np.flatnonzero((ids < 1) | (ids >= pages))
    if len(wrong):
        raise PageOutOfRangeError(
            f"page {ids[wrong[0]]} at position {wrong[0]}; the pool has 1..{pages - 1}", field=field
        )


def _check_distinct(ids: StateIds, field: str) -> None:
    ordered = np.sort(ids)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(again):
        raise DuplicatePageError(f"page {ordered[again[0]]} is named more than once", field=field)


class WindowTable(VisibleTable):
    """A visible table of window pages.

    Attributes:
        swa: the full-to-window map, which only updates change.
    """

    def __init__(self, shape: TableShape, pages: int, window_pages: int) -> None:
        super().__init__(shape)
        self.swa = SwaMap(pages, window_pages)
        self._uses = np.zeros(window_pages, np.int64)  # in how many entries each window page is visible

    def rebind(self, update: TableUpdate, undo: Undo) -> StateIds:
        """Release and bind the pages of an update; ``undo`` reverts it.

        Returns:
            The released window pages, ``(n,)`` int64.

        Raises:
            KvferryError: what ``SwaMap.release`` and ``SwaMap.bind`` raise.
        """
        released: StateIds = NONE
        if len(update.released):
            released = self.swa.release(update.released)
            undo.by(self.swa.bind, update.released, released)
        if len(update.bound_full) or len(update.bound_window):
            self.swa.bind(update.bound_full, update.bound_window)
            undo.by(self.swa.release, update.bound_full)
        return released

    def translated(self, entries: TouchedEntries, full_ids: Int32s, released: StateIds, undo: Undo) -> Int32s:
        """Return the window pages of these entries, ``(n,)`` int32, 0 where an entry is not visible.

        Args:
            entries: that may change.
            full_ids: the full page of each, ``(n,)``.
            released: window pages that ``rebind`` released.
            undo: reverts the counts.

        Raises:
            WindowMismatchError: a visible page has no window page, or it was released; row, column and page are named.
        """
        pages: Int32s = (self.swa.pages[full_ids] * entries.visible).astype(np.int32)
        if np.count_nonzero(pages) != np.count_nonzero(entries.visible):
            self._missing(entries, full_ids, pages)
        self._count(self.contents(entries), -1, undo)
        self._check_unused(released, entries)
        self._count(pages, 1, undo)
        return pages

    def check(self) -> None:
        """Check the map and the counts; a failure is a bug."""
        self.swa.check()
        uses = np.bincount(self._flat, minlength=len(self._uses))
        assert np.array_equal(uses[1:], self._uses[1:])

    def _missing(self, entries: TouchedEntries, full_ids: Int32s, pages: Int32s) -> NoReturn:
        at = int(np.flatnonzero(entries.visible & (pages == 0))[0])
        row, column = divmod(int(entries.positions[at]), self._columns)
        raise WindowMismatchError(
            f"row {row} column {column}: full page {full_ids[at]} is visible in the window and has no page in the "
            "window pool",
            field="bound_full",
        )

    def _count(self, pages: Int32s, step: int, undo: Undo) -> None:
        np.add.at(self._uses, pages, step)
        undo.by(np.subtract.at, self._uses, pages, step)

    def _check_unused(self, released: StateIds, entries: TouchedEntries) -> None:
        used = np.flatnonzero(self._uses[released]) if len(released) else released
        if not len(used):
            return
        page = released[used[0]]
        elsewhere = self._flat == page
        elsewhere[entries.positions] = False
        row, column = divmod(int(np.flatnonzero(elsewhere)[0]), self._columns)
        raise WindowMismatchError(
            f"row {row} column {column}: window page {page} is visible and cannot be released", field="released"
        )
