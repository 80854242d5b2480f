"""The memory that daemons of other hosts may write: bounce buffers, and pages where ``network.direct`` is on.

A bounce buffer is free, credited to one (peer, write credit), or quarantined: its write credit is over, but a write of
the peer may still land. Quarantine ends for a single bounce buffer when the peer reports that its writes have ended, or
for all at once by a fence: this daemon destroys and rebuilds its network engine, after which no old write can land. As
a fence aborts the writes of live write credits too, it waits for them to end, with no new ones meanwhile, for at most
``drain_timeout_s``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from collections.abc import Set as AbstractSet
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.daemon.transports.mooncake import MooncakeEngine
from kvferry.daemon.transports.mooncake_native import MooncakeSettings, check_delivery
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.integrity import Walk, problem_at
from kvferry.pools.pool import Pool
from kvferry.protocol.config.schema import STAGING_BUFFERS, Config, NetworkConfig
from kvferry.protocol.errors import ConfigError, KvferryError

log = structlog.get_logger(__name__)

State = Literal["pending", "ready", "refused"]


class FenceBounds(NamedTuple):
    """When a fence is due.

    Attributes:
        quarantined_bytes: more quarantined bytes than this require a fence.
        quarantined_s: a bounce buffer that is quarantined for longer requires a fence.
        drain_timeout_s: how long a fence that is due waits for live write credits to end.
        pages_s: pages that are quarantined for longer require a fence; where nothing else is in flight, at once.
            A transfer waits for them to settle, as for no bounce buffer.
    """

    quarantined_bytes: int
    quarantined_s: float
    drain_timeout_s: float
    pages_s: float


class Target(NamedTuple):
    """What a write credit allows a peer to write.

    Attributes:
        number: identifies it: a bounce buffer's index, 0 to ``count - 1``, or for pages a higher number.
        address: the first byte in this process, by which the peer's writes address it.
        runs: the address and bytes of each run of pages; () for a bounce buffer.
    """

    number: int
    address: int
    runs: tuple[tuple[int, int], ...] = ()


class _Credited(NamedTuple):
    peer: Incarnation
    credit_id: int
    size_bytes: int
    quarantined_since_s: float = 0.0


class BounceBuffers:
    """``count`` contiguous buffers of ``bounce_buffer_bytes`` each, from ``base_address``, in memory of the caller.

    Pages that peers write directly are tracked as bounce buffers that exist while they are credited or quarantined.
    Knows nothing of sockets, engines or clocks: times are seconds of any clock that the caller reads.
    """

    def __init__(self, base_address: int, bounce_buffer_bytes: int, count: int, bounds: FenceBounds) -> None:
        assert base_address > 0, base_address
        assert bounce_buffer_bytes > 0, bounce_buffer_bytes
        assert count > 0, count
        self.bounce_buffer_bytes: Final = bounce_buffer_bytes
        self.count: Final = count
        self._base_address = base_address
        self.bounds: Final = bounds
        self._free = list(range(count - 1, -1, -1))  # a stack: lowest first, then the last one returned
        self._credited: dict[int, _Credited] = {}
        self._quarantined: dict[int, _Credited] = {}  # oldest first
        self._page_numbers = itertools.count(count)
        self._draining_since_s: float | None = None
        self._fencing = False

    def __repr__(self) -> str:
        """Show the number of bounce buffers in each state."""
        state = " draining" if self.draining else ""
        return (
            f"<BounceBuffers free={len(self._free)} credited={len(self._credited)} "
            f"quarantined={len(self._quarantined)} bounce_buffer_bytes={self.bounce_buffer_bytes}{state}>"
        )

    @property
    def free(self) -> int:
        """Return the number of free bounce buffers, for which there are write credits unless a fence is due."""
        return len(self._free)

    @property
    def credits(self) -> int:
        """Return the number of live write credits, of bounce buffers and of pages."""
        return len(self._credited)

    @property
    def quarantined_bytes(self) -> int:
        """Return the number of quarantined bytes, of bounce buffers and of pages."""
        return sum(one.size_bytes for one in self._quarantined.values())

    @property
    def quarantined(self) -> int:
        """Return the number of quarantined bounce buffers, not counting pages."""
        return sum(number < self.count for number in self._quarantined)

    @property
    def draining(self) -> bool:
        """Return whether a fence waits for live write credits to end or is in progress: nothing is credited."""
        return self._fencing or self._draining_since_s is not None

    def oldest_quarantine_s(self, now_s: float) -> float:
        """Return the age in seconds of the oldest quarantine; 0 where there is none."""
        for quarantined in self._quarantined.values():
            return now_s - quarantined.quarantined_since_s
        return 0.0

    def take(self, peer: Incarnation, credit_id: int) -> Target | None:
        """Give a peer a write credit for a bounce buffer; None where none is free or a fence is due."""
        if self.draining or not self._free:
            return None
        number = self._free.pop()
        self._credited[number] = _Credited(peer, credit_id, self.bounce_buffer_bytes)
        return Target(number, self._base_address + number * self.bounce_buffer_bytes)

    def take_pages(self, peer: Incarnation, credit_id: int, runs: tuple[tuple[int, int], ...]) -> Target | None:
        """Give a peer a write credit for runs of pages, by address and bytes; None where a fence is due."""
        if self.draining:
            return None
        number = next(self._page_numbers)
        self._credited[number] = _Credited(peer, credit_id, sum(size_bytes for _, size_bytes in runs))
        return Target(number, runs[0][0], runs)

    def give_back(self, number: int, peer: Incarnation, credit_id: int) -> bool:
        """Free the buffer of a write credit whose writes have ended. Return False where that is over already.

        Ends a quarantine as well, so a late report of ended writes counts. A report that comes after a fence and a new
        write credit of the same buffer does not match that one and changes nothing.
        """
        was_held = any(_take_out(states, number, peer, credit_id) for states in (self._credited, self._quarantined))
        if was_held:
            self._put_back(number)
        return was_held

    def quarantine(self, number: int, peer: Incarnation, credit_id: int, now_s: float) -> bool:
        """Quarantine the buffer of a write credit whose writes may still land.

        Return False where the write credit is over already.
        """
        credited = _take_out(self._credited, number, peer, credit_id)
        if credited is not None:
            self._quarantined[number] = credited._replace(quarantined_since_s=now_s)
        return credited is not None

    def quarantine_peer(self, peer: Incarnation, now_s: float) -> list[int]:
        """End all write credits of a lost peer; return the numbers that are quarantined by this."""
        lost = [(number, credited.credit_id) for number, credited in self._credited.items() if credited.peer == peer]
        for number, credit_id in lost:
            self.quarantine(number, peer, credit_id, now_s)
        return [number for number, _ in lost]

    def problems(self, awaited: AbstractSet[int]) -> Walk:
        """Yield the buffers that are not in exactly one state; ``awaited``: those of live write credits."""
        known = Counter(number for number in itertools.chain(self._free, self._credited, self._quarantined))
        wrong = [number for number in range(self.count) if known[number] != 1]
        if wrong:
            yield problem_at("a bounce buffer is in none or several of the states free, credited, quarantined", wrong)
        lost = sorted(self._credited.keys() - awaited)
        if lost:
            yield problem_at("a credited buffer, or credited pages, whose write credit nothing waits for", lost)

    def fence_due(self, now_s: float, *, writing: bool = False) -> bool:
        """Return whether to fence now. If a bound is exceeded while a write credit is live, start draining instead.

        Pages are fenced at once where nothing is in flight: it disturbs nobody.

        ``writing``: this daemon has writes in flight, which a fence would abort, so it waits for those too.
        Draining ends without a fence when quarantine falls below its bounds again. False while a fence is in progress.
        """
        idle = not self._credited and not writing
        if self._fencing or not (self._bounds_exceeded(now_s) or (idle and self._oldest_pages_s(now_s) is not None)):
            self._draining_since_s = None
            return False
        if self._draining_since_s is None:
            self._draining_since_s = now_s
        return idle or now_s - self._draining_since_s >= self.bounds.drain_timeout_s

    def fence_begins(self, now_s: float) -> list[int]:
        """Quarantine what is still credited, just before the engine is destroyed; return the numbers.

        Nothing is credited until ``fenced``, also where the engine cannot be rebuilt and ``fenced`` is never called.
        """
        self._fencing = True
        peers = {credited.peer for credited in self._credited.values()}
        ended = [number for peer in peers for number in self.quarantine_peer(peer, now_s)]
        assert not self._credited, "a write credit outlived its engine"
        return ended

    def fenced(self) -> int:
        """Free what is quarantined, after the engine was rebuilt; return how many buffers and write credits of pages.

        Nothing is credited after ``fence_begins``, so everything quarantined was credited before the fence.
        """
        assert self._fencing, "fenced() without fence_begins()"
        assert not self._credited, "credited while the engine was being rebuilt"
        freed = list(self._quarantined)
        self._quarantined.clear()
        for number in freed:
            self._put_back(number)
        self._draining_since_s = None
        self._fencing = False
        return len(freed)

    def _put_back(self, number: int) -> None:
        if number < self.count:
            self._free.append(number)

    def _bounds_exceeded(self, now_s: float) -> bool:
        pages_s = self._oldest_pages_s(now_s)
        return (
            self.quarantined_bytes > self.bounds.quarantined_bytes
            or self.oldest_quarantine_s(now_s) > self.bounds.quarantined_s
            or (pages_s is not None and pages_s > self.bounds.pages_s)
        )

    def _oldest_pages_s(self, now_s: float) -> float | None:
        """Return the age in seconds of the oldest quarantine of pages; None where there is none."""
        ages = (now_s - one.quarantined_since_s for number, one in self._quarantined.items() if number >= self.count)
        return next(ages, None)


def _take_out(states: dict[int, _Credited], number: int, peer: Incarnation, credit_id: int) -> _Credited | None:
    """Remove and return the state of a write credit; None where the buffer is another's or in another state."""
    credited = states.get(number)
    return states.pop(number) if credited is not None and credited[:2] == (peer, credit_id) else None


