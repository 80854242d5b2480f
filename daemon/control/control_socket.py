"""The control socket: a ZeroMQ ROUTER, drained fairly on the control loop.

Its file descriptor is edge-triggered, so EVENTS is checked again after every drain and every send. zmq.asyncio is not
used: its futures cost several times the CPU time of a drain. Frames are not interpreted here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import zmq

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.process.access import SOCKET_MODE
from kvferry.protocol.addresses import is_v6
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.limits import Limits

DRAIN_BOUND = 64
"""Messages handled in a row before other callbacks of the loop run."""

DRAIN_RECEIVED_BOUND = 16
"""Drains in a row, in ``drain_received``."""

# Plain integers: an enum costs a microsecond or more at every use.
NOBLOCK, SEND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class ReceivedMessage(NamedTuple):
    """One message: the identity to answer to, and its frames; ``frames`` is truncated if ``too_large``."""

    identity: bytes
    frames: list[bytes]
    too_large: bool


OnMessage = Callable[[ReceivedMessage], None]


class ControlSocket:
    """Binds on construction; serves between ``start`` and ``close``."""

    def __init__(
        self,
        path: Path,
        limits: Limits,
        counters: Counters,
        *,
        also: str | None = None,
        mode: int = SOCKET_MODE,
    ) -> None:
        """Listen on a Unix socket of this mode and, if given, on the TCP address ``also``.

        Raises:
            ConfigError: the TCP address cannot be listened on.
        """
        self._limits = limits
        self._counters = counters
        self._on_message: OnMessage | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_scheduled = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 100)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.max_frame_bytes)
        self._socket.setsockopt(zmq.SNDHWM, limits.max_requests_per_session + 2 * limits.max_transfers_per_session)
        umask = os.umask(0o777 & ~mode)
        try:
            self._socket.bind(f"ipc://{path}")
        finally:
            os.umask(umask)
        path.chmod(mode)
        if also:
            self._bind_tcp(also)

    @property
    def endpoint(self) -> str:
        """Return the address bound last: the TCP address with its port, if there is one."""
        return cast("bytes", self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def start(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        """Serve on this loop: each message goes to ``on_message``."""
        self._loop = loop
        self._on_message = on_message
        loop.add_reader(self._socket.FD, self._drain)
        self._schedule_drain()

    def close(self) -> None:
        """Stop serving; libzmq may send queued replies for another 0.1 s."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
            self._loop = None
        self._socket.close()
        self._context.term()

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Queue a message; return False, with nothing queued, if the peer is gone or its queue is full."""
        if self._socket.closed:
            return False
        try:
            put = self._socket.send
            put(identity, SEND_MORE)
            for frame in frames[:-1]:
                put(frame, SEND_MORE)
            put(frames[-1], NOBLOCK)
        except zmq.Again:
            self._counters.add("replies.queue_full")
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._counters.add("replies.peer_gone")
            return False
        finally:
            self._schedule_drain()
        return True

    def drain_received(self) -> None:
        """Handle the messages that have arrived by now, before something that happened after them is handled."""
        for _ in range(DRAIN_RECEIVED_BOUND):
            if self._loop is None or not self._readable():
                return
            self._drain()

    def _bind_tcp(self, address: str) -> None:
        self._socket.setsockopt(zmq.IPV6, int(is_v6(address)))
        try:
            self._socket.bind(address)
        except zmq.ZMQError as cause:
            self._socket.close(0)
            self._context.term()
            raise ConfigError(
                f"cannot listen on {address}: {cause.strerror}",
                field="peers.listen",
                retryable=True,  # the process that listens there may end, and the address may come up
                remedy="see what listens there (ss -lptn), or name another address of this host",
            ) from cause

    def _schedule_drain(self) -> None:
        """Schedule a drain if a message has arrived without a signal."""
        if self._loop is not None and not self._drain_scheduled and self._readable():
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _readable(self) -> bool:
        return bool(cast("int", self._socket.getsockopt(EVENTS)) & POLLIN)

    def _drain(self) -> None:
        self._drain_scheduled = True  # sends made while draining need not check EVENTS
        try:
            for _ in range(DRAIN_BOUND):
                try:
                    message = self._receive()
                except zmq.Again:
                    break
                if self._on_message is not None:
                    self._on_message(message)
        finally:
            self._drain_scheduled = False
        self._schedule_drain()

    def _receive(self) -> ReceivedMessage:
        """Return one message, or raise zmq.Again if there is none."""
        receive = self._socket.recv
        identity = receive(NOBLOCK)
        frames: list[bytes] = []
        size = 0
        fits = more = True  # libzmq hands over whole messages: after the identity comes at least one frame
        while more:
            frame = receive(NOBLOCK, copy=False)  # a Frame knows whether another follows, without a further call
            more = frame.more
            size += len(frame)
            fits = fits and size <= self._limits.max_message_bytes and len(frames) < self._limits.max_frames
            if fits:
                frames.append(frame.bytes)
        return ReceivedMessage(identity, frames, not fits)
