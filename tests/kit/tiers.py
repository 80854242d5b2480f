"""The tiers' services on their own: real messages in and out, a copier and a store that do nothing by themselves."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvferry.daemon.control.dispatch import Dispatcher
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import Peer, SessionRegistry
from kvferry.daemon.control.zmtp import ReceivedMessage
from kvferry.daemon.process.descriptors import Descriptors
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.process.shares import share
from kvferry.daemon.services import tiers
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.pool_registry import LostPools, PoolRegistry
from kvferry.daemon.services.pools import HostResources, PoolService
from kvferry.daemon.tiers.copier import BlockJob, OnJobDone
from kvferry.daemon.tiers.disk_tier import DiskTier
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.daemon.tiers.kept_tier import KeptTier
from kvferry.daemon.tiers.remote_store import StoredHeader
from kvferry.daemon.tiers.remote_tier import RemoteTier
from kvferry.daemon.tiers.scheduler import OperationClass, Scheduler
from kvferry.daemon.tiers.store_process import Range
from kvferry.daemon.tiers.tier_health import TierHealth
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.integrity import check
from kvferry.pools.pool import Pool
from kvferry.pools.tiers.blocks import BlockStep
from kvferry.pools.tiers.cached_block import CachedBlock, Namespace
from kvferry.pools.tiers.tier_record import TierRecord, record_bytes
from kvferry.protocol.base import Busy, ErrorReply, PageList, RequestBody
from kvferry.protocol.codec import Frames, PageIds, decode_from_daemon, encode, split
from kvferry.protocol.config.schema import Config, DiskTierConfig, RemoteTierConfig, TiersConfig
from kvferry.protocol.envelope import Reply, Request
from kvferry.protocol.errors import CancelledError, KvferryError, OverloadedError, SnapshotDamagedError, raised
from kvferry.protocol.events import SingleEvent, TierDone, Together
from kvferry.protocol.ids import ModelIdentity, new_boot_id
from kvferry.protocol.limits import Limits
from kvferry.protocol.manifests import HybridSwaSpec, MhaSpec, PoolSpec
from kvferry.protocol.pool_messages import Allocate, CreatePool, Free, PoolCreated
from kvferry.protocol.tier_messages import (
    CacheEvict,
    CacheEvicted,
    CancelOperation,
    Found,
    Load,
    Lookup,
    Offload,
    Offloading,
    OperationStarted,
    Restore,
    Store,
    Unpin,
    Unpinned,
)

UNIT: Final = 4096
SPEC: Final = MhaSpec(
    layers=2, tokens=60, page_size=4, kv_heads=1, head_dim=4, v_head_dim=2, dtype="float32", optional_components=()
)
"""15 pages of 192 bytes: each takes an allocation unit of the arena."""

HYBRID: Final = HybridSwaSpec(
    full_layers=(0,), window_layers=(1,), tokens=60, window_tokens=28, window=8, page_size=4, kv_heads=1, head_dim=4,
    dtype="float32",
)  # fmt: skip
POOL: Final = "pool"
MODEL: Final = ModelIdentity(name="some/model", revision="1")
LIMITS: Final = Limits()
WAIT_S: Final = 2.0
ReplyT = TypeVar("ReplyT")


class ScriptedCopier:
    """See ``TierCopier``. Between ``start`` and ``end`` a job is under way: its bytes move when ``copy`` is called.

    Attributes:
        under_way: the jobs started and not ended, oldest first.
        stopped: those that are to stop.
    """

    def __init__(self) -> None:
        self.under_way: list[BlockJob] = []
        self.stopped: set[BlockJob] = set()
        self._on_done: dict[BlockJob, OnJobDone] = {}

    def start(self, job: BlockJob, on_done: OnJobDone) -> None:
        assert job not in self.under_way, "a job that is under way"
        self.under_way.append(job)
        self._on_done[job] = on_done

    def stop(self, job: BlockJob) -> None:
        if job in self.under_way:
            self.stopped.add(job)

    def close(self) -> None:
        self.under_way.clear()

    def copy(self, job: BlockJob) -> KvferryError | None:
        """Move a job's bytes, without a word: it stays under way. Return what is wrong with them; then none moved."""
        if job.kind == "restore" and job.digests is not None:
            for segment, expected, found in zip(job.segments, job.digests, self._digests(job), strict=True):
                wrong = np.flatnonzero(found != expected)
                if len(wrong):
                    space = segment.pages.layout.space
                    return SnapshotDamagedError(f"block {wrong[0]} of {space!r}", field=f"{space}[{wrong[0]}]")
        for segment in job.segments:
            step = BlockStep(0, len(segment.pages.ids), 0, segment.pages.layout.content_bytes)
            move = segment.region.begin_offload if job.kind == "offload" else segment.region.begin_restore
            move(segment.pages, step, job.arena.view()).wait()
        if job.kind == "offload" and job.checksums:
            job.digests = self._digests(job)
        return None

    def end(self, job: BlockJob, error: KvferryError | None = None) -> None:
        """Report a job's end: no byte of it moves any more. One that was stopped ends with its error."""
        self.under_way.remove(job)
        if job in self.stopped:
            self.stopped.remove(job)
            error = error or CancelledError("stopped before all bytes were copied")
        self._on_done.pop(job)(job, error)

    def finish(self, job: BlockJob) -> None:
        """Move a job's bytes and report how that went; one that was stopped was done before."""
        self.stopped.discard(job)
        self.end(job, self.copy(job))

    def finish_all(self) -> None:
        """Finish every job, also those that start meanwhile; those that were stopped move nothing."""
        while self.under_way:
            job = self.under_way[0]
            (self.end if job in self.stopped else self.finish)(job)

    def _digests(self, job: BlockJob) -> tuple[npt.NDArray[np.uint64], ...]:
        arena, found = job.arena.view(), []
        for _, pages in job.segments:
            blocks = [arena[at : at + pages.layout.block_bytes].data for at in pages.offsets.tolist()]
            found.append(np.array([xxhash.xxh3_64_intdigest(one) for one in blocks], np.uint64))
        return tuple(found)