class _Registered:
    """One pool's memory, kept mapped by the view."""

    def __init__(self, view: npt.NDArray[np.uint8]) -> None:
        self.view = view
        self.address = int(view.ctypes.data)
        self.state: State = "pending"
        self.registering: asyncio.Task[None]


class DirectPages:
    """The pools whose pages peers write directly: registered on first use, until they are deleted. For the loop.

    Everybody who reaches the engine's port can write any byte of a registered pool, and a late write lands in a page.
    So this is optional, the receiver holds pages until nothing can land in them, and a pool's memory stays mapped until
    it is unregistered.
    """

    def __init__(self, engine: MooncakeEngine) -> None:
        self._listeners: list[Callable[[], None]] = []
        self._engine = engine
        self._pools: dict[Pool, _Registered] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        """Show the number of pools in each state."""
        states = [registered.state for registered in self._pools.values()]
        return f"<DirectPages ready={states.count('ready')} pending={states.count('pending')}>"

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever a pool stops being pending."""
        self._listeners.append(listener)

    def state(self, pool: Pool) -> State:
        """Return whether peers may write the pool's pages; start registering it if it is new."""
        registered = self._pools.get(pool)
        if registered is None:
            assert isinstance(pool.region, HostRegion), pool
            registered = self._pools[pool] = _Registered(pool.region.view())
            registered.registering = self._run(self._register(pool, registered))
        return registered.state

    def drop(self, pool: Pool) -> None:
        """Unregister a pool that has no writes in flight; its memory stays mapped until that is done."""
        registered = self._pools.pop(pool, None)
        if registered is not None:
            self._run(self._unregister(registered))

    async def close(self) -> None:
        """Cancel what is in progress. Called after the engine was closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _register(self, pool: Pool, registered: _Registered) -> None:
        try:
            await self._engine.register(registered.address, registered.view.nbytes)
        except KvferryError as error:
            registered.state = "refused"
            log.warning("pages are not written directly, but through bounce buffers", pool=pool.name, cause=str(error))
        else:
            registered.state = "ready"
        for listener in self._listeners:
            listener()

    async def _unregister(self, registered: _Registered) -> None:
        await asyncio.wait([registered.registering])
        if registered.state == "ready":
            with contextlib.suppress(KvferryError):  # the engine is closed, which unregisters everything
                await self._engine.unregister(registered.address)


class NetworkTuning(msgspec.Struct, frozen=True, kw_only=True):
    """What the network chooses itself.

    Outgoing bytes are gathered in ``staging`` buffers of ``bounce_buffer_bytes``. A write may take ``write_timeout_s``.
    Buffers in which a write may still land are quarantined: beyond ``quarantined_bytes`` (None: half of all), or after
    ``quarantined_s``, the engine is rebuilt to free them, after running transfers had ``drain_timeout_s`` to end. Pages
    that peers may write directly are quarantined in the same way, but for ``pages_s`` at most.
    """

    staging: int = STAGING_BUFFERS
    write_timeout_s: float = 30.0
    quarantined_bytes: int | None = None
    quarantined_s: float = 60.0
    drain_timeout_s: float = 5.0
    pages_s: float = 5.0


class NetworkMemory:
    """The engine that writes between hosts and the memory that it may access. Made by ``open_network``.

    Attributes:
        config: its configuration, and ``tuning`` what it chose itself.
        engine: the network engine; it listens.
        bounce_buffers: the memory that peers write.
        staging: the memory that outgoing bytes are gathered in, in buffers of ``bounce_buffer_bytes``.
        pages: whole pages that peers may write directly; None where the configuration does not allow it.
    """

    def __init__(
        self,
        config: NetworkConfig,
        tuning: NetworkTuning,
        engine: MooncakeEngine,
        buffers: HostRegion,
        staging: HostRegion,
    ) -> None:
        bounds = FenceBounds(
            buffers.size_bytes // 2 if tuning.quarantined_bytes is None else tuning.quarantined_bytes,
            tuning.quarantined_s,
            tuning.drain_timeout_s,
            tuning.pages_s,
        )
        self.config = config
        self.tuning = tuning
        self.engine = engine
        self.staging = staging
        self.bounce_buffers = BounceBuffers(buffers.address, config.bounce_buffer_bytes, config.bounce_buffers, bounds)
        self.pages = DirectPages(engine) if config.direct else None
        self._regions = (buffers, staging)

    def __repr__(self) -> str:
        """Show its session name and buffers."""
        return f"<NetworkMemory {self.engine.session_name} {self.bounce_buffers!r}>"

    def drop_pool(self, pool: Pool) -> None:
        """Unregister a pool's pages, if peers may write them."""
        if self.pages is not None:
            self.pages.drop(pool)

    async def stop(self) -> None:
        """Stop listening; no write lands afterwards."""
        await self.engine.close()
        if self.pages is not None:
            await self.pages.close()

    def close(self) -> None:
        """Unmap the memory; no thread may gather or scatter any more."""
        for region in self._regions:
            region.close()


