"""What an engine may say on its sockets: ZMTP on the control socket, frames and descriptors on the session socket.

The daemon's own session socket runs on a scripted loop, without a clock. A frame is a step, see ``_Engines.step``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from kvferry.daemon.control.kept_bytes import SMALL_BYTES
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import Session, SessionRegistry
from kvferry.daemon.control.zmtp import GREETING, IncomingStream, encoded, frame
from kvferry.daemon.process.access import Listener
from kvferry.daemon.process.closer import Closer
from kvferry.daemon.process.descriptors import Descriptors, count_open
from kvferry.daemon.quota import Quota
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.codec import decode_request
from kvferry.protocol.errors import (
    AccessDeniedError,
    MalformedError,
    OutOfDescriptorsError,
    TooLargeError,
)
from kvferry.protocol.ids import BootId
from kvferry.protocol.limits import Limits
from kvferry.protocol.session_stream import (
    MemoryFollows,
    RegionRequest,
    SessionEnd,
    SessionOpen,
    ShareFollows,
    VmmShare,
    pack,
)
from tests.fuzz.inputs import frames_of, joined
from tests.protocol.samples import MESSAGES, SESSION_FRAMES, to_frames

ROUNDS: Final = 2_000
LIMITS: Final = Limits(max_frame_bytes=4096, max_message_bytes=8192)
OPENING: Final = GREETING + frame(4, b"\5READY\x0bSocket-Type\0\0\0\6DEALER")
MOST_CONNECTIONS: Final = 4
MOST_KEPT_BYTES: Final = 64 << 10
KNOWN: Final = b"\1"
"""Stands for the secret of a session that lives."""


def seeds() -> list[bytes]:
    """Return conversations of engines, and messages as they travel on the control socket."""
    opening = SessionOpen(protocol_min=4, protocol_max=4, name="decode", instance="a", keep=True)
    region = RegionRequest(tenant=7, pool="mine", region=1, send_request=1, key="0" * 32)
    share = ShareFollows(message_id=1, shares=(VmmShare(handle=1, size_bytes=4096),))
    memory = b"\x10" + _packed(MemoryFollows(message_id=2))
    opened, alone = b"m\0" + _packed(opening), b"m\0" + _packed(SessionOpen(protocol_min=4, protocol_max=4))
    again = b"m\1" + _packed(msgspec.structs.replace(opening, resume=KNOWN))
    found = [
        [b"c\0", opened, b"m\0" + _packed(share), b"m" + memory, b"k\0\1", b"k\0\2", b"e\0", b"c\1", again],
        [b"c\0", opened, b"c\1", b"m\1" + _packed(opening), b"e\0", b"g", b"m\1" + _packed(SessionEnd())],
        [b"c\0", alone, b"q"],
        [b"c\0", b"m\0" + _packed(region)],
        [b"c\0", b"b\0" + pack(opening)[:9], b"b\0" + pack(opening)[9:] + pack(share)],
        *([b"c\0", opened, b"m\0" + _packed(one)] for one in SESSION_FRAMES.values()),
    ]
    found += [[b"z" + OPENING, *_in_zmtp(to_frames(*one))] for one in MESSAGES.values()]
    found.append([b"z" + OPENING[:40], b"z" + OPENING[40:], b"z" + frame(4, b"\4PING\0\1context")])
    return [joined(frames) for frames in found if sum(map(len, frames)) < MOST_KEPT_BYTES // 8]


def take_one_input(data: bytes) -> None:
    """Say what the steps say; nothing is raised, and all is given back in the end."""
    steps = frames_of(data)
    _read_zmtp([_zmtp_of(one) for one in steps if one[:1] in {b"z", b"y", b"Y"}])
    _region(), _memory(), _nothing()  # once for all inputs
    before = count_open()
    engines = _Engines()
    try:
        for step in steps:
            engines.step(step)
    finally:
        engines.close()
    engines.check_nothing_left()
    assert count_open() <= before, "a descriptor is left"


# -- the control socket


def _read_zmtp(parts: list[bytes]) -> None:
    """Read a stream in parts, and as a whole: both are the same messages, and no more is kept than has come."""
    if not parts:
        return
    in_parts, whole = IncomingStream(b"1", LIMITS), IncomingStream(b"1", LIMITS)
    some, is_refused = _messages(in_parts, parts)
    others, is_whole_refused = _messages(whole, [b"".join(parts)])
    assert is_refused == is_whole_refused
    both = min(len(some), len(others))  # of a stream that is refused, what came just before may be lost
    assert some[:both] == others[:both]
    assert is_refused or len(some) == len(others)
    for one in some:
        decode_request(one)


def _messages(stream: IncomingStream, parts: list[bytes]) -> tuple[list[list[bytes]], bool]:
    """Return the frames of each message, and whether the stream was refused."""
    found: list[list[bytes]] = []
    came = 0
    try:
        for part in parts:
            stream.feed(part)
            came += len(part)
            while True:
                messages = stream.take(3)
                for one in messages:
                    assert len(one.frames) <= LIMITS.max_frames
                    assert sum(map(len, one.frames)) <= LIMITS.max_message_bytes
                    found.append(one.frames)
                if not messages and not stream.has_more:
                    break
            assert stream.held_bytes <= 64 * (came + 1) + LIMITS.max_message_bytes
            assert len(stream.answers) <= 8192
    except (MalformedError, TooLargeError):
        return found, True
    return found, False


def _zmtp_of(step: bytes) -> bytes:
    return {b"z": step[1:], b"y": frame(0, step[1:]), b"Y": frame(1, step[1:])}[step[:1]]


def _in_zmtp(frames: list[bytes]) -> list[bytes]:
    assert encoded(frames) == b"".join([_zmtp_of(b"Y" + one) for one in frames[:-1]]) + _zmtp_of(b"y" + frames[-1])
    return [*(b"Y" + one for one in frames[:-1]), b"y" + frames[-1]]


# -- the session socket


def _packed(message: Any) -> bytes:  # noqa: ANN401  any frame
    return pack(message)[4:]


class _Loop:
    """As much of an event loop as the socket uses."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], object]] = {}
        self.timers: list[_Timer] = []

    def add_reader(self, source: Any, call: Callable[..., object], *given: object) -> None:  # noqa: ANN401  or a socket
        self.readers[source if isinstance(source, int) else source.fileno()] = lambda: call(*given)

    def remove_reader(self, source: Any) -> bool:  # noqa: ANN401  or a socket
        return self.readers.pop(source if isinstance(source, int) else source.fileno(), None) is not None

    def call_later(self, _delay_s: float, call: Callable[..., object], *given: object) -> _Timer:
        self.timers.append(_Timer(lambda: call(*given)))
        return self.timers[-1]

    def run(self) -> None:
        """Call who can read, until nobody can."""
        while True:
            poll = select.poll()
            for fd in self.readers:
                poll.register(fd, select.POLLIN)
            ready = [self.readers[fd] for fd, _ in poll.poll(0)]
            if not ready:
                return
            ready[0]()

    def pass_time(self) -> None:
        timers, self.timers = self.timers, []
        for one in timers:
            one.fire()