class _Stored(NamedTuple):
    header: StoredHeader
    pages: list[bytes]


class ScriptedStore:
    """See ``RemoteStore``; it is a dictionary. While ``holds`` is True every call waits for ``let_go``.

    Attributes:
        available: whether it is there.
        state, health: what STATUS is to say.
        values: what it has, by name.
        waiting: calls that wait, oldest first.
        holds: whether calls wait.
    """

    def __init__(self, arena: HostRegion) -> None:
        self.available = True
        self.state = "ready"
        self.health = TierHealth("remote")
        self.values: dict[str, _Stored] = {}
        self.waiting: list[asyncio.Future[None]] = []
        self.holds = False
        self._arena = arena

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def let_go(self) -> bool:
        """Let the call that waits longest go on; return whether there was one."""
        while self.waiting:
            waiting = self.waiting.pop(0)
            if not waiting.done():  # else its caller was cancelled
                waiting.set_result(None)
                return True
        return False

    async def exists(self, names: Sequence[str]) -> list[bool]:
        await self._turn()
        return [self.available and name in self.values for name in names]

    async def put(self, name: str, ranges: Sequence[Range], *, parent: bytes | None, digests: Sequence[int]) -> bool:
        await self._turn()
        if self.available:
            pages = [self._arena.buffer[at : at + size] for at, size in ranges]
            self.values.setdefault(name, _Stored(StoredHeader(parent=parent, digests=tuple(digests)), pages))
        return self.available

    async def get(self, name: str, ranges: Sequence[Range], *, pages: int) -> StoredHeader | None:
        await self._turn()
        found = self.values.get(name) if self.available else None
        if found is None or len(found.pages) != pages:
            return None
        for (at, size), content in zip(ranges, found.pages, strict=True):
            self._arena.buffer[at : at + size] = content
        return found.header

    async def remove(self, names: Sequence[str]) -> bool:
        await self._turn()
        for name in names:
            self.values.pop(name, None)
        return True

    async def _turn(self) -> None:
        if self.holds:
            waiting = asyncio.get_running_loop().create_future()
            self.waiting.append(waiting)
            await waiting


