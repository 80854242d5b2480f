"""Pages of a pool that an operation reads or writes: held from its acceptance to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.daemon.transfer.page_ranges import PageRange
from kvferry.pools.allocator import PageAllocator
from kvferry.pools.planning.runs import PageIds
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import KvferryError


class _Held(NamedTuple):
    allocator: PageAllocator
    ids: PageIds


class PageHold:
    """Pages with one reader, or their one writer, more, until ``release``."""

    def __init__(self, *, write: bool) -> None:
        self._write = write
        self._held: list[_Held] = []

    def add(self, allocator: PageAllocator, owner: int, ids: PageIds, field: str) -> None:
        """Hold pages of ``owner``.

        Raises:
            KvferryError: they are not its, or are busy: see ``PageAllocator``.
        """
        if self._write:
            allocator.begin_write(owner, ids, field)
        else:
            allocator.begin_read(owner, ids, field)
        self._held.append(_Held(allocator, ids))

    def release(self) -> None:
        """Hold them no longer; a second time there is nothing to do."""
        for allocator, ids in self._held:
            if self._write:
                allocator.end_write(ids)
            else:
                allocator.end_read(ids)
        self._held.clear()

    def give_back(self, owner: int) -> None:
        """Free those that ``owner`` has still, each once."""
        by_allocator: dict[PageAllocator, list[PageIds]] = {}
        for allocator, ids in self._held:
            by_allocator.setdefault(allocator, []).append(ids)
        for allocator, lists in by_allocator.items():
            allocator.free_owned(owner, np.unique(np.concatenate(lists)))


def hold_pages(pool: Pool, owner: int, lists: Sequence[PageRange], *, write: bool) -> PageHold:
    """Hold the pages of some lists: all or none.

    Raises:
        KvferryError: see ``PageHold.add``.
    """
    hold = PageHold(write=write)
    try:
        for one in lists:
            hold.add(pool.allocator_of(one.component), owner, one.ids, f"{one.field}.pages")
    except KvferryError:
        hold.release()
        raise
    return hold
