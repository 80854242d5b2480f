"""What one version writes and the next one reads: a file of each format stands here, from its first day on.

``python -m tests.formats.test_formats`` writes the files of formats that have none. A file is never written anew: where
this version writes other bytes, the format has another number from now on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pytest

from kvferry.daemon.control.session_index import SessionIndex, SessionRecord, format_index, index_bytes
from kvferry.daemon.process.shares import share
from kvferry.pools.layouts import manifest_of
from kvferry.pools.pool_file import (
    KeptRecord,
    PoolRecord,
    manifest_digest,
    owners_in,
    pool_file_bytes,
    read_pool_record,
    write_pool_file,
)
from kvferry.pools.records import FORMAT
from kvferry.pools.tiers import tier_record
from kvferry.pools.tiers.block_file import FORMAT_VERSION, decode_header, encode_header, new_header
from kvferry.pools.tiers.cached_block import BlockKey, Namespace
from kvferry.pools.tiers.tier_record import (
    NamespaceHead,
    SegmentHead,
    SnapshotHead,
    TierRecord,
    record_bytes,
)
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.manifests import MhaSpec

FOLDER: Final = Path(__file__).parent
SPEC: Final = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=2, head_dim=8, dtype="float16")
MODEL: Final = ModelIdentity(name="some/model", revision="r1")
SESSION: Final = SessionRecord(
    session=3, owner=2, uid=1000, gid=1000, pid=4242, started=987, name="decode", instance="node-a", secret=b"s" * 16,
    turn=1,
)  # fmt: skip
POOL: Final = PoolRecord(
    name="decode", tenant=1000, spec=SPEC, model=MODEL, ends_with=2, memory=77,
    manifest=manifest_digest(manifest_of(SPEC)),
)  # fmt: skip
ON_DEVICE: Final = msgspec.structs.replace(
    POOL, kept=KeptRecord(device="npu:0", key="0123456789abcdef" * 2, size_bytes=2 << 20)
)
BLOCKS: Final = NamespaceHead(
    tenant=1000, layout_digest="ab" * 16, identity="cd" * 16, group="main", block_pages=2, page_bytes=5000, model="m"
)
SNAPSHOT: Final = SnapshotHead(
    name="ef" * 16, tenant=1000, owner=2, pool="decode", model=MODEL, created_s=12.5,
    segments=(SegmentHead(component="main", space="main", tokens=20, count=2, block_bytes=2048),),
)  # fmt: skip
ARENA_BYTES: Final = 1 << 20
HEADER: Final = new_header(
    BlockKey(Namespace(1000, "ab" * 16, "cd" * 16, "main", 2), b"h" * 16), 5000, (7, 8), b"p" * 16, "m"
)


def index() -> bytes:
    buffer = bytearray(index_bytes(3))
    format_index(_Memory(buffer))
    written = SessionIndex(_Memory(buffer))
    written.begin("b" * 32)
    written.came_up()
    written.give(3)
    assert written.put(SESSION)
    return bytes(buffer)


def read_index(content: bytes) -> object:
    found = SessionIndex(_Memory(bytearray(content)))
    return found.last, found.boot_id, found.begin("c" * 32).records


def pool(record: PoolRecord) -> bytes:
    manifest = manifest_of(SPEC)
    buffer = bytearray(pool_file_bytes(record, manifest))
    write_pool_file(_Memory(buffer), record)
    owners_in(np.frombuffer(buffer, np.uint8), manifest)["main"][1:3] = 2
    return bytes(buffer)


def read_pool(content: bytes) -> object:
    owners = owners_in(np.frombuffer(content, np.uint8), manifest_of(SPEC))
    return read_pool_record(_Memory(bytearray(content))), {space: one.tolist() for space, one in owners.items()}


def tier() -> bytes:
    memory = np.zeros(record_bytes(ARENA_BYTES), np.uint8)
    record = TierRecord(memory, ARENA_BYTES, share)
    record.begin(77)
    offsets = np.array([[0, 8192], [16384, 24576]])
    digests = offsets.astype(np.uint64) + 1
    assert record.put_blocks(BLOCKS, [b"a" * 16, b"b" * 16], [None, b"a" * 16], [0, 1], offsets, digests)
    pages = np.array([65536, 69632])
    assert record.put_snapshot(SNAPSHOT, manifest_of(SPEC), [(pages, pages.astype(np.uint64) + 1)])
    return memory.tobytes()


def read_tier(content: bytes) -> object:
    memory = np.frombuffer(content, np.uint8).copy()
    found = TierRecord(memory, ARENA_BYTES, share).read(77, [(0, len(memory))], checksums=True)
    [blocks], [snapshot] = found.blocks, found.snapshots
    return (
        (blocks.head, blocks.hashes, blocks.parents, blocks.depths, blocks.offsets.tolist()),
        (msgspec.structs.replace(snapshot.head, manifest=0), snapshot.manifest == manifest_of(SPEC)),
        [one.offsets.tolist() for one in snapshot.segments],
        found.dropped,
    )


class _Memory:
    """A writable buffer, as an ``mmap`` is."""

    def __init__(self, content: bytearray) -> None:
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401  an index or a slice
        found = self._content[key]
        return bytes(found) if isinstance(found, bytearray) else found

    def __setitem__(self, key: slice, value: bytes) -> None:
        assert len(self._content[key]) == len(value)
        self._content[key] = value


class Format(NamedTuple):
    """A format, what this version writes of it, and what must be read."""

    number: int
    write: Callable[[], bytes]
    read: Callable[[bytes], object]
    means: object


FORMATS: Final = {
    "index": Format(FORMAT, index, read_index, (3, "b" * 32, (SESSION,))),
    "pool": Format(FORMAT, lambda: pool(POOL), read_pool, (POOL, {"main": [0, 2, 2, 0, 0]})),
    "device-pool": Format(FORMAT, lambda: pool(ON_DEVICE), read_pool, (ON_DEVICE, {"main": [0, 2, 2, 0, 0]})),
    "tier": Format(
        tier_record.FORMAT,
        tier,
        read_tier,
        (
            (BLOCKS, [b"a" * 16, b"b" * 16], [None, b"a" * 16], [0, 1], [[0, 8192], [16384, 24576]]),
            (SNAPSHOT, True),
            [[65536, 69632]],
            0,
        ),
    ),
    "block": Format(FORMAT_VERSION, lambda: encode_header(HEADER), decode_header, HEADER),
}


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.{FORMATS[name].number}.zlib"


@pytest.mark.parametrize("name", FORMATS)
def test_this_version_writes_its_format(name: str) -> None:
    assert zlib.decompress(file_of(name).read_bytes()) == FORMATS[name].write(), (
        f"{name} of format {FORMATS[name].number} has other bytes by now: give the format another number"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_this_version_reads_its_format(name: str) -> None:
    assert FORMATS[name].read(zlib.decompress(file_of(name).read_bytes())) == FORMATS[name].means


if __name__ == "__main__":
    for one in FORMATS:
        if not file_of(one).exists():
            file_of(one).write_bytes(zlib.compress(FORMATS[one].write(), 9))
