"""What a daemon leaves to the next one, with anything in it: sessions, a pool's record, the record of the host tier.

The first frame says which, each other one is a change of what a daemon once wrote (``tests/formats``): see ``_edited``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Final, cast

import msgspec
import numpy as np
import xxhash

from kvferry.daemon.control.session_index import SESSION_BYTES, SessionIndex
from kvferry.daemon.control.sessions import SessionRegistry
from kvferry.daemon.process.fd_store import PREFIX
from kvferry.daemon.process.shares import share
from kvferry.daemon.services.adoption import FoundPool
from kvferry.daemon.services.upgrade import check_kept
from kvferry.daemon.tiers.kept_tier import RECORD
from kvferry.pools.allocator import PageAllocator
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.pool_file import drop_owners, owners_in
from kvferry.pools.records import HEAD_BYTES, MAGIC, MAX_NUMBER, Buffer, UnreadableFileError, write_record
from kvferry.pools.tiers.arena import Arena, whole_units
from kvferry.pools.tiers.index import BlockIndex
from kvferry.pools.tiers.journal import CacheJournal
from kvferry.pools.tiers.tier_record import ROW_BYTES, FoundTier, NamespaceHead, TierRecord, record_bytes
from kvferry.protocol.errors import KvferryError, UpgradeRefusedError
from kvferry.protocol.limits import Limits
from tests.fuzz.inputs import FOLDER, frames_of, joined

ROUNDS: Final = 2_000
FILES: Final = {b"i": "index.1", b"p": "pool.1", b"d": "device-pool.1", b"t": "tier.1"}
CHECKED: Final = {b"p": f"{PREFIX}pool.77.record", b"t": RECORD}
"""What a newer version looks at before it takes over."""
PREFACE_BYTES: Final = 8192

IDENTITY: Final = 77
"""Of the memory that the files are about."""
ARENA_BYTES: Final = 1 << 20
UNIT: Final = 4096
PLACES: Final = (256, 256 + SESSION_BYTES, 256 + 2 * SESSION_BYTES, MAGIC.size + 32)
"""Of the index's records: three sessions, and the boot."""

SLOTS_AT, HEADS_AT, ROWS_AT = UNIT, 2 * UNIT, 2 * UNIT + ARENA_BYTES
"""Of the host tier's record: what each part of it begins with."""
LAST: Final = NamespaceHead(
    tenant=0, layout_digest="ab" * 16, identity="cd" * 16, group="main", block_pages=1, page_bytes=UNIT
)
"""Of a block that ends where the arena does."""

_ROW: Final = struct.Struct("<16s16sQIIIHBB")
_U32: Final = struct.Struct("<I")
_SLOT: Final = struct.Struct("<QQ")


