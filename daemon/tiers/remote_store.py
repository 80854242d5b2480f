"""The remote tier's store: blocks in a Mooncake Store that many nodes share, used without blocking the control loop.

The store is optional: while it is away, every call reports at once that nothing is there; that is logged once when it
goes away and once when it is back. Its contents may be lost, damaged or forged, so whoever fetches a block compares its
digests. Knows nothing of pages, tenants or the contents of other tiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import msgspec
import structlog
import xxhash

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.tiers.store_link import GRACE_S, Moved, StoreAwayError, StoreLink, StoreMoves, to_its_end
from kvferry.daemon.tiers.store_process import (
    MASTER_AWAY,
    NO_ROOM,
    OBJECT_NOT_FOUND,
    OK,
    RPC_FAIL,
    RPC_TIMEOUT,
    TRANSFER_FAILED,
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
from kvferry.daemon.tiers.tier_health import TierHealth, Way
from kvferry.daemon.transports.mooncake_native import INSTALL, MooncakeSettings, check_address, check_protocol
from kvferry.pools.tiers.cached_block import BlockKey
from kvferry.protocol.config.schema import RemoteTierConfig
from kvferry.protocol.errors import ConfigError

# -- the name of a cached block in the remote tier, and the header stored before its bytes.
#
# Everybody who reaches the store may write to it, and its nodes check nothing. So the header says which block it
# belongs to and what the digests must be, and whoever fetches a block compares. Knows nothing of how the store is
# reached.


_PREFIX: Final = "kvferry/2"  # version 1 did not contain the model
_HEAD: Final = struct.Struct("<8sII16s")  # magic, pages, whether there is a parent, parent
_DIGEST: Final = struct.Struct("<Q")
_MAGIC: Final = b"kvferry1"
_NO_PARENT: Final = bytes(16)


class StoredHeader(NamedTuple):
    """What is stored with a block's bytes.

    Attributes:
        parent: 16 bytes, the hash of the preceding block in its chain; None for the first one.
        digests: XXH3-64 of each of its pages, in order.
    """

    parent: bytes | None
    digests: tuple[int, ...]


def remote_name(key: BlockKey, *, shared: bool) -> str:
    """Return the block's name in the store; without ``shared``, tenants have distinct names."""
    namespace, block_hash = key
    scope = "shared" if shared else f"tenant-{namespace.tenant}"
    block_kind = f"{namespace.layout_digest}/{namespace.identity}/{namespace.group}/{namespace.block_pages}"
    return f"{_PREFIX}/{scope}/{block_kind}/{block_hash.hex()}"


def header_bytes(pages: int) -> int:
    """Return the header size of a block of ``pages`` pages."""
    return _HEAD.size + (pages + 1) * _DIGEST.size


def pack_header(name: str, parent: bytes | None, digests: Sequence[int]) -> bytes:
    """Return the header of the block ``name``, with one digest per page."""
    head = _HEAD.pack(_MAGIC, len(digests), parent is not None, parent or _NO_PARENT)
    packed = head + struct.pack(f"<{len(digests)}Q", *digests)
    return packed + _DIGEST.pack(_own_digest(name, packed))


def unpack_header(name: str, data: bytes) -> StoredHeader | None:
    """Return the parsed header; None where it is damaged, of another block or of another format."""
    if len(data) < header_bytes(0):
        return None
    packed, own = data[: -_DIGEST.size], data[-_DIGEST.size :]
    magic, pages, has_parent, parent = _HEAD.unpack_from(packed)
    if magic != _MAGIC or len(data) != header_bytes(pages) or own != _DIGEST.pack(_own_digest(name, packed)):
        return None
    digests = struct.unpack_from(f"<{pages}Q", packed, _HEAD.size)
    return StoredHeader(parent if has_parent else None, digests)


def _own_digest(name: str, packed: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name.encode() + packed)


PING_INTERVAL_S: Final = 1.0
MAX_LOOKUPS: Final = 64
"""Concurrent lookups; further ones find nothing."""

