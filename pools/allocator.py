"""The page allocator of one pool: who owns a page, who reads it, who writes it, and when it is free again.

A page is free, owned, or doomed (given back while in flight: nobody's any more, free once its last reader and its
writer are gone). Beside that it has a count of readers and at most one writer; a writer excludes readers. Page 0 is
the padding page: never free, never owned. Knows nothing of sessions beyond a number above 0 for each owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvferry.pools.planning.page_checks import check_distinct, check_range
from kvferry.pools.planning.runs import PageIds
from kvferry.protocol.errors import NotOwnerError, PageBusyError, PoolFullError

NOBODY = 0
_SCAN_PAGES = 1 << 10  # at first; each further look is twice as wide


class FreedPages(NamedTuple):
    """How many pages are free at once, and how many once they are idle."""

    freed: int
    deferred: int


class PageAllocator:
    """Hands out the lowest free pages, so that lists have long runs and the pool does not fragment."""

    def __init__(self, pages: int) -> None:
        """Start with all pages but page 0 free.

        Args:
            pages: the pool's pages, the padding page included; at least 2.
        """
        self._pages = pages
        self._free = np.ones(pages, np.bool_)
        self._free[0] = False
        self._free_count = pages - 1
        self._lowest_free = 1
        self._owner = np.zeros(pages, np.int32)
        self._readers = np.zeros(pages, np.int32)
        self._writing = np.zeros(pages, np.bool_)
        self._doomed = np.zeros(pages, np.bool_)
        self._when_freed: list[Callable[[], None]] = []

    def when_freed(self, call: Callable[[], None]) -> None:
        """Call this once, when pages have become free; asked for again before that, it is called once all the same."""
        if call not in self._when_freed:
            self._when_freed.append(call)

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<PageAllocator pages={self.capacity} free={self._free_count} busy={self.busy_count}>"

    @property
    def capacity(self) -> int:
        """Return how many pages can be handed out: all but the padding page."""
        return self._pages - 1

    @property
    def free_count(self) -> int:
        """Return how many pages are free."""
        return self._free_count

    @property
    def busy_count(self) -> int:
        """Return how many pages have a reader or a writer."""
        return int(np.count_nonzero((self._readers > 0) | self._writing))

    @property
    def idle(self) -> bool:
        """Return whether every page is free."""
        return self._free_count == self.capacity

    def pages_by_owner(self) -> dict[int, int]:
        """Return how many pages each owner has."""
        counts = np.bincount(self._owner)
        return {int(owner): int(counts[owner]) for owner in np.flatnonzero(counts) if owner != NOBODY}

    def pages_of(self, owner: int) -> PageIds:
        """Return the pages of an owner, ascending."""
        return np.flatnonzero(self._owner == owner)

    def is_busy(self, ids: PageIds) -> bool:
        """Return whether one of these pages has a reader or a writer."""
        return bool(((self._readers[ids] > 0) | self._writing[ids]).any())

    def allocate(self, owner: int, count: int) -> PageIds:
        """Give ``count`` free pages to ``owner`` and return their ids, ascending.

        Raises:
            PoolFullError: fewer are free; none is taken.
        """
        if count > self._free_count:
            raise PoolFullError(f"{count} pages asked for, {self._free_count} of {self.capacity} free", field="count")
        ids = self._find_free(count)
        self._free[ids] = False
        self._free_count -= count
        self._owner[ids] = owner
        return ids

    def free(self, owner: int, ids: PageIds, field: str = "pages") -> FreedPages:
        """Take pages back from ``owner``: all or none. A page in flight becomes doomed.

        Raises:
            EmptyPagesError, PageOutOfRangeError, DuplicatePageError, NotOwnerError: nothing was freed.
        """
        self.check_owned(owner, ids, field)
        check_distinct(ids, field)
        return self._give_back(ids)

    def free_owned(self, owner: int, ids: PageIds) -> FreedPages:
        """Take back those of distinct, valid ids that ``owner`` has still; those in flight become doomed."""
        return self._give_back(ids[self._owner[ids] == owner])

    def release_owner(self, owner: int) -> FreedPages:
        """Take every page of ``owner`` back; those in flight become doomed."""
        return self._give_back(self.pages_of(owner))

    def check_owned(self, owner: int, ids: PageIds, field: str) -> None:
        """Check that the ids are in range and all owned by ``owner``.

        Raises:
            EmptyPagesError, PageOutOfRangeError, NotOwnerError: with the first page at fault.
        """
        check_range(ids, self._pages, field)
        foreign = np.flatnonzero(self._owner[ids] != owner)
        if len(foreign):
            page = int(ids[foreign[0]])
            whose = "another instance's" if self._owner[page] != NOBODY else "nobody's: not allocated, or freed before"
            raise NotOwnerError(f"page {page} at position {foreign[0]} is {whose}", field=field)

    def begin_read(self, owner: int, ids: PageIds, field: str) -> None:
        """Count one more reader on pages of ``owner``; a page named twice has two.

        Raises:
            EmptyPagesError, PageOutOfRangeError, NotOwnerError, PageBusyError: a page is being written.
        """
        self.check_owned(owner, ids, field)
        self._check_none(self._writing[ids], ids, "is being written", field)
        np.add.at(self._readers, ids, 1)

    def end_read(self, ids: PageIds) -> None:
        """Undo ``begin_read``; doomed pages without a user become free."""
        np.subtract.at(self._readers, ids, 1)
        self._reclaim(np.unique(ids))

    def begin_write(self, owner: int, ids: PageIds, field: str) -> None:
        """Make the caller the one writer of pages of ``owner``.

        Raises:
            EmptyPagesError, PageOutOfRangeError, NotOwnerError, DuplicatePageError, PageBusyError: a page has a
                reader or a writer.
        """
        self.check_owned(owner, ids, field)
        check_distinct(ids, field)
        self._check_none(self._writing[ids], ids, "is being written", field)
        self._check_none(self._readers[ids] > 0, ids, "is being read", field)
        self._writing[ids] = True

    def end_write(self, ids: PageIds) -> None:
        """Undo ``begin_write``; doomed pages become free."""
        self._writing[ids] = False
        self._reclaim(ids)

    def check_integrity(self) -> None:
        """Check that the counts are those of the arrays: for tests and for a debugging operator.

        Raises:
            AssertionError: what is wrong.
        """
        assert int(self._free.sum()) == self._free_count, "free count"
        assert not self._free[: self._lowest_free].any(), "a free page below the hint"
        used = (self._owner != NOBODY) | self._doomed
        assert not (self._free & used).any(), "a free page with an owner"
        assert (self._free | used)[1:].all(), "a page that is neither free nor used"
        assert not self._free[0], "the padding page is free"
        assert not used[0], "the padding page is in use"
        busy = (self._readers > 0) | self._writing
        assert not (self._free & busy).any(), "a free page in flight"
        assert not (self._doomed & ~busy).any(), "a doomed page that is idle"
        assert not (self._writing & (self._readers > 0)).any(), "a page both read and written"

    def _find_free(self, count: int) -> PageIds:
        found: list[PageIds] = []
        start, missing, window = self._lowest_free, count, max(_SCAN_PAGES, 2 * count)
        while missing:
            ids = np.flatnonzero(self._free[start : start + window])[:missing] + start
            found.append(ids)
            missing -= len(ids)
            start, window = start + window, 2 * window
        taken = found[0] if len(found) == 1 else np.concatenate(found)
        self._lowest_free = int(taken[-1]) + 1
        return taken

    def _give_back(self, ids: PageIds) -> FreedPages:
        self._owner[ids] = NOBODY
        self._doomed[ids] = True
        freed = self._reclaim(ids)
        return FreedPages(freed, len(ids) - freed)

    def _reclaim(self, ids: PageIds) -> int:
        """Free those of the ids that are doomed and idle; return how many."""
        idle = ids[self._doomed[ids] & (self._readers[ids] == 0) & ~self._writing[ids]]
        if len(idle):
            self._doomed[idle] = False
            self._free[idle] = True
            self._free_count += len(idle)
            self._lowest_free = min(self._lowest_free, int(idle.min()))
            waiting, self._when_freed = self._when_freed, []
            for waiter in waiting:
                waiter()
        return len(idle)

    def _check_none(self, busy: np.typing.NDArray[np.bool_], ids: PageIds, what: str, field: str) -> None:
        at = np.flatnonzero(busy)
        if len(at):
            raise PageBusyError(f"page {ids[at[0]]} at position {at[0]} {what}", field=field)
