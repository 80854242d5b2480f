"""What outlives the daemon: host pools with the owners of their pages, and the sessions of those owners.

Each daemon records them (``pools.pool_file``, ``control.session_index``) in memory that a store of descriptors keeps
(``process.fd_store``), and the next one adopts what it can trust, record by record. What it cannot is dropped, counted,
and said in the log: it is never half-adopted. Everything else ends with a boot: transfers, operations, events, event
rings and graph tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import structlog

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.session_index import INDEX_BYTES, FoundSessions, SessionIndex, SessionRecord, format_index
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import Session, SessionRegistry
from kvferry.daemon.process.device_keeper import DeviceKeeper, Fence
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.process.fd_store import ANSWER_S, PREFIX, FdStore, FdStoreError, NoStore
from kvferry.daemon.process.host import started_at
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.process.threads import on_thread, started_threads
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.kept_tier import KeptTier, open_kept_tier
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion, identity_of
from kvferry.pools.host.memory import smallest_limit
from kvferry.pools.integrity import Problem, Walk, problem_at
from kvferry.pools.layouts import manifest_of
from kvferry.pools.pool import Pool
from kvferry.pools.pool_file import (
    KeptRecord,
    PoolRecord,
    drop_owners,
    end_pool_file,
    manifest_digest,
    owners_in,
    pool_file_bytes,
    read_pool_record,
    write_pool_file,
)
from kvferry.pools.records import UnreadableFileError
from kvferry.protocol.config.schema import TiersConfig
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.ids import BootId
from kvferry.protocol.manifests import Manifest

INDEX: Final = f"{PREFIX}index"
_POOL: Final = f"{PREFIX}pool."
_MEMORY: Final = ".memory"
_RECORD: Final = ".record"
MOST_TRIES: Final = 3
"""Daemons that may end while they adopt; the next one drops everything, rather than that none ever comes up."""

LOOK_S: Final = 1.0
"""How often it is looked whether the store's process answers."""

LEAST_HOLD_S: Final = 10.0
"""How long the holder waits for the next daemon after an orderly end, at least."""

log = structlog.get_logger(__name__)


class FoundPool(NamedTuple):
    """What the daemon before has left of a pool; ``key`` is its memory's in the store."""

    key: str
    record: PoolRecord
    manifest: Manifest
    file: HostRegion

    @classmethod
    def at(cls, key: str, record_fd: int) -> FoundPool:
        """Return the pool whose record this descriptor has, which is owned from now on.

        Raises:
            KvferryError, UnreadableFileError: it cannot be trusted.
        """
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(contextlib.closing(_mapped(record_fd)))
            record, manifest = _read(file)
            if str(record.memory) != key:
                raise UnreadableFileError(f"the record of pool {record.name!r} has another one's name")
            undo.pop_all()
        return cls(key, record, manifest, file)