_OUTCOMES: Final = {OK: "done", OBJECT_NOT_FOUND: "missed", NO_ROOM: "no_room"}
_PROBE: Final = ["kvferry/1/probe"]
FULL_S: Final = 10.0
"""A store that has no room for so long is full."""
_CAUSES: Final = {TRANSFER_FAILED: "bytes do not reach the node that was to keep them"}
_LOOK: Final = "do the nodes reach each other at their tiers.remote.address? kvferry doctor on each; the store's log"
_ENLARGE: Final = "give it memory: tiers.remote.segment_bytes of some nodes"
log = structlog.get_logger(__name__)


class StoreTuning(msgspec.Struct, frozen=True, kw_only=True):
    """What the remote tier chooses itself.

    ``threads`` calls move blocks at a time. A lookup waits for at most ``lookup_timeout_s`` and then finds nothing. A
    peer that moves no byte for ``progress_timeout_s`` fails. The store process is killed when a block is not settled
    after ``timeout_s``, which is longer than that, or when it does not answer for ``hung_s``; the blocks that this node
    holds are lost with it. It is restarted after ``retry_s``, twice as long after each failure, up to
    ``retry_at_most_s``.
    """

    threads: int = 2
    lookup_timeout_s: float = 0.5
    progress_timeout_s: int = 3
    timeout_s: float = 30.0
    hung_s: float = 5.0
    start_timeout_s: float = 60.0
    retry_s: float = 1.0
    retry_at_most_s: float = 30.0


DEFAULT_TUNING: Final = StoreTuning()


