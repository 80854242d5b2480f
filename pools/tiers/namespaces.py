"""Names of cached blocks: what may stand for what. Knows nothing of where the blocks are."""

from __future__ import annotations

from typing import NamedTuple


class Namespace(NamedTuple):
    """Blocks of one namespace can stand for each other: one tenant, pages of one form, as many pages a block."""

    tenant: int
    layout_digest: str
    """32 hexadecimal digits."""
    space: str
    block_pages: int


class BlockKey(NamedTuple):
    """One cached block: its namespace, and the 16-byte hash that its caller gave it."""

    namespace: Namespace
    hash: bytes
