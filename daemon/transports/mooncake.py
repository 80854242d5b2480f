"""Writes into peers' bounce buffers by the Mooncake Transfer Engine, from the control loop, without blocking it.

Mooncake listens on all interfaces, on ports that it picks itself, and authenticates nobody: whoever reaches the port
may read and write all registered memory. So register bounce buffers only, and firewall the ports (docs/operations.md
says how). Knows nothing of receive requests, write credits or pages: a write is one contiguous range of memory.

How Mooncake's calls behave (0.3.13): a submission may block on the first contact with a peer (a connection that nobody
accepts: for ``MC_HANDSHAKE_CONNECT_TIMEOUT``; a peer that accepts and never answers: for a minute), and meanwhile holds
a lock that all other submissions take. Hence one worker thread submits, and the loop first checks, without blocking,
whether a new peer accepts connections. Statuses are polled, which takes a microsecond, on another thread
(``CompletionPoller``). An id whose status was 1 or -1 is dropped at once, since asking again aborts the process.

A write that ends with 1 has landed, as confirmed by the peer. One that ends with -1 no longer reads its source, but
bytes in the kernel may still land minutes later, when a cut link returns: ``WriteFailedError.may_still_land``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Self, TypeVar

from kvferry.daemon.transports import mooncake_native
from kvferry.daemon.transports.mooncake_completions import CompletionPoller
from kvferry.daemon.transports.mooncake_native import FAILED, MooncakeSettings, NativeEngine
from kvferry.protocol.errors import InvalidFieldError, KvferryError, TransferFailedError

LARGEST_PORT = 65535

OnWriteDone = Callable[[KvferryError | None], None]
"""Called once, on the loop, when the source is not read any more.

None: the bytes have landed. Else a WriteFailedError.
"""

OnWriteLate = Callable[[int], None]
"""Called at most once, on the loop, with the id of a write that is still in flight after its deadline."""


class WriteFailedError(TransferFailedError):
    """A write that did not land, or is not known to have landed.

    Attributes:
        may_still_land: bytes of it may still land; only the receiver's fence rules that out.
    """

    def __init__(self, detail: str, *, may_still_land: bool) -> None:
        super().__init__(detail)
        self.may_still_land = may_still_land


@dataclass(eq=False, slots=True, kw_only=True)
class Write:
    """One write: queued, then handed to the worker thread, then ``begun``: set there just before Mooncake is called."""

    write_id: int
    session_name: str
    local_address: int
    remote_address: int
    size_bytes: int
    timeout_s: float
    on_done: OnWriteDone
    on_late: OnWriteLate | None
    timer: asyncio.TimerHandle | None = None
    handed: bool = False
    begun: bool = False
    withdrawn: bool = False

    def __str__(self) -> str:
        return f"a write of {self.size_bytes} bytes to {self.session_name} at {self.remote_address:#x}"


@dataclass(eq=False, slots=True)
class Peer:
    """The queued writes of one session name, and its bytes in flight."""

    waiting: deque[Write] = field(default_factory=deque)
    bytes_in_flight: int = 0
    contact: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Return whether nothing is queued, in flight or being contacted."""
        return not self.waiting and not self.bytes_in_flight and self.contact is None


def host_and_port(session_name: str) -> tuple[str, int]:
    """Return the host and port of a session name ``ADDRESS:PORT``.

    Raises:
        InvalidFieldError: it has another form.
    """
    host, _, port = session_name.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port[:6]) > LARGEST_PORT:
        raise InvalidFieldError(f"{session_name!r} is not ADDRESS:PORT", field="session_name")
    return host.strip("[]"), int(port)


CreateEngine = Callable[[MooncakeSettings], NativeEngine]
DestroyEngine = Callable[[list[NativeEngine]], None]

_T = TypeVar("_T")


