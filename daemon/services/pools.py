"""The pools of all tenants, and the requests about them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final, NamedTuple

import msgspec
import structlog

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.process.descriptors import PER_POOL, Descriptors
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.process.shares import share
from kvferry.daemon.process.threads import started_threads
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
)
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import STEP_BYTES, HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.manifest import total_bytes
from kvferry.pools.pool import Pool
from kvferry.pools.pool_file import PoolRecord, manifest_digest
from kvferry.protocol.base import ReplyBody
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
from kvferry.protocol.session_stream import RegionFollows, Share, ShareFollows

SWEEP_S: Final = 0.05
DEVICE_GRACE_S: Final = 0.05
"""Before an ended instance's device pages are freed: the driver stops a killed engine's kernels a moment after its
sockets are closed."""


log = structlog.get_logger(__name__)


class _Creation(msgspec.Struct):
    """A pool whose memory is being allocated or imported, and the requests that wait for it, oldest first.

    Attributes:
        deleting: the requests to delete it that came meanwhile.
        stopped: set where nobody wants it any more: its memory is given back after the step under way.
        in_reserved_pages: its memory is of reserved huge pages.
    """

    traits: PoolTraits
    waiting: list[Call]
    registered: HostRegion | None = None
    deleting: list[Call] = msgspec.field(default_factory=list)
    stopped: threading.Event = msgspec.field(default_factory=threading.Event)
    file: HostRegion | None = None
    in_reserved_pages: bool = False


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
            dispatcher.handle(kind, handler)

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
        for pool in list(self._pools):
            if pool.region.device == HOST:
                _release(pool, owner_id)
            else:
                asyncio.get_running_loop().call_later(DEVICE_GRACE_S, _release, pool, owner_id)
            if pool.ends_with == owner_id:
                self._pools.lost.deleted(pool.tenant, pool.name)
                log.info("pool deleted", pool=pool.name, tenant=pool.tenant, cause="its instance has ended")
                self._remove(pool)

    @property
    def leaving(self) -> Sequence[Pool]:
        """Return the pools that were removed while pages of them were in flight."""
        return self._leaving

    def status(self) -> tuple[PoolStatus, ...]:
        """Return the pools as STATUS shows them."""
        return tuple(map(status_of, self._pools))

    def close(self) -> None:
        """Free all memory, without waiting for a lost device."""
        for creation in self._creations.values():
            creation.stopped.set()
        for executor in (self._executor, self._device_executor, self._freeing):
            executor.shutdown(wait=not self._devices.lost, cancel_futures=True)
        for pool in (*self._pools, *self._leaving):
            pool.close()

    def _create(self, call: Call) -> Answer | None:
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
            if creation.traits.registered_by is None and not self._is_wanted(creation):
                raise OverloadedError(
                    f"pool {body.pool!r} was deleted, or its instance ended, while it was populated"
                ).after(RETRY_AT_ONCE_MS)
            self._check_found(call, body.pool, creation.traits, wanted)
            creation.waiting.append(call)
            return None
        creation, size_bytes = _Creation(wanted, [call]), wanted.manifest.region_bytes
        if body.device == HOST:
            self._check_budget(wanted.manifest, call.session.tenant)
            self._begin_on_host(key, creation, body)
        else:
            self._begin(key, creation, self._device_executor, self._devices.allocate, body.device, size_bytes)
        return None

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

    def _register(self, call: Call) -> Answer | None:
        body = expect(call, RegisterPool)
        if body.device == HOST:
            self._register_memory(call, body)
            return None
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
        creation, size_bytes = _Creation(_registered(call, body, manifest), [call]), manifest.region_bytes
        self._begin(key, creation, self._device_executor, self._devices.register, body.device, segments, size_bytes)
        return None

    def _register_memory(self, call: Call, body: RegisterPool) -> None:
        """Register a pool in an engine's host memory; answered in the loop's next turn."""
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
        made: asyncio.Future[Region] = asyncio.get_running_loop().create_future()
        made.set_result(region)
        self._await(key, _Creation(_registered(call, body, manifest), [call], region), made)

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
        """Return the regions of all pools: being registered, live, or removed with pages still in flight."""
        coming = ((one.registered, one.traits.manifest) for one in self._creations.values())
        made = ((pool.region, pool.manifest) for pool in (*self._pools, *self._leaving))
        return [MemoryInUse(region, manifest) for region, manifest in (*coming, *made) if region is not None]

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

    def _begin_on_host(self, key: tuple[int, str], creation: _Creation, body: CreatePool) -> None:
        region = self._reserved(*key, creation.traits.manifest.region_bytes)
        creation.in_reserved_pages = region.is_reserved
        record = _record_of(key, body, creation.traits, region)
        self._begin(key, creation, self._executor, self._filled, creation, region, record)

    def _filled(self, creation: _Creation, region: HostRegion, record: PoolRecord) -> HostRegion:
        try:
            if self._populate or creation.in_reserved_pages:
                self._memory.fill(region, creation.stopped)
            if self._adoption is not None:
                creation.file = self._adoption.keep(region, record, creation.traits.manifest)
        except BaseException:
            region.close()
            raise
        return region

    def _begin(
        self,
        key: tuple[int, str],
        creation: _Creation,
        executor: Executor,
        make: Callable[..., Region],
        *arguments: object,
    ) -> None:
        """Make a pool's region by ``make(*arguments)`` on a thread that may block, then the pool."""
        self._await(key, creation, asyncio.get_running_loop().run_in_executor(executor, make, *arguments))

    def _await(self, key: tuple[int, str], creation: _Creation, made: asyncio.Future[Region]) -> None:
        self._creations[key] = creation
        made.add_done_callback(lambda done: self._made(key, done))

    def _made(self, key: tuple[int, str], done: asyncio.Future[Region]) -> None:
        creation = self._creations.pop(key)
        failed = None if done.cancelled() else done.exception()
        if done.cancelled() or failed is not None:
            error = failed if isinstance(failed, KvferryError) else OutOfMemoryError(f"no memory: {failed}")
            if creation.in_reserved_pages and isinstance(error, OutOfMemoryError) and self._is_wanted(creation):
                self._memory.leave_reserved(error.detail)
                try:
                    self._begin_on_host(key, creation, expect(creation.waiting[0], CreatePool))
                except KvferryError as cause:
                    error = cause
                else:
                    return
            self._end_creation(key[1], creation, error)
            return
        try:
            self._add_made(key, creation, done.result())
        except Exception as cause:
            log.exception("a pool could not be added", pool=key[1], tenant=key[0], cause=str(cause))
            pool = self._pools.find(*key)
            if pool is not None:
                self._remove(pool)
            else:
                done.result().close()
            self._end_creation(key[1], creation, InternalError(f"the pool could not be added: {cause!r}"))

    def _add_made(self, key: tuple[int, str], creation: _Creation, region: Region) -> None:
        """Add a pool whose memory is there, and answer those who wait for it."""
        traits, is_registered = creation.traits, creation.traits.registered_by is not None
        pool = Pool(
            *key,
            traits.manifest,
            region,
            registered_by=traits.registered_by,
            ends_with=traits.ends_with,
            model=traits.model,
            max_payload_bytes=traits.max_payload_bytes,
            file=creation.file,
        )
        if not self._is_wanted(creation):
            if self._adoption is not None:
                self._adoption.forget(pool)
            self._close_pool(pool)
            if creation.deleting:
                deleted = UnknownPoolError(f"pool {key[1]!r} was deleted while it was being made", field="pool")
                self._end_creation(key[1], creation, deleted)
            return
        if is_registered:
            registering = creation.waiting[0].session
            pool.give_all(registering.owner_id)
            self._pools.attach(registering, pool.name, pool.region_id)
        self._pools.add(pool)
        if traits.device != HOST and not is_registered:
            self._pools.lost.made(*key, traits.device)
        log.info(
            "pool registered" if is_registered else "pool created",
            pool=key[1],
            tenant=key[0],
            device=traits.device,
            pages=pool.manifest.pages,
            region_bytes=pool.manifest.region_bytes,
            model=pool.model.label if pool.model else "",
        )
        for number, call in enumerate(creation.waiting):
            reply: ReplyBody = PoolCreated(pool=key[1], created=number == 0, manifest=pool.manifest)
            if is_registered:
                reply = PoolRegistered(pool=key[1], manifest=pool.manifest)
            self._dispatcher.answer(call.session, call.message_id, Answer(reply))

    def _end_creation(self, name: str, creation: _Creation, error: KvferryError) -> None:
        """Answer all who waited for a pool that there will not be."""
        for call in creation.waiting:
            self._dispatcher.answer_error(call.session, call.message_id, error)
        for call in creation.deleting:
            self._dispatcher.answer(call.session, call.message_id, Answer(PoolDeleted(pool=name)))

    def _is_wanted(self, creation: _Creation) -> bool:
        """Return whether a new pool is not deleted, and its owner lives; if registered, that its request is pending."""
        if creation.deleting:
            return False
        if creation.traits.registered_by is not None:
            call = creation.waiting[0]
            return self._session_socket.is_connected(call.session) and call.session.is_pending(call.message_id)
        ends_with = creation.traits.ends_with
        return ends_with is None or bool(self._dispatcher.sessions.of_instance(ends_with))

    def _remove(self, pool: Pool) -> None:
        """Remove a pool; its memory is freed once none of its pages is in flight."""
        self._pools.remove(pool)
        self._leaving.append(pool)
        self._sweep()

    def _sweep(self) -> None:
        for pool in [one for one in self._leaving if not any(space.busy_count for space in one.allocators.values())]:
            self._leaving.remove(pool)
            self._close_pool(pool)
        if self._leaving:
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

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

    def _attach(self, call: Call) -> Answer | None:
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
        sharing = asyncio.get_running_loop().run_in_executor(self._device_executor, region.share, process_id)

        def shared(done: asyncio.Future[Share]) -> None:
            self._dispatcher.run_held(call, lambda _call: self._shared(call, pool, done.result()))

        sharing.add_done_callback(shared)
        return None

    def _shared(self, call: Call, pool: Pool, share: Share) -> Answer:
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

    def _delete(self, call: Call) -> Answer | None:
        body = expect(call, DeletePool)
        creation = self._creations.get((call.session.tenant, body.pool))
        if creation is not None and creation.traits.registered_by is None:
            creation.deleting.append(call)
            creation.stopped.set()
            return None
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
        deleted = Answer(PoolDeleted(pool=body.pool))
        if closing is None:
            return deleted
        closing.add_done_callback(lambda _: self._dispatcher.answer(call.session, call.message_id, deleted))
        return None

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

    def _check_budget(self, manifest: Manifest, user: int) -> None:
        made = [(pool.tenant, pool.manifest) for pool in (*self._pools, *self._leaving) if pool.region.device == HOST]
        coming = [(key[0], one.traits.manifest) for key, one in self._creations.items() if one.traits.device == HOST]
        used: Counter[int] = Counter()
        for tenant, its in (*made, *coming):
            used[tenant] += total_bytes(its)
        wanted, most = total_bytes(manifest), share(user, self._max_bytes, used.total() - used[user])
        if used[user] + wanted > most:
            raise OutOfMemoryError(
                f"the pool needs {wanted} bytes; {used.total()} of {self._max_bytes} are taken (pools.max_bytes), and "
                f"user {user} may have {most} in all",
                field="spec",
            )


def _registered(call: Call, body: RegisterPool, manifest: Manifest) -> PoolTraits:
    return PoolTraits(manifest, body.device, body.model, body.max_payload_bytes, registered_by=call.session.session_id)


def _record_of(key: tuple[int, str], body: CreatePool, traits: PoolTraits, region: HostRegion) -> PoolRecord:
    return PoolRecord(
        name=key[1],
        tenant=key[0],
        spec=body.spec,
        model=traits.model,
        max_payload_bytes=traits.max_payload_bytes,
        ends_with=traits.ends_with,
        memory=region.identity,
        manifest=manifest_digest(traits.manifest),
    )


def _public(pool: Pool) -> ModelIdentity | None:
    return pool.model.public if pool.model else None


def _release(pool: Pool, owner_id: int) -> None:
    for allocator in pool.allocators.values():
        allocator.release_owner(owner_id)
