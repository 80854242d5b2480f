"""Names of cached blocks: what may stand for what. Knows nothing of where the blocks are."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec

from kvferry.protocol.model_identity import ModelIdentity

IDENTITY_BYTES = 16


class Namespace(NamedTuple):
    """Blocks of one namespace can stand for each other: one tenant, one model's KV, pages of one form, one block size.

    ``layout_digest`` and ``identity`` are 32 hexadecimal digits each.
    """

    tenant: int
    layout_digest: str
    """The form of a page: layers, roles, dtypes, formats, scales, and which of the model's heads they are."""
    identity: str
    """Whose KV it is: see ``identity_of``."""
    space: str
    block_pages: int


class BlockKey(NamedTuple):
    """One cached block: its namespace, and the 16-byte hash that its caller gave it."""

    namespace: Namespace
    hash: bytes


def namespace_of(tenant: int, layout_digest: str, model: ModelIdentity, space: str, block_pages: int) -> Namespace:
    """Return where a pool's blocks belong. Every key, in memory, on disk and in the store, has this in it.

    Args:
        tenant: whose they are.
        layout_digest: of the pool's manifest.
        model: the pool's.
        space: of the pages.
        block_pages: how many make a block.
    """
    return Namespace(tenant, layout_digest, identity_of(model), space, block_pages)


def identity_of(model: ModelIdentity) -> str:
    """Return 32 hexadecimal digits over all that a model identity says: name, revision, adapter and salt."""
    said = msgspec.json.encode([model.name, model.revision, model.adapter, model.salt])
    return hashlib.blake2b(said, digest_size=IDENTITY_BYTES, person=b"kvferry model").hexdigest()
