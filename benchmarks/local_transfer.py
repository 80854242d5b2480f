"""The local transport: pages of one host region into another, against one memcpy of as many bytes.

The transport is the daemon's own, with its threads, chunks and choice of copy; the clock runs from ``start`` to the
report on the loop. The memcpy is one ``numpy.copyto`` of one contiguous range of the same two regions.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import uvloop

from benchmarks.bare_copies import TRANSFER_THREADS, limit_of
from benchmarks.measure import GIGABYTES_A_SECOND, SETTLE, Effort, Row, Target, compare, gigabytes_a_second
from benchmarks.pools import KIB, MIB, check_last_pages, regions
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.daemon.transfer.registry import StartOp
from kvferry.daemon.transports.local import LocalTransport
from kvferry.pools import copy_kernel
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.planning.plan import Plan, make_plan
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.manifests import Entry, Manifest

LAYERS = 4
TARGETS = {16 * KIB: 0.75, 128 * KIB: 1.2, 1 * MIB: 1.5}
"""At 64 MiB. Where memcpy itself goes past the caches, from three quarters of the last one on, none is much faster."""
SHORT_BYTES = 512
"""Two heads of a token: what pools of one token a page have."""
TARGETED = (("random", 64), ("random", 8))
CHECKSUMS = 0.2
"""Of what it copies, a transfer with checksums gathers both sides anew, and hashes both."""
MEMCPY = "one numpy.copyto of one contiguous range, one thread"


def measure(effort: Effort) -> list[Row]:
    """Measure four page sizes, random and contiguous pages, and two amounts."""
    keep_freed_memory()
    sizes_mib = (8, 16) if effort.quick else (64, 512)
    rows = []
    for page_bytes in (SHORT_BYTES, *TARGETS):
        size = f"{page_bytes // KIB}KiB" if page_bytes >= KIB else f"{page_bytes}B"
        with copying(page_bytes, sizes_mib[-1] * MIB) as copier:
            rows += [
                copier.measure(f"local_transfer/{size}/{order}/{size_mib}MiB", order, size_mib, effort)
                for size_mib in sizes_mib
                for order in ("random", "contiguous")
            ]
            if page_bytes in TARGETS:
                rows.append(copier.measure_checksums(f"local_transfer/checksums/{size}", sizes_mib[0], effort))
    return rows


class Copier:
    """Two pools, and a transport between them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        manifests: tuple[Manifest, Manifest],
        memory: tuple[HostRegion, HostRegion],
    ) -> None:
        self.source, self.destination = (
            Pool(0, *one) for one in zip(("source", "destination"), manifests, memory, strict=True)
        )
        self._memory = memory
        self._loop = loop
        self._ended: asyncio.Future[KvferryError | None] = loop.create_future()
        self._op_ids = itertools.count(1)
        self.transport = LocalTransport.as_fast_as_here(loop, threads=Tuning().copy_threads)

    def measure(self, name: str, order: str, size_mib: int, effort: Effort) -> Row:
        """Return the row of one order of pages and one amount."""
        size_bytes = size_mib * MIB
        entries = self.source.manifest.entries
        count = size_bytes // sum(entry.page_bytes for entry in entries)
        ids = [self._pages(order, count, seed) for seed in (1, 2)]
        plan = make_plan(pair_entries(entries, entries), *ids)
        assert plan.total_bytes == size_bytes
        blocks = plan.blocks()
        blocks[:, :2] += np.array(self.addresses, np.uint64)
        in_unit = partial(gigabytes_a_second, size_bytes=size_bytes)
        row = compare(
            name,
            GIGABYTES_A_SECOND,
            ours=partial(self.copied_gigabytes_a_second, plan),
            peer=gigabytes_a_second(partial(self._memcpy, size_bytes), size_bytes),
            peer_is=MEMCPY,
            rounds=effort.pick(11, 2),
            settle=effort.pick(SETTLE, 1),
            target=_target(entries[0].page_bytes, order, size_mib),
            limit=limit_of(partial(copy_kernel.copy, blocks), TRANSFER_THREADS, in_unit),
        )
        self.copied_gigabytes_a_second(plan)
        self.check(*ids)
        return row

    def _random_plan(self, size_bytes: int) -> Plan:
        entries = self.source.manifest.entries
        count = size_bytes // sum(entry.page_bytes for entry in entries)
        return make_plan(pair_entries(entries, entries), *[self._pages("random", count, seed) for seed in (1, 2)])

    def measure_checksums(self, name: str, size_mib: int, effort: Effort) -> Row:
        """Return the row of transfers of random pages whose bytes are compared with the source's."""
        plan = self._random_plan(size_mib * MIB)
        return compare(
            name,
            GIGABYTES_A_SECOND,
            ours=partial(self.copied_gigabytes_a_second, plan, checksums=True),
            peer=partial(self.copied_gigabytes_a_second, plan),
            peer_is="the same transfer without checksums",
            rounds=effort.pick(11, 2),
            settle=effort.pick(SETTLE, 1),
            target=Target(CHECKSUMS),
        )

    @property
    def addresses(self) -> tuple[int, int]:
        """Return where both pools' memory begins."""
        source, destination = self._memory
        return source.address, destination.address

    def check(self, source_ids: PageIds, destination_ids: PageIds) -> None:
        """Check that the last of these pages have arrived."""
        source, destination = zip(
            (self.source.manifest, self.destination.manifest), self._memory, (source_ids, destination_ids), strict=True
        )
        check_last_pages(source, destination)

    def _pages(self, order: str, count: int, seed: int) -> PageIds:
        ids = np.arange(1, self.source.manifest.pages)
        return np.random.default_rng(seed).permutation(ids)[:count] if order == "random" else ids[:count]

    def copied_gigabytes_a_second(self, plan: Plan, *, checksums: bool = False) -> float:
        """Copy what is planned, and return how fast that was."""
        return plan.total_bytes / self._loop.run_until_complete(self._copy(plan, checksums=checksums)) / 1e9

    def _op_done(self, _op_id: int, error: KvferryError | None) -> None:
        self._ended.set_result(error)

    async def _copy(self, plan: Plan, *, checksums: bool) -> float:
        self._ended = self._loop.create_future()
        op = StartOp(next(self._op_ids), self.source, self.destination, (plan,), checksums=checksums)
        started = time.perf_counter()
        self.transport.start(op, self._op_done)
        error = await self._ended
        if error is not None:
            raise error
        return time.perf_counter() - started

    def _memcpy(self, size_bytes: int) -> None:
        source, destination = (one.view() for one in self._memory)
        np.copyto(destination[:size_bytes], source[:size_bytes])


def _target(page_bytes: int, order: str, size_mib: int) -> Target | None:
    return Target(TARGETS[page_bytes]) if page_bytes in TARGETS and (order, size_mib) in TARGETED else None


@contextmanager
def copying(page_bytes: int, size_bytes: int) -> Iterator[Copier]:
    """Make populated pools that hold as many bytes, the source filled with noise, and the transport."""
    entries = [
        Entry(component="main", role="k", layer=layer, base=0, page_bytes=page_bytes, page_tokens=128, pages=pages)
        for pages in (size_bytes // page_bytes // LAYERS + 1,)
        for layer in range(LAYERS)
    ]
    manifest = lay_out(entries)
    with between(manifest, manifest) as copier:
        yield copier


@contextmanager
def between(source: Manifest, destination: Manifest) -> Iterator[Copier]:
    """Make two populated pools, the source filled with noise, and the transport."""
    loop = uvloop.new_event_loop()
    with regions(source.region_bytes, destination.region_bytes) as memory:
        copier = Copier(loop, (source, destination), memory)
        try:
            yield copier
        finally:
            copier.transport.close()
            loop.close()
