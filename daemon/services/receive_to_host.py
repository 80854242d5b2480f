"""RECEIVE into the host tier: a temporary pool holds just the transfer's pages, and its bytes become a snapshot.

The transfer sees an ordinary pool: the same layout, with pages in host tier memory. The memory of both the pool and the
snapshot is reserved when the pool is made, so that KV that has arrived cannot be lost to a full tier. Once the transfer
has settled, the pages are copied to the snapshot's blocks and the pool's memory is freed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.daemon.control.dispatch import Call
from kvferry.daemon.control.sessions import Session
from kvferry.daemon.services.offload import OffloadService
from kvferry.daemon.tiers.host_tier import LARGER_TIER, HostTier, SpaceRequest
from kvferry.daemon.tiers.operations import Operation, Operations
from kvferry.daemon.tiers.snapshots import Snapshot, new_segments
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.manifest import bytes_per_page, component_of, space_of, spaces_of
from kvferry.pools.planning.page_ranges import PageRange, lists_with_pages, page_ranges
from kvferry.pools.pool import Pool
from kvferry.pools.tiers.arena import Extent
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    KvferryError,
    OutOfMemoryError,
    UnknownComponentError,
    raised,
)
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.manifests import Entry, Manifest
from kvferry.protocol.transfer_messages import Receive

ALIGNMENT = 64


class HostReceive(msgspec.Struct):
    """A RECEIVE into the host tier: its temporary pool, page lists, memory (bytes in the host tier) and outcome."""

    session: Session
    request_id: str
    pool: Pool
    ranges: tuple[PageRange, ...]
    snapshot: Snapshot
    offset: int
    size_bytes: int
    before: HostReceive | None
    """The receive that had the same key before; it gets the key back where this one is refused."""
    error: KvferryError | None = None

    @property
    def key(self) -> tuple[int, str, str]:
        """Return (session number, request id, pool name), as the transfer's events name it."""
        return (self.session.session_id, self.request_id, self.pool.name)


class HostReceivePlan(NamedTuple):
    """A temporary pool that is not there yet.

    Attributes:
        pool: the engine's.
        laid_out: a manifest like that pool's, for just these pages, from base 0.
        ranges: the page lists.
    """

    pool: Pool
    laid_out: Manifest
    ranges: tuple[PageRange, ...]


