"""Records in memory that outlives the daemon, for the one that follows it: checksum, length, content.

They are read again after the process was killed at any moment. So a record is valid only with its checksum, which is
written last: every prefix of the writes reads as absence or as the whole, and a damaged record as absence. Pure: works
on writable buffers, and knows neither processes nor descriptors.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Protocol, overload

import xxhash
from msgspec import Meta

FORMAT: Final = 1
"""Another one is not read: all that it describes is dropped."""

MAX_NUMBER: Final = (1 << 31) - 1
"""The highest number of a session, and so of an owner: a page has room for an int32."""

MAGIC: Final = struct.Struct("<8sI4x")
LENGTH: Final = struct.Struct("<I4x")
_DIGEST: Final = struct.Struct("<Q")
HEAD_BYTES: Final = _DIGEST.size + LENGTH.size
_NO_DIGEST: Final = bytes(_DIGEST.size)

Number = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
UserId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Buffer(Protocol):
    """Writable memory, such as an ``mmap``."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> bytes: ...
    def __setitem__(self, key: slice, value: bytes, /) -> None: ...


class UnreadableFileError(Exception):
    """What the memory holds cannot be used; the text says why."""


def _digest(length: bytes, content: bytes) -> bytes:
    found = xxhash.xxh3_64_intdigest(length + content)
    return _DIGEST.pack(found or 1)  # 0 is what an invalid record has


def write_record(buffer: Buffer, at: int, content: bytes) -> None:
    """Write a record, its checksum last."""
    length = LENGTH.pack(len(content))
    buffer[at + HEAD_BYTES : at + HEAD_BYTES + len(content)] = content
    buffer[at + _DIGEST.size : at + HEAD_BYTES] = length
    buffer[at : at + _DIGEST.size] = _digest(length, content)


def invalidate(buffer: Buffer, at: int) -> None:
    """Take a record away, by its checksum."""
    buffer[at : at + _DIGEST.size] = _NO_DIGEST


def read_record(buffer: Buffer, at: int, room: int) -> bytes | None:
    """Return a record's content; None where there is no valid one in these ``room`` bytes."""
    digest = buffer[at : at + _DIGEST.size]
    length = buffer[at + _DIGEST.size : at + HEAD_BYTES]
    if digest == _NO_DIGEST or len(length) < LENGTH.size:
        return None
    size = LENGTH.unpack(length)[0]
    if size > room - HEAD_BYTES:
        return None
    content = buffer[at + HEAD_BYTES : at + HEAD_BYTES + size]
    return content if digest == _digest(length, content) else None


def is_blank(buffer: Buffer, at: int) -> bool:
    """Return whether there is no record, not even a damaged one."""
    return buffer[at : at + _DIGEST.size] == _NO_DIGEST


def check_magic(buffer: Buffer, magic: bytes, what: str) -> None:
    """Check that the memory begins with ``magic`` and this format.

    Raises:
        UnreadableFileError: it does not; names ``what`` it should be.
    """
    if len(buffer) < MAGIC.size:
        raise UnreadableFileError(f"{what} has {len(buffer)} bytes")
    found, version = MAGIC.unpack(buffer[: MAGIC.size])
    if found != magic:
        raise UnreadableFileError(f"it is no {what}")
    if version != FORMAT:
        raise UnreadableFileError(f"the {what} has format {version}, this daemon reads {FORMAT}")
