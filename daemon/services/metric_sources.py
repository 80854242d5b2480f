"""Where the values of metrics come from: each function returns a source over a part of the daemon, read when asked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvferry.daemon.control.http_socket import Asker
from kvferry.daemon.control.kept_bytes import ConnectionBytes
from kvferry.daemon.control.loop_lag import LoopLag
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import SessionRegistry
from kvferry.daemon.peers.links import PeerLinks
from kvferry.daemon.process.descriptors import Descriptors
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.quota import Quota
from kvferry.daemon.services import metric_catalogue as catalogue
from kvferry.daemon.services.copy_times import CopyTimes
from kvferry.daemon.services.metric_catalogue import TIMED, CounterNames, Sample
from kvferry.daemon.services.metrics import Source
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.services.tables import TableService
from kvferry.daemon.services.tiers import Tiers
from kvferry.daemon.transfer.endpoints import ReceiveRequest, SendRequest
from kvferry.daemon.transfer.registry import Endpoints
from kvferry.daemon.transfer.transitions import State
from kvferry.daemon.transports.network_receiver import NetworkReceiver
from kvferry.pools.allocator import PageCounts
from kvferry.pools.planning.manifest import bytes_per_page
from kvferry.protocol.limits import Limits

MOST_POOLS: Final = 64
"""Pools that are named; the others are summed, so that no engine makes up series without end."""

MOST_DEVICES: Final = 64
"""Devices that are named: those that somebody merely asked for are not here."""

AT_ONCE: Final = 256
"""Transfers that are looked at before others have a turn: some 0.1 ms."""

PAGE_STATES: Final = PageCounts._fields[:-1]
Samples = Iterator[Sample | None]


def of_counters(counters: Counters) -> Source:
    """Return the source of all that is counted."""
    names, times = CounterNames(), CounterNames(TIMED)

    def samples(_asker: Asker) -> Samples:
        yield from names.samples(counters.snapshot())
        for name, seen in counters.times().items():
            found = times.of(name)
            if found is not None:
                yield Sample(found[0].metric, found[1], seen)

    return samples


def of_copies(copies: CopyTimes) -> Source:
    """Return the source of the time in which copies were under way."""
    return lambda _asker: [Sample(catalogue.COPY_BUSY_SECONDS, (way,), busy) for way, busy in copies.busy_seconds()]


def of_pools(pools: PoolRegistry) -> Source:
    """Return the source of pools, with the pages of each, or of all of a device together where it is not named."""

    def samples(asker: Asker) -> Samples:
        every = list(pools)
        counts, memory = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for one in every:
            labels = (one.region.device, "daemon" if one.registered_by is None else "engine")
            counts[labels] += 1
            memory[labels] += one.manifest.region_bytes
        yield from (Sample(catalogue.POOLS, labels, count) for labels, count in counts.items())
        yield from (Sample(catalogue.POOL_MEMORY_BYTES, labels, size) for labels, size in memory.items())
        others: dict[tuple[str, str], PageCounts] = {}
        for number, pool in enumerate(every):
            yield None
            if pools.find(pool.tenant, pool.name) is not pool:
                continue  # deleted in that pause
            for space, allocator in pool.allocators.items():
                found = allocator.counts()
                if asker == "operator" and number < MOST_POOLS:
                    its = (str(pool.tenant), pool.name, pool.region.device, space)
                    yield from _pages(its, found)
                    yield Sample(catalogue.POOL_PAGE_BYTES, its, bytes_per_page(pool.manifest, space))
                else:
                    key = (pool.region.device, space)
                    others[key] = _together(others[key], found) if key in others else found
        for (device, space), found in others.items():
            yield from _pages(("", "", device, space), found)

    return samples


def _pages(labels: tuple[str, ...], counts: PageCounts) -> Iterator[Sample]:
    for state, count in zip(PAGE_STATES, counts, strict=False):
        yield Sample(catalogue.POOL_PAGES, (*labels, state), count)
    yield Sample(catalogue.POOL_FREE_RUN_PAGES, labels, counts.largest_free_run)


def _together(one: PageCounts, other: PageCounts) -> PageCounts:
    together = PageCounts(*(a + b for a, b in zip(one, other, strict=True)))
    return together._replace(largest_free_run=max(one.largest_free_run, other.largest_free_run))


def of_sessions(sessions: SessionRegistry, socket: SessionSocket) -> Source:
    """Return the source of sessions."""

    def samples(_asker: Asker) -> Samples:
        connected = sum(socket.is_connected(one) for one in sessions)
        yield Sample(catalogue.SESSIONS, ("connected",), connected)
        yield Sample(catalogue.SESSIONS, ("away",), len(sessions) - connected)
        yield Sample(catalogue.UNACKNOWLEDGED_EVENTS, (), sum(len(one.unacknowledged) for one in sessions))

    return samples


def of_kept(
    requests: Quota, payloads: Quota, sessions: SessionRegistry, connections: ConnectionBytes, limits: Limits
) -> Source:
    """Return the source of what others make the daemon keep; ``payloads`` are a part of ``requests``."""

    def samples(_asker: Asker) -> Samples:
        for what, size, most in (
            ("requests", requests.total, requests.most),
            ("payloads", payloads.total, payloads.most),
            ("replies", sessions.reply_bytes, limits.max_kept_reply_bytes),
            ("connections", connections.total, connections.most),
        ):
            yield Sample(catalogue.KEPT_BYTES, (what,), size)
            yield Sample(catalogue.KEPT_LIMIT_BYTES, (what,), most)

    return samples


def of_transfers(endpoints: Endpoints) -> Source:
    """Return the source of transfers that have not settled."""

    def samples(_asker: Asker) -> Samples:
        counts = Counter[tuple[str, str]](
            {(way, state): 0 for way in ("send", "receive") for state in ("waiting", "moving", "finished")}
        )
        oldest: dict[tuple[str, str], float] = {}
        for number, one in enumerate([*endpoints, *endpoints.quarantined]):
            key = (one.direction, _state_of(one))
            counts[key] += 1
            oldest[key] = min(oldest.get(key, one.created_at), one.created_at)
            if number % AT_ONCE == 0:
                yield None
        now = time.monotonic()
        for key, count in counts.items():
            yield Sample(catalogue.TRANSFERS, key, count)
            yield Sample(catalogue.OLDEST_TRANSFER_SECONDS, key, now - oldest[key] if key in oldest else 0.0)

    return samples


def _state_of(endpoint: SendRequest | ReceiveRequest) -> str:
    if endpoint.state is not State.OPEN:
        return "quarantined" if endpoint.state is State.QUARANTINED else "finished"
    return "waiting" if endpoint.first_copy_at is None else "moving"


def of_peers(links: PeerLinks, receiver: NetworkReceiver | None) -> Source:
    """Return the source of other daemons, and of the buffers into which those of other hosts write."""

    def samples(_asker: Asker) -> Samples:
        status = links.status()
        for state, count in Counter(one.state for one in status).items():
            yield Sample(catalogue.PEERS, (state,), count)
        slowest_us = max((one.round_trip_us for one in status if one.state == "up"), default=0)
        yield Sample(catalogue.PEER_ROUND_TRIP_SECONDS, (), slowest_us / 1e6)
        if receiver is not None:
            network = receiver.status()
            used = network.bounce_buffers - network.free - network.quarantined
            for buffers, count in (("free", network.free), ("credited", used), ("quarantined", network.quarantined)):
                yield Sample(catalogue.NETWORK_BUFFERS, (buffers,), count)
            yield Sample(catalogue.NETWORK_READY, (), network.state == "ready")

    return samples


def of_devices(devices: Devices, tables: TableService) -> Source:
    """Return the source of devices, and of the graph tables on them."""

    def samples(_asker: Asker) -> Samples:
        for one in list(devices.status())[:MOST_DEVICES]:
            yield Sample(catalogue.DEVICE_READY, (one.device,), one.state == "ready")
            others = max(0, one.total_bytes - one.free_bytes - one.pool_bytes)
            for state, size in (("free", one.free_bytes), ("pools", one.pool_bytes), ("others", others)):
                yield Sample(catalogue.DEVICE_BYTES, (one.device, state), size)
            yield Sample(catalogue.DEVICE_STREAMS, (one.device,), devices.streams(one.device))
        every = list(tables.status())
        waiting = Counter(one.device for one in every if one.waiting)
        for device, count in Counter(one.device for one in every).items():
            yield Sample(catalogue.TABLES, (device,), count)
            yield Sample(catalogue.TABLES_WAITING, (device,), waiting[device])

    return samples


def of_tiers(tiers: Tiers) -> Source:
    """Return the source of tiers and their operations."""

    def samples(_asker: Asker) -> Samples:
        for one in tiers.status():
            if one.state == "off":
                continue
            slow = one.state.startswith("slow: ")
            yield Sample(catalogue.TIER_READY, (one.tier,), slow or one.state == "ready")
            yield Sample(catalogue.TIER_SLOW, (one.tier,), slow)
            yield Sample(catalogue.TIER_BLOCKS, (one.tier,), one.blocks)
            cached = one.used_bytes - one.pinned_bytes
            free = max(0, one.total_bytes - one.used_bytes)
            for state, size in (("free", free), ("cached", cached), ("pinned", one.pinned_bytes)):
                yield Sample(catalogue.TIER_BYTES, (one.tier, state), size)
            if one.tier == "host":
                yield Sample(catalogue.TIER_SNAPSHOTS, (), one.snapshots)
        states = Counter((one.kind, "waiting" if one.waits_for else "copying") for one in tiers.operations)
        yield from (Sample(catalogue.OPERATIONS, labels, count) for labels, count in states.items())

    return samples


def of_descriptors(descriptors: Descriptors) -> Source:
    """Return the source of descriptors."""

    def samples(_asker: Asker) -> Samples:
        promised = descriptors.promised()
        yield Sample(catalogue.DESCRIPTORS, ("promised",), promised)
        yield Sample(catalogue.DESCRIPTORS, ("free",), max(0, descriptors.room - promised))

    return samples


def of_loop(lag: LoopLag) -> Source:
    """Return the source of the loop's lag."""
    return lambda _asker: [Sample(catalogue.LOOP_LAG_SECONDS, (), lag.seconds.snapshot())]