class Harness:
    """All services over one host tier; whatever else runs, runs when the test says so.

    Attributes:
        said: what was sent to whom, in order: the session's number, and ``reply`` or the event's kind.
        now_s: what the disk tier's clock shows.
        damaged: where in the host tier's memory a test has changed bytes.
    """

    def __init__(self, config: TiersConfig, *, remote: bool = False, hasher: Executor | None = None) -> None:
        self.now_s = 0.0
        self.damaged: set[int] = set()
        self.counters = Counters()
        self.sessions = SessionRegistry(LIMITS)
        self.boot = new_boot_id()
        self.dispatcher = Dispatcher(self.boot, LIMITS, self.sessions, self.counters, self._send)
        self.pools = PoolRegistry(LostPools(None), self.sessions, self._pool_removed)
        self.executor = ThreadPoolExecutor(1)
        devices, no_socket, memory = cast("Devices", _NoDevices()), cast("SessionSocket", None), HostMemory()
        rings = EventRings(self.dispatcher, no_socket, devices, self.executor, lambda *_: None, Descriptors())
        resources = HostResources(memory, Descriptors())
        self.pool_service = PoolService(
            self.dispatcher, no_socket, devices, self.pools, rings, resources, max_bytes=1 << 30, populate=False
        )
        self.scheduler = Scheduler(dict.fromkeys(OperationClass, 1 << 30), patience_s=0)
        call_soon, size_bytes = asyncio.get_running_loop().call_soon, config.size_bytes(0)
        file = HostRegion.create("host-tier-record", record_bytes(size_bytes))
        self.kept = KeptTier(memory.region("host-tier", size_bytes, grows=True), file)
        self.host = HostTier(config, self.counters, memory, call_soon=call_soon, kept=self.kept)
        self.copier, self.store, self.disk = ScriptedCopier(), ScriptedStore(self.host.region), self._disk(config)
        if remote:
            far = RemoteTierConfig(transport="mooncake_store", address="127.0.0.1")
            config = msgspec.structs.replace(config, remote=far)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiers, "HostTier", lambda *_, **__: self.host)
            patch.setattr(tiers, "TierCopier", lambda *_, **__: self.copier)
            patch.setattr(tiers, "DiskTier", lambda *_: self.disk)
            patch.setattr(tiers, "RemoteStore", lambda *_: self.store)
            patch.setattr(tiers, "RemoteTier", functools.partial(RemoteTier, hasher=hasher))
            self.all = tiers.Tiers(
                Config(tiers=config), self.dispatcher, self.sessions, self.pools, rings, self.scheduler, self.executor,
                memory, self.counters,
            )  # fmt: skip
        self.operations, self.host_receives = self.all.operations, self.all.host_receives
        self.service, self.cache, self.reports = self.all.offloads, self.all.cache, self.all.reports
        self.lower, self.remote = self.all.lower, self.all.lower.remote
        self.engines: dict[bytes, Engine] = {}
        self.said: list[tuple[int, str]] = []

    def engine(self, uid: int = 1, instance: str = "") -> Engine:
        """Return a new session of a user."""
        one = Engine(self, uid, instance)
        self.engines[one.identity] = one
        return one

    def pool(self, name: str = POOL, tenant: int = 1) -> Pool:
        return self.pools.get(tenant, name)

    @property
    def namespace(self) -> Namespace:
        """Return the namespace of the first pool that stored blocks."""
        return next(iter(self.host.page_bytes))

    def blocks(self, *numbers: int) -> list[CachedBlock]:
        """Return those of these blocks that are visible."""
        found = [self.host.index.get(self.namespace, one) for one in names(*numbers)]
        return [one for one in found if one is not None]

    async def stored(self, *numbers: int) -> list[CachedBlock]:
        """Store blocks full of their number, by a session that ends then; return them."""
        engine = self.engine()
        await engine.stored(*numbers)
        self.lose(engine)
        return self.blocks(*numbers)

    async def finish(self) -> None:
        """Let all jobs be done, and what follows."""
        await settle()
        while self.copier.under_way:
            self.copier.finish_all()
            await settle()

    async def let_store_answer(self) -> None:
        """Let the store answer all that it is asked, from now on."""
        self.store.holds = False
        while self.store.let_go():
            await settle()

    def empty_memory(self) -> None:
        """Let blocks be in lower tiers only."""
        for block in list(self.host.index.host_victims()):
            self.host.free_all([self.host.index.drop_host(block)])

    def lose(self, engine: Engine) -> None:
        """Let a session end as the daemon's loop does."""
        session_id, owner_id = engine.session.session_id, engine.session.owner_id
        self.sessions.close(engine.session)
        self.dispatcher.forget_session(engine.session)
        self.all.session_lost(session_id)
        self.pool_service.session_lost(session_id)
        if not self.sessions.of_instance(owner_id):
            self.all.instance_lost(owner_id)
            self.pool_service.instance_lost(owner_id)
        del self.engines[engine.identity]

    async def close(self) -> None:
        """End the tiers, and what they are given."""
        await self.dispatcher.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.host, "close", lambda: None)  # it waits for a thread
            await self.all.close()
        await asyncio.to_thread(self.executor.shutdown)
        await self.pool_service.close()
        await asyncio.to_thread(self.host.close)
        self.kept.close()

    def check(self) -> None:
        """Check that what is counted is what is there."""
        owners = {session.owner_id for session in self.sessions}
        for one in self.all.checks():
            check(one.walk())
        for pool in self.pools:
            for allocator in pool.allocators.values():
                check(allocator.problems())
                check(allocator.holder_problems(self.operations.held_pages()))
                check(allocator.owner_problems(owners))
        self._check_kept()

    def damage(self, offset: int) -> None:
        """Change the first byte of a page in the host tier's memory."""
        self.host.region.view()[offset] ^= 1
        self.damaged.add(int(offset))

    def _check_kept(self) -> None:
        """Check that the next daemon would find just what is ready in the host tier, with the bytes of its digests."""
        file, region = self.kept.file, self.kept.region
        record = TierRecord(file.view().copy(), region.size_bytes, share)
        found = record.read(region.identity, file.data_ranges(), checksums=False)
        blocks = {(one.head.namespace, its) for one in found.blocks for its in one.hashes}
        assert not found.dropped or any(one.dropped for one in self.service.snapshots)
        assert blocks == {one.key for one in self.host.index.page(0, 1 << 20).blocks if one.in_host}
        ready = {one.name for one in self.service.snapshots if one.state == "ready" and not one.dropped}
        assert {one.head.name for one in found.snapshots} == ready
        pages = [(one.offsets, one.digests, one.head.page_bytes) for one in found.blocks]
        pages += [(its.offsets, its.digests, its.head.block_bytes) for one in found.snapshots for its in one.segments]
        for offsets, digests, size in pages:
            for at, digest in zip(offsets.flat, () if digests is None else digests.flat, strict=False):
                assert at in self.damaged or digest == xxhash.xxh3_64_intdigest(region.view()[at : at + size].data)

    def check_empty(self) -> None:
        """Check that nothing is held, counted or allocated by anybody any more."""
        self.check()
        assert not list(self.operations), self.operations
        assert not len(self.service.snapshots)
        assert not len(self.host.index), self.host.index
        assert not self.host.index.pinned_by()
        assert self.host.arena.used_bytes == 0, self.host.arena
        for tenant, usage in self.host.index.accounts.items():
            assert usage.used_bytes == usage.awaited_bytes == usage.evictable_bytes == 0, tenant
        for pool in self.pools:
            assert pool.idle, pool
            assert all(one.busy_count == 0 for one in pool.allocators.values()), pool

    def _disk(self, config: TiersConfig) -> DiskTier | None:
        if config.disk.path is None:
            return None
        given = config.disk, config.policy, self.host, self.scheduler, self.counters
        opening = self.executor.submit(DiskTier, *given, clock=lambda: self.now_s)  # it looks at files
        return opening.result()

    def _pool_removed(self, pool: Pool) -> None:
        self.all.pool_removed(pool)

    def _send(self, identity: bytes, frames: Frames, *, more: bool = False) -> bool:
        del more
        engine = self.engines.get(identity)
        if engine is None:
            return False
        engine.take([bytes(one) for one in frames])
        return True


