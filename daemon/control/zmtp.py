"""ZMTP 3.1, the wire protocol of ZeroMQ, as the side that listens speaks it, without security. Without I/O.

libzmq is not used here: it accepts connections on a thread of its own as fast as they come, and where no descriptor is
left it ends the process (an assertion after ``accept4``, ipc_listener.cpp). See https://rfc.zeromq.org/spec/37.
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


class IncomingStream:
    """The bytes that one connection sends: its greeting, its commands, and its messages.

    Attributes:
        answers: what the protocol itself answers; whoever sends it empties it.
        is_ready: whether the handshake is over.
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
        self.is_ready = False
        self._frames: list[bytes] = []
        self._size = self._count = 0
        self.answers = bytearray(GREETING)
        self.silence_ms = 0

    def __repr__(self) -> str:
        """Show how much waits."""
        return f"<IncomingStream {self.held_bytes} bytes>"

    @property
    def held_bytes(self) -> int:
        """Return how many bytes of messages that are not complete, or not taken yet, are kept."""
        return len(self._data) - self._at + self._chunks_bytes + min(self._size, self._limits.max_message_bytes)

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._chunks.append(data)
        self._chunks_bytes += len(data)

    def take(self, bound: int) -> list[ReceivedMessage]:
        """Return the messages that are complete by now, at most ``bound``; with so many, more may be there.

        Raises:
            MalformedError: it is not ZMTP, or not of a client.
            TooLargeError: a frame is larger than the limits allow.
        """
        messages: list[ReceivedMessage] = []
        if len(self._data) - self._at + self._chunks_bytes < self._wanted:
            return messages
        self._join()
        if not self._greeted and not self._take_greeting():
            return messages
        while len(messages) < bound and (found := self._frame()) is not None:
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

    def _take_greeting(self) -> bool:
        """Read the greeting; return False where it is not complete."""
        found = self._data[: len(GREETING)]
        is_signed = found[:1] == _SIGNATURE[:1] and (len(found) < len(_SIGNATURE) or found[9] & 1)
        if found and not is_signed:
            raise MalformedError("the other side does not speak ZMTP")
        if len(found) < len(GREETING):
            self._wanted = len(GREETING)
            return False
        if found[10] < GREETING[10] or found[12:32] != _MECHANISM:
            raise MalformedError("the other side speaks ZMTP before 3.0, or wants security")
        self._at, self._greeted = len(GREETING), True
        self.answers += READY
        return True

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
            self.answers += frame(_COMMAND, b"\4PONG" + rest[2:18])
