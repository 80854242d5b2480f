"""Frames on the session socket: a little-endian uint32 length, then that many bytes of msgpack. Sans I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from kvferry.protocol.errors import MalformedError
from kvferry.protocol.session_messages import (
    MemoryFollows,
    RegionRequest,
    SessionEnd,
    SessionFrame,
    SessionOpen,
    ShareFollows,
)

MAX_SESSION_FRAME_BYTES = 16384
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_open_decoder = msgspec.msgpack.Decoder(SessionOpen | RegionRequest)
_said_decoder = msgspec.msgpack.Decoder(ShareFollows | MemoryFollows | SessionEnd)
_frame_decoder = msgspec.msgpack.Decoder(SessionFrame)


def pack(message: SessionOpen | SessionEnd | RegionRequest | MemoryFollows | SessionFrame) -> bytes:
    """Return the message as one frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameSplitter:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def between_frames(self) -> bool:
        """Return whether no partial frame is buffered."""
        return not self._pending

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes; yield the frames that are now complete.

        Raises:
            MalformedError: a frame announces more than MAX_SESSION_FRAME_BYTES.
        """
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._pending)
            if size > MAX_SESSION_FRAME_BYTES:
                raise MalformedError(f"a session frame of {size} bytes; at most {MAX_SESSION_FRAME_BYTES}")
            if len(self._pending) < _LENGTH.size + size:
                return
            frame = bytes(self._pending[_LENGTH.size : _LENGTH.size + size])
            del self._pending[: _LENGTH.size + size]
            yield frame


def unpack_open(frame: bytes) -> SessionOpen | RegionRequest:
    """Return the first frame from a client or another daemon.

    Raises:
        MalformedError: the bytes are not such a frame.
    """
    try:
        opening: SessionOpen | RegionRequest = _open_decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as cause:
        raise MalformedError(f"not a session opening: {cause}") from cause
    return opening


def unpack_attachment(frame: bytes) -> ShareFollows | MemoryFollows | SessionEnd:
    """Return a later frame from an engine, after its session was opened.

    Raises:
        MalformedError: the bytes are not such a frame.
    """
    try:
        message: ShareFollows | MemoryFollows | SessionEnd = _said_decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise MalformedError("not a share of memory or events") from None  # the cause's text might contain a handle
    return message


def unpack_frame(frame: bytes) -> SessionFrame:
    """Return a frame from the daemon.

    Raises:
        MalformedError: the bytes are not such a frame.
    """
    try:
        message: SessionFrame = _frame_decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as cause:
        raise MalformedError(f"not a session frame: {cause}") from cause
    return message
