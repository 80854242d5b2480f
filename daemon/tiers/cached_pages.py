"""What requests about cached blocks name: hashes and page ids, checked."""

from __future__ import annotations

from kvferry.pools.planning.runs import PageIds
from kvferry.pools.pool import Pool
from kvferry.pools.tiers import namespaces
from kvferry.pools.tiers.namespaces import Namespace
from kvferry.protocol.cache_messages import HASH_BYTES
from kvferry.protocol.errors import InvalidFieldError, LengthMismatchError, NoModelError
from kvferry.protocol.model_identity import ModelIdentity


def model_of(pool: Pool) -> ModelIdentity:
    """Return whose KV a pool's pages hold.

    Raises:
        NoModelError: nobody said so.
    """
    if pool.model is None:
        raise NoModelError(
            f"pool {pool.name!r} was made without a model: another one's blocks could be taken for its own",
            field="model",
        )
    return pool.model


def namespace_of(pool: Pool, space: str, block_pages: int) -> Namespace:
    """Return where blocks of these pages belong.

    Raises:
        NoModelError: the pool does not say whose KV it holds.
        InvalidFieldError: the space's pages are of several groups, and a hash would not say of which.
    """
    if any(one.group for one in pool.manifest.components if one.space == space):
        raise InvalidFieldError(
            f"pages of pool {pool.name!r} are of several groups of layers, and a block's hash does not say of which: "
            "offload and restore them",
            field="pool",
        )
    return namespaces.namespace_of(pool.tenant, pool.manifest.layout_digest, model_of(pool), space, block_pages)


def split_hashes(joined: bytes) -> list[bytes]:
    """Return the hashes one by one.

    Raises:
        InvalidFieldError: there is none, or a part of one is left over.
    """
    if not joined or len(joined) % HASH_BYTES:
        raise InvalidFieldError(f"{len(joined)} bytes are no whole number of hashes of {HASH_BYTES}", field="hashes")
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def hashes_of(joined: bytes) -> list[bytes]:
    """Return the hashes of a chain, one by one.

    Raises:
        InvalidFieldError: as ``split_hashes``, or one comes twice.
    """
    hashes = split_hashes(joined)
    if len(set(hashes)) < len(hashes):
        raise InvalidFieldError("a hash comes twice: each covers all tokens before it", field="hashes")
    return hashes


def ids_by_block(ids: PageIds, blocks: int, block_pages: int) -> PageIds:
    """Return the page ids of each block: ``(blocks, block_pages)``.

    Raises:
        LengthMismatchError: there are more or fewer.
    """
    if len(ids) != blocks * block_pages:
        raise LengthMismatchError(
            f"{blocks} blocks of {block_pages} pages need {blocks * block_pages} ids, not {len(ids)}",
            field="pages",
        )
    return ids.reshape(blocks, block_pages)
