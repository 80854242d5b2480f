"""Writes into peers' bounce buffers with the Mooncake Transfer Engine, from the control loop, never blocking it.

Mooncake listens on all interfaces, on ports it picks itself, and asks nobody who they are: whoever reaches the port
may read and write all memory that is registered. So register bounce buffers only, and fence the ports off (the
documents say how). Knows nothing of receive requests, grants or pages: one write is one extent of memory.

What Mooncake's calls do (0.3.13): a submission may block for the first contact with a peer (a connection that nobody
accepts: ``MC_HANDSHAKE_CONNECT_TIMEOUT``; a peer that accepts and then says nothing: a minute), and holds a lock
meanwhile that all other submissions take. Hence one worker thread submits, and the loop itself first tries, without
blocking, whether a new peer takes connections. A status is asked for on the loop: that takes a microsecond. An id ends
with 1 or -1 and is forgotten at once, since asking again aborts the process.

A write that ends with 1 has landed, the peer said so. One that ends with -1 reads its source no more, but what the
kernel holds may land minutes later, when a cut link returns: ``WriteFailedError.may_still_land``.
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
from kvferry.daemon.transports.mooncake_native import MooncakeSettings, NativeEngine
from kvferry.protocol.errors import InvalidFieldError, KvferryError, TransferFailedError

# -- one write of the Mooncake engine, from waiting to its end, and the writes to one peer.
#
# Knows nothing of Mooncake.


LARGEST_PORT = 65535

OnWriteDone = Callable[[KvferryError | None], None]
"""Called once, on the loop: the source is not read any more. None: the bytes have landed. Else a WriteFailedError."""

OnWriteLate = Callable[[int], None]
"""Called with the write's id, at most once, on the loop: its deadline has passed, but it is still under way."""


class WriteFailedError(TransferFailedError):
    """A write that did not land, or not as far as anybody can tell.

    Attributes:
        may_still_land: bytes of it may land yet; only the receiver's fence ends that.
    """

    def __init__(self, detail: str, *, may_still_land: bool) -> None:
        super().__init__(detail)
        self.may_still_land = may_still_land


@dataclass(eq=False, slots=True, kw_only=True)
class Write:
    """One write: waiting, then handed to the worker thread, then begun: set there, just before Mooncake sees it."""

    write_id: int
    session_name: str
    local_address: int
    remote_address: int
    size_bytes: int
    timeout_s: float
    on_done: OnWriteDone
    on_late: OnWriteLate | None
    timer: asyncio.TimerHandle | None = None
    batch_id: int = 0
    handed: bool = False
    begun: bool = False
    withdrawn: bool = False

    def __str__(self) -> str:
        return f"a write of {self.size_bytes} bytes to {self.session_name} at {self.remote_address:#x}"


