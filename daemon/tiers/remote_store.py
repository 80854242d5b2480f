"""The remote tier: blocks in a Mooncake Store that many nodes share, asked from the control loop without blocking it.

The store is a help, never a need: while it is away every call says at once that nothing is there, which is logged once
when it goes and once when it is back. What lies there may be gone, damaged or forged: whoever fetches a block compares
its digests. Knows nothing of pages, tenants or what the other tiers hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import os
import time
from collections.abc import Sequence
from typing import Final, Self

import structlog

from kvferry.daemon.config.remote_tier import RemoteTierConfig
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.tiers.remote_value import StoredHeader, header_bytes, pack_header, unpack_header
from kvferry.daemon.tiers.store_link import GRACE_S, StoreAwayError, StoreLink, to_its_end
from kvferry.daemon.tiers.store_messages import (
    MASTER_AWAY,
    NO_ROOM,
    OBJECT_NOT_FOUND,
    OK,
    RPC_FAIL,
    RPC_TIMEOUT,
    Answer,
    Begin,
    Exists,
    GetBlock,
    Ping,
    PutBlock,
    Range,
    Remove,
    pack_ranges,
)
from kvferry.daemon.tiers.store_moves import Moved, StoreMoves
from kvferry.daemon.transports.mooncake_native import INSTALL, MooncakeSettings, check_address, check_protocol
from kvferry.protocol.errors import ConfigError

PING_INTERVAL_S: Final = 1.0
MAX_LOOKUPS: Final = 64
"""Lookups under way; one more finds nothing."""

_OUTCOMES: Final = {OK: "done", OBJECT_NOT_FOUND: "missed", NO_ROOM: "no_room"}
_PROBE: Final = ["kvferry/1/probe"]
log = structlog.get_logger(__name__)


class RemoteStore:
    """See the module. ``async with`` begins to join the store and leaves it; all methods belong on the loop."""

    def __init__(
        self, config: RemoteTierConfig, address: str, arena_fd: int, arena_bytes: int, counters: Counters
    ) -> None:
        """Prepare.

        Args:
            config: its ``address`` is not looked at.
            address: this host's, without a port, that other nodes reach it by.
            arena_fd: the memfd that all ranges are of; stays the caller's, and open until ``close``.
            arena_bytes: its size.
            counters: get ``remote.…``.
        """
        self._config = config
        self._address = address
        self._arena_fd = arena_fd
        self._arena_bytes = arena_bytes
        self._counters = counters
        self._link: StoreLink | None = None  # while the process is one of the store
        self._master_answers = False
        self._told_away = False
        self._lookups = 0
        self._moves = StoreMoves(config.threads, config.timeout_s, lambda: self._reachable)
        self._changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Show the store, and whether it is there."""
        return f"<RemoteStore {self._config.master} {'there' if self.available else 'away'} link={self._link!r}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def available(self) -> bool:
        """Return whether the store can be asked."""
        return self._reachable is not None

    @property
    def _reachable(self) -> StoreLink | None:
        """The process that can be asked now: its master answered last time."""
        return self._link if self._master_answers else None

    @property
    def process_id(self) -> int:
        """Return the store process's number; 0 while it is none of the store."""
        return 0 if self._link is None else self._link.pid

    async def changed(self) -> None:
        """Wait until ``available`` has changed once more."""
        await self._changed.wait()

    async def start(self) -> None:
        """Begin to join the store. Does not wait for it: it may come later, or never.

        Raises:
            ConfigError: Mooncake is not installed, or the address is none of this host's.
        """
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(f"Mooncake is not installed; {INSTALL}", field="tiers.remote.transport")
        await asyncio.to_thread(check_address, self._address)
        check_protocol(self._config.protocol)
        self._supervisor = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """Leave the store: the blocks that this node holds are lost to all. What runs ends first. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)

    # --- what it is asked ---

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which names the store has; none where it is away or does not say in time. Empty for no names.

        What is there is not evicted for the next ten seconds, but may go with its node.
        """
        link = self._reachable
        nothing = [False] * len(names)
        if link is None or not names:
            return nothing
        if self._lookups >= MAX_LOOKUPS:
            self._counters.add("remote.lookups_refused")
            return nothing
        self._counters.add("remote.lookups")
        timeout_s = self._config.lookup_timeout_s
        until_s = time.monotonic() + timeout_s
        self._lookups += 1
        try:
            async with asyncio.timeout(timeout_s):
                answer = await link.ask(Exists(link.next_number(), until_s, list(names)))
        except TimeoutError:
            self._counters.add("remote.lookups_late")
            return nothing
        except StoreAwayError:
            return nothing
        finally:
            self._lookups -= 1
        self._look_at(link, answer.status)
        if answer.status != OK or len(answer.found) != len(names):
            return nothing
        found = [one == 1 for one in answer.found]
        self._counters.add("remote.found", sum(found))
        return found

    async def put(self, name: str, ranges: Sequence[Range], *, parent: bytes | None, digests: Sequence[int]) -> bool:
        """Store ranges of the arena, one after the other; return whether the store has the name now.

        The ranges must not change until this returns; also where the caller is cancelled, it returns only once nobody
        reads them. A name that is there stays as it is.

        Args:
            name: from ``remote_name``.
            ranges: (offset, size) in bytes, at least one.
            parent: 16 bytes, for whoever fetches the block.
            digests: XXH3-64 of each page.
        """
        block = PutBlock(name, pack_header(name, parent, digests), pack_ranges(ranges))
        moved = await self._move(block, "puts", ranges)
        return moved is not None and moved.status == OK

    async def get(self, name: str, ranges: Sequence[Range], *, pages: int) -> StoredHeader | None:
        """Fetch a block of so many pages into ranges of the arena; return what its bytes must be. None: not there.

        The ranges hold anything until the caller has compared all digests, and must be the caller's until this returns;
        also where the caller is cancelled, it returns only once nobody writes there.
        """
        moved = await self._move(GetBlock(name, header_bytes(pages), pack_ranges(ranges)), "gets", ranges)
        if moved is None or moved.status != OK:
            return None
        header = unpack_header(name, moved.header)
        if header is None:
            self._counters.add("remote.headers_damaged")
            log.warning("damaged block in the remote tier", name=name)
            await self.remove([name])
        return header

    async def remove(self, names: Sequence[str]) -> bool:
        """Let the store forget names, also where others are fetching them; return whether it has none of them now."""
        link = self._reachable
        if link is None:
            return False
        try:
            async with asyncio.timeout(self._config.hung_s):
                answer = await link.ask(Remove(link.next_number(), list(names)))
        except (TimeoutError, StoreAwayError):
            return False
        self._look_at(link, answer.status)
        return answer.status == OK

    async def _move(self, block: PutBlock | GetBlock, what: str, ranges: Sequence[Range]) -> Moved | None:
        """Return how a block's way ended; nothing of it is under way any more."""
        link = self._reachable
        if link is None:
            return None
        size_bytes = sum(size for _, size in ranges)
        moved = await self._moves.move(block, size_bytes)
        outcome = "failed" if moved is None else _OUTCOMES.get(moved.status, "failed")
        self._counters.add(f"remote.{what}_{outcome}")
        if outcome == "done":
            self._counters.add(f"remote.{what}_bytes", size_bytes)
        if moved is not None:
            self._look_at(link, moved.status)
        return moved

    # --- whether it is there ---

    async def _supervise(self) -> None:
        pause_s = self._config.retry_s
        while True:
            began_s = time.monotonic()
            try:
                await self._reach_master()
                why = await self._one_life()
            except StoreAwayError as error:
                why = str(error)
            self._notify(why)
            if time.monotonic() - began_s > self._config.retry_at_most_s:
                pause_s = self._config.retry_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.retry_at_most_s)

    async def _reach_master(self) -> None:
        """Wait until something listens there: Mooncake would try for minutes, and tell nobody."""
        host, _, port = self._config.master.rpartition(":")
        while True:
            try:
                async with asyncio.timeout(self._config.hung_s):
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
            except (OSError, OverflowError) as error:  # also TimeoutError
                self._notify(f"its master at {self._config.master} takes no connections: {error!r}")
                await asyncio.sleep(self._config.retry_s)
            else:
                return

    async def _one_life(self) -> str:
        """Start a process and watch it until its end; return why it ended."""
        config = self._config
        begin = Begin(
            address=self._address,
            master=config.master,
            protocol=config.protocol,
            segment_bytes=config.segment_bytes,
            arena_bytes=self._arena_bytes,
            threads=config.threads,
        )
        link = StoreLink(begin, self._arena_fd, self._environment())
        grace_s = 0.0
        try:
            self._counters.add("remote.processes_started")
            endpoint = await link.open(config.start_timeout_s)
            self._link = link
            self._there(endpoint)
            await self._watch(link, endpoint)
        except asyncio.CancelledError:
            grace_s = GRACE_S
            raise
        finally:
            self._link = None
            why = await to_its_end(link.end(grace_s))
        return why

    async def _watch(self, link: StoreLink, endpoint: str) -> None:
        probe: asyncio.Future[Answer] | None = None
        while not link.ended.is_set():
            ping = link.ask(Ping(link.next_number()))
            done, _ = await asyncio.wait({ping}, timeout=self._config.hung_s)
            if not done:
                ping.cancel()
                link.kill(f"the store process said nothing for {self._config.hung_s} s")
                await link.ended.wait()
                break
            if ping.exception() is not None:
                break
            if ping.result().status == MASTER_AWAY:
                self._master_lost()
            # Mooncake believes in a master that is gone for some seconds more: only an answer shows that it is back.
            if not self._master_answers:
                if probe is not None and probe.done() and probe.exception() is None and probe.result().status >= OK:
                    self._there(endpoint)
                    probe = None
                elif probe is None or probe.done():
                    probe = link.ask(Exists(link.next_number(), math.inf, _PROBE))
            await _wait_for(link.ended, PING_INTERVAL_S)
        if probe is not None:
            await asyncio.gather(probe, return_exceptions=True)

    def _look_at(self, link: StoreLink, status: int) -> None:
        if status in (RPC_FAIL, RPC_TIMEOUT) and link is self._link:
            self._master_lost()

    def _master_lost(self) -> None:
        if self._master_answers:
            self._notify(f"its master at {self._config.master} does not answer")

    def _there(self, endpoint: str) -> None:
        self._master_answers, self._told_away = True, False
        self._counters.add("remote.joined")
        log.info("remote tier there", master=self._config.master, endpoint=endpoint)
        self._wake()

    def _notify(self, why: str) -> None:
        """Say once that the store is away."""
        self._master_answers = False
        if self._told_away:
            return
        self._told_away = True
        self._counters.add("remote.lost")
        log.warning("remote tier away", cause=why, remedy="the node goes on without it, and joins it once it is back")
        self._wake()

    def _wake(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def _environment(self) -> dict[str, str]:
        """Return how long Mooncake may wait for whom; what the operator has set stays as it is."""
        progress_s = self._config.progress_timeout_s
        settings = MooncakeSettings(
            address=self._address, protocol=self._config.protocol, progress_timeout_s=progress_s
        )
        variables = settings.environment() | {
            "MC_RPC_TIMEOUT_MS": str(progress_s * 1000),
            "MC_RPC_CONNECT_TIMEOUT_MS": str(progress_s * 1000),
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_STORE_CLIENT_METRIC": "0",
        }
        return {name: value for name, value in variables.items() if name not in os.environ}


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