class RemoteStore:
    """A Mooncake Store, see the module. ``async with`` starts joining it and leaves it. For the control loop."""

    def __init__(
        self,
        config: RemoteTierConfig,
        address: str,
        arena_fd: int,
        arena_bytes: int,
        counters: Counters,
        tuning: StoreTuning = DEFAULT_TUNING,
    ) -> None:
        """Prepare; ``start`` joins.

        Args:
            config: its ``address`` is ignored.
            address: this host's address for other nodes, without a port.
            arena_fd: the memfd that all ranges refer to; owned by the caller and open until ``close``.
            arena_bytes: its size.
            counters: receives ``remote.…``.
            tuning: its times.
        """
        self._config = config
        self._tuning = tuning
        self._settings = MooncakeSettings(
            section="tiers.remote",
            address=address,
            protocol=config.protocol,
            progress_timeout_s=tuning.progress_timeout_s,
        )
        self._family = socket.AF_INET
        self._arena_fd = arena_fd
        self._arena_bytes = arena_bytes
        self._counters = counters
        self._link: StoreLink | None = None  # while the process has joined the store
        self._master_answers = False
        self._away_logged = False
        self._why_away = "it has not been joined yet"
        self.health = TierHealth("remote")
        """Of puts and gets, while the store is there."""
        self._lookups = 0
        self._moves = StoreMoves(tuning.threads, tuning.timeout_s, lambda: self._reachable)
        self._changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Show the store and whether it is reachable."""
        return f"<RemoteStore {self._config.master} {'there' if self.available else 'away'} link={self._link!r}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def available(self) -> bool:
        """Return whether the store is reachable."""
        return self._reachable is not None

    @property
    def state(self) -> str:
        """Return ``ready``, ``full``, or what is wrong: ``away: …``, ``failing: …`` or ``slow: …``."""
        return self.health.state if self.available else f"away: {self._why_away}"

    @property
    def _reachable(self) -> StoreLink | None:
        """The process to send requests to; None unless its master answered last time."""
        return self._link if self._master_answers else None

    @property
    def process_id(self) -> int:
        """Return the store process's id; 0 while it has not joined."""
        return 0 if self._link is None else self._link.pid

    async def changed(self) -> None:
        """Wait until ``available`` changes."""
        await self._changed.wait()

    async def start(self) -> None:
        """Start joining the store, without waiting for it: it may come up later, or never.

        Raises:
            ConfigError: Mooncake is not installed, or the address does not belong to this host.
        """
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(f"Mooncake is not installed; {INSTALL}", field="tiers.remote.transport")
        self._family = await asyncio.to_thread(check_address, self._settings)
        check_protocol(self._settings)
        self._supervisor = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """Leave the store after the calls in progress. Blocks held by this node are lost to all. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)

    # --- requests ---

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the store has it; all False where the store is away or does not answer in time.

        Names that are found are not evicted for ten seconds, but may be lost with their node.
        """
        link = self._reachable
        nothing = [False] * len(names)
        if link is None or not names:
            return nothing
        if self._lookups >= MAX_LOOKUPS:
            self._counters.add("remote.lookups_refused")
            return nothing
        self._counters.add("remote.lookups")
        timeout_s = self._tuning.lookup_timeout_s
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
        self._check_status(link, answer.status)
        if answer.status != OK or len(answer.found) != len(names):
            return nothing
        found = [one == 1 for one in answer.found]
        self._counters.add("remote.found", sum(found))
        return found

    async def put(self, name: str, ranges: Sequence[Range], *, parent: bytes | None, digests: Sequence[int]) -> bool:
        """Store ranges of the arena, concatenated; return whether the store has the name now.

        The ranges must not change until this returns; also where the caller is cancelled, it returns only once nothing
        reads them any more. A name that exists already is not written again.

        Args:
            name: from ``remote_name``.
            ranges: (offset, size) in bytes, at least one.
            parent: 16 bytes, or None; kept in the header.
            digests: XXH3-64 of each page.
        """
        block = PutBlock(name, pack_header(name, parent, digests), pack_ranges(ranges))
        moved = await self._move(block, "puts", ranges)
        self._note_put(moved)
        return moved is not None and moved.status == OK

    async def get(self, name: str, ranges: Sequence[Range], *, pages: int) -> StoredHeader | None:
        """Fetch a block of ``pages`` pages into ranges of the arena; return its header, or None where it is missing.

        The ranges are undefined until the caller has compared all digests. They must stay reserved until this returns;
        also where the caller is cancelled, it returns only once nothing writes there any more.
        """
        moved = await self._move(GetBlock(name, header_bytes(pages), pack_ranges(ranges)), "gets", ranges)
        if moved is None or moved.status != OK:
            return None
        header = unpack_header(name, moved.header)
        if header is None:
            self._counters.add("remote.headers_damaged")
            log.warning("a block of the remote tier has a damaged header", name=name)
            await self.remove([name])
        return header

    async def remove(self, names: Sequence[str]) -> bool:
        """Delete names, also while others fetch them; return whether the store has none of them now."""
        link = self._reachable
        if link is None:
            return False
        try:
            async with asyncio.timeout(self._tuning.hung_s):
                answer = await link.ask(Remove(link.next_number(), list(names)))
        except (TimeoutError, StoreAwayError):
            return False
        self._check_status(link, answer.status)
        return answer.status == OK

    async def _move(self, block: PutBlock | GetBlock, what: str, ranges: Sequence[Range]) -> Moved | None:
        """Return the outcome of a block's transfer; nothing of it is in progress any more."""
        link = self._reachable
        if link is None:
            return None
        size_bytes = sum(size for _, size in ranges)
        began_s = time.monotonic()
        moved = await self._moves.move(block, size_bytes)
        outcome = "failed" if moved is None else _OUTCOMES.get(moved.status, "failed")
        self._counters.add(f"remote.{what}_{outcome}")
        if outcome == "done":
            self._counters.add(f"remote.{what}_bytes", size_bytes)
            way: Way = "write" if what == "puts" else "read"
            took_s = time.monotonic() - began_s
            self._counters.observe(f"tiers.remote.{way}", took_s)
            self.health.took(way, took_s, size_bytes)
        if moved is not None:
            self._check_status(link, moved.status)
        return moved

    def _note_put(self, moved: Moved | None) -> None:
        """Keep what STATUS and the log say of puts; nothing while the store is away, which is said itself."""
        if not self.available:
            return
        if moved is None:
            self.health.failed(f"failing: no answer within {self._tuning.timeout_s:g} s", _LOOK)
        elif moved.status == OK:
            self.health.succeeded()
        elif moved.status == NO_ROOM:  # for moments where the store is new, or evicts
            self.health.failed("full", _ENLARGE, patience_s=FULL_S)
        else:
            cause = _CAUSES.get(moved.status, "Mooncake's error")
            self.health.failed(f"failing: {cause} ({moved.status})", _LOOK)

    # --- supervision ---

    async def _supervise(self) -> None:
        pause_s = self._tuning.retry_s
        while True:
            began_s = time.monotonic()
            try:
                await self._reach_master()
                why = await self._one_life()
            except StoreAwayError as error:
                why = str(error)
            self._away(why)
            if time.monotonic() - began_s > self._tuning.retry_at_most_s:
                pause_s = self._tuning.retry_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._tuning.retry_at_most_s)

    async def _reach_master(self) -> None:
        """Wait until the master accepts a TCP connection: Mooncake itself would retry silently for minutes."""
        host, _, port = self._config.master.rpartition(":")
        while True:
            try:
                async with asyncio.timeout(self._tuning.hung_s):
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
            except (OSError, OverflowError) as error:  # also TimeoutError
                self._away(f"its master at {self._config.master} accepts no connections: {error!r}")
                await asyncio.sleep(self._tuning.retry_s)
            else:
                return

    async def _one_life(self) -> str:
        """Start a store process and watch it until it ends; return the reason."""
        config = self._config
        begin = Begin(
            address=self._settings.address,
            master=config.master,
            protocol=config.protocol,
            segment_bytes=config.segment_bytes,
            arena_bytes=self._arena_bytes,
            threads=self._tuning.threads,
        )
        link = StoreLink(begin, self._arena_fd, self._environment())
        grace_s = 0.0
        try:
            self._counters.add("remote.processes_started")
            endpoint = await link.open(self._tuning.start_timeout_s)
            self._link = link
            self._joined(endpoint)
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
            done, _ = await asyncio.wait({ping}, timeout=self._tuning.hung_s)
            if not done:
                ping.cancel()
                link.kill(f"the store process did not answer for {self._tuning.hung_s} s")
                await link.ended.wait()
                break
            if ping.exception() is not None:
                break
            if ping.result().status == MASTER_AWAY:
                self._master_lost()
            # Mooncake calls a master healthy for seconds after it is gone: only an answer shows that it is back.
            if not self._master_answers:
                if probe is not None and probe.done() and probe.exception() is None and probe.result().status >= OK:
                    self._joined(endpoint)
                    probe = None
                elif probe is None or probe.done():
                    probe = link.ask(Exists(link.next_number(), math.inf, _PROBE))
            await _wait_for(link.ended, PING_INTERVAL_S)
        if probe is not None:
            await asyncio.gather(probe, return_exceptions=True)

    def _check_status(self, link: StoreLink, status: int) -> None:
        if status in (RPC_FAIL, RPC_TIMEOUT) and link is self._link:
            self._master_lost()

    def _master_lost(self) -> None:
        if self._master_answers:
            self._away(f"its master at {self._config.master} does not answer")

    def _joined(self, endpoint: str) -> None:
        self._master_answers, self._away_logged = True, False
        self._counters.add("remote.joined")
        log.info("remote tier joined", master=self._config.master, endpoint=endpoint)
        self._wake()

    def _away(self, why: str) -> None:
        """Mark the store as away, and log that once."""
        self._master_answers, self._why_away = False, why
        if self._away_logged:
            return
        self._away_logged = True
        self._counters.add("remote.lost")
        log.warning("remote tier away", cause=why, remedy="the node continues without it and rejoins once it is back")
        self._wake()

    def _wake(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def _environment(self) -> dict[str, str]:
        """Return the store process's environment."""
        timeout_ms = str(self._tuning.progress_timeout_s * 1000)
        return self._settings.environment(
            self._family,
            {
                "MC_RPC_TIMEOUT_MS": timeout_ms,
                "MC_RPC_CONNECT_TIMEOUT_MS": timeout_ms,
                "MC_STORE_CLIENT_SETUP_RETRIES": "1",
                "MC_STORE_CLIENT_METRIC": "0",
            },
        )


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
