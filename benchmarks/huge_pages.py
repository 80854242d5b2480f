"""Huge pages: the same copies of random pages in regions of huge pages and of normal ones, by the daemon's kernel.

What the host allows is measured as it is, and nothing is changed: where transparent huge pages of shared memory are
off, their rows compare normal pages with normal pages, and say so; without enough free reserved pages there are no rows
of these. ``touch`` is what an engine pays that has attached a pool, and touches each of its pages for the first time.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import ExitStack
from functools import partial

import numpy as np

from benchmarks.measure import GIGABYTES_A_SECOND, MILLISECONDS, Effort, Row, compare
from benchmarks.pools import KIB, MIB, noise
from kvferry.pools.copy_kernel import Copies, copy
from kvferry.pools.devices.host import HostRegion, Pages
from kvferry.pools.host.memory import read_file
from kvferry.pools.host.placement import SHMEM_ENABLED, reserved, transparent

PAGE_BYTES = (16 * KIB, 128 * KIB, 1 * MIB)
NORMAL = "the same in normal pages"


def measure(effort: Effort) -> list[Row]:
    """Measure three page sizes, and the first access of an attached pool, for each kind of huge pages."""
    size_bytes = effort.pick(512, 16) * MIB
    rows = []
    with ExitStack() as stack:
        normal = _Pair("normal", size_bytes, stack)
        for kind, note in _kinds(2 * size_bytes).items():
            huge = _Pair(kind, size_bytes, stack)
            rows += [_copies(huge, normal, page_bytes, note, effort) for page_bytes in PAGE_BYTES]
            rows.append(
                compare(
                    f"huge_pages/{kind}/touch/{size_bytes // MIB}MiB",
                    MILLISECONDS,
                    ours=huge.first_touch_ms,
                    peer=normal.first_touch_ms,
                    peer_is=NORMAL,
                    rounds=effort.pick(11, 2),
                    note=note,
                )
            )
    return rows


class _Pair:
    """Two populated regions of one kind of pages, the first one full of noise."""

    def __init__(self, kind: Pages, size_bytes: int, stack: ExitStack) -> None:
        self.kind = kind
        self.source, self.target = (stack.enter_context(HostRegion.create("bench", size_bytes, kind)) for _ in range(2))
        for one in (self.source, self.target):
            one.populate(lambda _step_bytes: True)
        self.source.view()[:] = noise(size_bytes)
        self.target.view()[:] = 1

    def copies(self, page_bytes: int, size_bytes: int) -> Copies:
        """Return copies of random pages to random places."""
        pages, count = self.source.size_bytes // page_bytes, size_bytes // page_bytes
        sources, targets = (np.random.default_rng(seed).permutation(pages)[:count] for seed in (1, 2))
        rows = np.full((count, 3), page_bytes, np.uint64)
        rows[:, 0] = self.source.address + sources * page_bytes
        rows[:, 1] = self.target.address + targets * page_bytes
        return rows

    def first_touch_ms(self) -> float:
        """Return the milliseconds of one access to each 4 KiB of a new mapping."""
        with HostRegion(os.dup(self.source.fd), self.source.size_bytes) as mapping:
            started = time.perf_counter()
            mapping.view()[:: mmap.PAGESIZE].max()
            return (time.perf_counter() - started) * 1e3


def _kinds(size_bytes: int) -> dict[Pages, str]:
    """Return the kinds of huge pages to measure, with what a reader must know of each."""
    offered, kept = transparent(read_file), reserved(read_file)
    kinds: dict[Pages, str] = {
        "transparent": f"{offered.page_bytes // MIB} MiB each"
        if offered.is_on
        else f"none: {SHMEM_ENABLED} says {offered.setting or 'nothing'}"
    }
    if kept.page_bytes and not kept.missing(size_bytes):
        kinds["reserved"] = f"{kept.page_bytes // MIB} MiB each"
    return kinds


def _copies(huge: _Pair, normal: _Pair, page_bytes: int, note: str, effort: Effort) -> Row:
    size_bytes = effort.pick(64, 4) * MIB
    ours, theirs = (one.copies(page_bytes, size_bytes) for one in (huge, normal))
    row = compare(
        f"huge_pages/{huge.kind}/{page_bytes // KIB}KiB/random/{size_bytes // MIB}MiB",
        GIGABYTES_A_SECOND,
        ours=partial(_gigabytes_a_second, ours, size_bytes),
        peer=partial(_gigabytes_a_second, theirs, size_bytes),
        peer_is=NORMAL,
        rounds=effort.pick(21, 2),
        note=note,
    )
    assert np.array_equal(_last_page(huge, ours, page_bytes), _last_page(normal, theirs, page_bytes))
    return row


def _gigabytes_a_second(copies: Copies, size_bytes: int) -> float:
    started = time.perf_counter()
    copy(copies)
    return size_bytes / (time.perf_counter() - started) / 1e9


def _last_page(pair: _Pair, copies: Copies, page_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return what came with the last copy, which is the same in every pair."""
    start = int(copies[-1, 1]) - pair.target.address
    return pair.target.view()[start : start + page_bytes]
