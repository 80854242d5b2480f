"""The pools of all tenants, and the requests about them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog

from kvferry.daemon.control import first_step
from kvferry.daemon.control.dispatch import Answer, AsyncHandler, Call, Dispatcher, expect
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import Session
from kvferry.daemon.process.descriptors import PER_POOL, PER_REGION, Descriptors
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.process.threads import on_thread, started_threads
from kvferry.daemon.services.adoption import Adoption
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.pool_checks import (
    MemoryInUse,
    PoolTraits,
    check_same,
    placed_in,
    registered_segments,
    traits_of,
)
from kvferry.daemon.services.pool_registry import (
    PoolRegistry,
    holders_text,
    owner_text,
    pool_full,
    session_text,
    status_of,
    with_holders,
)
from kvferry.daemon.tiers.lower_tiers import Background
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import STEP_BYTES, HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.manifest import total_bytes
from kvferry.pools.pool import Pool
from kvferry.pools.pool_file import KeptRecord, PoolRecord, manifest_digest
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import (
    RETRY_AT_ONCE_MS,
    InternalError,
    InvalidFieldError,
    KvferryError,
    LayoutMismatchError,
    OutOfMemoryError,
    OverloadedError,
    PoolExistsError,
    PoolFullError,
    PoolInUseError,
    PoolLostError,
    TooLargeError,
    UnknownPoolError,
)
from kvferry.protocol.ids import HOST, ModelIdentity
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.pool_messages import (
    Allocate,
    Allocated,
    AttachPool,
    CreatePool,
    DeletePool,
    Free,
    Freed,
    ListOwned,
    OwnedPages,
    OwnedSpace,
    PoolAttached,
    PoolCreated,
    PoolDeleted,
    PoolRegistered,
    RegisterPool,
)
from kvferry.protocol.session_messages import PoolStatus
from kvferry.protocol.session_stream import RegionFollows, ShareFollows

SWEEP_S: Final = 0.05
DEVICE_GRACE_S: Final = 0.05
"""Before an ended instance's device pages are freed: the driver stops a killed engine's kernels a moment after its
sockets are closed."""

RegionT = TypeVar("RegionT", bound=Region)
log = structlog.get_logger(__name__)


class _Creation(msgspec.Struct, eq=False):
    """A pool that is being made or registered: its name is taken, and what it will take is counted.

    Attributes:
        stopped: set where nobody wants it any more: its memory is given back after the step under way.
        making: what ends with the pool, or with the reason why there is none; None for one that is registered.
        file: see ``Pool``.
    """

    traits: PoolTraits
    stopped: threading.Event = msgspec.field(default_factory=threading.Event)
    making: asyncio.Future[Pool | KvferryError] | None = None
    file: HostRegion | None = None


class HostResources(NamedTuple):
    """What counts what pools take of the host."""

    memory: HostMemory
    descriptors: Descriptors


class PoolService:
    """Creates, registers and deletes pools, and allocates pages.

    Host memory is populated on one thread, device memory is allocated on another: one pool at a time each.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        session_socket: SessionSocket,
        devices: Devices,
        pools: PoolRegistry,
        rings: EventRings,
        host: HostResources,
        *,
        max_bytes: int,
        populate: bool,
        largest_payload_bytes: int = LARGEST_PAYLOAD_BYTES,
        adoption: Adoption | None = None,
    ) -> None:
        """Serve; ``adoption`` lets new pools outlive the daemon."""
        self._dispatcher = dispatcher
        self._session_socket = session_socket
        self._devices = devices
        self._pools = pools
        self._memory, self._descriptors = host
        self._adoption = adoption
        self._max_bytes = max_bytes
        self._largest_payload_bytes = largest_payload_bytes
        self._populate = populate
        self._creations: dict[tuple[int, str], _Creation] = {}
        self._leaving: list[Pool] = []
        self._background = Background("the end of a pool")
        self._executor = started_threads(1, "populate")
        self._freeing = started_threads(1, "free")
        self._device_executor = started_threads(1, "device-memory")  # populating host memory takes long
        for kind, handler in (
            ("CREATE_POOL", self._create),
            ("ATTACH_POOL", self._attach),
            ("REGISTER_POOL", self._register),
            ("DELETE_POOL", self._delete),
            ("ALLOCATE", self._allocate),
            ("FREE", rings.after(self._free)),
            ("LIST_OWNED", self._list_owned),
        ):
            dispatcher.handle(kind, self._when_adopted(handler))

    def _when_adopted(self, handle: AsyncHandler) -> AsyncHandler:
        """Return a handler that waits for the request's pool where that is being adopted."""

        async def handle_then(call: Call, adopted: asyncio.Future[None]) -> Answer | None:
            await asyncio.shield(adopted)
            answer = handle(call)
            return answer if answer is None or isinstance(answer, Answer) else await answer

        def handle_adopted(call: Call) -> Coroutine[Any, Any, Answer | None] | Answer | None:
            adopted = self._pools.coming(call.session.tenant, getattr(call.body, "pool", ""))
            return handle(call) if adopted is None else handle_then(call, adopted)

        return handle_adopted

    def session_lost(self, session_id: int) -> None:
        """Remove the pools that a session registered: their memory belongs to its process, not to its instance."""
        for pool in [one for one in self._pools if one.registered_by == session_id]:
            self._pools.lost.lose(pool.tenant, pool.name, "was registered by an engine that is gone")
            log.warning("pool lost", pool=pool.name, tenant=pool.tenant, cause="its engine is gone")
            self._remove(pool)

    def instance_lost(self, owner_id: int) -> None:
        """Free every page of an instance, and remove the pools that end with it; pages in flight are freed later."""
        for creation in self._creations.values():
            if creation.traits.ends_with == owner_id:
                creation.stopped.set()
        for pool in (*self._pools, *self._leaving):
            if pool.region.device == HOST:
                _release(pool, owner_id)
            else:
                asyncio.get_running_loop().call_later(DEVICE_GRACE_S, _release, pool, owner_id)
        for pool in list(self._pools):
            if pool.ends_with == owner_id:
                self._pools.lost.deleted(pool.tenant, pool.name)
                log.info("pool deleted", pool=pool.name, tenant=pool.tenant, cause="its instance has ended")
                self._remove(pool)

    @property
    def leaving(self) -> Sequence[Pool]:
        """Return the pools that were removed while pages of them were in flight."""
        return self._leaving

    def status(self, *, holders: bool = False) -> tuple[PoolStatus, ...]:
        """Return the pools as STATUS shows them; ``holders``: with the holders of their pages."""
        if not holders:
            return tuple(map(status_of, self._pools))
        return tuple(with_holders(status_of(one), one, self._dispatcher.sessions) for one in self._pools)

    async def close(self) -> None:
        """Free all memory, without waiting for a lost device."""
        await self._background.close()
        for creation in self._creations.values():
            creation.stopped.set()
        for creation in list(self._creations.values()):
            if creation.making is not None and not self._devices.lost:
                await asyncio.wait([creation.making])
        for executor in (self._executor, self._device_executor, self._freeing):
            if not self._devices.lost:
                await on_thread(executor, lambda: None)  # after what it was given
            executor.shutdown(wait=False, cancel_futures=True)
        for pool in (*self._pools, *self._leaving):
            pool.close()

    async def _create(self, call: Call) -> Answer:
        body = expect(call, CreatePool)
        self._check_payload_bound(body.max_payload_bytes)
        wanted = PoolTraits(
            manifest_of(body.spec),
            body.device,
            body.model,
            body.max_payload_bytes,
            ends_with=call.session.owner_id if body.lifetime == "instance" else None,
        )
        key = (call.session.tenant, body.pool)
        existing, creation = self._pools.find(*key), self._creations.get(key)
        if existing is not None:
            self._check_found(call, body.pool, traits_of(existing), wanted, self._holders(existing, call))
            return Answer(PoolCreated(pool=body.pool, created=False, manifest=existing.manifest))
        if creation is not None:
            if creation.traits.registered_by is None and creation.stopped.is_set():
                raise OverloadedError(_unwanted(body.pool)).after(RETRY_AT_ONCE_MS)
            self._check_found(call, body.pool, creation.traits, wanted)
            pool = await _made(creation)
            return Answer(PoolCreated(pool=body.pool, created=False, manifest=pool.manifest))
        if body.device == HOST:
            self._check_budget(wanted.manifest, call.session.tenant)
        creation = self._creations[key] = _Creation(wanted)
        creation.making = first_step.begin(self._make(key, creation, body))
        pool = await _made(creation)
        return Answer(PoolCreated(pool=body.pool, created=True, manifest=pool.manifest))

    def _check_found(self, call: Call, name: str, found: PoolTraits, wanted: PoolTraits, held: str = "") -> None:
        """Check that a pool that exists, or is being made, is the one that CREATE_POOL asks for.

        Raises:
            PoolExistsError: it is another one, or an engine's.
        """
        sessions = self._dispatcher.sessions
        if found.registered_by is not None:
            holder = session_text(sessions, found.registered_by, call.session.session_id)
            raise PoolExistsError(f"pool {name!r} is registered by {holder}: it ends with that session", field="pool")
        end = "the daemon" if found.ends_with is None else owner_text(sessions, found.ends_with, call.session.owner_id)
        check_same(name, found, wanted, held=held, end=end)

    async def _register(self, call: Call) -> Answer:
        body = expect(call, RegisterPool)
        if body.device == HOST:
            return self._register_memory(call, body)
        shares = self._session_socket.take_share(call.session, call.message_id).shares
        self._check_payload_bound(body.max_payload_bytes)
        if len(shares) != len(body.arrays):
            raise InvalidFieldError(
                f"{len(shares)} shares came over the session socket, REGISTER_POOL names {len(body.arrays)} arrays",
                field="arrays",
            )
        key = self._check_new(call, body.pool)
        manifest = manifest_of(body.spec)
        segments = registered_segments(manifest, body.arrays, shares)
        self._creations[key] = _Creation(_registered(call, body, manifest))
        try:
            region = await self._on_device(lambda: self._devices.register(body.device, segments, manifest.region_bytes))
            return self._add_registered(call, key, self._creations[key].traits, region)
        finally:
            del self._creations[key]

    def _register_memory(self, call: Call, body: RegisterPool) -> Answer:
        """Register a pool in an engine's host memory."""
        fd = self._session_socket.take_memory(call.session, call.message_id)
        if fd is None:
            raise InvalidFieldError(
                "no descriptor of its memory came over the session socket: the client library passes that of its "
                "kvferry.clients.SharedMemory",
                field="memory",
            )
        region = HostRegion.registered(fd)
        try:
            self._check_payload_bound(body.max_payload_bytes)
            key = self._check_new(call, body.pool)
            manifest = placed_in(region, manifest_of(body.spec), body.arrays, self._memory_in_use())
            self._check_budget(manifest, key[0])
            self._memory.count_on(region, region.size_bytes, call.session.peer.pid)
            self._descriptors.take(region, key[0], "pools", PER_POOL)
        except BaseException:
            region.close()
            raise
        return self._add_registered(call, key, _registered(call, body, manifest), region)

    def _add_registered(self, call: Call, key: tuple[int, str], traits: PoolTraits, region: Region) -> Answer:
        pool = _pool_of(key, traits, region)
        self._add(pool, is_wanted=self._session_socket.is_connected(call.session), registering=call.session)
        return Answer(PoolRegistered(pool=key[1], manifest=pool.manifest))

    def _check_payload_bound(self, wanted_bytes: int) -> None:
        if wanted_bytes > self._largest_payload_bytes:
            raise TooLargeError(
                f"payloads of {wanted_bytes} bytes; at most {self._largest_payload_bytes}, half of "
                "limits.max_frame_bytes",
                field="max_payload_bytes",
            )

    def _check_new(self, call: Call, name: str) -> tuple[int, str]:
        """Return the key of a pool that does not exist.

        Raises:
            PoolExistsError: it does.
        """
        key = (call.session.tenant, name)
        existing = self._pools.find(*key)
        if key in self._creations or existing is not None:
            held = self._holders(existing, call) if existing else ""
            raise PoolExistsError(f"pool {name!r} exists{held and f'; {held}'}", field="pool")
        return key

    def _memory_in_use(self) -> list[MemoryInUse]:
        """Return the regions of all pools: live, or removed with pages still in flight."""
        return [MemoryInUse(pool.region, pool.manifest) for pool in (*self._pools, *self._leaving)]

    def _reserved(self, tenant: int, name: str, size_bytes: int) -> HostRegion:
        """Return a pool's region, for which there are memory and descriptors now.

        Raises:
            OutOfMemoryError, OutOfDescriptorsError: there are not.
        """
        region = self._memory.region(f"{tenant}:{name}", size_bytes)
        try:
            self._descriptors.take(region, tenant, "pools", PER_POOL)
            self._memory.count_on(region, size_bytes)
        except BaseException:
            region.close()
            raise
        return region

    async def _make(self, key: tuple[int, str], creation: _Creation, body: CreatePool) -> Pool | KvferryError:
        """Make a pool; return why there is none where there is none, as those who ask for it may have left."""
        try:
            region: Region
            if body.device == HOST:
                region = await self._on_host(key, creation, body)
            else:
                region = await self._on_device(partial(self._device_memory, key, creation, body))
            pool = _pool_of(key, creation.traits, region, creation.file)
            self._count_record(pool)
            self._add(pool, is_wanted=not creation.stopped.is_set())
        except KvferryError as error:
            return error
        except Exception as cause:
            log.exception("a pool could not be added", pool=key[1], tenant=key[0], cause=str(cause))
            return InternalError(f"the pool could not be added: {cause!r}")
        else:
            return pool
        finally:
            del self._creations[key]

    async def _on_host(self, key: tuple[int, str], creation: _Creation, body: CreatePool) -> HostRegion:
        """Return memory of the host for a pool: of reserved pages if there are some, or else of others."""
        while True:
            region = self._reserved(*key, creation.traits.manifest.region_bytes)
            record = _record_of(key, body, creation.traits, region)
            try:
                return await self._allocated(self._executor, partial(self._filled, creation, region, record))
            except OutOfMemoryError as error:
                if not region.is_reserved or creation.stopped.is_set():
                    raise
                self._memory.leave_reserved(error.detail)

    async def _on_device(self, allocate: Callable[[], Region]) -> Region:
        return await self._allocated(self._device_executor, allocate)

    async def _allocated(self, executor: Executor, allocate: Callable[[], RegionT]) -> RegionT:
        """Return memory that a thread allocates or imports, which takes long."""
        try:
            return await on_thread(executor, allocate, lambda region: region.close())
        except KvferryError:
            raise
        except Exception as cause:
            raise OutOfMemoryError(f"no memory: {cause}") from cause

    def _count_record(self, pool: Pool) -> None:
        """Promise what a pool on a device has of descriptors: its record; of a host pool that was done before."""
        if pool.file is None or isinstance(pool.region, HostRegion):
            return
        try:
            self._descriptors.take(pool.file, pool.tenant, "pools", PER_REGION)
        except KvferryError:
            self._discard(pool)
            raise

    def _device_memory(self, key: tuple[int, str], creation: _Creation, body: CreatePool) -> AcceleratorRegion:
        region = self._devices.allocate(body.device, creation.traits.manifest.region_bytes)
        try:
            if self._adoption is not None and region.kept is not None:
                record = _record_of(key, body, creation.traits, region)
                creation.file = self._adoption.keep(region, record, creation.traits.manifest)
        except BaseException:
            region.close()
            raise
        return region

    def _filled(self, creation: _Creation, region: HostRegion, record: PoolRecord) -> HostRegion:
        try:
            if self._populate or region.is_reserved:
                self._memory.fill(region, creation.stopped)
            if self._adoption is not None:
                creation.file = self._adoption.keep(region, record, creation.traits.manifest)
        except BaseException:
            region.close()
            raise
        return region

    def _add(self, pool: Pool, *, is_wanted: bool, registering: Session | None = None) -> None:
        """Add a pool whose memory is there, if it is still wanted; if not, or where it fails, nothing of it is left."""
        if not is_wanted:
            self._discard(pool)
            raise UnknownPoolError(_unwanted(pool.name), field="pool")
        try:
            if registering is not None:
                pool.give_all(registering.owner_id)
                self._pools.attach(registering, pool.name, pool.region_id)
            self._pools.add(pool)
            if registering is None and pool.region.device != HOST:
                self._pools.lost.made(pool.tenant, pool.name, pool.region.device)
        except BaseException:
            if self._pools.find(pool.tenant, pool.name) is pool:
                self._remove(pool)
            else:
                self._discard(pool)
            raise
        log.info(
            "pool created" if registering is None else "pool registered",
            pool=pool.name,
            tenant=pool.tenant,
            device=pool.region.device,
            pages=pool.manifest.pages,
            region_bytes=pool.manifest.region_bytes,
            model=pool.model.label if pool.model else "",
        )

    def _remove(self, pool: Pool) -> None:
        """Remove a pool; its memory is freed once none of its pages is in flight."""
        self._pools.remove(pool)
        if _is_in_flight(pool):
            self._leaving.append(pool)
            self._background.spawn(self._leave(pool))
        else:
            self._close_pool(pool)

    async def _leave(self, pool: Pool) -> None:
        while _is_in_flight(pool):  # noqa: ASYNC110  pages are counted by what copies them
            await asyncio.sleep(SWEEP_S)
        self._leaving.remove(pool)
        self._close_pool(pool)

    def _discard(self, pool: Pool) -> None:
        """Give back a pool that was not added."""
        if self._adoption is not None:
            self._adoption.forget(pool)
        self._close_pool(pool)

    def _close_pool(self, pool: Pool) -> asyncio.Future[None] | None:
        """Close a pool. On a device, and where there is much memory, this takes long: it is done on a thread then.

        Return what to wait for until the host has its memory back; None: it has.
        """
        loop, region = asyncio.get_running_loop(), pool.region
        if not isinstance(region, HostRegion):
            loop.run_in_executor(self._device_executor, pool.close)
            return None
        if region.size_bytes > STEP_BYTES:
            return loop.run_in_executor(self._freeing, region.release())
        pool.close()
        return None

    async def _attach(self, call: Call) -> Answer:
        body = expect(call, AttachPool)
        if body.region:
            return self._attached_before(call, body)
        pool = self._pools.get(call.session.tenant, body.pool)
        if body.layout_digest not in {"", pool.manifest.layout_digest}:
            raise LayoutMismatchError(
                f"pool {body.pool!r} has layout {pool.manifest.layout_digest}, not {body.layout_digest}",
                field="layout_digest",
            )
        region = pool.region
        if isinstance(region, HostRegion):
            follows = RegionFollows(message_id=call.message_id, pool=pool.name)
            self._session_socket.pass_frame(call.session, follows, [region.fd])
            return self._attached(call, pool)
        assert isinstance(region, AcceleratorRegion), region
        if pool.registered_by is not None:
            raise InvalidFieldError(
                f"pool {pool.name!r} is registered: its engine has the memory already", field="pool"
            )
        process_id = body.device_pid or call.session.peer.pid
        share = await on_thread(self._device_executor, lambda: region.share(process_id))
        self._session_socket.pass_frame(call.session, ShareFollows(message_id=call.message_id, shares=(share,)), [])
        return self._attached(call, pool)

    def _attached_before(self, call: Call, body: AttachPool) -> Answer:
        """Answer an engine that has mapped a pool, of this daemon or of the one before, and asks whether it still is.

        Raises:
            PoolLostError, UnknownPoolError: it is not; requests of its instance that name the pool are refused.
        """
        self._pools.attach(call.session, body.pool, body.region)
        pool = self._pools.get(call.session.tenant, body.pool)
        if pool.region_id != body.region:
            raise PoolLostError(f"pool {body.pool!r} was made again since this session attached it", field="pool")
        return self._attached(call, pool)

    def _attached(self, call: Call, pool: Pool) -> Answer:
        """Answer an engine that has the memory of a pool; other memory of this name is none to it from now on."""
        self._pools.attach(call.session, pool.name, pool.region_id)
        return Answer(
            PoolAttached(
                pool=pool.name,
                manifest=pool.manifest,
                device=pool.region.device,
                model=_public(pool),
                region=pool.region_id,
            )
        )

    async def _delete(self, call: Call) -> Answer:
        body = expect(call, DeletePool)
        creation = self._creations.get((call.session.tenant, body.pool))
        if creation is not None and creation.making is not None:
            creation.stopped.set()
            await asyncio.wait([creation.making])
            return Answer(PoolDeleted(pool=body.pool))
        pool = self._pools.named_by(call.session, body.pool)
        if pool.registered_by is not None:
            registering = self._dispatcher.sessions.get(pool.registered_by)
            if registering is None or registering.owner_id != call.session.owner_id:
                holder = session_text(self._dispatcher.sessions, pool.registered_by, call.session.session_id)
                raise PoolInUseError(f"pool {body.pool!r} is registered by {holder}", field="pool")
        if not pool.idle:
            used = sum(one.capacity - one.free_count for one in pool.allocators.values())
            raise PoolInUseError(
                f"{used} pages of pool {body.pool!r} are owned or in flight: {self._holders(pool, call)}", field="pool"
            )
        self._pools.remove(pool)
        self._pools.lost.deleted(pool.tenant, pool.name)
        closing = self._close_pool(pool)
        log.info("pool deleted", pool=pool.name, tenant=pool.tenant)
        if closing is not None:
            await asyncio.shield(closing)
        return Answer(PoolDeleted(pool=body.pool))

    def _allocate(self, call: Call) -> Answer:
        body = expect(call, Allocate)
        pool = self._pools.named_by(call.session, body.pool)
        asking = call.session.owner_id
        try:
            ids = pool.space(body.space).allocate(asking, body.count)
        except PoolFullError as error:
            raise pool_full(error, self._dispatcher.sessions, pool, body.space, asking) from None
        return Answer(Allocated(pages=len(ids)), (ids,))

    def _free(self, call: Call) -> Answer:
        body = expect(call, Free)
        pool = self._pools.named_by(call.session, body.pool)
        if pool.registered_by is not None:
            raise InvalidFieldError(
                f"pool {body.pool!r} is registered: its engine numbers its pages itself", field="pool"
            )
        freed = pool.space(body.space).free(call.session.owner_id, call.ids[0])
        return Answer(Freed(freed=freed.freed, deferred=freed.deferred))

    def _list_owned(self, call: Call) -> Answer:
        body = expect(call, ListOwned)
        pool = self._pools.named_by(call.session, body.pool)
        ids = {name: space.pages_of(call.session.owner_id) for name, space in pool.allocators.items()}
        spaces = tuple(OwnedSpace(space=name, pages=len(its)) for name, its in ids.items())
        return Answer(OwnedPages(spaces=spaces), tuple(ids.values()))

    def _holders(self, pool: Pool, call: Call) -> str:
        """Return a text saying who holds pages of a pool; empty where nobody does."""
        return holders_text(self._dispatcher.sessions, pool.allocators.values(), call.session.owner_id)

    def host_bytes(self) -> Counter[int]:
        """Return the host memory of the pools of each tenant, in bytes."""
        made = [(pool.tenant, pool.manifest) for pool in (*self._pools, *self._leaving) if pool.region.device == HOST]
        coming = [(key[0], one.traits.manifest) for key, one in self._creations.items() if one.traits.device == HOST]
        used: Counter[int] = Counter()
        for tenant, its in (*made, *coming):
            used[tenant] += total_bytes(its)
        return used

    def _check_budget(self, manifest: Manifest, tenant: int) -> None:
        wanted, used = total_bytes(manifest), self.host_bytes()
        most = self._dispatcher.sessions.tenants.shares.most(tenant, self._max_bytes, used)
        if used[tenant] + wanted > most:
            raise OutOfMemoryError(
                f"the pool needs {wanted} bytes; {used.total()} of {self._max_bytes} are taken (pools.max_bytes), and "
                f"{whose(tenant)} may have {most} in all",
                field="spec",
            )


