"""The pools of all tenants, and the requests about them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import structlog

from kvferry.daemon.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.session_socket import SessionSocket
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.manifest import bytes_per_page, spaces_of
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import (
    KvferryError,
    LayoutMismatchError,
    OutOfMemoryError,
    PoolExistsError,
    PoolInUseError,
    UnknownPoolError,
)
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.pool_messages import (
    Allocate,
    Allocated,
    AttachPool,
    CreatePool,
    DeletePool,
    Free,
    Freed,
    PoolAttached,
    PoolCreated,
    PoolDeleted,
)
from kvferry.protocol.session_messages import PoolStatus, RegionFollows, SpaceStatus

log = structlog.get_logger(__name__)


class _Creation(msgspec.Struct):
    """A pool whose memory is being fetched, and the requests that wait for it; the first one asked first."""

    pool: Pool
    waiting: list[Call]


class PoolService:
    """Owns every pool. Memory is populated on a thread of its own, one pool at a time.

    Attributes:
        on_deleted: each is called with a pool just before its memory is given back.
    """

    def __init__(
        self, dispatcher: Dispatcher, session_socket: SessionSocket, *, max_bytes: int, populate: bool
    ) -> None:
        self._dispatcher = dispatcher
        self._session_socket = session_socket
        self._max_bytes = max_bytes
        self._populating_ends = threading.Event()
        if not populate:
            self._populating_ends.set()
        self.on_deleted: list[Callable[[Pool], None]] = []
        self._pools: dict[tuple[int, str], Pool] = {}
        self._creations: dict[tuple[int, str], _Creation] = {}
        self._executor = ThreadPoolExecutor(1, "populate")
        for kind, handler in (
            ("CREATE_POOL", self._create),
            ("ATTACH_POOL", self._attach),
            ("DELETE_POOL", self._delete),
            ("ALLOCATE", self._allocate),
            ("FREE", self._free),
        ):
            dispatcher.handle(kind, handler)

    def __iter__(self) -> Iterator[Pool]:
        """Yield the pools that can be used."""
        return iter(self._pools.values())

    def get(self, tenant: int, name: str) -> Pool:
        """Return a tenant's pool.

        Raises:
            UnknownPoolError: none of that name.
        """
        pool = self._pools.get((tenant, name))
        if pool is None:
            raise UnknownPoolError(f"no pool {name!r} of user {tenant}", field="pool")
        return pool

    def session_lost(self, session_id: int) -> None:
        """Take back every page of a session; those in flight follow when their hand-offs settle."""
        for pool in self:
            for allocator in pool.allocators.values():
                allocator.release_owner(session_id)

    def pages_by_session(self) -> Counter[int]:
        """Return how many pages each session owns, over all pools."""
        owned: Counter[int] = Counter()
        for pool in self:
            for allocator in pool.allocators.values():
                owned.update(allocator.pages_by_owner())
        return owned

    def status(self) -> tuple[PoolStatus, ...]:
        """Return the pools as STATUS shows them."""
        return tuple(_status_of(pool) for pool in self)

    def close(self) -> None:
        """Give all memory back."""
        self._populating_ends.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        for pool in self:
            pool.close()

    def _create(self, call: Call) -> Answer | None:
        body = expect(call, CreatePool)
        manifest = manifest_of(body.spec)
        key = (call.session.tenant, body.pool)
        creation = self._creations.get(key)
        existing = creation.pool if creation else self._pools.get(key)
        if existing is not None:
            _check_same(existing.manifest, manifest, body.pool)
            if creation is None:
                return Answer(PoolCreated(pool=body.pool, created=False, manifest=existing.manifest))
            creation.waiting.append(call)
            return None
        self._check_budget(manifest)
        region = HostRegion.create(f"{call.session.tenant}:{body.pool}", manifest.region_bytes)
        self._creations[key] = _Creation(Pool(*key, manifest, region), [call])
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._executor, region.populate, self._populating_ends)
        work.add_done_callback(lambda done: self._created(key, done))
        return None

    def _created(self, key: tuple[int, str], done: asyncio.Future[None]) -> None:
        creation = self._creations.pop(key)
        failed = None if done.cancelled() else done.exception()
        if done.cancelled() or failed is not None:
            creation.pool.close()
            error = failed if isinstance(failed, KvferryError) else OutOfMemoryError(f"no memory: {failed}")
            for call in creation.waiting:
                self._dispatcher.answer_error(call.session, call.message_id, error)
            return
        self._pools[key] = creation.pool
        manifest = creation.pool.manifest
        log.info("pool created", pool=key[1], tenant=key[0], pages=manifest.pages, region_bytes=manifest.region_bytes)
        for number, call in enumerate(creation.waiting):
            reply = PoolCreated(pool=key[1], created=number == 0, manifest=manifest)
            self._dispatcher.answer(call.session, call.message_id, Answer(reply))

    def _attach(self, call: Call) -> Answer:
        body = expect(call, AttachPool)
        pool = self.get(call.session.tenant, body.pool)
        if body.layout_digest not in {"", pool.manifest.layout_digest}:
            raise LayoutMismatchError(
                f"pool {body.pool!r} has layout {pool.manifest.layout_digest}, not {body.layout_digest}",
                field="layout_digest",
            )
        follows = RegionFollows(message_id=call.message_id, pool=pool.name)
        self._session_socket.pass_fds(call.session, follows, [pool.region.fd])
        return Answer(PoolAttached(pool=pool.name, manifest=pool.manifest))

    def _delete(self, call: Call) -> Answer:
        body = expect(call, DeletePool)
        pool = self.get(call.session.tenant, body.pool)
        if not pool.idle:
            used = sum(one.capacity - one.free_count for one in pool.allocators.values())
            raise PoolInUseError(f"{used} pages of pool {body.pool!r} are owned or in flight", field="pool")
        del self._pools[pool.tenant, pool.name]
        for told in self.on_deleted:
            told(pool)
        pool.close()
        log.info("pool deleted", pool=pool.name, tenant=pool.tenant)
        return Answer(PoolDeleted(pool=body.pool))

    def _allocate(self, call: Call) -> Answer:
        body = expect(call, Allocate)
        pool = self.get(call.session.tenant, body.pool)
        ids = pool.space(body.space).allocate(call.session.session_id, body.count)
        return Answer(Allocated(pages=len(ids)), (ids,))

    def _free(self, call: Call) -> Answer:
        body = expect(call, Free)
        pool = self.get(call.session.tenant, body.pool)
        freed = pool.space(body.space).free(call.session.session_id, call.ids[0])
        return Answer(Freed(freed=freed.freed, deferred=freed.deferred))

    def _check_budget(self, manifest: Manifest) -> None:
        pools = [*self, *(creation.pool for creation in self._creations.values())]
        used = sum(pool.manifest.region_bytes for pool in pools)
        if used + manifest.region_bytes > self._max_bytes:
            raise OutOfMemoryError(
                f"the pool needs {manifest.region_bytes} bytes; {used} of {self._max_bytes} are taken", field="spec"
            )


def _status_of(pool: Pool) -> PoolStatus:
    spaces = tuple(
        SpaceStatus(
            space=space,
            page_bytes=bytes_per_page(pool.manifest, space),
            pages=allocator.capacity,
            free=allocator.free_count,
            busy=allocator.busy_count,
        )
        for space, allocator in pool.allocators.items()
    )
    return PoolStatus(
        pool=pool.name,
        tenant=pool.tenant,
        layout_digest=pool.manifest.layout_digest,
        region_bytes=pool.manifest.region_bytes,
        page_bytes=spaces[0].page_bytes,
        pages=spaces[0].pages,
        free=spaces[0].free,
        busy=spaces[0].busy,
        spaces=spaces if len(spaces) > 1 else (),
    )


def _check_same(existing: Manifest, wanted: Manifest, name: str) -> None:
    if (existing.layout_digest, spaces_of(existing)) != (wanted.layout_digest, spaces_of(wanted)):
        raise PoolExistsError(
            f"pool {name!r} exists with {_pages_text(existing)} pages of layout {existing.layout_digest}; "
            f"asked for {_pages_text(wanted)} of {wanted.layout_digest}",
            field="spec",
        )


def _pages_text(manifest: Manifest) -> str:
    spaces = spaces_of(manifest)
    return ", ".join(f"{pages} {space}" for space, pages in spaces.items()) if len(spaces) > 1 else f"{manifest.pages}"
