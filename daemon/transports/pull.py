"""Transfers between two daemons of one host: the receiving daemon reads the source's pool through its own mapping.

The mapping is read-only, and so is the descriptor. Before the bytes of a transfer op count, the source confirms that
the pages belonged to the send request all the time: otherwise they might have been reused while they were read.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from kvferry.daemon.transfer.endpoints import Incarnation, RemotePool, SendRequest, TransferOp
from kvferry.daemon.transfer.registry import StartOp
from kvferry.daemon.transports.local import OnOpDone, SendToPeer, Transport
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import (
    AccessDeniedError,
    CancelledError,
    InternalError,
    KvferryError,
    PeerLostError,
    TransferFailedError,
    raised,
)
from kvferry.protocol.peer_messages import Confirm, Confirmed
from kvferry.protocol.session_stream import (
    FrameSplitter,
    RegionFollows,
    RegionRequest,
    SessionRefused,
    pack,
    unpack_frame,
)
from kvferry.protocol.settings import SESSION_SOCKET

FETCH_TIMEOUT_S = 5.0
_RECEIVE_BYTES = 4096
_CREDENTIALS = struct.Struct("=iII")

log = structlog.get_logger(__name__)

FetchRegion = Callable[[str, RegionRequest, int], HostRegion]


class _Pull:
    """One transfer op: mapped, then copied, then confirmed; and its error."""

    def __init__(self, op: TransferOp, peer: Incarnation, pool: RemotePool, on_done: OnOpDone) -> None:
        self.on_done = on_done
        self.op = op
        self.peer = peer
        self.pool = pool
        self.copying = False
        self.confirming = False
        self.view: npt.NDArray[np.uint8] | None = None
        self.error: KvferryError | None = None


class PullTransport:
    """See ``Transport``, for transfer ops whose send request is on this host. For the control loop."""

    def __init__(self, send: SendToPeer, copier: Transport, executor: Executor, fetch: FetchRegion) -> None:
        """Copy by ``copier``; map pools by ``fetch`` on ``executor``."""
        self._send = send
        self._copier = copier
        self._executor = executor
        self._fetch = fetch
        self._loop = asyncio.get_running_loop()
        self._pulls: dict[int, _Pull] = {}
        self._mapping: dict[RemotePool, list[_Pull]] = {}
        self._closed = False

    def __repr__(self) -> str:
        """Show what is in progress."""
        return f"<PullTransport transfer ops={len(self._pulls)}>"

    def start(self, op: TransferOp, on_done: OnOpDone) -> None:
        """See ``Transport.start``."""
        pool = op.send_request.pool
        assert isinstance(pool, RemotePool), op
        pull = self._pulls[op.op_id] = _Pull(op, pool.peer, pool, on_done)
        if pool.mapping is not None:
            self._copy(pull)
            return
        waiting = self._mapping.setdefault(pool, [])
        waiting.append(pull)
        if len(waiting) == 1:
            assert op.send_request.origin is not None, op
            request = RegionRequest(
                tenant=pool.tenant,
                pool=pool.name,
                region=pool.region_id,
                send_request=op.send_request.origin.send_request,
                key=op.send_request.region_key,
            )
            mapping = self._loop.run_in_executor(
                self._executor, self._fetch, pool.peer.address, request, pool.manifest.region_bytes
            )
            mapping.add_done_callback(lambda done: self._on_mapped(pool, op.send_request, done))

    def confirmed(self, peer: Incarnation, message: Confirmed) -> None:
        """Process the source's answer on a transfer op that was copied."""
        pull = self._pulls.get(message.op)
        if pull is not None and pull.peer == peer and pull.confirming:
            pull.error = raised(message.error) if message.error else None
            self._end(pull)

    def stop(self, op_id: int) -> bool:
        """See ``Transport.stop``."""
        pull = self._pulls.get(op_id)
        if pull is not None:
            self._fail(pull, CancelledError("the transfer ended before all bytes were copied"))
        return pull is not None

    def peer_lost(self, peer: Incarnation, why: str) -> None:
        """Fail the transfer ops of a peer."""
        for pull in [one for one in self._pulls.values() if one.peer == peer]:
            self._fail(pull, PeerLostError(f"the daemon at {peer.address} is gone: {why}"))

    def close(self) -> None:
        """See ``Transport.close``. The copier is closed by its owner; its reports are ignored from now on."""
        self._closed = True

    def _on_copied(self, op_id: int, error: KvferryError | None) -> None:
        """Process the end of a copy: its bytes count once the source confirms that the pages were not reused."""
        pull = self._pulls.get(op_id)
        if pull is None or self._closed:
            return
        pull.copying, pull.view = False, None
        pull.error = pull.error or error
        if pull.error is not None:
            self._end(pull)
            return
        origin = pull.op.send_request.origin
        assert origin is not None, pull.op
        pull.confirming = True
        try:
            confirm = Confirm(receive_request=pull.op.receive_request.name, send_request=origin.send_request, op=op_id)
            if not self._send(pull.peer, confirm):
                self._fail(pull, PeerLostError(f"the daemon at {pull.peer.address} is gone"))
        except Exception as cause:
            log.exception("a copy could not be confirmed", op=op_id, cause=str(cause))
            self._fail(pull, InternalError(f"the copy could not be confirmed: {cause!r}"))

    def _on_mapped(self, pool: RemotePool, asked_with: SendRequest, done: asyncio.Future[HostRegion]) -> None:
        waiting = self._mapping.pop(pool)
        failed = done.exception()
        wanted = any(pull.op.op_id in self._pulls for pull in waiting)
        if failed is None and wanted:
            pool.mapping = done.result()
        elif failed is None:
            done.result().close()  # the peer may be gone, and nothing else would close it
        error = failed if isinstance(failed, KvferryError) else TransferFailedError(f"cannot map the pool: {failed}")
        if isinstance(failed, AccessDeniedError) and failed.field == "key":  # its own word of that comes later
            error = PeerLostError(f"the daemon at {pool.peer.address} has ended the send request")
        for pull in waiting:
            if pull.op.op_id not in self._pulls:
                continue
            if isinstance(failed, AccessDeniedError) and pull.op.send_request is not asked_with:
                self.start(pull.op, pull.on_done)  # the key of one that has ended is refused; this one has its own
            elif failed is not None:
                self._fail(pull, error)
            else:
                try:
                    self._copy(pull)
                except Exception as cause:
                    log.exception("a copy could not begin", op=pull.op.op_id, cause=str(cause))
                    self._fail(pull, InternalError(f"the copy could not begin: {cause!r}"))

    def _copy(self, pull: _Pull) -> None:
        pull.view = pull.pool.region.view()  # keeps the memory mapped until the copy has ended
        plans = tuple(planned_copy.plan for planned_copy in pull.op.planned_copies)
        receive_request = pull.op.receive_request
        op = StartOp(
            pull.op.op_id, pull.pool, receive_request.pool, plans, receive_request.request_id, pull.op.checksums
        )
        self._copier.start(op, self._on_copied)
        pull.copying = True

    def _fail(self, pull: _Pull, error: KvferryError) -> None:
        pull.error = pull.error or error
        if pull.copying:
            self._copier.stop(pull.op.op_id)
        else:
            self._end(pull)

    def _end(self, pull: _Pull) -> None:
        if self._pulls.pop(pull.op.op_id, None) is not None and not self._closed:
            self._loop.call_soon(pull.on_done, pull.op.op_id, pull.error)