class Adoption:
    """Records for the next daemon, and adopts what the one before has left. For the control loop, except ``keep``."""

    def __init__(
        self,
        store: FdStore,
        boot_id: BootId,
        sessions: SessionRegistry,
        session_socket: SessionSocket,
        pools: PoolRegistry,
        counters: Counters,
        keeper: DeviceKeeper | None = None,
    ) -> None:
        """Take what the store has; ``adopt`` comes before any session or pool.

        ``coming`` are the pools on devices that ``adopt_devices`` has not come to.
        """
        self._store = store
        self._keeper = keeper
        if keeper is not None:
            loop = asyncio.get_running_loop()
            keeper.when_lost = partial(loop.call_soon_threadsafe, counters.add, "adoption.keeper_lost")
        self._device_tries = 0
        self.coming: list[FoundPool] = []
        self._sessions = sessions
        self._session_socket = session_socket
        self._pools = pools
        self._counters = counters
        self._stored = store.take()
        self._found = FoundSessions((), 0)
        self._removing = ThreadPoolExecutor(1, "fd-store")
        self._pidfd = -1
        self._looks: asyncio.TimerHandle | None = None
        self._is_silent = False
        self._tier: KeptTier | None = None
        self._memory = self._open_index()
        if self._memory is None:
            return
        self._index = SessionIndex(self._memory.buffer)
        self._before, self._device_tries = self._index.boot_id, self._index.device_tries
        self._found = self._index.begin(boot_id)

    def __repr__(self) -> str:
        """Show who keeps what outlives the daemon."""
        return f"<Adoption by {self._store.where or 'nobody'}>"

    @property
    def outlives(self) -> bool:
        """Return whether sessions and host pools outlive the daemon."""
        return bool(self._store.where)

    def host_tier(self, memory: HostMemory, config: TiersConfig) -> KeptTier | None:
        """Return the host tier's memory, of the daemon before this one or new; None where it does not outlive."""
        size_bytes = config.size_bytes(smallest_limit().size_bytes)
        if self._memory is not None and size_bytes:
            checksums = config.checksums
            self._tier = open_kept_tier(self._store, self._stored, memory, size_bytes, checksums=checksums)
            if self._tier is not None:
                self._count("tier_records_dropped", self._tier.found.dropped)
        return self._tier

    def adopt(self, loop: asyncio.AbstractEventLoop, adopt_tier: Callable[[], None]) -> None:
        """Adopt the sessions whose processes live, and then the pools; call it once, before anything is served.

        The sessions may be resumed for the grace, which begins now. ``adopt_tier`` adopts what is in the host tier of
        those that are known by then.
        """
        if self._memory is None:
            return
        self._watch(loop)
        self._sessions.continue_after(max([self._index.last, *(one.session for one in self._found.records)]))
        self._count("sessions_dropped", self._found.unreadable)
        for record in self._found.records:
            self._adopt_session(record, loop)
        for key in [name[len(_POOL) : -len(_RECORD)] for name in self._stored if _is_record(name)]:
            self._adopt_pool(key)
        adopt_tier()
        self._drop_rest("nothing knows them")
        self._index.came_up()
        log.info(
            "adopted",
            of_boot=self._before,
            kept_by=self._store.where,
            sessions=len(self._sessions),
            pools=sum(1 for _ in self._pools),
            dropped={name: count for name, count in self._counters.snapshot().items() if name.startswith("adoption.")},
        )

    def keep(self, region: HostRegion | AcceleratorRegion, record: PoolRecord, manifest: Manifest) -> HostRegion | None:
        """Let a new pool outlive the daemon; return the memory of its record and its pages' owners, None if it fails.

        For a thread that may block: returns when both are kept.
        """
        if not self.outlives:
            return None
        names = _names(region.identity)
        file: HostRegion | None = None
        try:
            file = HostRegion.create(f"record:{record.tenant}:{record.name}", pool_file_bytes(record, manifest))
            write_pool_file(file.buffer, record)
            fds = (region.fd, file.fd) if isinstance(region, HostRegion) else (file.fd,)
            self._store.put(dict(zip(names[-len(fds) :], fds, strict=True)))
        except (FdStoreError, KvferryError) as cause:
            if file is not None:
                file.close()
                self._store.remove(names)
            self._counters.add("adoption.not_kept")
            log.warning("a pool does not outlive the daemon", pool=record.name, tenant=record.tenant, cause=str(cause))
            return None
        _let_outlive(region, outlives=True)
        return file

    def forget(self, pool: Pool) -> None:
        """Let a pool that was removed not be adopted."""
        if pool.file is not None:
            self.forget_records([pool])
            identity = pool.region.identity
            self._removing.submit(self._store.remove, _names(identity))

    def forget_records(self, pools: Iterable[Pool]) -> None:
        """Let pools not be adopted, as far as this daemon itself goes: it may be about to end."""
        for pool in pools:
            if pool.file is not None:
                end_pool_file(pool.file.buffer)
                _let_outlive(pool.region, outlives=False)

    def descriptors(self) -> dict[str, list[int]]:
        """Return what the store keeps of this daemon, by name; they stay the daemon's."""
        found = {INDEX: [self._memory.fd]} if self._memory is not None else {}
        found |= self._tier.descriptors() if self._tier is not None else {}
        for pool in self._pools:
            if pool.file is not None:
                memory, record = _names(pool.region.identity)
                found[record] = [pool.file.fd]
                if isinstance(pool.region, HostRegion):
                    found[memory] = [pool.region.fd]
        found |= {_names(one.key)[1]: [one.file.fd] for one in self.coming}
        return found

    def handed_over(self) -> dict[str, list[int]]:
        """Return what the next daemon is to be given: a service manager gives it what it keeps at a start only."""
        return {} if self._store.pid else self.descriptors()

    def leave(self) -> None:
        """End: what is recorded waits for the next daemon; without records the holder ends too."""
        self._removing.shutdown()
        if self._looks is not None:
            self._looks.cancel()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        pools = self.coming or any(pool.file for pool in self._pools)
        kept = self._memory is not None and (len(self._sessions) or pools)
        grace_s = max(self._session_socket.resume_grace_s, LEAST_HOLD_S) if kept else None
        self._store.leave(grace_s)
        if self._keeper is not None:
            self._keeper.leave(grace_s)
        for one in self.coming:
            one.file.close()
        if self._tier is not None:
            self._tier.close()
        if self._memory is not None:
            self._memory.close()

    def problems(self) -> Walk:
        """Yield the sessions and pools whose records are not theirs; pages' owners are kept in the record alone."""
        if self._memory is None:
            return
        for session in self._sessions:
            record = self._index.get(session.session_id)
            if record is None and session.session_id not in self._index.sessions:
                continue  # there was no room for it, which was said then
            if record is None or record != _record_of(session, record.started):
                yield Problem("a session's record is not its own", holder=f"session {session.session_id}")
        extra = self._index.sessions - {one.session_id for one in self._sessions}
        if extra:
            yield problem_at("a session has a record, and has ended", sorted(extra))
        for pool in list(self._pools):
            if pool.file is None:
                continue
            try:
                its = read_pool_record(pool.file.buffer)
            except UnreadableFileError as cause:
                yield Problem(f"the record of pool {pool.name!r} cannot be read: {cause}")
                continue
            if (its.tenant, its.name, its.memory) != (pool.tenant, pool.name, pool.region.identity):
                yield Problem(f"the record of pool {pool.name!r} is another one's", holder=its.name)
        yield None

    # -- recording

    def session_began(self, session: Session) -> None:
        """Record a session, or the process that has resumed it."""
        if self._memory is None:
            return
        self._index.give(session.session_id)
        if not self._index.put(_record_of(session, started_at(session.peer.pid))):
            self._counters.add("adoption.not_kept")
            log.warning("a session does not outlive the daemon", session=session.session_id, cause="the index is full")

    def session_ended(self, session_id: int) -> None:
        """Let a session not be adopted."""
        if self._memory is not None:
            self._index.remove(session_id)

    # -- adopting

    def _open_index(self) -> HostRegion | None:
        """Return the index, of the daemon before this one or a new one; None where nothing is kept."""
        fd = self._stored.pop(INDEX, None)
        if fd is not None:
            try:
                region = HostRegion(fd, INDEX_BYTES)
                _check_tries(SessionIndex(region.buffer).tries)
            except (KvferryError, UnreadableFileError) as cause:
                self._drop_rest(f"the index: {cause}", INDEX)
            else:
                return region
        elif self._stored:
            self._drop_rest("there is no index")
        if not self.outlives:
            return None
        region = HostRegion.create("index", INDEX_BYTES)
        format_index(region.buffer)
        try:
            self._store.put({INDEX: region.fd})
        except FdStoreError as cause:
            region.close()
            self._go_cold(str(cause))
            return None
        return region

    def _adopt_session(self, record: SessionRecord, loop: asyncio.AbstractEventLoop) -> None:
        try:
            session = self._sessions.adopt(record)
        except KvferryError as cause:
            self._index.remove(record.session)
            self._count("sessions_dropped", 1)
            log.warning("a session is not adopted", session=record.session, cause=str(cause))
            return
        if self._session_socket.adopt(session, record.started, loop):
            self._count("sessions", 1)
            return
        self._sessions.close(session)
        self._index.remove(record.session)
        self._count("sessions_ended", 1)

    def _adopt_pool(self, key: str) -> None:
        """Adopt a host pool, or expect one on a device."""
        memory, record = (self._stored.pop(name, -1) for name in _names(key))
        try:
            with contextlib.ExitStack() as undo:
                if memory >= 0:
                    undo.callback(os.close, memory)
                found = FoundPool.at(key, record)
                undo.callback(found.file.close)
                if found.record.kept is not None:
                    self._expect(found, found.record.kept)
                else:
                    region = _region_of(found, memory)
                    undo.callback(region.close)
                    self._pools.add(self._pool(found, region))
                    self._count("pools", 1)
                undo.pop_all()
                if memory >= 0:
                    os.close(memory)
        except Exception as cause:  # noqa: BLE001  no record may keep the daemon from its start, again and again
            self._drop_pool(key, cause)

    def _drop_pool(self, key: str, cause: Exception) -> str:
        self._store.remove(_names(key))
        self._count("pools_dropped", 1)
        why = str(cause) or type(cause).__name__
        log.warning("a pool is not adopted", memory=key, cause=why)
        return why

    def _pool(self, found: FoundPool, region: Region) -> Pool:
        """Return the pool that a record and its memory make.

        Raises:
            UnreadableFileError: it has ended, or is there already.
        """
        record, file = found.record, found.file
        if self._pools.find(record.tenant, record.name) is not None:
            raise UnreadableFileError(f"there is a pool {record.name!r} of user {record.tenant} already")
        if record.ends_with is not None and not self._sessions.of_instance(record.ends_with):
            raise UnreadableFileError(f"the instance of pool {record.name!r} has ended")
        known = {one.owner_id for one in self._sessions if one.tenant == record.tenant}
        for owners in owners_in(file.view(), found.manifest).values():
            dropped = drop_owners(owners, known)
            self._count("pages_dropped", dropped)
            self._count("pages", int(np.count_nonzero(owners)))
        return Pool(
            record.tenant,
            record.name,
            found.manifest,
            region,
            ends_with=record.ends_with,
            model=record.model,
            max_payload_bytes=record.max_payload_bytes,
            file=file,
        )

    # -- adopting pools on devices, while others are served

    def _expect(self, found: FoundPool, kept: KeptRecord) -> None:
        name = found.record.name
        if self._device_tries >= MOST_TRIES:
            raise UnreadableFileError(f"{self._device_tries} daemons have ended while they adopted pools on devices")
        if kept.size_bytes < found.manifest.region_bytes:
            raise UnreadableFileError(f"{kept.size_bytes} bytes are too few for pool {name!r}")
        if self._pools.coming(found.record.tenant, name) is not None:
            raise UnreadableFileError(f"there are two pools {name!r} of user {found.record.tenant}")
        self.coming.append(found)
        self._pools.expect(found.record.tenant, name)

    async def adopt_devices(self, devices: Devices, fence: Fence) -> None:
        """Adopt the pools on devices, one after another, after ``adopt``: opening a device takes seconds.

        Until then who names one waits, or is told to come again. None of their pages is handed out before the fence.
        """
        if self._memory is None:
            return
        if not (self.coming or devices.has_strays):
            self._index.devices_came_up()
            return
        executor, adopted = started_threads(1, "adopt"), set[str]()
        try:
            passed = not self.coming or await fence.passed()
            while self.coming:
                found = self.coming[0]
                kept = found.record.kept
                assert kept is not None, found
                if await self._adopt_on_device(found, kept, devices, executor, passed=passed):
                    adopted.add(kept.key)
                self.coming.remove(found)
                self._pools.came(found.record.tenant, found.record.name)
            self._count("memories_dropped", await on_thread(executor, partial(devices.drop_all_but, adopted)))
        finally:
            executor.shutdown(wait=False)
        self._index.devices_came_up()

    async def _adopt_on_device(
        self, found: FoundPool, kept: KeptRecord, devices: Devices, executor: Executor, *, passed: bool
    ) -> bool:
        """Adopt a pool, or let it be lost; return whether it is there."""
        record, region = found.record, None
        try:
            _check_passed(passed)
            adopt = partial(devices.adopt, kept, found.manifest.region_bytes, record.memory)
            region = await on_thread(executor, adopt, lambda region: region.close())
            self._pools.add(self._pool(found, region))
        except Exception as cause:  # noqa: BLE001  as of host pools
            if region is not None:
                executor.submit(region.close)
            why = self._drop_pool(found.key, cause)
            found.file.close()
            self._pools.lost.lose(record.tenant, record.name, f"was on {kept.device} and is not adopted: {why}")
            return False
        self._pools.lost.made(record.tenant, record.name, kept.device)
        self._count("pools", 1)
        log.info("adopted", pool=record.name, tenant=record.tenant, device=kept.device)
        return True

    def _drop_rest(self, why: str, *names: str) -> None:
        """Close what the store had and nobody adopted, and remove it and these names from the store."""
        for fd in self._stored.values():
            os.close(fd)
        dropped = [*self._stored, *names]
        self._stored.clear()
        if dropped:
            self._store.remove(dropped)
            self._count("descriptors_dropped", len(dropped))
            log.warning("descriptors dropped", count=len(dropped), cause=why)

    def _count(self, what: str, count: int) -> None:
        if count:
            self._counters.add(f"adoption.{what}", count)

    # -- the store's process

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._store.pid:
            with contextlib.suppress(OSError):  # it is gone: the next pool says so
                self._pidfd = os.pidfd_open(self._store.pid)
                loop.add_reader(self._pidfd, self._store_lost, loop)
            self._look(loop)

    def _store_lost(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._pidfd)
        self._go_cold(f"{self._store.where} has ended")

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look whether the store's process answers; say it once where it does not, and where it does again."""
        if not self._store.pid:
            return
        self._looks = loop.call_later(LOOK_S, self._look, loop)
        if self._is_silent == (self._store.silent_s() > ANSWER_S):
            return
        self._is_silent = not self._is_silent
        if not self._is_silent:
            log.info("the process that keeps descriptors answers again", pid=self._store.pid)
            return
        self._counters.add("adoption.store_silent")
        log.warning(
            "while this process stands still, the daemon's end is that of all pools and sessions",
            cause=f"{self._store.where} has not answered for {ANSWER_S:g} s",
            pid=self._store.pid,
            remedy="let it go on (kill -CONT)",
        )

    def _go_cold(self, cause: str) -> None:
        self._store = NoStore()
        self._counters.add("adoption.store_lost")
        log.warning(
            "nothing outlives this daemon: its end is that of all pools and sessions",
            cause=cause,
            remedy="restart it when no engine needs them",
        )