class _Timer:
    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self._call = None

    def fire(self) -> None:
        if self._call is not None:
            self._call()


class _Engines:
    """A session socket, and those who connect to it."""

    def __init__(self) -> None:
        self._loop = _Loop()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listening.bind("")  # the kernel gives it a name without a file
        listening.listen(8)
        self._address = listening.getsockname()
        self._registry = SessionRegistry(LIMITS)
        self._descriptors = Descriptors(4096, lambda: 10)
        self._kept = Quota("session", MOST_KEPT_BYTES, 2 * MOST_KEPT_BYTES, self._registry.tenant_of, small=SMALL_BYTES)
        self._live: set[Session] = set()
        self._socket = SessionSocket(
            Listener(Path("session.sock"), listening),
            BootId("b" * 32),
            self._registry,
            Counters(),
            self._live.add,
            self._live.remove,
            _region_of,
            self._descriptors,
            self._kept,
            resume_grace_s=10,
        )
        self._socket.closer = Closer(self._descriptors, lambda call: call())
        self._socket.start(cast("asyncio.AbstractEventLoop", self._loop), lambda _identity: None)
        self._connections: dict[int, socket.socket] = {}

    def step(self, step: bytes) -> None:
        """Do one thing: the second byte is the number of a connection, and 16 times the descriptors that go with it."""
        kind, which, rest = step[:1], step[1:2], step[2:]
        number, fds = (which[0] % MOST_CONNECTIONS, which[0] // 16 % 4) if which else (0, 0)
        match kind:
            case b"c":  # connect
                self._end(number)
                self._connections[number] = channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                channel.connect(self._address)
            case b"b":  # bytes
                self._say(number, rest, fds)
            case b"m":  # a frame
                body = self._with_secret(rest)
                self._say(number, len(body).to_bytes(4, "little") + body, fds)
            case b"e":  # close
                self._end(number)
            case b"k":  # a request comes that takes what was sent for it
                self._take(rest[0] if rest else 0)
            case b"g":  # all deadlines pass
                self._loop.pass_time()
            case b"q":  # the process ends
                for session in list(self._live):
                    session.keep = False
        self._loop.run()
        self._check()

    def close(self) -> None:
        for number in list(self._connections):
            self._end(number)
        self._loop.run()
        self._socket.close()

    def check_nothing_left(self) -> None:
        assert not self._live
        assert not len(self._registry)
        assert not self._loop.readers
        assert not self._descriptors.promised()
        assert not self._kept.total

    def _check(self) -> None:
        assert self._live == set(self._registry)
        assert self._kept.total <= 3 * MOST_KEPT_BYTES

    def _say(self, number: int, data: bytes, fds: int) -> None:
        """Send with the data as many descriptors, of which a third is of something else than memory."""
        channel = self._connections.get(number)
        if channel is None or not data:
            return
        channel.setblocking(False)  # noqa: FBT003  socket's own signature
        with contextlib.suppress(OSError):  # the daemon has closed it
            socket.send_fds(channel, [data], [_memory(), _memory(), _nothing()][:fds])

    def _end(self, number: int) -> None:
        if number in self._connections:
            self._connections.pop(number).close()
            self._loop.run()

    def _take(self, message_id: int) -> None:
        for session in list(self._live):
            with contextlib.suppress(OutOfDescriptorsError):
                self._socket.take_share(session, message_id)
                if session in self._live and (fd := self._socket.take_memory(session, message_id)) is not None:
                    os.close(fd)

    def _with_secret(self, body: bytes) -> bytes:
        try:
            value = msgspec.msgpack.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return body
        if isinstance(value, dict) and value.get("resume") == KNOWN and self._live:
            newest = max(self._live, key=lambda one: one.session_id)
            return msgspec.msgpack.encode({**value, "resume": newest.secret})
        return body


def _region_of(asked: RegionRequest) -> HostRegion:
    if asked.pool != "mine":
        raise AccessDeniedError("another pool", field="key")
    return _region()


@cache
def _region() -> HostRegion:
    return HostRegion.create("mine", 4096)


@cache
def _memory() -> int:
    return os.memfd_create("fuzzed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


@cache
def _nothing() -> int:
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
