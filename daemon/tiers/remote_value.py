"""The name of a cached block in the remote tier, and the header stored before its bytes.

Everybody who reaches the store may write to it, and its nodes check nothing. So the header says which block it belongs
to and what the digests must be, and whoever fetches a block compares. Knows nothing of how the store is reached.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from kvferry.pools.tiers.namespaces import BlockKey

_PREFIX: Final = "kvferry/2"  # version 1 did not contain the model
_HEAD: Final = struct.Struct("<8sII16s")  # magic, pages, whether there is a parent, parent
_DIGEST: Final = struct.Struct("<Q")
_MAGIC: Final = b"kvferry1"
_NO_PARENT: Final = bytes(16)


class StoredHeader(NamedTuple):
    """What is stored with a block's bytes.

    Attributes:
        parent: 16 bytes, the hash of the preceding block in its chain; None for the first one.
        digests: XXH3-64 of each of its pages, in order.
    """

    parent: bytes | None
    digests: tuple[int, ...]


def remote_name(key: BlockKey, *, shared: bool) -> str:
    """Return the block's name in the store; without ``shared``, tenants have distinct names."""
    namespace, block_hash = key
    scope = "shared" if shared else f"tenant-{namespace.tenant}"
    block_kind = f"{namespace.layout_digest}/{namespace.identity}/{namespace.space}/{namespace.block_pages}"
    return f"{_PREFIX}/{scope}/{block_kind}/{block_hash.hex()}"


def header_bytes(pages: int) -> int:
    """Return the header size of a block of ``pages`` pages."""
    return _HEAD.size + (pages + 1) * _DIGEST.size


def pack_header(name: str, parent: bytes | None, digests: Sequence[int]) -> bytes:
    """Return the header of the block ``name``, with one digest per page."""
    head = _HEAD.pack(_MAGIC, len(digests), parent is not None, parent or _NO_PARENT)
    packed = head + struct.pack(f"<{len(digests)}Q", *digests)
    return packed + _DIGEST.pack(_own_digest(name, packed))


def unpack_header(name: str, data: bytes) -> StoredHeader | None:
    """Return the parsed header; None where it is damaged, of another block or of another format."""
    if len(data) < header_bytes(0):
        return None
    packed, own = data[: -_DIGEST.size], data[-_DIGEST.size :]
    magic, pages, has_parent, parent = _HEAD.unpack_from(packed)
    if magic != _MAGIC or len(data) != header_bytes(pages) or own != _DIGEST.pack(_own_digest(name, packed)):
        return None
    digests = struct.unpack_from(f"<{pages}Q", packed, _HEAD.size)
    return StoredHeader(parent if has_parent else None, digests)


def _own_digest(name: str, packed: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name.encode() + packed)
