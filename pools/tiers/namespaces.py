"""Names of cached blocks: which blocks are interchangeable. Independent of where the blocks are."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec

from kvferry.protocol.model_identity import ModelIdentity

IDENTITY_BYTES = 16


class Namespace(NamedTuple):
    """Blocks of one namespace are interchangeable: one tenant, one model's KV, one page layout, one block size.

    ``layout_digest`` and ``identity`` are 32 hexadecimal digits each.
    """

    tenant: int
    layout_digest: str
    """The layout of a page: layers, roles, dtypes, formats, scales, and which of the model's heads it holds."""
    identity: str
    """The model whose KV it is: see ``identity_of``."""
    space: str
    block_pages: int


class BlockKey(NamedTuple):
    """One cached block: its namespace, and the 16-byte hash that the engine gave it."""

    namespace: Namespace
    hash: bytes


def namespace_of(tenant: int, layout_digest: str, model: ModelIdentity, space: str, block_pages: int) -> Namespace:
    """Return the namespace of a pool's blocks, which is part of every key in memory, on disk and in the store.

    Args:
        tenant: the owner.
        layout_digest: of the pool's manifest.
        model: of the pool.
        space: page space of the pages.
        block_pages: pages of a block.
    """
    return Namespace(tenant, layout_digest, identity_of(model), space, block_pages)


def identity_of(model: ModelIdentity) -> str:
    """Return a hash, 32 hexadecimal digits, of the whole model identity: name, revision, adapter and salt."""
    encoded = msgspec.json.encode([model.name, model.revision, model.adapter, model.salt])
    return hashlib.blake2b(encoded, digest_size=IDENTITY_BYTES, person=b"kvferry model").hexdigest()
