"""A block's file on disk, with anything in it: a miss, or what its checksums say.

A frame is one change of a file that was right: its first byte says which, see ``_changed``.
"""

from __future__ import annotations

import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from kvferry.pools.tiers.block_file import (
    FORMAT_VERSION,
    MAGIC,
    DamagedBlockError,
    decode_header,
    encode_header,
    header_bytes,
    new_header,
)
from kvferry.pools.tiers.disk import DiskStore
from tests.fuzz.inputs import frames_of, joined
from tests.kit.disk_blocks import block, read, scanned

ROUNDS: Final = 1_000
BLOCK: Final = block(1, pages=3, page_bytes=200, parent=b"p" * 16)
HEADER: Final = new_header(BLOCK.key, 200, tuple(BLOCK.digests), BLOCK.parent, "some/model")
RIGHT: Final = encode_header(HEADER) + b"".join(BLOCK.pages)
PAGES_AT: Final = header_bytes(BLOCK.key.namespace)
MOST_BYTES: Final = 1 << 16
_AT: Final = struct.Struct("<H")
_PREFIX: Final = struct.Struct("<8sIII")
_CHECKSUM: Final = struct.Struct("<Q")


def seeds() -> list[bytes]:
    """Return each kind of change."""
    at = _AT.pack(PAGES_AT)
    description = b"h" + msgspec.msgpack.encode(HEADER)
    seal = b"s" + _AT.pack(PAGES_AT)
    return [
        b"",
        b"f",
        b"f" + RIGHT,
        b"w" + at + b"other",
        b"t" + at,
        b"t\xff\xff",
        description,
        joined([description, b"w" + at + bytes(200)]),
        joined([b"w" + _AT.pack(8) + bytes(8), seal]),
        joined([b"w" + _AT.pack(40) + b"x", seal, b"d"]),
        joined([b"w" + at + b"other", b"d"]),
    ]


def take_one_input(data: bytes) -> None:
    """Read the file, scan it and examine it; all three say the same of it."""
    content = _changed(data)
    with_store = _store()
    path = BLOCK.file_in(with_store)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    problems = [one for step in with_store.examine(deep=True) for one in step.problems]
    found = scanned(with_store)
    if not path.exists():
        assert problems, "a scan has removed what nothing is wrong with"
        path.write_bytes(content)
    try:
        pages = read(with_store, BLOCK)
    except DamagedBlockError:
        assert not path.exists(), "a damaged file stays"
        # what is right in itself, and of other pages than were asked for, is no problem of the file's
        assert problems or decode_header(content[:PAGES_AT]).page_bytes != len(BLOCK.pages[0])
        return
    assert not problems, problems
    assert [one.header.key for one in found] == [BLOCK.key]
    digests = [xxhash.xxh3_64_intdigest(page) for page in pages]
    assert pages == BLOCK.pages or digests == list(decode_header(content[:PAGES_AT]).digests), "wrong bytes"


def _changed(data: bytes) -> bytes:
    content = bytearray(RIGHT)
    for frame in frames_of(data):
        kind, rest = frame[:1], frame[1:]
        at = _AT.unpack(rest[:2])[0] if len(rest) >= _AT.size else 0
        match kind:
            case b"f":  # the whole file
                content[:] = rest
            case b"w":  # bytes somewhere
                content[at : at + len(rest) - 2] = rest[2:]
            case b"t":  # another length
                content[at:] = bytes(max(0, at - len(content)))
            case b"h":  # another description, with its checksum
                size = _PREFIX.size + len(rest) + _CHECKSUM.size
                size += -size % 4096
                content[:PAGES_AT] = _PREFIX.pack(MAGIC, FORMAT_VERSION, size, len(rest)) + rest.ljust(
                    size - _PREFIX.size, b"\0"
                )
                _seal(content, size)
            case b"s":  # the header's checksum
                _seal(content, at)
            case b"d":  # the pages' checksums, as far as the header can be read
                _digest(content)
        del content[MOST_BYTES:]
    return bytes(content)


def _seal(content: bytearray, size: int) -> None:
    if _CHECKSUM.size <= size <= len(content):
        checksum = xxhash.xxh3_64_intdigest(content[: size - _CHECKSUM.size])
        content[size - _CHECKSUM.size : size] = _CHECKSUM.pack(checksum)


def _digest(content: bytearray) -> None:
    try:
        header = decode_header(bytes(content[:PAGES_AT]))
    except ValueError:
        return
    starts = [PAGES_AT + page * header.page_bytes for page in range(min(header.block_pages, 64))]
    digests = tuple(xxhash.xxh3_64_intdigest(content[one : one + header.page_bytes]) for one in starts)
    content[:PAGES_AT] = encode_header(msgspec.structs.replace(header, digests=digests))


@cache
def _store() -> DiskStore:
    folder = tempfile.TemporaryDirectory(prefix="kvferry-fuzz-")
    store = DiskStore(Path(folder.name), "never")
    _kept.append(folder)
    return store


_kept: Final[list[tempfile.TemporaryDirectory[str]]] = []
"""The folder goes with the process."""
