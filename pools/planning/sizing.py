"""Memory use of a pool: bytes per token, per page and in total, for each page space."""

from __future__ import annotations

import msgspec

from kvferry.pools.planning.manifest import bytes_per_page, spaces_of
from kvferry.protocol.manifests import ComponentKind, Manifest


class SpaceSize(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one page space. ``pages`` excludes the padding page, ``total_bytes`` includes it.

    ``page_tokens`` and ``token_bytes`` are None for a state, whose pages are slots; ``token_bytes`` is rounded up if a
    page has bytes that belong to no token.
    """

    space: str
    kind: ComponentKind
    pages: int
    page_tokens: int | None
    token_bytes: int | None
    page_bytes: int
    total_bytes: int


def space_sizes(manifest: Manifest) -> tuple[SpaceSize, ...]:
    """Return the sizes of each page space, in the components' order."""
    return tuple(_size(manifest, space, pages) for space, pages in spaces_of(manifest).items())


def _size(manifest: Manifest, space: str, pages: int) -> SpaceSize:
    inside = [one for one in manifest.components if one.space == space]
    names = {one.name for one in inside}
    page_tokens = next(entry.page_tokens for entry in manifest.entries if entry.component in names)
    page_bytes = bytes_per_page(manifest, space)
    return SpaceSize(
        space=space,
        kind=inside[0].kind,
        pages=pages - 1,
        page_tokens=page_tokens,
        token_bytes=None if page_tokens is None else -(-page_bytes // page_tokens),
        page_bytes=page_bytes,
        total_bytes=pages * page_bytes,
    )
