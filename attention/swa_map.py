"""The full-to-window page map of hybrid sliding-window models.

Such a model has two pools: its full layers keep every page of a request, its window layers only the last ones, in
pages of their own. Requests name full pages; the map says which page of the window pool goes with each. Knows neither
pools nor requests, only ids.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.attention.state_windows import PageWindow, StateIds
from kvferry.protocol.errors import (
    DuplicatePageError,
    LengthMismatchError,
    PageOutOfRangeError,
    WindowMismatchError,
)

PADDING = 0
PageMap: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""``(full_pages,)`` integers: the window pool's page of each full page, 0 (the padding page) where it has none."""


class SwaMap:
    """A page map that is kept up to date: no window page ever goes with two full pages.

    Attributes:
        pages: the map, ``(full_pages,)`` int64, to read only; page 0 stays 0.
    """

    def __init__(self, full_pages: int, window_pages: int) -> None:
        """Make an empty map between pools of these many pages, the padding pages included."""
        self._map = np.zeros(full_pages, np.int64)
        self._holders = np.zeros(window_pages, np.int64)  # the full page of each window page
        self.pages = self._map.view()
        self.pages.flags.writeable = False

    def __repr__(self) -> str:
        """Show how many pages are bound."""
        return f"<SwaMap {np.count_nonzero(self._map)} of {len(self._map) - 1} full pages bound>"

    def bind(self, full_ids: StateIds, window_ids: StateIds) -> None:
        """Let each full page go with the window page at its position; all of them or none.

        Args:
            full_ids: ``(n,)`` int64, not bound yet; n may be 0.
            window_ids: ``(n,)`` int64, not held by any full page.

        Raises:
            LengthMismatchError: the lists differ in length.
            PageOutOfRangeError: page 0 or beyond a pool's end.
            DuplicatePageError: a page twice, or already bound.
        """
        if len(full_ids) != len(window_ids):
            raise LengthMismatchError(f"{len(full_ids)} full pages, {len(window_ids)} window pages", field="window_ids")
        for field, ids, taken in (("full_ids", full_ids, self._map), ("window_ids", window_ids, self._holders)):
            _check_range(ids, len(taken), field)
            _check_distinct(ids, field)
            bound = np.flatnonzero(taken[ids])
            if len(bound):
                raise DuplicatePageError(
                    f"page {ids[bound[0]]} goes with page {taken[ids[bound[0]]]} already", field=field
                )
        self._map[full_ids] = window_ids
        self._holders[window_ids] = full_ids

    def release(self, full_ids: StateIds) -> StateIds:
        """Forget the window pages of these full pages, all or none, and return them, ``(n,)`` int64, to be freed.

        Raises:
            PageOutOfRangeError: page 0 or beyond the pool's end.
            DuplicatePageError: a page twice.
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
    """Return the window pool's pages of a request's window, in logical order: ``(window.pages,)`` int64, a copy.

    Args:
        page_map: ``(full_pages,)``, an engine's own or ``SwaMap.pages``.
        full_ids: ``(n,)`` int64, the request's full pages from logical page ``first_page`` on.
        first_page: the logical page of the first one.
        window: the logical pages that are wanted; none gives an empty list.

    Raises:
        WindowMismatchError: the window reaches outside the request's pages, or the window pool has not got one of them.
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
            f"full page {full_ids[at]}, at {at} of the {len(full_ids)} asked for, has no page in the window pool; nor "
            f"have {len(missing) - 1} after it",
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
