"""Messages between the daemon and its store process: length-prefixed msgpack over a socketpair.

Ranges of the arena are raw int64 pairs (offset, size) in the host's byte order, as both ends are on one host.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

LENGTH: Final = struct.Struct("<I")
MAX_MESSAGE_BYTES: Final = 256 << 20
MAX_HEADER_BYTES: Final = 1 << 20

# Statuses of answers: Mooncake's own, and ours above 0.
OK: Final = 0
MASTER_AWAY: Final = 1
INTERNAL_ERROR: Final = -1
NO_ROOM: Final = -200
INVALID_PARAMS: Final = -600
OBJECT_NOT_FOUND: Final = -704
RPC_FAIL: Final = -900
RPC_TIMEOUT: Final = -901

Range = tuple[int, int]
"""(offset, size) in bytes of a range of the arena."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One message; ``number`` pairs an answer with its request."""


class Begin(_Message, frozen=True):
    """The first message: which store to join, and how."""

    address: str
    master: str
    protocol: str
    segment_bytes: int
    arena_bytes: int
    threads: int


class Ping(_Message, frozen=True):
    """Ask whether the process is alive and its master answers."""

    number: int


class Exists(_Message, frozen=True):
    """Ask which names the store has; after ``until_s`` by ``time.monotonic()`` nobody waits for the answer any more."""

    number: int
    until_s: float
    names: list[str]


class PutBlock(msgspec.Struct, frozen=True, array_like=True):
    """Store the header followed by these ranges of the arena."""

    name: str
    header: bytes
    ranges: bytes


class GetBlock(msgspec.Struct, frozen=True, array_like=True):
    """Fetch an object of exactly this size: the header is returned, the rest goes to these ranges of the arena."""

    name: str
    header_bytes: int
    ranges: bytes


class Put(_Message, frozen=True):
    """Store blocks in one call; each succeeds or fails on its own."""

    number: int
    blocks: list[PutBlock]


class Get(_Message, frozen=True):
    """Fetch blocks in one call; each succeeds or fails on its own."""

    number: int
    blocks: list[GetBlock]


class Remove(_Message, frozen=True):
    """Delete these names, even while others read them."""

    number: int
    names: list[str]


class Began(_Message, frozen=True):
    """The answer to ``Begin``: this node's address for others; or, with an error, the process ends."""

    endpoint: str = ""
    error: str = ""


class Answer(_Message, frozen=True):
    """The answer to all other requests.

    Attributes:
        number: the request's.
        status: ``OK``, ``MASTER_AWAY`` for a ``Ping`` while the master does not answer, or Mooncake's error, below 0.
        found: for ``Exists``, one byte per name, 1 where it exists.
        statuses: for ``Put`` and ``Get``, one per block.
        headers: for ``Get``, one per block; empty where it failed.
    """

    number: int
    status: int = 0
    found: bytes = b""
    statuses: list[int] = []
    headers: list[bytes] = []


Request = Ping | Exists | Put | Get | Remove
FromDaemon = Begin | Request
FromProcess = Began | Answer

_encoder: Final = msgspec.msgpack.Encoder()


def framed(message: FromDaemon | FromProcess) -> bytes:
    """Return the message with its length prefix."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def pack_ranges(ranges: Sequence[Range]) -> bytes:
    """Return ranges as raw int64 pairs."""
    return array("q", [number for one in ranges for number in one]).tobytes()


def unpack_ranges(data: bytes) -> tuple[list[int], list[int]]:
    """Return the ranges' offsets and sizes, in bytes."""
    flat = memoryview(data).cast("q").tolist()
    return flat[::2], flat[1::2]
