"""Allocating and freeing pages, against a free list with a set of pages for each owner."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import MICROSECONDS, Effort, Row, Target, compare
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.pools.allocator import PageAllocator

POOL_PAGES = 100_000
PAGES = 1000
OWNER = 1
FREE_LIST = "a Python list of free pages and a set of owned ones"


class FreeList:
    """The peer: a list, a set, and the one check that they make cheap."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, 0, -1))
        self._owned: dict[int, set[int]] = {OWNER: set()}

    def allocate(self, owner: int, count: int) -> list[int]:
        """Take pages."""
        taken = self._free[-count:]
        del self._free[-count:]
        self._owned[owner].update(taken)
        return taken

    def free(self, owner: int, pages: list[int]) -> None:
        """Give pages back."""
        owned = self._owned[owner]
        assert owned.issuperset(pages)
        owned.difference_update(pages)
        self._free.extend(pages)


class Times(NamedTuple):
    """Medians in microseconds: of one allocation, and of freeing what it took."""

    allocate: float
    free: float


def measure(effort: Effort) -> list[Row]:
    """Measure 1000 pages of a pool that is empty, and of one that is full of holes."""
    keep_freed_memory()
    empty, holes = PageAllocator(POOL_PAGES), PageAllocator(POOL_PAGES)
    taken = np.random.default_rng(0).permutation(holes.allocate(OWNER + 1, POOL_PAGES - 1))
    holes.free(OWNER + 1, taken[: POOL_PAGES // 2])
    return [
        *_rows("empty_pool", empty, effort, "pages from an empty pool: one run"),
        *_rows("holes", holes, effort, "pages from a pool of which a random half is taken"),
    ]


def _rows(state: str, pool: PageAllocator, effort: Effort, note: str) -> list[Row]:
    free_list, repeats = FreeList(POOL_PAGES), effort.pick(300, 2)
    return [
        compare(
            f"allocation/{what}/{state}",
            MICROSECONDS,
            ours=partial(_time_of, what, pool, repeats),
            peer=partial(_time_of, what, free_list, repeats),
            peer_is=FREE_LIST,
            rounds=effort.pick(15, 2),
            target=Target(50, "ours"),
            note=f"{PAGES} {note}",
        )
        for what in Times._fields
    ]


def _time_of(what: str, pool: PageAllocator | FreeList, repeats: int) -> float:
    times: list[float] = [_cycle(pool)._asdict()[what] for _ in range(repeats)]
    median: float = statistics.median(times)
    return median


def _cycle(pool: PageAllocator | FreeList) -> Times:
    started = time.perf_counter()
    pages: Any = pool.allocate(OWNER, PAGES)
    between = time.perf_counter()
    pool.free(OWNER, pages)
    return Times((between - started) * 1e6, (time.perf_counter() - between) * 1e6)