def _check_tries(tries: int) -> None:
    """Check that the daemons before this one have not all ended by what this one is about to adopt.

    Raises:
        UnreadableFileError: they have.
    """
    if tries >= MOST_TRIES:
        raise UnreadableFileError(f"{tries} daemons have ended while they adopted it")


def _record_of(session: Session, started: int) -> SessionRecord:
    return SessionRecord(
        session=session.session_id,
        owner=session.owner_id,
        uid=session.peer.uid,
        gid=session.peer.gid,
        pid=session.peer.pid,
        started=started,
        name=session.name,
        instance=session.instance,
        secret=session.secret,
        turn=session.turn,
        tenant=session.tenant if session.tenant != session.peer.uid else None,
    )


def _check_passed(passed: bool) -> None:  # noqa: FBT001  what ``Fence.passed`` says
    if not passed:
        raise UnreadableFileError("copies of the daemon before may still reach its memory")


def _let_outlive(region: Region, *, outlives: bool) -> None:
    if isinstance(region, AcceleratorRegion) and region.kept is not None:
        region.kept.outlives = outlives


def _region_of(found: FoundPool, memory: int) -> HostRegion:
    """Return the memory of a host pool; the descriptor stays the caller's.

    Raises:
        UnreadableFileError: it is another one, or missing.
    """
    if memory < 0 or identity_of(memory) != found.record.memory:
        raise UnreadableFileError(f"the memory of pool {found.record.name!r} is missing")
    return HostRegion(os.dup(memory), found.manifest.region_bytes)


