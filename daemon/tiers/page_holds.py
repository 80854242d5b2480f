"""The pages of a pool that an operation reads or writes: held from its acceptance to its end."""

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
    """Pages with one more reader, or their one writer, until ``release``."""

    def __init__(self, *, write: bool) -> None:
        self._write = write
        self._held: list[_Held] = []

    def add(self, allocator: PageAllocator, owner: int, ids: PageIds, field: str) -> None:
        """Hold pages of ``owner``.

        Raises:
            KvferryError: they do not belong to it, or are busy: see ``PageAllocator``.
        """
        if self._write:
            allocator.begin_write(owner, ids, field)
        else:
            allocator.begin_read(owner, ids, field)
        self._held.append(_Held(allocator, ids))

    def release(self) -> None:
        """Release the pages. Idempotent."""
        for allocator, ids in self._held:
            if self._write:
                allocator.end_write(ids)
            else:
                allocator.end_read(ids)
        self._held.clear()

    def give_back(self, owner: int) -> None:
        """Free those pages that ``owner`` still has, each once."""
        by_allocator: dict[PageAllocator, list[PageIds]] = {}
        for allocator, ids in self._held:
            by_allocator.setdefault(allocator, []).append(ids)
        for allocator, lists in by_allocator.items():
            allocator.free_owned(owner, np.unique(np.concatenate(lists)))


def hold_pages(pool: Pool, owner: int, lists: Sequence[PageRange], *, write: bool) -> PageHold:
    """Hold the pages of all lists, or of none.

    Raises:
        KvferryError: see ``PageHold.add``.
    """
    hold = PageHold(write=write)
    try:
        for pages in lists:
            hold.add(pool.allocator_of(pages.component), owner, pages.ids, f"{pages.field}.pages")
    except KvferryError:
        hold.release()
        raise
    return hold