def seeds() -> list[bytes]:
    """Return what was written, and each kind of change of it."""
    session, boot = _record(b"i", PLACES[2]), _record(b"i", PLACES[3])
    rows = np.frombuffer(_content(b"t"), np.uint8)[ROWS_AT:].reshape(-1, ROW_BYTES)
    changes = [[b"i"], [b"i", b"r\x00" + session], [b"i", b"r\x01" + session, b"w" + _U32.pack(PLACES[2]) + bytes(8)]]
    changes += [[b"i", b"r\x03" + boot], [b"i", b"t" + _U32.pack(PLACES[1])]]
    for kind in (b"p", b"d", b"t"):
        changes += [[kind], [kind, b"r\x00" + _record(kind, MAGIC.size)], [kind, b"w" + _U32.pack(40) + b"other"]]
    changes += [[b"t", b"h" + bytes((number,)) + content] for number, content in _heads()]
    changes += [[b"t", b"x" + row.tobytes()[8:]] for row in rows if row.any()]
    changes.append([b"t", b"h\x09" + msgspec.msgpack.encode(LAST), b"x" + _row(head=9, unit=ARENA_BYTES // UNIT - 1)])
    return [joined(frames) for frames in changes]


def take_one_input(data: bytes) -> None:
    """Adopt what is there as a daemon does: it is refused, or what is adopted can be used and adopted again."""
    kind, *edits = frames_of(data)
    if kind not in FILES:
        return
    memory = _edited(kind, edits)
    if kind in CHECKED:
        with _file(memory[:PREFACE_BYTES]) as fd, contextlib.suppress(UpgradeRefusedError):
            check_kept({CHECKED[kind]: [fd]})
    with contextlib.suppress(UnreadableFileError, KvferryError):
        {b"i": _adopt_sessions, b"t": _adopt_tier}.get(kind, _adopt_pool)(memory)


def _adopt_sessions(memory: bytearray) -> None:
    with _file(memory) as fd, HostRegion(os.dup(fd), len(memory)) as region:
        index = SessionIndex(region.buffer)
        assert index.tries >= 0
        assert 0 <= index.last <= MAX_NUMBER
        found = index.begin("b" * 32)
        numbers = [one.session for one in found.records]
        assert numbers == sorted(set(numbers))
        registry = SessionRegistry(Limits())
        registry.continue_after(max([index.last, *numbers]))
        for record in found.records:
            try:
                session = registry.adopt(record)
            except KvferryError:
                index.remove(record.session)
            else:
                assert index.get(record.session) == record
                assert session in registry.of_instance(record.owner)
        assert SessionIndex(region.buffer).begin("c" * 32).records == tuple(
            one for one in found.records if one.session in index.sessions
        )
        for one in list(registry):
            registry.close(one)
            index.remove(one.session_id)
        assert SessionIndex(region.buffer).begin("d" * 32) == ((), 0)


def _adopt_pool(memory: bytearray) -> None:
    with _file(memory) as fd:
        found = FoundPool.at(str(IDENTITY), os.dup(fd))
    with found.file:
        for owners in owners_in(found.file.view(), found.manifest).values():
            drop_owners(owners, {2})
            allocator = PageAllocator(len(owners), owners)
            allocator.check_integrity()
            del allocator, owners


def _adopt_tier(memory: bytearray) -> None:
    if len(memory) != record_bytes(ARENA_BYTES):
        return  # a daemon looks at that first
    view = np.frombuffer(memory, np.uint8)
    record = TierRecord(view, ARENA_BYTES, share)
    found = record.read(IDENTITY, [(0, len(memory))], checksums=True)
    again = TierRecord(view, ARENA_BYTES, share)
    assert [len(one) for one in again.read(IDENTITY, [(0, len(memory))], checksums=True).extents] == [
        len(one) for one in found.extents
    ]
    _use_tier(found)
    record.clear(found.extents[0])
    assert record.is_empty
    assert TierRecord(view, ARENA_BYTES, share).read(IDENTITY, [(0, len(memory))], checksums=True).extents[0].size == 0


def _use_tier(found: FoundTier) -> None:
    """Take the memory and the blocks over."""
    arena = Arena(ARENA_BYTES)
    arena.occupy(*found.extents)
    arena.check_integrity()
    index = BlockIndex(CacheJournal(1 << 10), most_bytes=ARENA_BYTES)
    for blocks in found.blocks:
        head = blocks.head
        names = zip(blocks.hashes, blocks.parents, blocks.depths, strict=True)
        size_bytes = head.block_pages * whole_units(head.page_bytes)
        twice = index.adopt_in_host(head.namespace, names, size_bytes, blocks.offsets, blocks.digests)
        arena.free(*blocks.only(np.array(twice, np.int64)).pages)
    for snapshot in found.snapshots:
        for segment in snapshot.segments:
            assert segment.layout.block_bytes == segment.head.block_bytes
            assert len(segment.offsets) == segment.head.count
            arena.free(segment.offsets, segment.head.block_bytes)
    index.check_integrity()
    arena.check_integrity()
    assert arena.used_bytes == sum(account.cached_bytes for _, account in index.accounts.items())


def _edited(kind: bytes, edits: list[bytes]) -> bytearray:
    memory = _scratch(kind)
    for frame in edits:
        change, rest = frame[:1], frame[1:]
        if change == b"w" and memory and len(rest) >= _U32.size:  # bytes somewhere
            at = _U32.unpack_from(rest)[0] % len(memory)
            piece = rest[_U32.size :][: len(memory) - at]
            memory[at : at + len(piece)] = piece
        elif change == b"t" and memory and len(rest) >= _U32.size:  # another length
            at = _U32.unpack_from(rest)[0] % (2 * len(memory))
            memory = memory[:at] + bytes(max(0, at - len(memory)))
        elif change == b"r" and rest:  # a record with its checksum
            at = PLACES[rest[0] % len(PLACES)] if kind == b"i" else MAGIC.size
            if at + HEAD_BYTES + len(rest) - 1 <= len(memory):
                write_record(cast("Buffer", memoryview(memory)), at, rest[1:])
        elif change == b"h" and len(rest) > 1:  # a head of the tier's with its checksum
            number, content = rest[0], rest[1:]
            at = HEADS_AT + number * UNIT
            if at + len(content) <= ROWS_AT and len(memory) > ROWS_AT:
                memory[at : at + len(content)] = content
                check = xxhash.xxh3_64_intdigest(_SLOT.pack(number, len(content)) + content)
                _SLOT.pack_into(memory, SLOTS_AT + number * _SLOT.size, check, len(content))
        elif change == b"x" and len(rest) >= ROW_BYTES - 8 and len(memory) > ROWS_AT:  # a row of the tier's
            row = rest[: ROW_BYTES - 8]
            unit = _U32.unpack_from(row, 44)[0] % (ARENA_BYTES // UNIT)
            at = ROWS_AT + unit * ROW_BYTES
            memory[at : at + ROW_BYTES] = struct.pack("<Q", xxhash.xxh3_64_intdigest(row)) + row
    return memory


@contextlib.contextmanager
def _file(memory: bytearray) -> Iterator[int]:
    """Give memory by a descriptor, as the store of descriptors does."""
    fd = os.memfd_create("left", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, memory)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        yield fd
    finally:
        os.close(fd)


def _scratch(kind: bytes) -> bytearray:
    """Return what was written; a megabyte is always the same memory, which malloc would scatter others behind."""
    content = _content(kind)
    memory = _tier() if kind == b"t" else bytearray(len(content))
    memory[:] = content
    return memory


@cache
def _tier() -> bytearray:
    return bytearray(len(_content(b"t")))


@cache
def _content(kind: bytes) -> bytes:
    return zlib.decompress((FOLDER.parent / "formats" / f"{FILES[kind]}.zlib").read_bytes())


def _record(kind: bytes, at: int) -> bytes:
    content = _content(kind)
    size = _U32.unpack_from(content, at + 8)[0]
    return content[at + HEAD_BYTES : at + HEAD_BYTES + size]


def _row(head: int, unit: int) -> bytes:
    """Return a row of the only page of a block, without its checksum."""
    return _ROW.pack(b"h" * 16, bytes(16), 1, head, unit, 0, 0, 0, 1)


def _heads() -> list[tuple[int, bytes]]:
    content, found = _content(b"t"), []
    for number in range(256):
        check, size = _SLOT.unpack_from(content, SLOTS_AT + number * _SLOT.size)
        if check:
            found.append((number, content[HEADS_AT + number * UNIT :][:size]))
    return found
