"""Manifests: laying entries out in a region, checking them, the layout digest, and the sizes of page spaces.

Pools with equal digests have pages of the same content and form: a page of one can be copied into the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterable, Sequence

import msgspec

from kvferry.pools.planning.geometry import dtype_bytes
from kvferry.pools.planning.scales import canonical
from kvferry.protocol.errors import DuplicateEntryError, InvalidFieldError
from kvferry.protocol.manifests import Component, ComponentKind, Entry, Manifest

MAX_REGION_BYTES = 1 << 50
DIGEST_BYTES = 16
OPTIONAL_COMPONENTS = ("draft",)


def lay_out(
    entries: Sequence[Entry],
    components: Sequence[Component] = (),
    optional_components: Sequence[str] = OPTIONAL_COMPONENTS,
    places: Sequence[Hashable] | None = None,
) -> Manifest:
    """Return the manifest with these entries one after another from base 0, in the given order.

    Each begins at a multiple of its element size, as a tensor over it requires.

    Args:
        entries: at least one.
        components: the components; by default all are paged, in one space named after the first entry's component.
        optional_components: components that no source of a transfer has to cover.
        places: a key per entry; entries with equal keys, which must be of the same form, share one array. By default
            each entry has its own array.

    Raises:
        InvalidFieldError: the region would be too large, or an optional component is unknown, or all are optional.
        DuplicateEntryError: two entries have the same (component, role, layer).
    """
    placed: list[Entry] = []
    bases: dict[Hashable, int] = {}
    base = 0
    for entry, place in zip(entries, range(len(entries)) if places is None else places, strict=True):
        if place in bases:
            placed.append(msgspec.structs.replace(entry, base=bases[place]))
            continue
        base += -base % (dtype_bytes(entry.dtype) if entry.dtype else 1)
        bases[place] = base
        placed.append(msgspec.structs.replace(entry, base=base))
        base += entry.pages * entry.page_bytes
        if base > MAX_REGION_BYTES:
            raise InvalidFieldError(f"the region would exceed {MAX_REGION_BYTES} bytes", field="tokens")
    check_unique(placed, "entries")
    check_optional({entry.component for entry in placed}, optional_components, "optional_components")
    return Manifest(
        pages=entries[0].pages,
        region_bytes=base,
        layout_digest=layout_digest(placed),
        entries=tuple(placed),
        optional_components=tuple(optional_components),
        components=tuple(components) or _one_space(placed),
    )


def each_array(entries: Iterable[Entry]) -> list[Entry]:
    """Return the first entry of each array; layers of several KV cache groups may share one."""
    first: dict[int, Entry] = {}
    for entry in entries:
        first.setdefault(entry.base, entry)
    return list(first.values())


def component_of(manifest: Manifest, name: str) -> Component | None:
    """Return the component of that name, or None."""
    for one in manifest.components:
        if one.name == name:
            return one
    return None


def space_of(manifest: Manifest, name: str) -> str:
    """Return the page space of a component that the manifest has."""
    component = component_of(manifest, name)
    assert component is not None, name
    return component.space


def spaces_of(manifest: Manifest) -> dict[str, int]:
    """Return the number of pages of each page space, including the padding page, in the components' order."""
    return {one.space: one.pages for one in manifest.components}


def groups_of(manifest: Manifest) -> dict[str, str]:
    """Return the page space of each group: what has a page list of its own, a space or one of several groups in it."""
    return {one.space: one.space for one in manifest.components} | {
        one.name: one.space for one in manifest.components if one.group
    }


def windows_of(manifest: Manifest) -> dict[str, int | None]:
    """Return the length in tokens of each sliding window, by its component's name."""
    return {one.name: one.window for one in manifest.components if one.kind == "window"}


def check_unique(entries: Iterable[Entry], field: str) -> None:
    """Check that each (component, role, layer) occurs once.

    Raises:
        DuplicateEntryError: names the second of two by its index in ``field``.
    """
    seen: dict[tuple[str, str, int], int] = {}
    for index, entry in enumerate(entries):
        first = seen.setdefault(key_of(entry), index)
        if first != index:
            raise DuplicateEntryError(f"{entry.name} is entry {first} and entry {index}", field=f"{field}[{index}]")


def check_optional(components: set[str], optional: Collection[str], field: str) -> None:
    """Check the optional components. Those in ``OPTIONAL_COMPONENTS`` need not exist.

    Raises:
        InvalidFieldError: an optional component is unknown, or all components are optional.
    """
    unknown = sorted(set(optional) - components - set(OPTIONAL_COMPONENTS))
    if unknown:
        raise InvalidFieldError(f"the pool has no component {unknown[0]!r}", field=field)
    if components and components <= set(optional):
        raise InvalidFieldError("all components are optional: at least one must be required", field=field)


def key_of(entry: Entry) -> tuple[str, str, int]:
    """Return the key that entries are paired by: (component, role, layer)."""
    return (entry.component, entry.role, entry.layer)


def layout_digest(entries: Iterable[Entry]) -> str:
    """Return the layout digest: 32 hexadecimal digits over the form of each entry's pages.

    Covers component, role, layer, dtype, format, the geometry of a page (bytes, tokens, heads; the shape of a state's
    slot) and fixed scales, since the same 8 bits mean another number under another scale. Omits where entries lie, the
    number of pages, and the view.
    """
    pages = sorted(
        (
            *(*key_of(e), e.dtype, e.format, e.page_bytes, e.page_tokens, e.head_start, e.heads, e.total_heads),
            *(() if slot_shape(e) is None else (slot_shape(e),)),
            *(() if e.scales is None else (canonical(e.scales),)),
        )
        for e in entries
    )
    return hashlib.blake2b(msgspec.json.encode(pages), digest_size=DIGEST_BYTES).hexdigest()


def slot_shape(entry: Entry) -> tuple[int, ...] | None:
    """Return the shape of a slot (a page without tokens); None for pages of tokens and where the shape is unknown.

    The digest needs it because (window, channels) and (channels, window) have the same number of bytes.
    """
    return None if entry.page_tokens is not None or entry.shape is None else entry.shape[1:]


def bytes_per_page(manifest: Manifest, space: str | None = None) -> int:
    """Return the bytes of one page over all arrays of a page space, by default the first space."""
    if space is None:
        space = manifest.components[0].space
    inside = {one.name for one in manifest.components if one.space == space}
    return sum(entry.page_bytes for entry in each_array(manifest.entries) if entry.component in inside)


def total_bytes(manifest: Manifest) -> int:
    """Return the bytes of all arrays, without gaps between them."""
    return sum(entry.pages * entry.page_bytes for entry in each_array(manifest.entries))


def _one_space(entries: Sequence[Entry]) -> tuple[Component, ...]:
    space = entries[0].component
    names = dict.fromkeys(entry.component for entry in entries)
    return tuple(Component(name=name, space=space, pages=entries[0].pages) for name in names)


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
