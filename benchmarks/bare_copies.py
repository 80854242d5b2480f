"""The copy kernel by itself, on the bytes that a daemon copies: what is left where all else is taken away.

Nothing is asked for, planned, checked or told here: the lists are ready, and so are the threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np

from benchmarks.measure import Contender, Limit, after
from benchmarks.pools import Pair, Side
from kvferry.clients import Client
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.services.tiers import MOST_COPY_THREADS
from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies
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
from kvferry.protocol.codec import PageIds

Copying = Callable[[], object]
Parts = Callable[[int], Sequence[Copying]]
"""Cuts work for so many threads: what each of them does."""

CALL_BYTES = 4 << 20
"""Of one call of the kernel: threads that take such calls in turns stay close to each other in memory."""
TRANSFER_THREADS = min(Tuning().copy_threads, len(os.sched_getaffinity(0)))
TIER_THREADS = min(MOST_COPY_THREADS, len(os.sched_getaffinity(0)))


@contextmanager
def limit_of(
    parts: Parts, threads: int, in_unit: Callable[[Copying], Contender], asked_by: Client | None = None
) -> Iterator[Limit]:
    """Yield the limit: the work by one thread, by two, four …, and by so many.

    Args:
        parts: the work.
        threads: as many as the daemon has.
        in_unit: makes a contender of a call.
        asked_by: who asks for it, and must at least send a PING; None: nobody does.
    """
    counts = sorted({1 << power for power in range(threads.bit_length())} | {threads})  # as the daemon tries them
    with ThreadPoolExecutor(threads) as pool:

        def together(shared: Sequence[Copying]) -> None:
            for one in [pool.submit(one) for one in shared]:
                one.result()

        ways: list[Copying] = [parts(1)[0], *[partial(together, parts(count)) for count in counts[1:]]]
        yield Limit(
            tuple([in_unit(one if asked_by is None else partial(_asked, asked_by, one)) for one in ways]),
            "the copy kernel alone on the same bytes, from lists that are ready"
            + ("" if asked_by is None else ", and one PING")
            + (f"; by {', '.join(map(str, counts))} threads, whichever is the fastest" if threads > 1 else ""),
        )


def _asked(client: Client, copying: Copying) -> None:
    client.ping()
    copying()


def copies_in(copies: Copies, size_bytes: int) -> Parts:
    """Return the parts of a list of copies, as ``copy_kernel.copy`` takes it, of so many bytes."""

    def parts(count: int) -> list[Copying]:
        calls = np.array_split(copies, max(count, size_bytes // CALL_BYTES))
        return [partial(_copy_each, calls[number::count]) for number in range(count)]

    return parts


def _copy_each(calls: Sequence[Copies]) -> None:
    for one in calls:
        copy_kernel.copy(one)


def transfer_of(pair: Pair) -> Parts:
    """Return the parts of a transfer of all the source's pages into the target's."""
    manifests = pair.source.pool.manifest, pair.target.pool.manifest
    plan = make_plan(pair_entries(*[one.entries for one in manifests]), pair.source.ids, pair.target.ids)
    blocks = plan.blocks()
    blocks[:, :2] += np.array([memory_of(pair.source).address, memory_of(pair.target).address], np.uint64)
    return copies_in(blocks, plan.total_bytes)


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
            blocks = cls(pair, layout, memory, checksums=checksums)
            blocks.offload(1)[0]()
            yield blocks

    def offload(self, count: int) -> list[Copying]:
        """Return the parts of an offload."""
        return [partial(self._copy_out, step) for step in self._steps(count)]

    def restore(self, count: int) -> list[Copying]:
        """Return the parts of a restore, which compares checksums."""
        return [partial(self._copy_back, step) for step in self._steps(count)]

    def _steps(self, count: int) -> list[BlockStep]:
        cuts = [self._pair.count * number // count for number in range(count + 1)]
        return [BlockStep(*cut, 0, self._layout.content_bytes) for cut in pairwise(cuts)]

    def _pages(self, ids: PageIds) -> BlockPages:
        return BlockPages(self._layout, ids, self._offsets)

    def _copy_out(self, step: BlockStep) -> None:
        memory, pages = memory_of(self._pair.source).view(), self._pages(self._pair.source.ids)
        if not self._checksums:
            offload_step(memory, pages, step, self._memory.view())
            return
        found = offload_step_hashed(memory, pages, step, self._memory.view(), copy_kernel.new_hash())
        self._digests[step.first : step.stop] = found

    def _copy_back(self, step: BlockStep) -> None:
        memory, pages = memory_of(self._pair.target).view(), self._pages(self._pair.target.ids)
        if not self._checksums:
            restore_step(memory, pages, step, self._memory.view())
            return
        found = restore_step_hashed(memory, pages, step, self._memory.view(), copy_kernel.new_hash())
        assert (found == self._digests[step.first : step.stop]).all()


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
    with (
        Blocks.of(pair, checksums=checksums) as blocks,
        limit_of(blocks.offload, TIER_THREADS, in_unit, client) as out,
        limit_of(blocks.restore, TIER_THREADS, into_cleared, client) as back,
    ):
        yield out, back


def memory_of(side: Side) -> HostRegion:
    """Return the memory of a pool on the host."""
    assert isinstance(side.pool.region, HostRegion)
    return side.pool.region
