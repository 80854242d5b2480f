"""The page allocator of one page space of a pool: owner, readers and writer of each page, and when it is free again.

A page is free, owned, or doomed: released by its owner while in flight, and free once its last reader and its writer
have ended. Each page also has a reader count and at most one writer; a writer excludes readers. Page 0 is the padding
page: never free, never owned. An owner is a number above 0; the allocator knows nothing else about sessions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.pools.integrity import SHOWN, WALKED, Problem, Walk, check, problem_at
from kvferry.pools.planning.page_ids import FEW, check_distinct, check_range
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import NotOwnerError, PageBusyError, PoolFullError

NOBODY = 0
PADDING_PAGE = 0
OWNER_DTYPE = np.dtype(np.int32)
Owners = npt.NDArray[np.int32]
"""``(pages,)`` int32: the number of each page's owner, NOBODY for none."""
Flags: TypeAlias = npt.NDArray[np.bool_] | npt.NDArray[np.int32]
"""``(n,)``, set where not 0."""

_WALK_PAGES = 1 << 17  # of a check of all pages, before it may be paused: about a millisecond
_SCAN_PAGES = 1 << 10  # first window of the search for free pages; each further window is twice as wide
_STRETCH_PAGES = 1 << 10  # of which is known whether they are all taken, so that nobody looks for a free one there


class FreedPages(NamedTuple):
    """Pages that became free immediately, and pages that become free once their readers and writer end."""

    freed: int
    deferred: int


class PageCounts(NamedTuple):
    """How many pages are in which state; each page but the padding page is in one. ``largest_free_run``: in a row.

    ``idle``, ``read`` and ``written`` ones have an owner, ``releasing`` ones are free once nothing moves in them.
    """

    free: int
    idle: int
    read: int
    written: int
    releasing: int
    largest_free_run: int


class OwnedPages(NamedTuple):
    """What one owner has of an allocator's pages. ``busy``: with a reader or writer. ``age_s``: of the oldest one."""

    owner: int
    pages: int
    busy: int
    age_s: int


class HeldPages(NamedTuple):
    """Pages of one allocator that something reads or writes, as that thing says itself.

    Attributes:
        allocator: of the pages' space.
        ids: page ids; what reads may list a page several times.
        writing: whether it writes them; otherwise it reads them.
        holder: what it is, in words.
    """

    allocator: PageAllocator
    ids: PageIds
    writing: bool
    holder: str


