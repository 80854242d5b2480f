"""A pool's file, which a daemon leaves to the one that follows it: the pool's record, and the owner of each page.

The record is one of ``records``, and the owner of a page is one aligned word, so every prefix of the writes reads as
the old state or as the new one. Pure: works on writable buffers, and knows neither processes nor descriptors.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from kvferry.pools.allocator import NOBODY, OWNER_DTYPE, PADDING_PAGE, Owners
from kvferry.pools.planning.manifest import spaces_of
from kvferry.pools.records import (
    FORMAT,
    HEAD_BYTES,
    LENGTH,
    MAGIC,
    Buffer,
    Number,
    UnreadableFileError,
    check_magic,
    invalidate,
    is_blank,
    read_record,
    write_record,
)
from kvferry.protocol.ids import ModelIdentity, PoolName, TenantNumber
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES
from kvferry.protocol.manifests import Manifest, PoolSpec

_POOL_MAGIC: Final = b"kvf-pool"
_ALIGNMENT: Final = 64


class KeptRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Device memory that a keeper has under ``key``, which is random: another keeper has nothing under it."""

    device: Annotated[str, Meta(pattern="^npu:[0-9]{1,3}\\Z")]
    key: Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]
    size_bytes: Annotated[int, Meta(ge=1, le=1 << 50)]


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool of the daemon. ``memory`` is the identity of its region; ``kept`` where that is on a device.

    It is written once the memory is zeroed: memory of a keeper that no record names is nobody's.
    ``manifest`` is the digest of the manifest that follows from ``spec``: where another version of kvferry lays the
    same spec out otherwise, the bytes in the region are not what it takes them for.
    """

    name: PoolName
    tenant: TenantNumber
    spec: PoolSpec
    model: ModelIdentity | None = None
    max_payload_bytes: Annotated[int, Meta(ge=0)] = MAX_PAYLOAD_BYTES
    ends_with: Number | None = None
    memory: Annotated[int, Meta(ge=0)]
    manifest: str
    kept: KeptRecord | None = None


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(PoolRecord)


def manifest_digest(manifest: Manifest) -> str:
    """Return a digest of all of a manifest, also of where its entries lie."""
    return xxhash.xxh3_128_hexdigest(_encoder.encode(manifest))


def pool_file_bytes(record: PoolRecord, manifest: Manifest) -> int:
    """Return the size of a pool's file."""
    at, _ = _owners_at(len(_encoder.encode(record)), spaces_of(manifest))
    return at


def write_pool_file(buffer: Buffer, record: PoolRecord) -> None:
    """Write the file of a new pool into zeros: no page has an owner."""
    write_record(buffer, MAGIC.size, _encoder.encode(record))
    buffer[: MAGIC.size] = MAGIC.pack(_POOL_MAGIC, FORMAT)


def read_pool_record(buffer: Buffer) -> PoolRecord:
    """Return the record of a pool's file.

    Raises:
        UnreadableFileError: it has none that is valid.
    """
    check_magic(buffer, _POOL_MAGIC, "pool's record")
    content = read_record(buffer, MAGIC.size, len(buffer) - MAGIC.size)
    if content is None:
        gone = "the pool was deleted" if is_blank(buffer, MAGIC.size) else "its record's checksum is wrong"
        raise UnreadableFileError(gone)
    try:
        return _decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as cause:
        raise UnreadableFileError(f"its record cannot be read: {cause}") from None


def end_pool_file(buffer: Buffer) -> None:
    """Take a pool's record away: the pool is deleted."""
    invalidate(buffer, MAGIC.size)


def owners_in(memory: npt.NDArray[np.uint8], manifest: Manifest) -> dict[str, Owners]:
    """Return the owners of a pool's pages, by page space, as views of its file's memory; its record is valid.

    Raises:
        UnreadableFileError: the file has another size.
    """
    spaces = spaces_of(manifest)
    length = memory[MAGIC.size + HEAD_BYTES - LENGTH.size : MAGIC.size + HEAD_BYTES]
    size, starts = _owners_at(LENGTH.unpack(length.tobytes())[0], spaces)
    if size != len(memory):
        raise UnreadableFileError(f"its record's memory has {len(memory)} bytes, not {size}")
    width = OWNER_DTYPE.itemsize
    return {
        space: memory[start : start + pages * width].view(OWNER_DTYPE)
        for start, (space, pages) in zip(starts, spaces.items(), strict=True)
    }


def drop_owners(owners: Owners, known: Collection[int]) -> int:
    """Free the pages of everybody but the ``known`` owners; return how many that were."""
    stray = (owners != NOBODY) & ~np.isin(owners, np.fromiter(known, OWNER_DTYPE))
    stray[PADDING_PAGE] = owners[PADDING_PAGE] != NOBODY
    owners[stray] = NOBODY
    return int(np.count_nonzero(stray))


def _owners_at(record_bytes: int, spaces: dict[str, int]) -> tuple[int, list[int]]:
    """Return the size of a pool's file, and where the owners of each space begin."""
    at, starts = MAGIC.size + HEAD_BYTES + record_bytes, []
    for pages in spaces.values():
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        starts.append(at)
        at += pages * OWNER_DTYPE.itemsize
    return at, starts