class MooncakeEngine:
    """A Mooncake engine, see the module. ``async with`` creates and destroys it. For the control loop."""

    def __init__(
        self,
        settings: MooncakeSettings,
        *,
        create: CreateEngine = mooncake_native.create,
        destroy: DestroyEngine = mooncake_native.destroy,
        worker: ThreadPoolExecutor | None = None,
    ) -> None:
        """Use ``worker``, an executor of one thread, by default a new one; it is shut down with the engine."""
        self.settings: Final = settings
        self.session_name = ""
        self._create, self._destroy = create, destroy
        # Holds the engine's only reference, so that clearing the list destroys it: no frame that a traceback could
        # keep alive may refer to the engine itself. Empty without one.
        self._native: list[NativeEngine] = []
        self._regions: dict[int, int] = {}  # size by address
        self._peers: dict[str, Peer] = {}  # those that are not idle; the next one to serve first
        self._contacted: set[str] = set()  # peers known to accept connections
        self._writes: dict[int, Write] = {}  # all unfinished writes
        self._submitting = False
        self._held = False
        self._write_ids = itertools.count(1)
        self._poller = CompletionPoller[Write](self._on_completed)
        # Mooncake's threads inherit the loop's short slices from it: each waits for its peer's every few microseconds.
        self._worker = worker or ThreadPoolExecutor(1, "mooncake")
        self._lifecycle_lock = asyncio.Lock()  # serializes creation, registration, rebuild and close

    def __repr__(self) -> str:
        """Show its session name and what is in flight."""
        return (
            f"<MooncakeEngine {self.session_name or 'closed'} regions={len(self._regions)} "
            f"writes={len(self._writes)} bytes_in_flight={sum(self.bytes_in_flight.values())}>"
        )

    async def __aenter__(self) -> Self:
        """Create the engine.

        Raises:
            ConfigError: Mooncake is not installed, or the address does not belong to this host.
            TransferFailedError: Mooncake could not start.
        """
        async with self._lifecycle_lock:
            self._poller.start()
            try:
                self._use(await self._create_native())
            except BaseException:
                self._poller.close()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def bytes_in_flight(self) -> dict[str, int]:
        """Return the bytes submitted to Mooncake and not finished, by peer."""
        return {name: peer.bytes_in_flight for name, peer in self._peers.items() if peer.bytes_in_flight}

    @property
    def writing(self) -> bool:
        """Return whether any write is in flight."""
        return any(peer.bytes_in_flight for peer in self._peers.values())

    def hold(self, *, held: bool) -> None:
        """Begin no write while ``held``; those in flight continue."""
        self._held = held
        self._pump()

    async def register(self, address: int, size_bytes: int) -> None:
        """Allow every peer to read and write this memory. It must stay mapped until ``unregister`` or ``close``.

        Raises:
            TransferFailedError: Mooncake refuses it, for example because it overlaps registered memory.
        """
        async with self._lifecycle_lock:
            native = self._require_open()
            await self._on_worker(lambda: mooncake_native.register(native, address, size_bytes))
            self._regions[address] = size_bytes

    async def unregister(self, address: int) -> None:
        """Refuse new writes to this memory. This is no fence: writes in flight still land.

        Raises:
            TransferFailedError: nothing is registered at this address, or Mooncake fails.
        """
        async with self._lifecycle_lock:
            native = self._require_open()
            if self._regions.pop(address, None) is None:
                raise TransferFailedError(f"nothing is registered at {address:#x}")
            status = await self._on_worker(lambda: native[0].unregister_memory(address))
            if status:
                raise TransferFailedError(f"Mooncake did not unregister {address:#x}: {status}")

    def write(
        self,
        session_name: str,
        local_address: int,
        remote_address: int,
        size_bytes: int,
        on_done: OnWriteDone,
        *,
        timeout_s: float,
        on_late: OnWriteLate | None = None,
    ) -> int:
        """Write local memory into a peer's registered memory; return the write's id.

        ``on_done`` is called exactly once; until then the local bytes must not change. A write that has not begun by
        its deadline ends then. One that has begun cannot be stopped: ``on_late`` reports the deadline, and ``on_done``
        is called when Mooncake finishes it or the engine is destroyed. The local range is not checked.

        Raises:
            InvalidFieldError: ``size_bytes`` is not positive, or the session name is not ADDRESS:PORT.
            TransferFailedError: the engine is closed.
        """
        if size_bytes <= 0:
            raise InvalidFieldError(f"a write of {size_bytes} bytes", field="size_bytes")
        host_and_port(session_name)
        if not self.session_name:
            raise TransferFailedError("the Mooncake engine is closed")
        write = Write(
            write_id=next(self._write_ids),
            session_name=session_name,
            local_address=local_address,
            remote_address=remote_address,
            size_bytes=size_bytes,
            timeout_s=timeout_s,
            on_done=on_done,
            on_late=on_late,
        )
        write.timer = asyncio.get_running_loop().call_later(timeout_s, self.expire, write.write_id)
        self._writes[write.write_id] = write
        self._peers.setdefault(session_name, Peer()).waiting.append(write)
        self._pump()
        return write.write_id

    def expire(self, write_id: int) -> None:
        """Apply a write's deadline: end it if it has not begun, else call ``on_late``. Ignored once it is finished."""
        write = self._writes.get(write_id)
        if write is None:
            return
        write.timer = None
        write.withdrawn = True
        if not write.begun:
            self._finish(
                write, WriteFailedError(f"{write} did not begin within {write.timeout_s:g} s", may_still_land=False)
            )
            self._pump()
        elif write.on_late is not None:
            write.on_late(write_id)

    async def rebuild(self) -> str:
        """Destroy the engine and create another, with the same memory registered; no old write lands afterwards.

        Writes in flight fail; queued ones wait for the new engine. Returns the new session name, which always differs
        from the old one. After an error the engine is closed.

        Raises:
            TransferFailedError: the engine is closed, or a new one cannot be created.
        """
        async with self._lifecycle_lock:
            self._require_open()
            old, new = self._detach(), list[NativeEngine]()
            try:
                # Create the new one first: while the old one listens, its ports are taken, so a peer that still uses
                # them, for a write credit that is over, cannot reach the new one.
                new = await self._create_native()
                await self._destroy_all(old)
                for address, size_bytes in self._regions.items():
                    await self._on_worker(partial(mooncake_native.register, new, address, size_bytes))
            except BaseException:
                await self._shut_down(old, new)
                raise
            self._use(new)
            self._pump()
            return self.session_name

    async def close(self) -> None:
        """Destroy the engine; afterwards no byte is read or lands here. Unfinished writes fail. Idempotent."""
        async with self._lifecycle_lock:
            await self._shut_down(self._detach())

    # --- life cycle ---

    async def _create_native(self) -> list[NativeEngine]:
        return await self._on_worker(lambda: [self._create(self.settings)])

    def _use(self, native: list[NativeEngine]) -> None:
        self._native = native
        self.session_name = f"{self.settings.host}:{native[0].get_rpc_port()}"

    def _require_open(self) -> list[NativeEngine]:
        if not self._native:
            raise TransferFailedError("the Mooncake engine is closed")
        return self._native

    def _detach(self) -> list[NativeEngine]:
        """Return the engine, which gets no submission and no poll from now on."""
        old, self._native = self._native, []
        self._poller.forget()  # their ids end with the engine
        self._contacted.clear()
        return old

    async def _destroy_all(self, *engines: list[NativeEngine]) -> None:
        """Destroy engines, after the worker's current submission, and fail all writes that had begun."""
        for engine in engines:
            # Checked on the worker, as a cancelled caller may get here twice.
            if engine:
                await self._on_worker(partial(self._destroy_once, engine))
        for write in [write for write in self._writes.values() if write.begun]:
            self._finish(write, WriteFailedError(f"the engine was destroyed during {write}", may_still_land=True))

    def _destroy_once(self, engine: list[NativeEngine]) -> None:
        if engine:
            self._destroy(engine)

    async def _shut_down(self, *engines: list[NativeEngine]) -> None:
        self.session_name = ""
        try:
            await self._destroy_all(*engines)
        finally:
            contacts = [peer.contact for peer in self._peers.values() if peer.contact is not None]
            for contact in contacts:
                contact.cancel()
            for write in list(self._writes.values()):
                write.withdrawn = True
                self._finish(write, WriteFailedError(f"the engine is closed: {write}", may_still_land=write.begun))
            self._worker.shutdown(wait=False)
            self._poller.close()
            await asyncio.gather(*contacts, return_exceptions=True)

    async def _on_worker(self, function: Callable[[], _T]) -> _T:
        """Run a function on the worker thread, to its end even where the caller is cancelled."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._worker, function))

    # --- submission ---

    def _pump(self) -> None:
        """Hand the next write to the worker, peers in turn; contact new peers first."""
        if not self._native or self._held:
            return
        for name, peer in list(self._peers.items()):
            while peer.waiting and peer.waiting[0].withdrawn:
                peer.waiting.popleft()
            if peer.idle:
                del self._peers[name]
            elif peer.waiting and name not in self._contacted:
                if peer.contact is None:
                    peer.contact = asyncio.get_running_loop().create_task(self._make_contact(name, peer))
            elif peer.waiting and not self._submitting and self._may_submit(peer):
                self._peers[name] = self._peers.pop(name)  # to the end of the queue
                self._hand_to_worker(peer, peer.waiting.popleft())

    def _may_submit(self, peer: Peer) -> bool:
        wanted = peer.bytes_in_flight + peer.waiting[0].size_bytes
        return not peer.bytes_in_flight or wanted <= self.settings.max_bytes_in_flight_per_peer

    async def _make_contact(self, name: str, peer: Peer) -> None:
        """Check whether the peer accepts connections, so that one that does not cannot block the worker."""
        error: Exception | None = None
        host, port = host_and_port(name)
        try:
            async with asyncio.timeout(self.settings.contact_timeout_s):
                _, writer = await asyncio.open_connection(host, port, family=mooncake_native.family())
            writer.close()
            self._contacted.add(name)
        except (OSError, TimeoutError, UnicodeError) as caught:
            error = caught
        peer.contact = None
        if error is not None:
            reason = str(error) or f"no answer within {self.settings.contact_timeout_s} s"
            for write in [write for write in peer.waiting if not write.withdrawn]:
                write.withdrawn = True
                detail = f"{name} accepts no connections ({reason}): {write} did not begin"
                self._finish(write, WriteFailedError(detail, may_still_land=False))
        self._pump()

    def _hand_to_worker(self, peer: Peer, write: Write) -> None:
        self._submitting = True
        write.handed = True
        peer.bytes_in_flight += write.size_bytes
        native = self._native
        submission = asyncio.get_running_loop().run_in_executor(self._worker, self._submit, native, write)
        submission.add_done_callback(lambda done: self._on_submitted(native, write, done))

    def _submit(self, native: list[NativeEngine], write: Write) -> int:
        """On the worker thread: start the write, unless the engine is being replaced or the write was withdrawn.

        The loop sets ``withdrawn``, then reads ``begun``; this thread does it the other way round, so at least one of
        them notices.
        """
        if native is not self._native:
            return 0
        write.begun = True
        if write.withdrawn:
            write.begun = False
            return 0
        return native[0].batch_transfer_async_write(
            write.session_name, [write.local_address], [write.remote_address], [write.size_bytes]
        )

    def _on_submitted(self, native: list[NativeEngine], write: Write, done: asyncio.Future[int]) -> None:
        self._submitting = False
        if native is not self._native:
            if not write.begun and write.write_id in self._writes:
                self._requeue(write)
        elif done.exception() is not None or not (batch_id := done.result()):
            # 0: the peer could not be reached, or the write was withdrawn. Nothing has been sent.
            self._contacted.discard(write.session_name)
            cause = done.exception() or "the peer did not answer the engine"
            self._finish(write, WriteFailedError(f"{write} did not begin: {cause}", may_still_land=False))
        else:
            self._poller.watch(native, batch_id, write)
        self._pump()

    def _requeue(self, write: Write) -> None:
        """Put a write that the worker did not begin back at the head of the queue, for the new engine."""
        peer = self._peers[write.session_name]
        peer.bytes_in_flight -= write.size_bytes
        write.handed = False
        peer.waiting.appendleft(write)

    # --- completion ---

    def _on_completed(self, completed: list[tuple[Write, int]]) -> None:
        for write, status in completed:
            error = None
            if status == FAILED:
                detail = f"{write} failed: refused, or the peer or the link to it was lost"
                error = WriteFailedError(detail, may_still_land=True)
            self._finish(write, error)
        self._pump()

    def _finish(self, write: Write, error: KvferryError | None) -> None:
        """Report the end of a write, once; the callback runs from the loop, so that it may write again."""
        if self._writes.pop(write.write_id, None) is None:
            return
        if write.timer is not None:
            write.timer.cancel()
        if write.handed:
            self._peers[write.session_name].bytes_in_flight -= write.size_bytes
        asyncio.get_running_loop().call_soon(write.on_done, error)
