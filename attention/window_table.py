"""The block table of the window layers: the window pool's page of each page that a row's window shows.

Knows the full-to-window map and how often each window page is visible; a page that is visible somewhere cannot lose its
window page. Knows nothing of lengths.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from kvferry.attention.spans import NONE
from kvferry.attention.state_windows import StateIds
from kvferry.attention.swa_map import SwaMap
from kvferry.attention.table_layout import Int32s
from kvferry.attention.table_shape import TableShape
from kvferry.attention.table_update import TableUpdate
from kvferry.attention.touched_entries import TouchedEntries
from kvferry.attention.undo import Undo
from kvferry.attention.visible_table import VisibleTable
from kvferry.protocol.errors import WindowMismatchError


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
        """Release and bind what an update says; ``undo`` takes it back.

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
            entries: what may change.
            full_ids: the full page of each, ``(n,)``.
            released: window pages that ``rebind`` released.
            undo: takes back what is counted here.

        Raises:
            WindowMismatchError: a visible page has no window page, or lost it; row, column and page are named.
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
