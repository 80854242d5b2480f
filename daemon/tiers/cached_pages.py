"""Checks of what requests on cached blocks contain: hashes, page ids and the pool's model."""

from __future__ import annotations

from kvferry.pools.planning.runs import PageIds
from kvferry.pools.pool import Pool
from kvferry.pools.tiers import namespaces
from kvferry.pools.tiers.namespaces import Namespace
from kvferry.protocol.cache_messages import HASH_BYTES
from kvferry.protocol.errors import InvalidFieldError, LengthMismatchError, NoModelError
from kvferry.protocol.model_identity import ModelIdentity


def model_of(pool: Pool) -> ModelIdentity:
    """Return the model whose KV a pool's pages hold.

    Raises:
        NoModelError: the pool was created without a model.
    """
    if pool.model is None:
        raise NoModelError(
            f"pool {pool.name!r} was created without a model: its blocks could be confused with another model's",
            field="model",
        )
    return pool.model


def namespace_of(pool: Pool, space: str, block_pages: int) -> Namespace:
    """Return the namespace of a pool's blocks.

    Raises:
        NoModelError: the pool was created without a model.
        InvalidFieldError: the space's pages are of several groups, which a block's hash does not distinguish.
    """
    if any(one.group for one in pool.manifest.components if one.space == space):
        raise InvalidFieldError(
            f"pages of pool {pool.name!r} are of several groups of layers, which a block's hash does not distinguish: "
            "offload and restore them",
            field="pool",
        )
    return namespaces.namespace_of(pool.tenant, pool.manifest.layout_digest, model_of(pool), space, block_pages)


def split_hashes(joined: bytes) -> list[bytes]:
    """Return the concatenated hashes as a list.

    Raises:
        InvalidFieldError: there is none, or the length is not a multiple of HASH_BYTES.
    """
    if not joined or len(joined) % HASH_BYTES:
        raise InvalidFieldError(f"{len(joined)} bytes are not one or more hashes of {HASH_BYTES}", field="hashes")
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def hashes_of(joined: bytes) -> list[bytes]:
    """Return the hashes of a chain as a list.

    Raises:
        InvalidFieldError: as for ``split_hashes``, or a hash occurs twice.
    """
    hashes = split_hashes(joined)
    if len(set(hashes)) < len(hashes):
        raise InvalidFieldError("a hash occurs twice, but each one covers all tokens before it", field="hashes")
    return hashes


def ids_by_block(ids: PageIds, blocks: int, block_pages: int) -> PageIds:
    """Return the page ids by block, (blocks, block_pages).

    Raises:
        LengthMismatchError: the number of ids is not ``blocks * block_pages``.
    """
    if len(ids) != blocks * block_pages:
        raise LengthMismatchError(
            f"{blocks} blocks of {block_pages} pages need {blocks * block_pages} ids, not {len(ids)}",
            field="pages",
        )
    return ids.reshape(blocks, block_pages)
