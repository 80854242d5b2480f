"""The copy kernel by itself, on the bytes that a daemon copies: what is left where all else is taken away.

Nothing is asked for, planned, checked or told here: the lists are ready, and so are the threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from benchmarks.measure import Contender, Limit, after
from benchmarks.pools import Pair, Side
from kvferry.clients import Client
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.services.tiers import MOST_COPY_THREADS
from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import CopyThreads
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.planning.plan import make_plan
from kvferry.pools.tiers.block_copies import (
    offload_step,
    offload_step_hashed,
    restore_step,
    restore_step_hashed,
)
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages, BlockStep

Copying = Callable[[], object]
"""Copies once: one call of the kernel."""

TRANSFER_THREADS = min(Tuning().copy_threads, len(os.sched_getaffinity(0)))
TIER_THREADS = min(MOST_COPY_THREADS, len(os.sched_getaffinity(0)))


def limit_of(
    copying: Copying, threads: int, in_unit: Callable[[Copying], Contender], asked_by: Client | None = None
) -> Limit:
    """Return the limit: the work by one thread, by two, four … copy threads, and by so many.

    Args:
        copying: the work.
        threads: as many as the daemon has.
        in_unit: makes a contender of a call.
        asked_by: who asks for it, and must at least send a PING; None: nobody does.
    """
    counts = sorted({1 << power for power in range(threads.bit_length())} | {threads})  # as the daemon tries them
    copy_threads = copy_kernel.new_copy_threads(threads, b"")
    ways: list[Copying] = [
        copying,
        *[partial(_shared, copy_threads, count, copying) for count in counts[1:] if copy_threads],
    ]
    return Limit(
        tuple([in_unit(one if asked_by is None else partial(_asked, asked_by, one)) for one in ways]),
        "the copy kernel alone on the same bytes, from lists that are ready"
        + ("" if asked_by is None else ", and one PING")
        + (f"; by {', '.join(map(str, counts))} threads, whichever is the fastest" if len(ways) > 1 else ""),
    )


def _shared(copy_threads: CopyThreads, threads: int, copying: Copying) -> None:
    with copy_threads.serving():
        copy_threads.serve(threads)
        copying()


def _asked(client: Client, copying: Copying) -> None:
    client.ping()
    copying()


def transfer_of(pair: Pair) -> Copying:
    """Return a transfer of all the source's pages into the target's."""
    manifests = pair.source.pool.manifest, pair.target.pool.manifest
    plan = make_plan(pair_entries(*[one.entries for one in manifests]), pair.source.ids, pair.target.ids)
    blocks = plan.blocks()
    blocks[:, :2] += np.array([memory_of(pair.source).address, memory_of(pair.target).address], np.uint64)
    return partial(copy_kernel.copy, blocks)


class Blocks:
    """Pages of a pair's source as blocks of a host tier, and back into its target; with checksums, or without."""

    def __init__(self, pair: Pair, layout: BlockLayout, memory: HostRegion, *, checksums: bool) -> None:
        self._pair, self._layout, self._memory, self._checksums = pair, layout, memory, checksums
        self._offsets = np.arange(pair.count) * layout.block_bytes
        self._digests = np.zeros(pair.count, np.uint64)

    @classmethod
    @contextmanager
    def of(cls, pair: Pair, *, checksums: bool) -> Iterator[Blocks]:
        """Make the memory for all of the pair's pages, and fill it."""
        manifest = pair.source.pool.manifest
        layout = BlockLayout(manifest, manifest.components[0].space)
        with HostRegion.create("blocks", pair.count * layout.block_bytes) as memory:
            memory.view()[:] = 0  # there when kernel variants are tried: a first access takes longer than any
            blocks = cls(pair, layout, memory, checksums=checksums)
            blocks.offload()
            yield blocks

    def offload(self) -> None:
        """Copy the source's pages."""
        memory, pages, whole = self._of(self._pair.source)
        if not self._checksums:
            offload_step(memory.view(), pages, whole, self._memory.view())
            return
        self._digests = offload_step_hashed(memory.view(), pages, whole, self._memory.view(), copy_kernel.new_hash())

    def restore(self) -> None:
        """Copy them into the target, and compare checksums."""
        memory, pages, whole = self._of(self._pair.target)
        if not self._checksums:
            restore_step(memory.view(), pages, whole, self._memory.view())
            return
        found = restore_step_hashed(memory.view(), pages, whole, self._memory.view(), copy_kernel.new_hash())
        assert np.array_equal(found, self._digests)

    def _of(self, side: Side) -> tuple[HostRegion, BlockPages, BlockStep]:
        """Return a side's memory, its pages as blocks, and all of them as one step."""
        whole = BlockStep(0, self._pair.count, 0, self._layout.content_bytes)
        return memory_of(side), BlockPages(self._layout, side.ids, self._offsets), whole


@contextmanager
def tier_limits(
    pair: Pair, in_unit: Callable[[Copying], Contender], *, checksums: bool
) -> Iterator[tuple[Limit, Limit]]:
    """Yield the limits of an offload and of a restore, both of all pages and asked for by the source's client.

    Before each restore the target is cleared, outside the clock, as before those that are compared with it.
    """

    def into_cleared(copying: Copying) -> Contender:
        return after(pair.clear, in_unit(copying))

    client = pair.source.client
    with Blocks.of(pair, checksums=checksums) as blocks:
        yield (
            limit_of(blocks.offload, TIER_THREADS, in_unit, client),
            limit_of(blocks.restore, TIER_THREADS, into_cleared, client),
        )


def memory_of(side: Side) -> HostRegion:
    """Return the memory of a pool on the host."""
    assert isinstance(side.pool.region, HostRegion)
    return side.pool.region