def fetch_region(address: str, request: RegionRequest, size_bytes: int) -> HostRegion:
    """Request a pool's memory from a daemon of this host and map it read-only. Blocks for up to FETCH_TIMEOUT_S.

    Args:
        address: the peer's address, ``ipc://`` and a path; its session socket is in the same directory.
        request: the pool, and the key by which it is given.
        size_bytes: the size that the pool's manifest states.

    Raises:
        PeerLostError: no daemon answers there.
        AccessDeniedError: the daemon there runs neither as root nor as this daemon's user, or refuses the key.
        InvalidFieldError: its memory has another size, or is not sealed against resizing.
        KvferryError: it refuses.
    """
    path = Path(address.removeprefix("ipc://")).parent / SESSION_SOCKET
    frames, fds = FrameSplitter(), []
    end = time.monotonic() + FETCH_TIMEOUT_S
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(FETCH_TIMEOUT_S)
            channel.connect(os.fspath(path))
            _check_trusted(channel, path)
            channel.sendall(pack(request))
            while True:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise PeerLostError(f"the daemon at {path} did not answer within {FETCH_TIMEOUT_S} s")
                channel.settimeout(left_s)
                data, new_fds, _, _ = socket.recv_fds(channel, _RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                fds += new_fds
                while len(fds) > 1:  # close surplus ones: a peer must not use up descriptors
                    os.close(fds.pop())
                for frame in frames.feed(data):
                    message = unpack_frame(frame)
                    if isinstance(message, SessionRefused):
                        raise raised(message.error)
                    if isinstance(message, RegionFollows) and fds:
                        return HostRegion(fds.pop(), size_bytes, writable=False)
                if not data:
                    raise PeerLostError(f"the daemon at {path} closed its socket")
    except OSError as cause:
        raise PeerLostError(f"no daemon answers at {path}: {cause.strerror or cause}") from cause
    finally:
        for fd in fds:
            os.close(fd)


def _check_trusted(channel: socket.socket, path: Path) -> None:
    """Check the user that listens, as the peer's memory is mapped and its descriptors are kept."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid not in {0, os.getuid()}:
        raise AccessDeniedError(
            f"the daemon at {path} runs as user {uid}, not as this daemon's user or root", field="source_daemons"
        )