class HostReceives:
    """Makes the temporary pools, and turns them into snapshots when their transfers settle."""

    def __init__(self, host: HostTier, service: OffloadService, operations: Operations) -> None:
        self._host = host
        self._service = service
        self._operations = operations
        self._live: dict[tuple[int, str, str], HostReceive] = {}
        self._waiting: dict[tuple[int, int], Call] = {}
        self._becoming: dict[int, HostReceive] = {}
        """Settled, and being copied to their snapshots, by operation."""

    def plan(self, body: Receive, pool: Pool) -> HostReceivePlan:
        """Return the pages that a RECEIVE asks for, in the layout of ``pool``.

        Raises:
            UnknownComponentError, LengthMismatchError: the lists do not fit the pool.
            OutOfMemoryError, TierOffError: the host tier is smaller, or off.
        """
        ids = _numbered(body.lists, pool.manifest, self._host.region.size_bytes)
        laid_out = _laid_out(pool.manifest, body.lists)
        return HostReceivePlan(pool, laid_out, page_ranges(body.lists, ids, laid_out, may_end_inside=True))

    def making_room(self, plan: HostReceivePlan) -> Iterator[None] | None:
        """Make room for a RECEIVE's pool and snapshot; return the steps for ``make_room`` where that takes several.

        Raises:
            OutOfMemoryError, OverloadedError: there cannot be, or the user has too many snapshots.
        """
        self._service.snapshots.check(plan.pool.tenant)
        segments = new_segments(plan.pool, lists_with_pages(plan.ranges))
        space_requests = [SpaceRequest(one.count, one.layout.block_bytes) for one in segments]
        if space_requests:  # else it is refused
            space_requests.append(SpaceRequest(1, plan.laid_out.region_bytes))
        steps = self._host.making_room(plan.pool.tenant, space_requests)
        return None if next(steps, self) is self else steps

    async def make_room(self, call: Call, steps: Iterator[None]) -> None:
        """Wait until there is room for a RECEIVE."""
        key = (call.session.session_id, call.message_id)
        self._waiting[key] = call
        try:
            await self._host.make_room(steps)
        finally:
            del self._waiting[key]

    def waiting(self) -> list[Call]:
        """Return the RECEIVEs that wait for room."""
        return [one for one in self._waiting.values() if one.session.is_pending(one.message_id)]

    def make(self, call: Call, body: Receive, plan: HostReceivePlan) -> HostReceive:
        """Return the temporary pool of a plan.

        Raises:
            EmptyPagesError: no list has a page.
            OutOfMemoryError, OverloadedError: the host tier is full, or busy.
        """
        region, session, (pool, laid_out, ranges) = self._host.region, call.session, plan
        size_bytes = laid_out.region_bytes
        snapshot = self._service.new_snapshot(call, pool, lists_with_pages(ranges))
        snapshot.state = "network"
        try:
            offset = int(self._host.reserve(pool.tenant, 1, size_bytes)[0])
        except KvferryError as error:
            self._service.failed(snapshot, error)
            raise
        made = Pool(
            pool.tenant,
            pool.name,
            _moved(laid_out, offset, region.size_bytes),
            region,
            model=pool.model,
            max_payload_bytes=pool.max_payload_bytes,
            becomes_snapshot=snapshot.name,
        )
        _clear(region, made.manifest, ranges)
        for allocator in made.allocators.values():
            allocator.allocate(session.owner_id, allocator.capacity)
        before = self._live.get((session.session_id, body.request_id, pool.name))
        host_receive = HostReceive(session, body.request_id, made, ranges, snapshot, offset, size_bytes, before)
        self._live[host_receive.key] = host_receive
        return host_receive

    def refused(self, host_receive: HostReceive, error: KvferryError) -> None:
        """Free what ``make`` took, because the state machine refused the receive request."""
        del self._live[host_receive.key]
        if host_receive.before is not None:
            self._live[host_receive.key] = host_receive.before
        self._drop_snapshot(host_receive, error)

    def on_event(self, session_id: int, event: Finished | Settled) -> None:
        """Handle a transfer's event: when a receive into the host tier settles, fill or drop its snapshot."""
        host_receive = (
            self._live.get((session_id, event.request_id, event.pool)) if event.direction == "receive" else None
        )
        if host_receive is None:
            return
        if isinstance(event, Finished):
            host_receive.error = raised(event.error) if event.error else None
            return
        del self._live[host_receive.key]
        if host_receive.error is not None:
            self._drop_snapshot(host_receive, host_receive.error)
            return
        snapshot, pool = host_receive.snapshot, host_receive.pool
        snapshot.state = "writing"
        operation = self._operations.of_nobody(host_receive.session, "offload", pool.name, snapshot.pages)
        with contextlib.ExitStack() as holds:
            holds.enter_context(self._service.being_written(snapshot))
            holds.enter_context(self._becoming_snapshot(operation, host_receive))
            ids = [one.ids for one in lists_with_pages(host_receive.ranges)]
            self._operations.begin(operation, holds, self._service.fill(operation, snapshot, pool, ids))

    def _drop_snapshot(self, host_receive: HostReceive, error: KvferryError) -> None:
        self._service.failed(host_receive.snapshot, error)
        self._free(host_receive)

    @contextlib.contextmanager
    def _becoming_snapshot(self, operation: Operation, host_receive: HostReceive) -> Iterator[None]:
        self._becoming[operation.number] = host_receive
        try:
            yield
        finally:
            del self._becoming[operation.number]
            self._free(host_receive)

    def held(self) -> Iterator[HostReceive]:
        """Yield every receive that holds a temporary pool and its memory."""
        for one in (*self._live.values(), *self._becoming.values()):
            yield one
            before = one.before
            while before is not None and before is not one:
                yield before
                before = before.before

    def extents(self) -> Iterator[Extent]:
        """Yield the memory in the host tier that the temporary pools hold."""
        for one in self.held():
            its = f"RECEIVE {one.request_id} into the host tier"
            yield Extent(np.array([one.offset]), one.size_bytes, its, one.pool.tenant)

    def _free(self, host_receive: HostReceive) -> None:
        self._host.release(host_receive.pool.tenant, np.array([host_receive.offset]), host_receive.size_bytes)


