"""ZMTP 3.1, the wire protocol of ZeroMQ, as the side that listens speaks it, without security. Without I/O.

libzmq is not used here: it ends the process where no descriptor is left for a connection, or where a client has chosen
the routing id that it makes up for another; see docs/architecture.md. See https://rfc.zeromq.org/spec/37.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvferry.protocol.errors import MalformedError, TooLargeError
from kvferry.protocol.limits import Limits

_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
GREETING: Final = _SIGNATURE + bytes((3, 1)) + _MECHANISM + bytes(32)
_TALK_TO_US: Final = frozenset({b"DEALER", b"REQ", b"ROUTER"})
MAX_COMMAND_BYTES: Final = 512
_SHORT: Final = 256
TTL_STEP_MS: Final = 100
FRAMES_AT_ONCE: Final = 1024
"""Frames read in a row: commands, and frames of a message that never ends, take time as well."""

MAX_ANSWERS_BYTES: Final = 4096
"""With so many unsent bytes of answers, a PING gets none: its sender does not read."""

CHUNK_BYTES: Final = 64
"""What Python needs for a piece of received bytes, besides them."""


def frame(flags: int, body: bytes | memoryview) -> bytes:
    """Return one frame as it travels."""
    size = len(body)
    if size < _SHORT:
        return bytes((flags, size)) + body
    return bytes((flags | _LONG,)) + size.to_bytes(8) + body


def encoded(frames: Sequence[bytes | memoryview]) -> bytes:
    """Return a message as it travels; its frames have one byte an item."""
    if len(frames) == 1:
        return frame(0, frames[0])
    return b"".join([*(frame(_MORE, one) for one in frames[:-1]), frame(0, frames[-1])])


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4) + value


READY: Final = frame(_COMMAND, b"\5READY" + _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b""))


class ReceivedMessage(NamedTuple):
    """One message: the identity to answer to, and its frames; ``frames`` is truncated if ``too_large``."""

    identity: bytes
    frames: list[bytes]
    too_large: bool

    @property
    def size_bytes(self) -> int:
        """Return what it takes in memory."""
        return sum(map(len, self.frames)) + CHUNK_BYTES * len(self.frames)


class IncomingStream:
    """The bytes that one connection sends: its greeting, its commands, and its messages.

    Attributes:
        answers: what the protocol itself answers; whoever sends it empties it.
        is_ready: whether the handshake is over.
        has_more: whether ``take`` stopped at a bound, so that more may be there without more bytes.
        silence_ms: the silence after which the other side wants the connection closed; 0: it has not said.
    """

    def __init__(self, identity: bytes, limits: Limits) -> None:
        """``identity``: what its messages are to be answered to."""
        self._identity = identity
        self._limits = limits
        self._data = b""
        self._at = 0
        self._chunks: list[bytes] = []
        self._chunks_bytes = 0
        self._wanted = len(GREETING)
        self._greeted = False
        self.is_ready = self.has_more = False
        self._frames: list[bytes] = []
        self._size = self._count = 0
        self.answers = bytearray(GREETING)
        self.silence_ms = 0

    def __repr__(self) -> str:
        """Show how much waits."""
        return f"<IncomingStream {self.held_bytes} bytes>"

    @property
    def held_bytes(self) -> int:
        """Return how many bytes are kept: of messages that are not complete or not taken yet, and what goes with them.

        An unauthenticated client may send byte by byte, so the pieces count as well.
        """
        pieces = self._chunks_bytes + CHUNK_BYTES * (len(self._chunks) + len(self._frames))
        return len(self._data) + pieces + min(self._size, self._limits.max_message_bytes)

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._chunks.append(data)
        self._chunks_bytes += len(data)

    def take(self, bound: int) -> list[ReceivedMessage]:
        """Return the messages that are complete by now, at most ``bound``; see ``has_more``.

        Raises:
            MalformedError: it is not ZMTP, or not of a client.
            TooLargeError: a frame is larger than the limits allow.
        """
        messages: list[ReceivedMessage] = []
        if len(self._data) - self._at + self._chunks_bytes < self._wanted:
            return messages
        self._join()
        if not self._greeted:
            self._take_greeting()
        for _ in range(FRAMES_AT_ONCE):
            if len(messages) == bound:
                break
            found = self._frame()
            if found is None:
                self._data, self._at = self._data[self._at :], 0  # what was taken is not kept until more comes
                self.has_more = False
                return messages
            flags, body = found
            if flags & _COMMAND:
                self._command(body)
                continue
            self._size += len(body)
            self._count += 1
            if self._size <= self._limits.max_message_bytes and self._count <= self._limits.max_frames:
                self._frames.append(body)
            if not flags & _MORE:
                messages.append(ReceivedMessage(self._identity, self._frames, len(self._frames) < self._count))
                self._frames = []
                self._size = self._count = 0
        self.has_more = True
        return messages

    def _frame(self) -> tuple[int, bytes] | None:
        """Return the next frame's flags and its body; None where it is not complete."""
        data, start = self._data, self._at
        at = start + 2
        if len(data) < at:
            self._wanted = 2
            return None
        flags = data[start]
        size = data[start + 1]
        if flags & _LONG:
            at = start + 9
            if len(data) < at:
                self._wanted = 9
                return None
            size = int.from_bytes(data[start + 1 : at])
        if flags > _MORE | _LONG or not self.is_ready:
            self._check_command(flags, size)
        elif size > self._limits.max_frame_bytes:
            raise TooLargeError(f"a frame of {size} bytes")
        stop = at + size
        if stop > len(data):
            self._wanted = stop - start
            return None
        self._at = stop
        return flags, data[at:stop]

    def _join(self) -> None:
        if self._chunks:
            rest = self._data[self._at :]
            self._data = b"".join((rest, *self._chunks)) if rest or len(self._chunks) > 1 else self._chunks[0]
            self._at = self._chunks_bytes = 0
            self._chunks.clear()
        self._wanted = 0

    def _take_greeting(self) -> None:
        found = self._data[: len(GREETING)]
        if found[:1] != _SIGNATURE[:1] or not found[9] & 1:
            raise MalformedError("the other side does not speak ZMTP")
        if found[10] < GREETING[10] or found[12:32] != _MECHANISM:
            raise MalformedError("the other side speaks ZMTP before 3.0, or wants security")
        self._at, self._greeted = len(GREETING), True
        self.answers += READY

    def _check_command(self, flags: int, size: int) -> None:
        if flags & ~_LONG != _COMMAND or size > MAX_COMMAND_BYTES:
            raise MalformedError("a frame that is none of ZMTP's")

    def _command(self, body: bytes) -> None:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if not self.is_ready:
            if name != b"READY" or not any(_property(b"Socket-Type", one) in rest for one in _TALK_TO_US):
                raise MalformedError("the other side's socket is no DEALER")
            self.is_ready = True
        elif name == b"PING":
            self.silence_ms = int.from_bytes(rest[:2]) * TTL_STEP_MS
            if len(self.answers) < MAX_ANSWERS_BYTES:
                self.answers += frame(_COMMAND, b"\4PONG" + rest[2:18])
