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
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import structlog

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.session_index import INDEX_BYTES, FoundSessions, SessionIndex, SessionRecord, format_index
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import Session, SessionRegistry
from kvferry.daemon.process.fd_store import ANSWER_S, PREFIX, FdStore, FdStoreError, NoStore
from kvferry.daemon.process.host import started_at
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.pools.devices.host import HostRegion, identity_of
from kvferry.pools.integrity import Problem, Walk, problem_at
from kvferry.pools.layouts import manifest_of
from kvferry.pools.pool import Pool
from kvferry.pools.pool_file import (
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
    ) -> None:
        """Take what the store has; ``adopt`` comes before any session or pool."""
        self._store = store
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
        self._memory = self._open_index()
        if self._memory is None:
            return
        self._index = SessionIndex(self._memory.buffer)
        self._before = self._index.boot_id
        self._found = self._index.begin(boot_id)

    def __repr__(self) -> str:
        """Show who keeps what outlives the daemon."""
        return f"<Adoption by {self._store.where or 'nobody'}>"

    @property
    def outlives(self) -> bool:
        """Return whether sessions and host pools outlive the daemon."""
        return bool(self._store.where)

    def adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Adopt the sessions whose processes live, and then the pools; call it once, before anything is served.

        The sessions may be resumed for the grace, which begins now.
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

    def keep(self, region: HostRegion, record: PoolRecord, manifest: Manifest) -> HostRegion | None:
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
            self._store.put(dict(zip(names, (region.fd, file.fd), strict=True)))
        except (FdStoreError, KvferryError) as cause:
            if file is not None:
                file.close()
                self._store.remove(names)
            self._counters.add("adoption.not_kept")
            log.warning("a pool does not outlive the daemon", pool=record.name, tenant=record.tenant, cause=str(cause))
            return None
        return file

    def forget(self, pool: Pool) -> None:
        """Let a pool that was removed not be adopted."""
        if pool.file is not None:
            end_pool_file(pool.file.buffer)
            identity = pool.region.identity
            self._removing.submit(self._store.remove, _names(identity))

    def leave(self) -> None:
        """End: what is recorded waits for the next daemon; without records the holder ends too."""
        self._removing.shutdown()
        if self._looks is not None:
            self._looks.cancel()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        kept = self._memory is not None and (len(self._sessions) or any(pool.file for pool in self._pools))
        self._store.leave(max(self._session_socket.resume_grace_s, LEAST_HOLD_S) if kept else None)
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
        names = (f"{_POOL}{key}{_MEMORY}", f"{_POOL}{key}{_RECORD}")
        memory, record = (self._stored.pop(name, -1) for name in names)
        try:
            self._pools.add(self._pool_of(key, memory, record))
        except Exception as cause:  # noqa: BLE001  no record may keep the daemon from its start, again and again
            self._store.remove(names)
            self._count("pools_dropped", 1)
            log.warning("a pool is not adopted", memory=key, cause=str(cause) or type(cause).__name__)
        else:
            self._count("pools", 1)

    def _pool_of(self, key: str, memory: int, record_fd: int) -> Pool:
        """Return the pool of these two descriptors, which are owned from now on.

        Raises:
            KvferryError, UnreadableFileError: it cannot be trusted, has ended, or is there already.
        """
        with contextlib.ExitStack() as undo:
            if memory >= 0:
                undo.callback(os.close, memory)
            file = _mapped(record_fd)
            undo.callback(file.close)
            record = read_pool_record(file.buffer)
            manifest = manifest_of(record.spec)
            if manifest_digest(manifest) != record.manifest:
                raise UnreadableFileError(f"this version lays the spec of pool {record.name!r} out otherwise")
            if memory < 0 or str(record.memory) != key or identity_of(memory) != record.memory:
                raise UnreadableFileError(f"the memory of pool {record.name!r} is missing")
            if self._pools.find(record.tenant, record.name) is not None:
                raise UnreadableFileError(f"there is a pool {record.name!r} of user {record.tenant} already")
            if record.ends_with is not None and not self._sessions.of_instance(record.ends_with):
                raise UnreadableFileError(f"the instance of pool {record.name!r} has ended")
            known = {one.owner_id for one in self._sessions if one.tenant == record.tenant}
            for owners in owners_in(file.view(), manifest).values():
                dropped = drop_owners(owners, known)
                self._count("pages_dropped", dropped)
                self._count("pages", int(np.count_nonzero(owners)))
            region = HostRegion(os.dup(memory), manifest.region_bytes)
            undo.pop_all()
            os.close(memory)
        return Pool(
            record.tenant,
            record.name,
            manifest,
            region,
            ends_with=record.ends_with,
            model=record.model,
            max_payload_bytes=record.max_payload_bytes,
            file=file,
        )

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
    )


def _is_record(name: str) -> bool:
    return name.startswith(_POOL) and name.endswith(_RECORD)


def _names(memory: int) -> tuple[str, str]:
    """Return the names of a pool's memory, of this identity, and of its record."""
    return f"{_POOL}{memory}{_MEMORY}", f"{_POOL}{memory}{_RECORD}"


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
