"""What a client waits for: the replies to its requests, and its transfers and operations of the tiers.

Knows no socket: ``async_client`` and ``sync_client`` say how to wait. ``sync_requests`` is made from
``async_requests`` by ``make sync-client``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy.typing as npt

from kvferry.clients import calls
from kvferry.clients.arguments import device_names, pool_spec, seconds, sequence, truth, whole
from kvferry.clients.calls import NAME, TABLES, Call, asked, joined
from kvferry.clients.connection import Connection, Reconnected, connecting, find_runtime_dir
from kvferry.clients.core.followed import TierOperation, Transfer
from kvferry.clients.daemon_socket import REPLY_MARGIN_S, no_answer
from kvferry.clients.devices import RING_EVENTS, attached_pool, seen_as
from kvferry.clients.events import COUNTER_BYTES, EventRing, RingEvent
from kvferry.clients.pool import AttachedPool
from kvferry.clients.registration import registered
from kvferry.clients.resuming import Registration, Resuming, Said
from kvferry.clients.session_channel import SessionChannel, close_left
from kvferry.clients.submissions import DEFAULT_WAIT_S
from kvferry.clients.submitting import PendingReply, pending_reply
from kvferry.clients.tables import Place, Tables, memory_for
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import DeadlineError, NoSessionError, UnknownTablesError, UnknownTransferError
from kvferry.protocol.events import Finished, TierDone
from kvferry.protocol.ids import HOST, MAIN, ModelIdentity, PoolLifetime
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES
from kvferry.protocol.manifests import Manifest, PoolSpec
from kvferry.protocol.pool_messages import AttachPool, CreatePool, DeletePool, Freed, RegisterPool
from kvferry.protocol.session_messages import OpenEvents, Ping, Status, StatusReport, Verified, Verify
from kvferry.protocol.session_stream import EventsFollow, RegionFollows, ShareFollows, TablesFollow
from kvferry.protocol.table_messages import CreateTables, DeleteTables
from kvferry.protocol.tier_messages import (
    CacheChanges,
    CachedBlockStatus,
    CacheEvents,
    CacheEvict,
    CacheEvicted,
    CacheGroup,
    CacheList,
    CachePin,
    CancelOperation,
    DropSnapshot,
    Found,
    Lookup,
    OperationCancelled,
    SnapshotDropped,
    Snapshots,
    SnapshotStatus,
    Unpin,
)
from kvferry.protocol.transfer_messages import Abandon, Abandoned, Cancel, Cancelled, Direction, Result, TransferResult

if TYPE_CHECKING:
    import torch

LIST_LIMIT: Final = 1000
VERIFY_S: Final = 60.0
MIN_LEFT_S: Final = 0.001
PING: Final = asked(Ping())

T = TypeVar("T")


class AsyncRequests(Resuming):
    """One session with the daemon: its requests."""

    @classmethod
    @connecting  # async only
    async def connect(
        cls,
        runtime_dir: Path | str | None = None,
        *,
        name: str = "",
        instance: str = "",
        session: bool = True,
        reconnect: bool = True,
        on_reconnect: Callable[[Reconnected], object] | None = None,
        keep: bool = False,
        resume: bytes = b"",
        devices: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> Self:
        """Connect, open a session and agree on the protocol.

        Args:
            runtime_dir: where the daemon's sockets are; by default as ``kvferry daemon`` chooses it.
            name: shown in the daemon's status and logs.
            instance: the engine instance that this session belongs to. Sessions of this user that name the same one,
                say of a scheduler and its workers, own pages, leases and snapshots together; these are given back when
                the last of them ends. None: the session is an instance of its own.
            session: without one, only ping and status work.
            reconnect: reconnect when the daemon is lost, also to the next one, for as long as it keeps sessions
                without a socket (``limits.resume_grace_ms``; 0: not at all).
            on_reconnect: called with what was lost, each time; it must not call the client, nor raise.
            keep: without ``reconnect``: let the daemon keep the session as long, to be resumed by hand.
            resume: the ``secret`` of such a session, to take it over.
            devices: this process's names of the daemon's devices, if they differ: ``{"npu:3": "npu:0"}`` with
                ``ASCEND_RT_VISIBLE_DEVICES=3``. All calls take the daemon's names.
            timeout_s: how long to wait for the daemon.

        Raises:
            DaemonLostError: no daemon runs, or it does not answer.
            AccessDeniedError: this user may not use it.
            VersionMismatchError: it speaks other versions of the protocol.
            NoSessionError, SessionLostError: there is no session to resume, or its socket is still open.
        """
        hello, names = calls.hello(name), device_names(devices)
        keeps = truth(reconnect, "reconnect") | truth(keep, "keep")
        opening = calls.session_open(name, instance, keep=keeps, resume=resume)
        timeout_s, session = seconds(timeout_s, "timeout_s"), truth(session, "session")
        directory = await asyncio.to_thread(find_runtime_dir, runtime_dir)
        ends_at = time.monotonic() + timeout_s
        channel = await asyncio.to_thread(SessionChannel.open, directory, opening, timeout_s) if session else None
        client = cls(Connection(directory, channel, names, opening, reconnect, on_reconnect))
        try:
            left_s = max(MIN_LEFT_S, ends_at - time.monotonic())
            client.welcome = await client.call(hello, deadline_s=left_s, margin_s=0.0)
        except DeadlineError as cause:
            client.close()
            raise no_answer(directory, timeout_s) from cause
        except BaseException:
            client.close()
            raise
        return client

    # -- the daemon

    async def ping(self) -> float:
        """Return the seconds of one round trip."""
        started = time.perf_counter()
        await self.call(PING)
        return time.perf_counter() - started

    async def status(self) -> StatusReport:
        """Return what the daemon holds and does."""
        return await self.call(asked(Status()))

    # -- pools and pages

    async def verify(self, *, deep: bool = False, timeout_s: float = VERIFY_S) -> Verified:
        """Let the daemon check its books: pages, tiers and index against everything that holds a part of them.

        For the daemon's own user and root. ``deep`` also reads the disk tier's files, as far as the time allows.
        """
        seconds(timeout_s, "timeout_s")
        return await self.call(asked(Verify(deep=deep)), deadline_s=timeout_s)

    async def create_pool(
        self,
        name: str,
        spec: PoolSpec,
        *,
        model: ModelIdentity | None = None,
        device: str = HOST,
        lifetime: PoolLifetime = "daemon",
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        deadline_s: float | None = None,
    ) -> AttachedPool:
        """Create a pool, or find the existing one, and map it.

        Args:
            name: unique for the user.
            spec: what it holds.
            model: whose KV it holds. Needed for the prefix cache: ``store``, ``lookup`` and ``load`` find blocks of
                this identity only; a transfer between two models is refused.
            device: where its memory is, ``host``, ``npu:0`` and the like, as torch counts the daemon's devices.
            lifetime: ``daemon``: it stays until it is deleted; ``instance``: it is deleted when this session's instance
                ends, even if others have attached it.
            max_payload_bytes: the largest payload of a ``send`` from or to it; at most half of the daemon's
                ``limits.max_frame_bytes``, and 8 MiB.
            deadline_s: for the daemon's reply; the first pool on a device takes it some seconds more.

        Raises:
            PoolExistsError: the name has another layout, size, window, model or lifetime, or is on another device.
            InvalidFieldError: the spec makes no sense.
            OutOfMemoryError: the host or the device lacks memory.
            DeviceUnavailableError: no such device, or its software is missing, there or here.
        """
        spec = pool_spec(spec)
        body = CreatePool(
            pool=name, spec=spec, device=device, model=model, lifetime=lifetime, max_payload_bytes=max_payload_bytes
        )
        created = await self.call(asked(body, NAME), deadline_s=deadline_s)
        pool = await self.attach_pool(name, created.manifest.layout_digest)
        return seen_as(pool, spec)

    async def attach_pool(self, name: str, layout_digest: str = "") -> AttachedPool:
        """Map a pool of this user.

        Raises:
            UnknownPoolError: none of that name.
            LayoutMismatchError: it has another layout than the digest given.
            PoolLostError: it was on a device, and its memory is gone.
        """
        body = AttachPool(pool=name, layout_digest=layout_digest, device_pid=self._devices.process_id())
        with self._use:  # whole: the session's socket is read by one thread at a time
            number, attached, channel = await self._described(asked(body, NAME))
            kind: type[RegionFollows | ShareFollows] = RegionFollows if attached.device == HOST else ShareFollows
            follows, fds = channel.take(number, kind)  # before the thread: a loss meanwhile closes the channel
            try:
                pool = await asyncio.to_thread(attached_pool, name, attached, follows, fds, self._devices)
            finally:
                close_left(fds)
            self._keeps.regions[name] = attached.region
            self._keeps.places[name] = Place(attached.device, attached.manifest)
            self._lost_pools.discard(name)
            return pool

    async def register_pool(
        self,
        name: str,
        spec: PoolSpec,
        tensors: Mapping[tuple[Any, ...], torch.Tensor | npt.NDArray[Any]],
        *,
        device: str,
        model: ModelIdentity | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        deadline_s: float | None = None,
    ) -> Manifest:
        """Let the daemon use a pool whose memory this process owns: it ends with this session.

        Args:
            name: unique for the user.
            spec: what it holds; ``kvferry layout`` prints the arrays that it needs.
            tensors: by (component, role), all layers one after another, or by (component, role, layer); of exactly the
                shape, dtype and strides that ``AttachedPool.tensor`` would have, each with bytes of its own.
            device: where they are. On the ``host`` all lie in one ``SharedMemory`` of this process, as numpy arrays or
                CPU tensors.
            model: whose KV it holds, as in ``create_pool``.
            max_payload_bytes: as in ``create_pool``.
            deadline_s: for the daemon's reply; the first pool on a device takes it some seconds more.

        Raises:
            PoolExistsError: the name is taken.
            UncoveredEntryError, DuplicateEntryError, InvalidFieldError: the tensors do not fit the spec; the field
                names tensor and property: ``main/k.shape``, ``main/v/3.dtype``.
            DeviceUnavailableError: the daemon cannot use the device, or not map the memory.
        """
        arrays, said, fds = registered(spec, tensors, device, self._devices.export)
        body = RegisterPool(
            pool=name,
            spec=pool_spec(spec),
            device=device,
            arrays=arrays,
            model=model,
            max_payload_bytes=max_payload_bytes,
        )
        call = asked(body, NAME | {"arrays": "tensors"})
        with self._use:
            _, made = await self._exchange(call, deadline_s=deadline_s, said=Said(said, fds))
            self._keeps.add_registration(name, Registration(call, said, fds))
            self._keeps.places[name] = Place(device, made.manifest)
            self._lost_pools.discard(name)
        return made.manifest

    async def open_events(
        self, device: str = HOST, *, events: int = RING_EVENTS, deadline_s: float | None = None
    ) -> EventRing:
        """Return this session's event ring, which tells ``send(steps=…)`` when layers are ready.

        Args:
            device: that of its pools. On a device it has ``events`` interprocess events, recorded on the device's
                streams.
            events: how many, on a device; each is used again once its work is done.
            deadline_s: for the daemon's reply; the first use of a device takes it some seconds more.
        """
        events = whole(events, "events", least=1)
        made: list[RingEvent] = []

        def said(message_id: int) -> Sequence[ShareFollows]:
            if device == HOST:
                return ()
            made[:], frame = self._devices.events(device, events, message_id)
            return (frame,)

        with self._use:
            call = asked(OpenEvents(device=device))
            number, opened, channel = await self._described(call, deadline_s=deadline_s, said=Said(said))
            _, (counters, eventfd) = channel.take(number, EventsFollow)
            region = HostRegion(counters, opened.slots * COUNTER_BYTES)
            ring = EventRing(region, eventfd, made, self._keeps.plan_of(opened.ring))
            self._keeps.rings.add(ring)
            return ring

    async def delete_pool(self, name: str) -> None:
        """Delete a pool that has no owned page.

        Raises:
            PoolInUseError: pages are owned or in flight.
        """
        await self.call(asked(DeletePool(pool=name), NAME))
        self._keeps.forget_pool(name)
        self._lost_pools.discard(name)

    async def owned_pages(self, pool: str) -> dict[str, PageIds]:
        """Return the pages of a pool that this session's instance owns, by page space, each ``(n,)`` int64, ascending.

        Also those unknown here: another session of the instance has them, or a reply was lost.
        """
        return await self.call(calls.list_owned(pool))

    async def allocate(self, pool: str, count: int, space: str = MAIN) -> PageIds:
        """Return ``count`` pages for this session, ascending, ``(count,)`` int64.

        Raises:
            PoolFullError: fewer are free; says how many.
        """
        return await self.call(calls.allocate(pool, count, space))

    async def free(
        self,
        pool: str,
        ids: npt.ArrayLike,
        space: str = MAIN,
        *,
        after: DeviceEvent | None = None,
        deadline_s: float | None = None,
    ) -> Freed:
        """Give pages back; those in flight follow when their transfers settle.

        Args:
            pool: their pool.
            ids: which.
            space: their page space.
            after: work that still uses the pages, see ``EventRing.record_event``; they are not reused before its end.
            deadline_s: for the daemon's reply, which waits for ``after``.

        Raises:
            NotOwnerError, DuplicatePageError, PageOutOfRangeError, EmptyPagesError: nothing was freed.
        """
        return await self.call(calls.free(pool, ids, space, after), deadline_s=deadline_s)

    # -- transfers

    async def cancel(self, transfer: Transfer, *, wait: bool = True, deadline_s: float | None = None) -> Cancelled:
        """Cancel this side; returns when no byte can still move.

        Args:
            transfer: which.
            wait: false returns at once; ``settled`` of the result, and later of the transfer, says when its pages may
                be used again.
            deadline_s: for the daemon's reply.

        Raises:
            UnknownTransferError: it was refused, has ended, or the daemon has no such side.
        """
        self._check_transfer(transfer)
        if not self._core.is_named_by_key(transfer):
            timeout_s, _ = self._deadline(deadline_s)
            ends_at = time.monotonic() + timeout_s
            await self._wait_until(
                lambda: transfer.accepted is not None or transfer.is_finished, timeout_s, "the daemon's answer"
            )
            deadline_s = max(MIN_LEFT_S, ends_at - time.monotonic())
        if transfer.is_settled:
            raise UnknownTransferError(f"nothing of {transfer!r} is under way", field="transfer")
        key = transfer.key
        body = Cancel(request_id=key.request_id, pool=key.pool, direction=key.direction, wait=wait)
        return await self.call(asked(body), deadline_s=deadline_s)

    async def abandon(
        self,
        request_id: str,
        direction: Direction,
        *,
        daemons: Sequence[str] = (),
        reason: str = "",
        deadline_s: float | None = None,
    ) -> Abandoned:
        """Say that this user's ``send`` (or ``receive``) of a request will never come, aborted before it began.

        Sides that wait for it, here and at the named daemons, or come later, fail at once with PEER_CANCELLED.
        ``cancel`` ends a side that exists.

        Args:
            request_id: of the request.
            direction: which half does not come.
            daemons: the addresses of the daemons at which the other half may wait, as ``receive`` takes them. Daemons
                whose receivers wait for SENDs from here are told anyway.
            reason: what the error says, up to 256 characters.
            deadline_s: for the daemon's reply.
        """
        every = sequence(daemons, "addresses", "daemons")
        body = Abandon(request_id=request_id, direction=direction, daemons=every, reason=reason)
        return await self.call(asked(body), deadline_s=deadline_s)

    async def result(self, pool: str, request_id: str, direction: Direction) -> TransferResult:
        """Return a side's state as the daemon has it.

        Raises:
            UnknownTransferError: neither live nor unacknowledged.
        """
        return await self.call(asked(Result(request_id=request_id, pool=pool, direction=direction)))

    async def poll(self, timeout_s: float = 0.0) -> list[Transfer | TierOperation]:
        """Take what has arrived; wait for the first change up to ``timeout_s``, not at all by default.

        Returns:
            The transfers and operations that changed since the last call, each once.

        Raises:
            DaemonLostError: the daemon has gone; every transfer and operation of this session has failed.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        with self._use:
            await self._take_changes(timeout_s)
            changed, self._changed = list(self._changed), {}
            return changed

    async def wait_finished(self, transfer: Transfer, timeout_s: float = DEFAULT_WAIT_S) -> Finished:
        """Wait until the outcome is known and return it.

        Raises:
            KvferryError: the transfer failed or was refused; or DEADLINE, and it is still under way.
        """
        self._check_transfer(transfer)
        await self._wait_until(lambda: transfer.is_finished, timeout_s, "the outcome of the transfer")
        return transfer.outcome()

    async def wait_settled(self, transfer: Transfer, timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Wait until the daemon has released the transfer's pages, whatever its outcome.

        Raises:
            DeadlineError: it is still under way.
        """
        self._check_transfer(transfer)
        await self._wait_until(lambda: transfer.is_settled, timeout_s, "the end of the transfer")

    # -- graph tables

    async def create_tables(
        self,
        name: str,
        pool: str,
        *,
        max_batch: int,
        max_context_tokens: int,
        draft_tokens: int = 0,
        request_row_tokens: int = 0,
        captured: Sequence[int] = (),
        window: int | None = None,
        deadline_s: float | None = None,
    ) -> Tables:
        """Make the tables that captured graphs read, on the pool's device; before the first capture.

        On a device they are in memory of torch's allocator in this process, which the daemon maps.

        Args:
            name: unique in this session.
            pool: whose pages they name; on a device it is made, attached or registered by this client before.
            max_batch: rows.
            max_context_tokens: the longest request.
            draft_tokens: the most that speculation adds to a length.
            request_row_tokens: the width of the engine's own token map, which is wider than the context in practice.
            captured: the captured batch sizes; none: every batch is replayed as it is.
            window: the sliding window of a hybrid pool, in tokens: the one that the pool was made with.
            deadline_s: for the daemon's reply.

        Raises:
            UnknownPoolError, UnknownComponentError, InvalidFieldError: the arguments do not fit together.
            TablesExistError: the session has tables of that name.
            OutOfMemoryError: no memory for them.
            DeviceUnavailableError: the daemon cannot map their memory.
        """
        body = CreateTables(
            tables=name,
            pool=pool,
            max_batch=max_batch,
            max_context_tokens=max_context_tokens,
            draft_tokens=draft_tokens,
            request_row_tokens=request_row_tokens,
            captured=sequence(captured, "batch sizes", "captured"),
            window=window,
        )
        call, undo = asked(body, TABLES), asked(DeleteTables(tables=name))
        with self._use:
            memory = await asyncio.to_thread(memory_for, body, self._keeps.places.get(pool), self._devices)
            said = None if memory is None else Said(memory.frames)
            number, created, channel = await self._described(call, deadline_s=deadline_s, said=said, undo=undo)
            fds: list[int] = []
            try:
                _, fds = channel.take(number, TablesFollow)
                made = Tables(body, created, fds, memory)
            except BaseException:
                self._begin(asked(DeleteTables(tables=name)))  # nobody here can use them
                raise
            finally:
                close_left(fds)
            self._tables.add(made)
            return made

    async def delete_tables(self, tables: Tables) -> None:
        """Delete and unmap tables; graphs captured over them must not be replayed."""
        await self.call(asked(DeleteTables(tables=self._name_of(tables))))
        self._tables.discard(tables)
        tables.close()

    # -- offload and restore

    async def wait_done(self, operation: TierOperation, timeout_s: float = DEFAULT_WAIT_S) -> TierDone:
        """Wait until an operation is done and return its event.

        Raises:
            KvferryError: it failed or was refused; or DEADLINE, and it is still under way.
        """
        self._check_operation(operation)
        await self._wait_until(lambda: operation.is_done, timeout_s, "the end of the operation")
        return operation.outcome()

    async def wait_accepted(self, operation: TierOperation, timeout_s: float = DEFAULT_WAIT_S) -> TierOperation:
        """Wait until the daemon has answered the request and return the operation: an OFFLOAD's now names its snapshot.

        Raises:
            KvferryError: it was refused; or DEADLINE, and there is no answer yet.
        """
        self._check_operation(operation)
        await self._wait_until(
            lambda: operation.number is not None or operation.is_done, timeout_s, "the daemon's answer"
        )
        if operation.refused is not None:
            raise operation.refused
        return operation

    async def cancel_operation(
        self, operation: TierOperation, *, deadline_s: float | None = None
    ) -> OperationCancelled:
        """Cancel an operation, also before the daemon has answered; returns when none of its bytes can still move.

        Raises:
            UnknownOperationError: the daemon does not know it, or its end was acknowledged before.
            KvferryError: it was refused.
        """
        self._check_operation(operation)
        if operation.refused is not None:
            raise operation.refused
        number = operation.number
        if number is None and operation.is_done:  # by a restart, before it was answered
            return OperationCancelled(was_done=True)
        with self._use:
            message_id, part = (0, 0) if number is not None else self._core.asked_by(operation)
        body = CancelOperation(operation=number, request=message_id, part=part)
        return await self.call(asked(body), deadline_s=deadline_s)

    async def drop_snapshot(self, snapshot: str) -> SnapshotDropped:
        """Drop a snapshot; restores under way go on.

        Raises:
            UnknownSnapshotError: this user has none of that name.
        """
        return await self.call(asked(DropSnapshot(snapshot=snapshot)))

    async def snapshots(self) -> tuple[SnapshotStatus, ...]:
        """Return this user's snapshots, oldest first."""
        reply = await self.call(asked(Snapshots()))
        return reply.snapshots

    # -- the prefix cache

    async def lookup(
        self,
        pool: str,
        hashes: Sequence[bytes],
        *,
        groups: Sequence[CacheGroup] = (CacheGroup(),),
        lease: int | None = None,
        pin: bool = True,
        deadline_s: float | None = None,
    ) -> Found:
        """Return how many leading blocks are cached, and pin them: ``found.lease`` is for ``load`` and ``unpin``.

        Args:
            pool: of the blocks' layout and model: without a model this raises NO_MODEL.
            hashes: 16 bytes a block, see ``block_hashes``.
            groups: in which the blocks are to be cached; by default ``main`` alone, with all blocks of a page each.
            lease: of an earlier lookup, whose blocks come before these: only the new hashes travel. All of its groups
                need all blocks.
            pin: keep what is found until ``unpin`` or the session's end.
            deadline_s: for the reply; lower tiers may be asked.
        """
        asked_of = sequence(groups, "CacheGroup", "groups")
        body = Lookup(pool=pool, hashes=joined(hashes), groups=asked_of, lease=lease, pin=pin)
        return await self.call(asked(body), deadline_s=deadline_s)

    async def unpin(self, lease: int) -> int:
        """End a lease; return how many blocks it had.

        Raises:
            UnknownLeaseError: this session has none of that number.
        """
        reply = await self.call(asked(Unpin(lease=lease)))
        return reply.blocks

    async def cached_blocks(self) -> AsyncIterator[CachedBlockStatus]:
        """Yield this user's cached blocks, asking for a page of the list at a time."""
        position: int | None = 0
        while position is not None:
            listed = await self.call(asked(CacheList(position=position, limit=LIST_LIMIT)))
            for one in listed.blocks:
                yield one
            position = listed.position

    async def cache_events(self, cursor: int, *, limit: int = LIST_LIMIT, timeout_s: float = 1.0) -> CacheChanges:
        """Return what changed in the cache from ``cursor`` on, 1 for all: at once, or as soon as something does.

        If nothing changes within ``timeout_s``, the answer has no change. A late joiner takes ``cache_cursor``, lists
        the blocks, and goes on from that cursor.
        """
        seconds(timeout_s, "timeout_s")
        return await self.call(asked(CacheEvents(cursor=cursor, limit=limit)), deadline_s=timeout_s)

    async def cache_cursor(self) -> int:
        """Return the cursor of the next change."""
        reply = await self.call(asked(CacheList(position=0, limit=1)))
        return reply.cursor

    async def pin_cached(
        self, hashes: Sequence[bytes], *, pool: str | None = None, identity: str | None = None, pinned: bool = True
    ) -> int:
        """Protect blocks from eviction, or no longer; return how many were found. For operators.

        ``pool`` or ``identity`` says whose blocks the hashes name: see ``evict_cached``.
        """
        body = CachePin(hashes=joined(hashes), pinned=pinned, pool=pool, identity=identity)
        reply = await self.call(asked(body))
        return reply.blocks

    async def evict_cached(
        self, hashes: Sequence[bytes] | None = None, *, pool: str | None = None, identity: str | None = None
    ) -> CacheEvicted:
        """Drop blocks from every tier; pinned ones stay.

        Args:
            hashes: of the blocks; None: all.
            pool: only blocks of this pool's model identity and layout: what an engine that begins anew drops.
            identity: only blocks of this identity, as ``cached_blocks`` gives it, of every layout. Hashes need one of
                the two; without hashes, neither means the blocks of all of this user's models.
        """
        body = CacheEvict(
            hashes=joined(() if hashes is None else hashes), everything=hashes is None, pool=pool, identity=identity
        )
        return await self.call(asked(body))

    # -- replies

    def is_ready(self, pending: PendingReply[T]) -> bool:
        """Return whether ``wait`` would return at once; never waits.

        Raises:
            DaemonLostError: the daemon has gone.
        """
        self._check_pending(pending)
        with self._use:
            return self._has_reply(pending.message_id)

    async def wait(self, pending: PendingReply[T]) -> T:
        """Return what the daemon replies; once only.

        Raises:
            KvferryError: it was refused, or no reply came in time, or the daemon has gone.
        """
        self._check_pending(pending)
        with self._use:
            return await self._reply(pending)

    async def call(self, call: Call[T], *, deadline_s: float | None = None, margin_s: float = REPLY_MARGIN_S) -> T:
        """Send a request and wait for its reply.

        Raises:
            KvferryError: it was refused, or no reply came in time, or the daemon has gone.
        """
        with self._use:
            _, reply = await self._exchange(call, deadline_s=deadline_s, margin_s=margin_s)
            return reply

    # -- within a call that is under way

    async def _described(
        self,
        call: Call[T],
        *,
        deadline_s: float | None = None,
        said: Said | None = None,
        undo: Call[Any] | None = None,
    ) -> tuple[int, T, SessionChannel]:
        """Exchange a request whose reply comes with descriptors; return the socket that they came by, too.

        Where they went with a connection that was lost, it is asked again, after ``undo``.
        """
        ends_at = time.monotonic() + self._times(call, deadline_s)[1]
        while True:
            epoch = self._epoch
            try:
                number, reply = await self._exchange(call, deadline_s=deadline_s, said=said)
            except NoSessionError:
                if self._channel is not None:
                    self._read_channel()  # the daemon may have found the loss of the socket first
                if not self._was_lost_since(epoch):
                    raise
            else:
                channel = self._read_channel()
                if channel.has(number) or not self._was_lost_since(epoch):
                    return number, reply, channel
            if undo is not None:
                with contextlib.suppress(UnknownTablesError):  # the daemon has done so itself
                    await self._exchange(undo)
            deadline_s = max(0.001, ends_at - time.monotonic())

    async def _exchange(
        self,
        call: Call[T],
        *,
        deadline_s: float | None = None,
        margin_s: float = REPLY_MARGIN_S,
        said: Said | None = None,
    ) -> tuple[int, T]:
        """Send a request; return its number and the reply. ``said`` goes before it, also where it is sent again."""
        deadline_ms, kept_s = self._times(call, deadline_s)
        timeout_s = kept_s + seconds(margin_s, "margin_s")
        if self._lost_pools:
            self._check_pool(call.body)
        outgoing = self._core.request(call.body, call.ids, deadline_ms=deadline_ms)
        number = outgoing.message_id
        try:
            if said is not None:
                self._said[number] = said
                frames = await asyncio.to_thread(said.frames, number)
                epoch = -1
                while epoch != self._epoch and not self._held:
                    epoch = self._epoch
                    await asyncio.to_thread(self._say, frames, said.fds)
            self._put(outgoing)
            return number, await self._reply(pending_reply(self._core.token, call, number, timeout_s))
        finally:
            self._said.pop(number, None)

    async def _reply(self, pending: PendingReply[T]) -> T:
        number, pending.taken = pending.message_id, True
        try:
            if number not in self._replies:
                await self._take_reply(number, max(0.0, pending.ends_at - time.monotonic()), pending.timeout_s)
            reply = self._replies.pop(number)
        except BaseException:  # nobody will come for it any more
            self._forget(pending)
            raise
        if reply.error is not None:
            raise reply.error
        return pending.call.read(reply)

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        timeout_s = seconds(timeout_s, "timeout_s")
        with self._use:
            await self._take_until(condition, timeout_s, what)

    # -- what each kind of client does in its own way

    @abstractmethod
    def _has_reply(self, message_id: int) -> bool:
        """Take what has arrived, and return whether the reply has."""

    @abstractmethod
    async def _take_reply(self, message_id: int, left_s: float, timeout_s: float) -> None:
        """Take what arrives until the reply does.

        Raises:
            DeadlineError: it does not within ``left_s``; names ``timeout_s``, which the whole request had.
        """

    @abstractmethod
    async def _take_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Take what arrives until the condition holds.

        Raises:
            DeadlineError: it does not within ``timeout_s``; names ``what``.
        """

    @abstractmethod
    async def _take_changes(self, timeout_s: float) -> None:
        """Take what has arrived; wait up to ``timeout_s`` for the first change of a transfer or an operation."""

    @abstractmethod
    def close(self) -> None:
        """End the session. Closing twice does nothing."""