def _numbered(lists: Sequence[PageList], manifest: Manifest, most_bytes: int) -> list[PageIds]:
    """Return page ids for each list, numbered from 1 in each page space.

    Raises:
        UnknownComponentError: the pool lacks a component.
        OutOfMemoryError: the pages are larger than ``most_bytes``; checked before any array of ids is made.
    """
    used: Counter[str] = Counter()
    found = []
    for index, one in enumerate(lists):
        if component_of(manifest, one.component) is None:
            raise UnknownComponentError(
                f"the pool has no component {one.component!r}", field=f"lists[{index}].component"
            )
        space = space_of(manifest, one.component)
        wanted = one.pages * bytes_per_page(manifest, space)
        if wanted > most_bytes:
            raise OutOfMemoryError(
                f"{one.pages} pages are {wanted} bytes, the host tier has {most_bytes}",
                remedy=LARGER_TIER,
                field=f"lists[{index}].pages",
            )
        found.append(np.arange(used[space] + 1, used[space] + 1 + one.pages))
        used[space] += one.pages
    return found


def _laid_out(manifest: Manifest, lists: Sequence[PageList]) -> Manifest:
    """Return the manifest of a pool with just these pages, from base 0; each page space has a padding page."""
    counts = Counter(dict.fromkeys(spaces_of(manifest), 2))  # no allocator is smaller
    wanted: Counter[str] = Counter()
    for one in lists:
        wanted[space_of(manifest, one.component)] += one.pages
    for space, count in wanted.items():
        counts[space] = max(counts[space], count + 1)
    bases: dict[int, int] = {}  # old base -> new base: entries may share an array
    entries, base = [], 0
    for entry in manifest.entries:
        pages = counts[space_of(manifest, entry.component)]
        if entry.base not in bases:
            base += -base % ALIGNMENT
            bases[entry.base] = base
            base += pages * entry.page_bytes
        its_base, shape = bases[entry.base], _shape_of(entry, pages)
        entries.append(msgspec.structs.replace(entry, base=its_base, pages=pages, shape=shape))
    components = tuple(msgspec.structs.replace(one, pages=counts[one.space]) for one in manifest.components)
    return msgspec.structs.replace(
        manifest, entries=tuple(entries), components=components, pages=components[0].pages, region_bytes=base
    )


def _clear(region: HostRegion, manifest: Manifest, ranges: Sequence[PageRange]) -> None:
    """Zero what a transfer may leave unfilled: it may hold others' KV.

    That is optional components, cut lists, and, where several lists share a page space, each one's pages in the
    arrays of the others.
    """
    memory = region.view()
    lists = Counter(space_of(manifest, one.component) for one in lists_with_pages(ranges))
    for entry in manifest.entries:
        component = component_of(manifest, entry.component)
        if (
            component is None
            or component.kind != "paged"
            or component.name in manifest.optional_components
            or lists[component.space] > 1
        ):
            memory[entry.base : entry.base + entry.pages * entry.page_bytes] = 0


def _shape_of(entry: Entry, pages: int) -> tuple[int, ...] | None:
    """Return the entry's shape for ``pages`` pages, so that sources are checked as they are for the engine's pool."""
    return None if entry.shape is None else (entry.shape[0] // entry.pages * pages, *entry.shape[1:])


def _moved(manifest: Manifest, offset: int, region_bytes: int) -> Manifest:
    """Return the manifest with its entries ``offset`` bytes further into a region of ``region_bytes``."""
    entries = tuple(msgspec.structs.replace(one, base=one.base + offset) for one in manifest.entries)
    return msgspec.structs.replace(manifest, entries=entries, region_bytes=region_bytes)
