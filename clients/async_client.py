"""The asynchronous client: the same calls as ``Client``, on any asyncio loop; what waits there is awaited here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from kvferry.clients import calls
from kvferry.clients.arguments import device_names, pool_spec, seconds, truth, whole
from kvferry.clients.async_tiers import AsyncTiers
from kvferry.clients.connecting import Connecting
from kvferry.clients.connection import Connection, find_runtime_dir
from kvferry.clients.devices import RING_EVENTS, attached_pool, seen_as
from kvferry.clients.events import COUNTER_BYTES, EventRing, RingEvent
from kvferry.clients.pool import AttachedPool
from kvferry.clients.registration import registered
from kvferry.clients.session_channel import SessionChannel
from kvferry.clients.submissions import DEFAULT_WAIT_S
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.client_core import Transfer
from kvferry.protocol.client_operations import TierOperation
from kvferry.protocol.codec import PageIds
from kvferry.protocol.device_event import DeviceEvent
from kvferry.protocol.errors import DaemonLostError, DeadlineError
from kvferry.protocol.events import Finished
from kvferry.protocol.ids import HOST, MAIN, PoolLifetime
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES
from kvferry.protocol.manifests import Manifest, PoolSpec
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.pool_messages import Freed
from kvferry.protocol.session_messages import SessionOpen, ShareFollows, StatusReport
from kvferry.protocol.transfer_messages import Abandoned, Cancelled, Direction, TransferResult

if TYPE_CHECKING:
    import torch


class AsyncClient(AsyncTiers):
    """One session with the daemon of this node. Leaving it gives back everything that the session owns.

    What waits is awaited: ``connect``, ``wait_finished`` and all other calls but those that return at once, as they do
    in ``Client``: ``send``, ``receive``, ``offload``, ``restore``, ``store``, ``load``, ``update_tables``, ``begin``,
    ``batched``, ``is_ready`` and ``close``. Any number of tasks of the event loop that connected it may use it at a
    time; a call on another loop, or in a thread without one, raises ConcurrentUseError and sends nothing. Any thread
    may ``close`` it. A forked child has neither the session nor the pools: every call there is a ForkedError; connect
    and attach anew.
    """

    @classmethod
    def connect(
        cls,
        runtime_dir: Path | str | None = None,
        *,
        name: str = "",
        instance: str = "",
        session: bool = True,
        keep: bool = False,
        resume: bytes = b"",
        devices: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> Connecting[AsyncClient]:
        """Connect, open a session and agree on the protocol.

        Args:
            runtime_dir: where the daemon's sockets are; by default as ``kvferry daemon`` chooses it.
            name: shown in the daemon's status and logs.
            instance: the engine instance that this session belongs to. Sessions of this user that name the same one,
                say of a scheduler and its workers, own pages, leases and snapshots together; these are given back when
                the last of them ends. None: the session is an instance of its own.
            session: without one, only ping and status work.
            keep: where the session's socket is lost while this process lives, let the daemon keep the session for its
                ``limits.resume_grace_ms``.
            resume: the ``secret`` of such a session, to take it over with what it has; nothing is resumed by itself.
            devices: what this process calls the daemon's devices, where it sees others: ``{"npu:3": "npu:0"}`` with
                ``ASCEND_RT_VISIBLE_DEVICES=3``. All calls take the daemon's names.
            timeout_s: how long to wait for the daemon's first reply.

        Raises:
            DaemonLostError: no daemon answers.
            AccessDeniedError: this user may not use it.
            VersionMismatchError: it speaks other versions of the protocol.
            NoSessionError: there is no session to resume, or it has its socket still.
        """
        opening = functools.partial(calls.session_open, name, instance, keep=keep, resume=resume)
        return Connecting(cls, cls._connect(runtime_dir, name, opening, devices, timeout_s, session=session))

    @classmethod
    async def _connect(
        cls,
        runtime_dir: Path | str | None,
        name: str,
        open_session: Callable[[], SessionOpen],
        devices: Mapping[str, str] | None,
        timeout_s: float,
        *,
        session: bool,
    ) -> AsyncClient:
        hello, names = calls.hello(name), device_names(devices)
        opening = open_session()
        timeout_s, session = seconds(timeout_s, "timeout_s"), truth(session, "session")
        directory = await asyncio.to_thread(find_runtime_dir, runtime_dir)
        channel = await asyncio.to_thread(SessionChannel.open, directory, opening) if session else None
        client = cls(Connection(directory, channel, names))
        try:
            client.welcome = await client.call(hello, deadline_s=timeout_s, margin_s=0.0)
        except DeadlineError as cause:
            client.close()
            raise DaemonLostError(f"no daemon answers at {directory} within {timeout_s:g} s") from cause
        except BaseException:
            client.close()
            raise
        return client

    async def ping(self) -> float:
        """Return the seconds of one round trip."""
        started = time.perf_counter()
        await self.call(calls.ping())
        return time.perf_counter() - started

    async def status(self) -> StatusReport:
        """Return what the daemon holds and does."""
        return await self.call(calls.status())

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
        """Create a pool, or find it as it was created before, and map it.

        Args:
            name: unique for the user.
            spec: what it holds.
            model: whose KV it holds. Needed for the prefix cache: ``store``, ``lookup`` and ``load`` find blocks of
                this very identity only; a transfer between two models is refused.
            device: where its memory is, ``host``, ``npu:0`` and the like, as torch counts the daemon's devices.
            lifetime: ``daemon``: it stays until it is deleted; ``instance``: it is deleted when this session's instance
                ends, though others have attached it.
            max_payload_bytes: the largest payload of a ``send`` from or to it; at most half of the daemon's
                ``limits.max_frame_bytes``, and 8 MiB.
            deadline_s: for the daemon's reply; the first pool on a device takes it some seconds more.

        Raises:
            PoolExistsError: the name has another layout, size, window, model or lifetime, or is on another device.
            InvalidFieldError: the spec makes no sense.
            OutOfMemoryError: the host or the device cannot give it.
            DeviceUnavailableError: no such device, or what drives it is missing, there or here.
        """
        created = await self.call(
            calls.create_pool(name, spec, device, model, lifetime, max_payload_bytes), deadline_s=deadline_s
        )
        pool = await self.attach_pool(name, created.manifest.layout_digest)
        return seen_as(pool, pool_spec(spec))

    async def attach_pool(self, name: str, layout_digest: str = "") -> AttachedPool:
        """Map a pool of this user.

        Raises:
            UnknownPoolError: none of that name.
            LayoutMismatchError: it has another layout than the digest given.
            PoolLostError: it was on a device, and its memory is gone.
        """
        call = calls.attach_pool(name, layout_digest, self._devices.process_id())
        outgoing, attached = await self._round_trip(call)
        channel = self._open_channel()
        if attached.device == HOST:
            return attached_pool(name, attached, outgoing.message_id, channel, self._devices)
        return await asyncio.to_thread(attached_pool, name, attached, outgoing.message_id, channel, self._devices)

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
            UncoveredEntryError, DuplicateEntryError, InvalidFieldError: the tensors are not what the spec needs; the
                field is a tensor and what of it: ``main/k.shape``, ``main/v/3.dtype``.
            DeviceUnavailableError: the daemon cannot use the device, or not map the memory.
        """
        arrays, said, fds = registered(spec, tensors, device, self._devices.export)
        call = calls.register_pool(name, spec, device, arrays, model, max_payload_bytes)
        _, made = await self._round_trip(call, deadline_s=deadline_s, said=said, fds=fds)
        return made.manifest

    async def open_events(
        self, device: str = HOST, *, events: int = RING_EVENTS, deadline_s: float | None = None
    ) -> EventRing:
        """Return this session's event ring, by which ``send(steps=…)`` says when which layers are ready.

        Args:
            device: of the pools it speaks of. On a device it has ``events`` interprocess events, recorded on its
                streams.
            events: how many, on a device; one is used again once its work is done.
            deadline_s: for the daemon's reply; the first use of a device takes it some seconds more.
        """
        events = whole(events, "events", least=1)
        made: list[RingEvent] = []

        def said(message_id: int) -> Sequence[ShareFollows]:
            if device == HOST:
                return ()
            found, frame = self._devices.events(device, events, message_id)
            made.extend(found)
            return (frame,)

        outgoing, opened = await self._round_trip(calls.open_events(device), deadline_s=deadline_s, said=said)
        channel = self._open_channel()
        channel.receive()
        counters, eventfd = channel.take_fds(outgoing.message_id)
        return EventRing(HostRegion(counters, opened.slots * COUNTER_BYTES), eventfd, made)

    async def delete_pool(self, name: str) -> None:
        """Delete a pool that has no owned page.

        Raises:
            PoolInUseError: pages are owned or in flight.
        """
        await self.call(calls.delete_pool(name))

    async def allocate(self, pool: str, count: int, space: str = MAIN) -> PageIds:
        """Return ``count`` pages for this session, ascending, ``(count,)`` int64.

        Raises:
            PoolFullError: fewer are free; says how many.
        """
        return await self.call(calls.allocate(pool, count, space))

    async def free(
        self, pool: str, ids: npt.ArrayLike, space: str = MAIN, *, after: DeviceEvent | None = None
    ) -> Freed:
        """Give pages back; those in flight follow when their transfers settle.

        ``after``: work that still uses the pages, see ``EventRing.mark``; nobody gets them before it is done.

        Raises:
            NotOwnerError, DuplicatePageError, PageOutOfRangeError, EmptyPagesError: nothing was freed.
        """
        return await self.call(calls.free(pool, ids, space, after))

    async def cancel(self, transfer: Transfer, *, wait: bool = True, deadline_s: float | None = None) -> Cancelled:
        """Give up this side; returns when no byte can move any more.

        Args:
            transfer: which.
            wait: false returns at once; ``settled`` of what is returned, and of the transfer later, says when its pages
                may be used again.
            deadline_s: for the daemon's reply.

        Raises:
            UnknownTransferError: the daemon has no such side, or its end was acknowledged before.
        """
        self._check_transfer(transfer)
        key = transfer.key
        return await self.call(calls.cancel(key.pool, key.request_id, key.direction, wait=wait), deadline_s=deadline_s)

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

        Whoever waits for it, here and at the daemons named, fails at once with PEER_CANCELLED; who comes later hears it
        at once. A side that exists is given up by ``cancel``.

        Args:
            request_id: of the request.
            direction: which half does not come.
            daemons: the addresses of the daemons at which the other half may wait, as ``receive`` takes them. Daemons
                whose receivers wait for SENDs from here are told anyway.
            reason: what the error says, up to 256 characters.
            deadline_s: for the daemon's reply.
        """
        return await self.call(calls.abandon(request_id, direction, daemons, reason), deadline_s=deadline_s)

    async def result(self, pool: str, request_id: str, direction: Direction) -> TransferResult:
        """Return a side's state by the daemon's word.

        Raises:
            UnknownTransferError: neither live nor unacknowledged.
        """
        return await self.call(calls.result(pool, request_id, direction))

    async def poll(self, timeout_s: float = 0.0) -> list[Transfer | TierOperation]:
        """Take what has arrived; wait for the first change up to ``timeout_s``, not at all by default.

        Returns:
            The transfers and operations that changed since the last call, each once.

        Raises:
            DaemonLostError: the daemon has gone; every transfer and operation of this session has failed.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        with self._use:
            self._drain()
        if timeout_s > 0.0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not self._changed:
                        await self._next_news()
        else:
            await asyncio.sleep(0)  # the loop has to see that the daemon goes, too
        if self._lost is not None and not self._changed:
            raise self._lost
        return self._take_changes()

    async def wait_finished(self, transfer: Transfer, timeout_s: float = DEFAULT_WAIT_S) -> Finished:
        """Wait until the outcome is known and return it.

        Raises:
            KvferryError: the transfer failed or was refused; or DEADLINE, and it is still under way.
        """
        self._check_transfer(transfer)
        await self._wait_until(lambda: transfer.is_finished, timeout_s, "the outcome of the transfer")
        return transfer.outcome()

    async def wait_settled(self, transfer: Transfer, timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Wait until the daemon holds the transfer's pages no longer, whatever its outcome.

        Raises:
            DeadlineError: it is still under way.
        """
        self._check_transfer(transfer)
        await self._wait_until(lambda: transfer.is_settled, timeout_s, "the end of the transfer")