def network_settings(config: Config) -> MooncakeSettings:
    """Return how the engine is created.

    Raises:
        ConfigError: no address to listen on.
    """
    address = config.network_address
    if not address:
        raise ConfigError("set the address to listen at, or peers.listen", field="network.address")
    two_writes = 2 * config.network.bounce_buffer_bytes
    return MooncakeSettings(address=address, protocol=config.network.protocol, max_bytes_in_flight_per_peer=two_writes)


async def open_network(config: Config, tuning: NetworkTuning) -> NetworkMemory | None:
    """Start listening for writes of other hosts; None where no transport between hosts is configured.

    Raises:
        ConfigError: no address to listen on, Mooncake is not installed, or no bytes come by the address.
        OutOfMemoryError: no memory for bounce buffers or staging.
        TransferFailedError: Mooncake could not start.
    """
    network = config.network
    if network.transport == "none":
        return None
    settings = network_settings(config)
    began_s = time.monotonic()
    await asyncio.to_thread(check_delivery, settings)
    checked_ms = round((time.monotonic() - began_s) * 1000)
    engine = MooncakeEngine(settings)
    buffers = HostRegion.create("network", network.bounce_buffers * network.bounce_buffer_bytes)
    staging = HostRegion.create("staging", tuning.staging * network.bounce_buffer_bytes)
    await engine.__aenter__()
    # Peers may write whatever is registered, so only this is, unless pages are written directly.
    await engine.register(buffers.address, buffers.size_bytes)
    log.info(
        "network ready",
        transport=network.transport,
        session=engine.session_name,
        bounce_buffers=network.bounce_buffers,
        checked_ms=checked_ms,
    )
    return NetworkMemory(network, tuning, engine, buffers, staging)