@dataclass(eq=False, slots=True)
class Peer:
    """What waits for one session name, and how much of it is under way."""

    waiting: deque[Write] = field(default_factory=deque)
    bytes_in_flight: int = 0
    contact: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to remember."""
        return not self.waiting and not self.bytes_in_flight and self.contact is None


def host_and_port(session_name: str) -> tuple[str, int]:
    """Return what a session name, ``ADDRESS:PORT``, says.

    Raises:
        InvalidFieldError: it is none.
    """
    host, _, port = session_name.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port[:6]) > LARGEST_PORT:
        raise InvalidFieldError(f"{session_name!r} is not ADDRESS:PORT", field="session_name")
    return host.strip("[]"), int(port)


CreateEngine = Callable[[MooncakeSettings], NativeEngine]
DestroyEngine = Callable[[list[NativeEngine]], None]

_DONE, _FAILED = 1, -1
_POLL_AT_LEAST_S = 0.001  # also uvloop's shortest timer
_POLL_AT_MOST_S = 0.02
_POLL_FRACTION = 8  # a poll comes late by at most an eighth of what its write has taken
_T = TypeVar("_T")


class MooncakeEngine:
    """See the module. ``async with`` makes the engine and ends it; all methods belong on the loop."""

    def __init__(
        self,
        settings: MooncakeSettings,
        *,
        create: CreateEngine = mooncake_native.create,
        destroy: DestroyEngine = mooncake_native.destroy,
        worker: ThreadPoolExecutor | None = None,
    ) -> None:
        """``worker`` has one thread, a new one by default; it ends with the engine."""
        self.settings: Final = settings
        self.session_name = ""
        self._create, self._destroy = create, destroy
        # The engine's only reference, so that clearing the list destroys it: no frame that a traceback could keep
        # alive may name the engine itself. Empty while there is none.
        self._native: list[NativeEngine] = []
        self._regions: dict[int, int] = {}  # size by address
        self._peers: dict[str, Peer] = {}  # those with something to do; the next to be served first
        self._met: set[str] = set()  # those that this engine may be given writes for
        self._writes: dict[int, Write] = {}  # all that have not ended
        self._polled: list[Write] = []  # those that Mooncake has an id for
        self._submitting = False
        self._held = False
        self._write_ids = itertools.count(1)
        self._poll_timer: asyncio.TimerHandle | None = None
        self._progress_s = 0.0  # when a write was submitted or ended last
        self._worker = worker or ThreadPoolExecutor(1, "mooncake")
        self._exclusive = asyncio.Lock()  # a life's steps, one at a time

    def __repr__(self) -> str:
        """Show where it listens and how much is under way."""
        return (
            f"<MooncakeEngine {self.session_name or 'closed'} regions={len(self._regions)} "
            f"writes={len(self._writes)} bytes_in_flight={sum(self.bytes_in_flight.values())}>"
        )

    async def __aenter__(self) -> Self:
        """Make the engine.

        Raises:
            ConfigError: Mooncake is not installed, or the address is none of this host's.
            TransferFailedError: Mooncake could not begin.
        """
        async with self._exclusive:
            self._use(await self._created())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def bytes_in_flight(self) -> dict[str, int]:
        """Return, for each peer that has any, how many bytes Mooncake has been given and has not reported."""
        return {name: peer.bytes_in_flight for name, peer in self._peers.items() if peer.bytes_in_flight}

    @property
    def writing(self) -> bool:
        """Return whether Mooncake has writes of ours that it has not reported."""
        return any(peer.bytes_in_flight for peer in self._peers.values())

    def hold(self, *, held: bool) -> None:
        """Let no write begin while ``held``; those under way go on."""
        self._held = held
        self._pump()

    async def register(self, address: int, size_bytes: int) -> None:
        """Let every peer read and write this memory. It must stay mapped until ``unregister`` or ``close``.

        Raises:
            TransferFailedError: Mooncake refuses it, for one because it overlaps with what is registered.
        """
        async with self._exclusive:
            native = self._running()
            await self._on_worker(lambda: mooncake_native.register(native, address, size_bytes))
            self._regions[address] = size_bytes

    async def unregister(self, address: int) -> None:
        """Refuse writes that begin from now on. No fence: what is under way still lands.

        Raises:
            TransferFailedError: nothing is registered there, or Mooncake fails.
        """
        async with self._exclusive:
            native = self._running()
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
        """Write memory of ours into a peer's registered memory; return the write's id.

        ``on_done`` follows exactly once; until then the local bytes must stay as they are. A write that has not begun
        by its deadline ends there and then. One that has begun cannot be stopped: ``on_late`` tells of the deadline,
        ``on_done`` comes when Mooncake gives up or the engine is destroyed. Nobody checks the local range.

        Raises:
            InvalidFieldError: no bytes, or a session name that is not ADDRESS:PORT.
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
        """Do what a write's deadline does: end it where it has not begun, else tell ``on_late``; nothing once over."""
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
        """Destroy the engine and make another, with the same memory registered: nothing old lands afterwards.

        Writes of ours that are under way fail; those that have not begun wait for the new engine. Returns the new
        session name, which always differs from the old one. After an error the engine is closed.

        Raises:
            TransferFailedError: the engine is closed, or a new one cannot be had.
        """
        async with self._exclusive:
            self._running()
            old, new = self._detach(), list[NativeEngine]()
            try:
                # The new one first: while the old one listens its ports are taken, so that a peer which still tries
                # them, for a grant that is over, does not come to the new one.
                new = await self._created()
                await self._end(old)
                for address, size_bytes in self._regions.items():
                    await self._on_worker(partial(mooncake_native.register, new, address, size_bytes))
            except BaseException:
                await self._shut(old, new)
                raise
            self._use(new)
            self._pump()
            return self.session_name

    async def close(self) -> None:
        """Destroy the engine: afterwards no byte is read or lands here. What was not done fails. Idempotent."""
        async with self._exclusive:
            await self._shut(self._detach())

    # --- the engine's life ---

    async def _created(self) -> list[NativeEngine]:
        return await self._on_worker(lambda: [self._create(self.settings)])

    def _use(self, native: list[NativeEngine]) -> None:
        self._native = native
        host = f"[{self.settings.address}]" if ":" in self.settings.address else self.settings.address
        self.session_name = f"{host}:{native[0].get_rpc_port()}"

    def _running(self) -> list[NativeEngine]:
        if not self._native:
            raise TransferFailedError("the Mooncake engine is closed")
        return self._native

    def _detach(self) -> list[NativeEngine]:
        """Return the engine, which from now on gets no submission and no poll."""
        old, self._native = self._native, []
        self._polled.clear()  # their ids die with the engine
        self._poll_soon()
        self._met.clear()
        return old

    async def _end(self, *engines: list[NativeEngine]) -> None:
        """Destroy them, after the submission that the worker is at, and fail all that had begun."""
        for engine in engines:
            # Asked for on the worker: a caller that is cancelled may ask twice.
            if engine:
                await self._on_worker(partial(self._destroy_if_there, engine))
        for write in [write for write in self._writes.values() if write.begun]:
            self._finish(write, WriteFailedError(f"the engine was ended during {write}", may_still_land=True))

    def _destroy_if_there(self, engine: list[NativeEngine]) -> None:
        if engine:
            self._destroy(engine)

    async def _shut(self, *engines: list[NativeEngine]) -> None:
        self.session_name = ""
        try:
            await self._end(*engines)
        finally:
            contacts = [peer.contact for peer in self._peers.values() if peer.contact is not None]
            for contact in contacts:
                contact.cancel()
            for write in list(self._writes.values()):
                write.withdrawn = True
                self._finish(write, WriteFailedError(f"the engine is closed: {write}", may_still_land=write.begun))
            self._worker.shutdown(wait=False)
            await asyncio.gather(*contacts, return_exceptions=True)

    async def _on_worker(self, work: Callable[[], _T]) -> _T:
        """Run on the worker thread, to its end even where the caller is cancelled."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._worker, work))

    # --- from waiting to under way ---

    def _pump(self) -> None:
        """Hand the worker its next write, peers in turns; make contact with those that have not been met."""
        if not self._native or self._held:
            return
        for name, peer in list(self._peers.items()):
            while peer.waiting and peer.waiting[0].withdrawn:
                peer.waiting.popleft()
            if peer.idle:
                del self._peers[name]
            elif peer.waiting and name not in self._met:
                if peer.contact is None:
                    peer.contact = asyncio.get_running_loop().create_task(self._make_contact(name, peer))
            elif peer.waiting and not self._submitting and self._has_room(peer):
                self._peers[name] = self._peers.pop(name)  # to the end of the row
                self._hand_over(peer, peer.waiting.popleft())

    def _has_room(self, peer: Peer) -> bool:
        wanted = peer.bytes_in_flight + peer.waiting[0].size_bytes
        return not peer.bytes_in_flight or wanted <= self.settings.max_bytes_in_flight_per_peer

    async def _make_contact(self, name: str, peer: Peer) -> None:
        """Try whether the peer takes connections, so that the worker is not held up by one that does not."""
        error: Exception | None = None
        try:
            async with asyncio.timeout(self.settings.contact_timeout_s):
                _, writer = await asyncio.open_connection(*host_and_port(name))
            writer.close()
            self._met.add(name)
        except (OSError, TimeoutError, UnicodeError) as caught:
            error = caught
        peer.contact = None
        if error is not None:
            reason = str(error) or f"no answer within {self.settings.contact_timeout_s} s"
            for write in [write for write in peer.waiting if not write.withdrawn]:
                write.withdrawn = True
                detail = f"{name} takes no connections ({reason}): {write} did not begin"
                self._finish(write, WriteFailedError(detail, may_still_land=False))
        self._pump()

    def _hand_over(self, peer: Peer, write: Write) -> None:
        self._submitting = True
        write.handed = True
        peer.bytes_in_flight += write.size_bytes
        native = self._native
        submission = asyncio.get_running_loop().run_in_executor(self._worker, self._submit, native, write)
        submission.add_done_callback(lambda done: self._submitted(native, write, done))

    def _submit(self, native: list[NativeEngine], write: Write) -> int:
        """On the worker thread: let Mooncake begin, unless the engine is going or the loop has taken the write back.

        The loop sets ``withdrawn`` and then looks at ``begun``; here it is the other way round: one of both sees it.
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

    def _submitted(self, native: list[NativeEngine], write: Write, done: asyncio.Future[int]) -> None:
        self._submitting = False
        if native is not self._native:
            if not write.begun and write.write_id in self._writes:
                self._wait_again(write)
        elif done.exception() is not None or not (batch_id := done.result()):
            # 0: the peer could not be reached, or the write was taken back. Nothing has been sent.
            self._met.discard(write.session_name)
            cause = done.exception() or "the peer did not answer the engine"
            self._finish(write, WriteFailedError(f"{write} did not begin: {cause}", may_still_land=False))
        else:
            write.batch_id = batch_id
            self._polled.append(write)
            self._progress_s = asyncio.get_running_loop().time()
            self._poll_soon()
        self._pump()

    def _wait_again(self, write: Write) -> None:
        """Put back, at the head, a write that the worker did not begin since the engine was going."""
        peer = self._peers[write.session_name]
        peer.bytes_in_flight -= write.size_bytes
        write.handed = False
        peer.waiting.appendleft(write)

    # --- from under way to the end ---

    def _poll_soon(self) -> None:
        """Ask more often the shorter ago something happened, and not at all where nothing is under way."""
        loop = asyncio.get_running_loop()
        if self._poll_timer is not None:
            self._poll_timer.cancel()
            self._poll_timer = None
        if self._polled:
            quiet_s = (loop.time() - self._progress_s) / _POLL_FRACTION
            delay_s = min(max(quiet_s, _POLL_AT_LEAST_S), _POLL_AT_MOST_S)
            self._poll_timer = loop.call_later(delay_s, self._poll)

    def _poll(self) -> None:
        self._poll_timer = None
        under_way, self._polled = self._polled, []
        for write in under_way:
            status = self._native[0].transfer_check_status(write.batch_id)
            if status not in (_DONE, _FAILED):
                self._polled.append(write)
                continue
            self._progress_s = asyncio.get_running_loop().time()
            error = None
            if status == _FAILED:
                detail = f"{write} failed: refused, or the peer or the way to it is lost"
                error = WriteFailedError(detail, may_still_land=True)
            self._finish(write, error)
        self._poll_soon()
        self._pump()

    def _finish(self, write: Write, error: KvferryError | None) -> None:
        """Report the end, once; the callback runs by itself, so that it may write again."""
        if self._writes.pop(write.write_id, None) is None:
            return
        if write.timer is not None:
            write.timer.cancel()
        if write.handed:
            self._peers[write.session_name].bytes_in_flight -= write.size_bytes
        asyncio.get_running_loop().call_soon(write.on_done, error)