def _is_record(name: str) -> bool:
    return name.startswith(_POOL) and name.endswith(_RECORD)


def _names(memory: int | str) -> tuple[str, str]:
    """Return the names of a pool's memory, of this identity, and of its record; on a device it has a record alone."""
    return f"{_POOL}{memory}{_MEMORY}", f"{_POOL}{memory}{_RECORD}"


def check_record(name: str, fd: int) -> str:
    """Check that this version can adopt a pool, where that is its record; return the device that it is on, or "".

    The descriptor stays the caller's.

    Raises:
        KvferryError, UnreadableFileError: it cannot.
    """
    if not _is_record(name):
        return ""
    with contextlib.closing(_mapped(os.dup(fd))) as file:
        kept = _read(file)[0].kept
    return kept.device if kept is not None else ""


def _read(file: HostRegion) -> tuple[PoolRecord, Manifest]:
    """Return a pool's record, and what this version makes of its spec.

    Raises:
        UnreadableFileError: it cannot be read, or this version takes the pool's bytes for something else.
    """
    record = read_pool_record(file.buffer)
    manifest = manifest_of(record.spec)
    if manifest_digest(manifest) != record.manifest:
        raise UnreadableFileError(f"this version lays the spec of pool {record.name!r} out otherwise")
    return record, manifest


def _mapped(fd: int) -> HostRegion:
    """Map all of a descriptor, which the region owns.

    Raises:
        UnreadableFileError: it is empty.
        KvferryError: it cannot be mapped, or its size could change.
    """
    size_bytes = os.fstat(fd).st_size
    if not size_bytes:
        os.close(fd)
        raise UnreadableFileError("its record is empty")
    return HostRegion(fd, size_bytes)