async def _made(creation: _Creation) -> Pool:
    """Wait for a pool that is being made, also for others: it goes on if this is cancelled.

    Raises:
        KvferryError: there is none.
    """
    assert creation.making is not None, creation
    made = await asyncio.shield(creation.making)
    if isinstance(made, KvferryError):
        raise made
    return made


def _pool_of(key: tuple[int, str], traits: PoolTraits, region: Region, file: HostRegion | None = None) -> Pool:
    return Pool(
        *key,
        traits.manifest,
        region,
        registered_by=traits.registered_by,
        ends_with=traits.ends_with,
        model=traits.model,
        max_payload_bytes=traits.max_payload_bytes,
        file=file,
    )


def _unwanted(name: str) -> str:
    return f"pool {name!r} was deleted, or its instance ended, while it was made"


def _is_in_flight(pool: Pool) -> bool:
    return any(space.busy_count for space in pool.allocators.values())


def _registered(call: Call, body: RegisterPool, manifest: Manifest) -> PoolTraits:
    return PoolTraits(manifest, body.device, body.model, body.max_payload_bytes, registered_by=call.session.session_id)


def _record_of(key: tuple[int, str], body: CreatePool, traits: PoolTraits, region: Region) -> PoolRecord:
    kept = region.kept if isinstance(region, AcceleratorRegion) else None
    return PoolRecord(
        name=key[1],
        tenant=key[0],
        spec=body.spec,
        model=traits.model,
        max_payload_bytes=traits.max_payload_bytes,
        ends_with=traits.ends_with,
        memory=region.identity,
        manifest=manifest_digest(traits.manifest),
        kept=None if kept is None else KeptRecord(device=region.device, key=kept.key, size_bytes=kept.size_bytes),
    )


def _public(pool: Pool) -> ModelIdentity | None:
    return pool.model.public if pool.model else None


def _release(pool: Pool, owner_id: int) -> None:
    for allocator in pool.allocators.values():
        allocator.release_owner(owner_id)