class Engine:
    """One session: what it asks is answered at once, or later.

    Attributes:
        replies: by message number.
        events: all events, with their page lists.
    """

    _names = itertools.count(1)

    def __init__(self, harness: Harness, uid: int, instance: str = "") -> None:
        self.harness = harness
        self.identity = f"engine-{next(self._names)}".encode()
        self.session = harness.sessions.open(self.identity.decode(), Peer(1, uid, uid), instance)
        self.replies: dict[int, tuple[Any, tuple[PageIds, ...]]] = {}
        self.events: list[tuple[SingleEvent, tuple[PageIds, ...]]] = []
        self.cursor = 0
        self._numbers = itertools.count(1)

    def take(self, frames: list[bytes]) -> None:
        """Take a message of the daemon."""
        message, ids = decode_from_daemon(frames)
        if isinstance(message, Reply):
            self.replies[message.message_id] = (message.body, ids)
            self.harness.said.append((self.session.session_id, "reply"))
        else:
            events = message.body.events if isinstance(message.body, Together) else (message.body,)
            self.events += zip(events, split(events, ids), strict=True)
            self.cursor = message.cursor
            self.harness.said.append((self.session.session_id, type(message.body).__name__))

    def send(self, body: RequestBody, *ids: npt.ArrayLike, deadline_ms: int = 0, acknowledge: bool = True) -> int:
        """Send a request; return its number."""
        number = next(self._numbers)
        lists = [np.asarray(one, np.int64) for one in ids]
        acknowledged = self.cursor if acknowledge else 0
        request = Request(number, self.harness.boot, self.session.secret, deadline_ms, acknowledged, body)
        frames = [bytes(one) for one in encode(request, lists)]
        self.harness.dispatcher.on_message(ReceivedMessage(self.identity, frames, too_large=False))
        return number

    def reply(self, number: int, kind: type[ReplyT]) -> ReplyT:
        """Return the reply to a request; raise the error that it is."""
        body = self.replies[number][0]
        if isinstance(body, ErrorReply):
            raise raised(body.error)
        if isinstance(body, Busy):
            raise OverloadedError(body.detail)
        assert isinstance(body, kind), body
        return body

    def ask(self, body: RequestBody, kind: type[ReplyT], *ids: npt.ArrayLike, **options: Any) -> ReplyT:  # noqa: ANN401  send's
        """Send a request that is answered at once."""
        return self.reply(self.send(body, *ids, **options), kind)

    def allocate(self, count: int, pool: str = POOL) -> PageIds:
        number = self.send(Allocate(pool=pool, count=count))
        assert not isinstance(self.replies[number][0], ErrorReply), self.replies[number]
        return self.replies[number][1][0]

    def free(self, ids: npt.ArrayLike, pool: str = POOL) -> None:
        self.send(Free(pool=pool, pages=np.size(ids)), ids)

    def offload(self, ids: npt.ArrayLike, pool: str = POOL, *, release: bool = False, **options: Any) -> Offloading:  # noqa: ANN401
        body = Offload(pool=pool, lists=(PageList(pages=np.size(ids)),), release=release)
        return self.ask(body, Offloading, ids, **options)

    def restore(
        self,
        snapshot: str,
        ids: npt.ArrayLike | None = None,
        pool: str = POOL,
        *,
        drop: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> int:
        """Restore into pages, or into those that the daemon takes; return the operation's number."""
        lists = () if ids is None else (PageList(pages=np.size(ids)),)
        body = Restore(snapshot=snapshot, pool=pool, lists=lists, allocate=ids is None, drop=drop)
        return self.ask(body, OperationStarted, *([] if ids is None else [ids]), **options).operation

    def store(self, hashes: Sequence[bytes], ids: npt.ArrayLike, pool: str = POOL, **options: Any) -> int:  # noqa: ANN401
        """Store blocks of a page each; return the operation's number."""
        body = Store(pool=pool, hashes=b"".join(hashes), pages=np.size(ids))
        return self.ask(body, OperationStarted, ids, **options).operation

    def lookup(self, hashes: Sequence[bytes], pool: str = POOL, **options: Any) -> Found:  # noqa: ANN401
        """Look blocks up that are near, or surely not far."""
        return self.ask(Lookup(pool=pool, hashes=b"".join(hashes), **options), Found)

    def load(self, lease: int, ids: npt.ArrayLike, pool: str = POOL, first_block: int = 0, **options: Any) -> int:  # noqa: ANN401
        """Load blocks of a lease; return the operation's number."""
        body = Load(lease=lease, pool=pool, pages=np.size(ids), first_block=first_block)
        return self.ask(body, OperationStarted, ids, **options).operation

    def unpin(self, lease: int) -> int:
        """End a lease; return how many blocks it had."""
        return self.ask(Unpin(lease=lease), Unpinned).blocks

    def cancel(self, operation: int, **options: Any) -> int:  # noqa: ANN401  send's
        """Ask for an operation's end; return the message's number."""
        return self.send(CancelOperation(operation=operation), **options)

    async def evict(self, **which: Any) -> CacheEvicted:  # noqa: ANN401  CACHE_EVICT's fields
        """Drop cached blocks, all of them unless it is said which."""
        return await self.answer(CacheEvict(**(which or {"everything": True})), CacheEvicted)

    async def answer(self, body: RequestBody, kind: type[ReplyT], **options: Any) -> ReplyT:  # noqa: ANN401  send's
        """Send a request, and wait for its answer."""
        number = self.send(body, **options)
        await until(lambda: number in self.replies)
        return self.reply(number, kind)

    async def stored(self, *numbers: int) -> None:
        """Store blocks full of their number, from pages that are free again."""
        ids = self.allocate(len(numbers))
        for one, number in zip(ids, numbers, strict=True):
            self.write([one], number)
        operation = self.store(names(*numbers), ids)
        async with asyncio.timeout(WAIT_S):
            while self.done(operation) is None:
                await self.harness.finish()
        assert self.error(operation) is None
        self.free(ids)

    def ended(self, operation: int) -> TierDone:
        """Return an operation's event."""
        done = self.done(operation)
        assert done is not None, "it is not over"
        return done

    def done(self, operation: int) -> TierDone | None:
        """Return an operation's event, if it has come."""
        found = [body for body, _ in self.events if isinstance(body, TierDone) and body.operation == operation]
        assert len(found) <= 1, found
        return found[0] if found else None

    def error(self, operation: int) -> type[KvferryError] | None:
        """Return what an operation that is over failed with."""
        error = self.ended(operation).error
        return type(raised(error)) if error else None

    def write(self, ids: npt.ArrayLike, value: int, pool: str = POOL) -> None:
        """Fill pages with a value of a byte."""
        for array in self._arrays(pool):
            array[np.asarray(ids)] = value

    def read(self, ids: npt.ArrayLike, pool: str = POOL) -> list[set[int]]:
        """Return which bytes are in each page."""
        arrays = self._arrays(pool)
        return [{int(byte) for array in arrays for byte in array[one]} for one in np.asarray(ids).tolist()]

    def _arrays(self, name: str) -> list[npt.NDArray[np.uint8]]:
        """Return each entry's bytes, ``(pages, page_bytes)``."""
        pool = self.harness.pool(name, self.session.tenant)
        assert isinstance(pool.region, HostRegion)
        memory = pool.region.view()
        return [
            memory[one.base : one.base + one.pages * one.page_bytes].reshape(one.pages, one.page_bytes)
            for one in pool.manifest.entries
        ]


class _NoDevices:
    lost = ()


def tiers_config(units: int = 32, **fields: Any) -> TiersConfig:  # noqa: ANN401
    """Return the configuration of a host tier of so many allocation units."""
    return TiersConfig(host_bytes=units * UNIT, **fields)


@asynccontextmanager
async def harness(
    units: int = 32,
    *,
    disk: Path | None = None,
    disk_bytes: int = 1 << 20,
    remote: bool = False,
    tenants: Sequence[int] = (1,),
    adds_up: bool = True,
    scanned: bool = True,
    **fields: Any,  # noqa: ANN401
) -> AsyncIterator[Harness]:
    """Yield a harness with a pool of each tenant; in the end all must add up, unless the test has spoiled it.

    ``scanned``: what is on disk is known from the beginning.
    """
    config = tiers_config(units, disk=DiskTierConfig(path=str(disk) if disk else None, max_bytes=disk_bytes), **fields)
    made = Harness(config, remote=remote)
    await made.lower.start()
    if scanned:
        await made.lower.known()
    try:
        for tenant in tenants:
            await new_pool(made, tenant=tenant)
        yield made
        if adds_up:
            made.check()
    finally:
        made.copier.under_way.clear()
        await made.close()


async def new_pool(
    made: Harness, name: str = POOL, spec: PoolSpec = SPEC, tenant: int = 1, model: ModelIdentity | None = MODEL
) -> None:
    engine = made.engine(tenant)
    await engine.answer(CreatePool(pool=name, spec=spec, model=model), PoolCreated)
    made.lose(engine)


async def until(condition: Any) -> None:  # noqa: ANN401  a function of nothing
    """Let the loop and its threads go on until something is so."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  what it waits for says no word: a thread, a file, a counter
            await asyncio.sleep(0)


async def settle() -> None:
    """Let the loop do all that it has to do now."""
    for _ in range(10):
        await asyncio.sleep(0)


def names(*numbers: int) -> list[bytes]:
    """Return block hashes."""
    return [number.to_bytes(16, "big") for number in numbers]


def hashes(*numbers: int) -> bytes:
    """Return them as messages have them."""
    return b"".join(names(*numbers))