class PageAllocator:
    """Allocates the lowest free pages, so that page lists have long runs and the pool does not fragment."""

    def __init__(
        self, pages: int, owners: Owners | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with all pages but page 0 free, or with those that ``owners`` gives to nobody.

        Args:
            pages: number of pages, including the padding page; at least 2.
            owners: ``(pages,)`` int32, used from now on, so that what keeps this memory keeps the owners; page 0 has
                none.
            clock: in seconds, for the ages of pages; those that are owned from the start begin now.
        """
        self._pages = pages
        self._clock = clock
        self._began_s = clock()
        self._since_s = np.zeros(pages, np.int32)  # of each page, when it was allocated, after the beginning
        self._owner = np.zeros(pages, OWNER_DTYPE) if owners is None else owners
        self._free = self._owner == NOBODY
        self._free[PADDING_PAGE] = False
        self._free_count = int(np.count_nonzero(self._free))
        self._lowest_free = int(np.argmax(self._free)) if self._free_count else pages
        self._full = np.zeros(-(-pages // _STRETCH_PAGES), np.bool_)  # no page of the stretch is free
        self._readers = np.zeros(pages, np.int32)
        self._reader_counts = self._readers.data
        self._writing = np.zeros(pages, np.bool_)
        self._doomed = np.zeros(pages, np.bool_)
        self._when_freed: list[Callable[[], None]] = []
        self.changes = 0
        """Grows with each change of a page's state; for walks."""
        self._counted: tuple[int, PageCounts] | None = None

    def when_freed(self, call: Callable[[], None]) -> None:
        """Register ``call`` to be called once, the next time pages become free; registering it twice has no effect."""
        if call not in self._when_freed:
            self._when_freed.append(call)

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<PageAllocator pages={self.capacity} free={self._free_count} busy={self.busy_count}>"

    @property
    def capacity(self) -> int:
        """Return how many pages can be allocated: all but the padding page."""
        return self._pages - 1

    @property
    def free_count(self) -> int:
        """Return how many pages are free."""
        return self._free_count

    @property
    def busy_count(self) -> int:
        """Return how many pages have a reader or a writer."""
        return int(np.count_nonzero((self._readers > 0) | self._writing))

    def counts(self) -> PageCounts:
        """Count the pages of each state: some ms for a million pages, unless nothing has changed since."""
        if self._counted is None or self._counted[0] != self.changes:
            self._counted = (self.changes, self._count())
        return self._counted[1]

    def _count(self) -> PageCounts:
        releasing = int(np.count_nonzero(self._doomed))
        owned = self.capacity - self._free_count - releasing
        held = ~self._doomed
        read, written = (int(np.count_nonzero(flags & held)) for flags in (self._readers > 0, self._writing))
        edges = np.flatnonzero(np.diff(self._free, prepend=False, append=False))  # where runs of free pages begin, end
        largest = int((edges[1::2] - edges[::2]).max(initial=0))
        return PageCounts(self._free_count, owned - read - written, read, written, releasing, largest)

    @property
    def idle(self) -> bool:
        """Return whether every page is free."""
        return self._free_count == self.capacity

    def pages_by_owner(self) -> dict[int, int]:
        """Return the number of pages of each owner that has any."""
        counts = np.bincount(self._owner)
        return {int(owner): int(counts[owner]) for owner in np.flatnonzero(counts) if owner != NOBODY}

    def owned(self) -> list[OwnedPages]:
        """Return what each owner has; some ms for a million pages."""
        pages = np.bincount(self._owner)
        busy = np.bincount(self._owner, weights=(self._readers > 0) | self._writing)
        oldest = np.full(len(pages), np.iinfo(np.int32).max, np.int32)
        np.minimum.at(oldest, self._owner, self._since_s)
        now_s = int(self._clock() - self._began_s)
        owners = (int(one) for one in np.flatnonzero(pages) if one != NOBODY)
        return [OwnedPages(one, int(pages[one]), int(busy[one]), now_s - int(oldest[one])) for one in owners]

    def pages_of(self, owner: int) -> PageIds:
        """Return the page ids of an owner, ascending."""
        return np.flatnonzero(self._owner == owner)

    def is_busy(self, ids: PageIds) -> bool:
        """Return whether any of these pages has a reader or a writer."""
        return bool(((self._readers[ids] > 0) | self._writing[ids]).any())

    def allocate(self, owner: int, count: int) -> PageIds:
        """Allocate ``count`` free pages to ``owner`` and return their ids, ascending.

        Raises:
            PoolFullError: fewer pages are free; none is allocated.
        """
        if count > self._free_count:
            raise PoolFullError(f"{count} pages asked for, {self._free_count} of {self.capacity} free", field="count")
        ids = self._find_free(count)
        self.changes += 1
        self._free[ids] = False
        self._free_count -= count
        self._owner[ids] = owner
        self._since_s[ids] = self._clock() - self._began_s
        return ids

    def free(self, owner: int, ids: PageIds, field: str = "pages") -> FreedPages:
        """Free pages of ``owner``: all or none. A page in flight becomes doomed.

        Raises:
            EmptyPagesError, PageOutOfRangeError, DuplicatePageError, NotOwnerError: nothing was freed.
        """
        self.check_owned(owner, ids, field)
        check_distinct(ids, field)
        return self._release(owner, ids)

    def free_owned(self, owner: int, ids: PageIds) -> FreedPages:
        """Free those of ``ids`` (distinct, in range) that ``owner`` still owns; pages in flight become doomed."""
        return self._release(owner, ids[self._owner[ids] == owner])

    def release_owner(self, owner: int) -> FreedPages:
        """Free every page of ``owner``; pages in flight become doomed."""
        return self._release(owner, self.pages_of(owner))

    def check_owned(self, owner: int, ids: PageIds, field: str) -> None:
        """Check that the ids are in range and all owned by ``owner``.

        Raises:
            EmptyPagesError, PageOutOfRangeError, NotOwnerError: names the first invalid page.
        """
        check_range(ids, self._pages, field)
        owners = self._owner[ids]
        if len(ids) <= FEW and owners.tolist().count(owner) == len(ids):
            return
        foreign = (owners != owner).nonzero()[0]
        if len(foreign):
            page = int(ids[foreign[0]])
            state = "owned by another instance" if self._owner[page] != NOBODY else "not allocated, or already freed"
            raise NotOwnerError(f"page {page} at position {foreign[0]} is {state}", field=field)

    def begin_read(self, owner: int, ids: PageIds, field: str) -> None:
        """Add a reader to pages of ``owner``; a page listed twice gets two.

        Raises:
            EmptyPagesError, PageOutOfRangeError, NotOwnerError, PageBusyError: a page is being written.
        """
        self.check_owned(owner, ids, field)
        self._check_none(self._writing[ids], ids, "is being written", field)
        self.changes += 1
        self._add_readers(ids, 1)

    def end_read(self, ids: PageIds) -> None:
        """Undo ``begin_read``; doomed pages without readers become free."""
        self.changes += 1
        self._add_readers(ids, -1)
        try:
            self._reclaim(ids, repeated=len(ids) > 1)
        except Exception:  # no memory: they stay held
            self._add_readers(ids, 1)
            raise

    def begin_write(self, owner: int, ids: PageIds, field: str) -> None:
        """Mark pages of ``owner`` as being written; a page has one writer at a time.

        Raises:
            EmptyPagesError, PageOutOfRangeError, NotOwnerError, DuplicatePageError, PageBusyError: a page has a
                reader or a writer.
        """
        self.check_owned(owner, ids, field)
        check_distinct(ids, field)
        self._check_none(self._writing[ids], ids, "is being written", field)
        self._check_none(self._readers[ids], ids, "is being read", field)
        self.changes += 1
        self._writing[ids] = True

    def end_write(self, ids: PageIds) -> None:
        """Undo ``begin_write``; doomed pages become free."""
        self.changes += 1
        self._writing[ids] = False
        try:
            self._reclaim(ids)
        except Exception:  # no memory: they stay held
            self._writing[ids] = True
            raise

    def _add_readers(self, ids: PageIds, more: int) -> None:
        """Add so many readers to pages, to one that is listed twice twice as many."""
        if len(ids) > FEW:
            np.add.at(self._readers, ids, np.int32(more))  # of another type it takes 25 times as long
            return
        counts = self._reader_counts
        for page in ids.tolist():
            counts[page] += more

    def check_integrity(self) -> None:
        """Check that counts and arrays agree.

        Raises:
            AssertionError: names the invariant that is violated.
        """
        check(self.problems())

    def problems(self) -> Walk:
        """Yield what is wrong with the states of the pages, each of which must be in exactly one."""
        free_count = int(np.count_nonzero(self._free))
        if free_count != self._free_count:
            yield Problem(f"{free_count} pages are free, {self._free_count} are counted")
        if self._free[: self._lowest_free].any():
            low = np.flatnonzero(self._free[: self._lowest_free])
            yield problem_at("a free page below the first one that is looked for", low)
        full = np.repeat(self._full, _STRETCH_PAGES)[: self._pages]
        if (full & self._free).any():
            yield problem_at("a free page where none is looked for", np.flatnonzero(full & self._free))
        if self._free[0] or self._owner[0] != NOBODY or self._doomed[0] or self._readers[0] or self._writing[0]:
            yield problem_at("the padding page is in use, or free", [0])
        for first in range(0, self._pages, _WALK_PAGES):
            stop = first + _WALK_PAGES
            free, doomed, writing = self._free[first:stop], self._doomed[first:stop], self._writing[first:stop]
            readers, owned = self._readers[first:stop], self._owner[first:stop] != NOBODY
            states = free.astype(np.int8) + owned + doomed
            if not first:
                states[0] = 1  # see above
            busy = (readers > 0) | writing
            for what, wrong in (
                ("a page is in none of the states free, owned, doomed", states == 0),
                ("a page is in several of the states free, owned, doomed", states > 1),
                ("a free page is read or written", free & busy),
                ("a doomed page is idle, but not free", doomed & ~busy),
                ("a page is both read and written", writing & (readers > 0)),
                ("a page has a negative number of readers", readers < 0),
            ):
                if wrong.any():
                    yield problem_at(what, np.flatnonzero(wrong) + first)
            yield None

    def holder_problems(self, held: Iterable[HeldPages]) -> Walk:
        """Yield where the counts of readers and writers differ from what the holders of pages say.

        Args:
            held: what all holders say of the pages of this allocator; others are skipped.
        """
        readers, writers = np.zeros(self._pages, np.int32), np.zeros(self._pages, np.int32)
        known: list[HeldPages] = []
        for number, one in enumerate(held):
            if one.allocator is self:
                known.append(one)
                np.add.at(writers if one.writing else readers, one.ids, 1)
            if number % WALKED == 0:
                yield None
        for first in range(0, self._pages, _WALK_PAGES):
            part = slice(first, first + _WALK_PAGES)
            for is_writing, has, said in (
                (False, self._readers[part], readers[part]),
                (True, self._writing[part].astype(np.int32), writers[part]),
            ):
                wrong = np.flatnonzero(has != said)
                if len(wrong):
                    yield self._wrongly_held(wrong + first, has[wrong[0]], said[wrong[0]], known, writing=is_writing)
            yield None

    def owner_problems(self, owners: Container[int]) -> Walk:
        """Yield the pages whose owner is none of the live ``owners``."""
        for owner in self.pages_by_owner():
            if owner not in owners:
                yield problem_at(
                    "a page belongs to an instance that has ended", self.pages_of(owner), f"instance {owner}"
                )
        yield None

    @staticmethod
    def _wrongly_held(wrong: PageIds, has: int, said: int, held: Sequence[HeldPages], *, writing: bool) -> Problem:
        """Return the problem of pages with another count than their holders say; the first page's counts are named."""
        what = "writers" if writing else "readers"
        names = [one.holder for one in held if one.writing is writing and (one.ids == wrong[0]).any()]
        holder = ", ".join(names[:SHOWN])
        return problem_at(f"page {wrong[0]} has {has} {what}, its holders say {said}", wrong, holder)

    def _find_free(self, count: int) -> PageIds:
        found: list[PageIds] = []
        start, missing, window = self._lowest_free, count, max(_SCAN_PAGES, 2 * count)
        while missing:
            start = self._past_full(start)
            ids = np.flatnonzero(self._free[start : start + window])[:missing] + start
            found.append(ids)
            missing -= len(ids)
            start, window = start + window, 2 * window
        taken = found[0] if len(found) == 1 else np.concatenate(found)
        self._full[self._lowest_free // _STRETCH_PAGES : int(taken[-1]) // _STRETCH_PAGES] = True
        self._lowest_free = int(taken[-1]) + 1
        return taken

    def _past_full(self, start: int) -> int:
        """Return ``start`` or, where its stretch is full, the start of the next one that may have a free page."""
        stretch = start // _STRETCH_PAGES
        if not self._full[stretch]:
            return start
        return (stretch + int(np.argmin(self._full[stretch:]))) * _STRETCH_PAGES

    def _release(self, owner: int, ids: PageIds) -> FreedPages:
        self.changes += 1
        self._owner[ids] = NOBODY
        self._doomed[ids] = True
        try:
            freed = self._reclaim(ids)
        except Exception:  # no memory: they are its owner's still
            self._owner[ids] = owner
            self._doomed[ids] = False
            raise
        return FreedPages(freed, len(ids) - freed)

    def _reclaim(self, ids: PageIds, *, repeated: bool = False) -> int:
        """Free those of ``ids`` that are doomed and idle; return how many. One may be ``repeated``."""
        doomed = self._doomed[ids]
        if not _any(doomed):
            return 0
        idle = ids[doomed & (self._readers[ids] == 0) & ~self._writing[ids]]
        if repeated and len(idle):
            idle = np.unique(idle)
        count = len(idle)
        if count:
            lowest = min(self._lowest_free, int(idle.min()))
            self._full[idle // _STRETCH_PAGES] = False
            self._doomed[idle] = False
            self._free[idle] = True
            self._free_count += count
            self._lowest_free = lowest
            waiting, self._when_freed = self._when_freed, []
            for waiter in waiting:
                try:
                    waiter()
                except Exception:  # noqa: BLE001  the pages are free all the same; it is told of the next ones
                    self._when_freed.append(waiter)
        return count

    def _check_none(self, busy: Flags, ids: PageIds, what: str, field: str) -> None:
        if _any(busy):
            at = int(busy.nonzero()[0][0])
            raise PageBusyError(f"page {ids[at]} at position {at} {what}", field=field)


def _any(flags: Flags) -> bool:
    """Return whether any is set. numpy's own way to ask is slow where its code was not used of late."""
    return any(flags.tolist()) if len(flags) <= FEW else bool(flags.any())
