"""The names of cached blocks: a chain of 16-byte hashes over the full blocks of a token sequence.

A block's hash covers its own tokens and, through its parent's hash, all tokens before it: equal hashes mean equal
prefixes. The bytes are specified, so that engines in any process, language or version compute the same name::

    root  = sha256(b"kvferry blocks 1:" + salt)[:16]
    hash  = sha256(parent's hash, or the root + the block's tokens as little-endian int64)[:16]

The daemon accepts any 16 bytes as a name and never sees the tokens; an engine may use its own hashes instead:

* vLLM: sha256 over the pickled (or CBOR) tuple of parent, tokens and extra keys: LoRA name, multimodal hashes, and in
  the first block the cache salt. 32 bytes. The chain starts with a random value in every process unless PYTHONHASHSEED
  is set, so two engines share blocks only with that. Events carry 64 bits of it.
* SGLang: sha256 over the parent's 32 bytes and the page's tokens as little-endian uint32, as hex digits; cache salt and
  extra key seed the chain. This one differs in the width of a token, and truncates each link to 16 bytes.

``digest[:16]`` of either is as good a name as one made here, but a different one.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

from kvferry.clients.arguments import page_ids, shown, whole
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.tier_messages import HASH_BYTES

_ROOT: Final = b"kvferry blocks 1:"
_TOKEN: Final = np.dtype("<i8")


def block_hashes(
    tokens: npt.ArrayLike, block_tokens: int, *, parent: bytes | None = None, salt: bytes = b""
) -> list[bytes]:
    """Return the hash of each full block, in order; tokens of an incomplete last block are ignored.

    For a sequence that has grown, only the new blocks have to be hashed::

        known = hashes[-1] if hashes else None
        hashes += block_hashes(tokens[len(hashes) * block_tokens :], block_tokens, parent=known, salt=salt)

    Args:
        tokens: ``(n,)`` integers, the ids of the tokens after the parent's block.
        block_tokens: tokens of a block: page size x pages per block.
        parent: the hash of the block before the first of these; None at the start of the sequence.
        salt: anything else that K and V depend on, besides the pool's layout and model identity: an adapter chosen per
            request, or the user to whom a prefix must stay private. It is part of the root only: a given parent
            already includes it, and it is not added again.

    Raises:
        InvalidFieldError: the tokens are not a list of integers, ``block_tokens`` is not positive, or the parent is
            not a hash.
    """
    block_tokens = whole(block_tokens, "block_tokens", least=1)
    if parent is not None and (type(parent) is not bytes or len(parent) != HASH_BYTES):
        raise InvalidFieldError(f"{shown(parent)} is not a hash of {HASH_BYTES} bytes", field="parent")
    if not isinstance(salt, bytes):
        raise InvalidFieldError(f"{shown(salt)} is not bytes: give salt.encode()", field="salt")
    sha256 = hashlib.sha256
    before = sha256(_ROOT + salt).digest()[:HASH_BYTES] if parent is None else parent
    data = page_ids(tokens, "tokens").astype(_TOKEN, copy=False).tobytes()
    block_bytes = block_tokens * _TOKEN.itemsize
    hashes = []
    for end in range(block_bytes, len(data) + 1, block_bytes):
        before = sha256(before + data[end - block_bytes : end]).digest()[:HASH_BYTES]
        hashes.append(before)
    return hashes
