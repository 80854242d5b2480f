"""Building blocks of layouts: the heads a pool holds, and the entries of one component on pages of tokens.

Defines shape and bytes of a page in each view. Which arrays a model has is up to each layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvferry.pools.planning.geometry import PAGE_HEADS, dtype_bytes, page_bytes_of
from kvferry.pools.planning.scales import PAGE, KeyValueScales, fixed_scales
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.manifests import Component, Entry, View

DRAFT = "draft"
ND = "ND"
"""Row-major: a page is ``(page_size, heads, dim)``."""

FIA_NZ = "FIA_NZ"
"""Fractals: a page is ``(heads, dim / n, page_size, n)``, n elements in 32 bytes. Pairs only with itself."""

FRACTAL_BYTES = 32
SCALE_DTYPE = "float32"
MAX_NUMBER = (1 << 31) - 1
"""Layers and heads are numbered below this: the wire's bound on a manifest's fields."""


class Heads(msgspec.Struct, frozen=True):
    """Which of the model's KV heads a pool holds, and how many ranks hold the same heads."""

    start: int
    count: int
    total: int
    replicas: int = 1


class Paged(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the arrays of one attention component, on pages of ``page_size`` tokens."""

    component: str
    layers: Sequence[int]
    pages: int
    page_size: int
    heads: Heads
    dtype: str
    view: View = "paged"
    scales: KeyValueScales = KeyValueScales()


def heads_of(start: int, count: int, total: int | None, replicas: int, *, prefix: str = "") -> Heads:
    """Return the heads; ``total`` defaults to ``start + count``.

    Raises:
        InvalidFieldError: the heads exceed ``total`` or the numbering; names the field with the prefix.
    """
    if total is None:
        total = start + count
    if start + count > total:
        raise InvalidFieldError(f"heads {start}..{start + count - 1} of {total}", field=f"{prefix}total_heads")
    if total > MAX_NUMBER:
        raise InvalidFieldError(f"{total} heads; at most {MAX_NUMBER}", field=f"{prefix}head_start")
    return Heads(start, count, total, replicas)


def heads_beside(
    full: Heads, start: int | None, count: int | None, total: int | None, replicas: int | None, *, prefix: str
) -> Heads:
    """Return the heads of a component beside the full attention; omitted values default to those of ``full``.

    If the number of heads differs from ``full``, on this rank or in total, start and total cannot be derived and must
    be given, unless this rank holds all heads. ``replicas`` is then derived for the same number of ranks.

    Raises:
        InvalidFieldError: the heads exceed the total, or a value that must be given is missing; names the field with
            the prefix.
    """
    count = full.count if count is None else count
    if count == full.count and total in {None, full.total}:
        start, total = full.start if start is None else start, full.total
    elif total is None and (full.count < full.total or full.replicas > 1):
        raise InvalidFieldError(
            f"the total cannot be derived from {count} heads here, {full.count} of {full.total} in full attention: "
            "give it",
            field=f"{prefix}total_heads",
        )
    elif start is None and total is not None and count < total:
        raise InvalidFieldError(
            f"which {count} of {total} heads cannot be derived from {full.count} of {full.total} in full attention: "
            "give the first",
            field=f"{prefix}head_start",
        )
    found = heads_of(start or 0, count, total, 1, prefix=prefix)
    ranks = full.replicas * full.total * found.count // (full.count * found.total)
    return msgspec.structs.replace(found, replicas=replicas or max(1, ranks))


def layers_from(first: int, count: int) -> range:
    """Return the numbers of ``count`` layers from ``first`` on.

    Raises:
        InvalidFieldError: a layer number exceeds the bound.
    """
    if first + count > MAX_NUMBER:
        raise InvalidFieldError(f"layers {first}..; at most {MAX_NUMBER - 1}", field="first_layer")
    return range(first, first + count)


def check_ascending(layers: Sequence[int], field: str) -> None:
    """Check that the layer numbers are strictly ascending.

    Raises:
        InvalidFieldError: names the first that is not.
    """
    for index in range(1, len(layers)):
        if layers[index] <= layers[index - 1]:
            raise InvalidFieldError(f"layer {layers[index]} after {layers[index - 1]}", field=f"{field}[{index}]")


def check_apart(layers: Iterable[int], others: Iterable[int], field: str) -> None:
    """Check that no layer is in both lists.

    Raises:
        InvalidFieldError: names the first layer that is.
    """
    both = sorted({*layers} & {*others})
    if both:
        raise InvalidFieldError(f"layer {both[0]} is in both lists of layers", field=field)


def main_component(pages: int) -> Component:
    """Return the component ``main``, in the page space ``main``."""
    return Component(name=MAIN, space=MAIN, pages=pages)


def attention_entries(part: Paged, head_dim: int, v_head_dim: int | None) -> list[Entry]:
    """Return k of all layers, then v of all layers, then the scales that travel with their pages.

    ``v_head_dim`` defaults to ``head_dim``.

    Raises:
        InvalidFieldError: the dtype is unknown, a width is not a multiple of a fractal's, or the scales are invalid.
    """
    return [
        *_scaled_entries(part, "k", head_dim),
        *_scaled_entries(part, "v", head_dim if v_head_dim is None else v_head_dim),
        *_scale_entries(part, "k"),
        *_scale_entries(part, "v"),
    ]


def paged_entries(part: Paged, role: str, dim: int, layers: Sequence[int] | None = None) -> list[Entry]:
    """Return a role's entries: per layer one array ``(pages, page_size, heads, dim)``, in the part's view.

    Args:
        part: the component.
        role: the role of the entries.
        dim: elements of one head of one token.
        layers: the layers that have this role; by default all layers of the part.

    Raises:
        InvalidFieldError: the dtype is unknown, or the width is not a multiple of a fractal's.
    """
    shape = _shape(part, dim)
    token_bytes = part.heads.count * dim * dtype_bytes(part.dtype)
    return [
        paged_entry(part, role, layer, shape, token_bytes, form=FIA_NZ if part.view == "nz" else ND)
        for layer in (part.layers if layers is None else layers)
    ]


def paged_entry(part: Paged, role: str, layer: int, shape: tuple[int, ...], token_bytes: int, *, form: str) -> Entry:
    """Return one entry with ``token_bytes`` bytes per token, checked against its shape by ``page_bytes_of``."""
    name = f"{part.component}/{role}/{layer}"
    return Entry(
        component=part.component,
        role=role,
        layer=layer,
        base=0,
        pages=part.pages,
        page_bytes=page_bytes_of(shape, part.dtype, part.pages, part.page_size * token_bytes, name),
        page_tokens=part.page_size,
        head_start=part.heads.start,
        heads=part.heads.count,
        total_heads=part.heads.total,
        dtype=part.dtype,
        shape=shape,
        format=form,
        replicas=part.heads.replicas if part.heads.replicas > 1 else None,
    )


def shard_of(heads: Heads, field: str) -> Heads:
    """Return a rank's shard as one head of as many as there are ranks.

    A value computed over all heads of a rank cannot be cut for another split. Described as one head per rank, it pairs
    only with the same rank of the same split.

    Raises:
        InvalidFieldError: the heads are not an even share of the total.
    """
    if heads.start % heads.count or heads.total % heads.count:
        raise InvalidFieldError(
            f"heads {heads.start}..{heads.start + heads.count - 1} are not an even share of {heads.total}", field=field
        )
    return Heads(heads.start // heads.count, 1, heads.total // heads.count, heads.replicas)


def _scaled_entries(part: Paged, role: str, dim: int) -> list[Entry]:
    """Return the entries of k or v with the fixed scales of each layer."""
    entries = paged_entries(part, role, dim)
    fixed = fixed_scales(part.scales.of(role), len(part.layers), part.heads.count, part.dtype, part.scales.field(role))
    return [msgspec.structs.replace(entry, scales=its) for entry, its in zip(entries, fixed, strict=True)]


def _scale_entries(part: Paged, role: str) -> list[Entry]:
    """Return the entries ``(pages, heads)`` of the scales that travel with the pages of k or v, if any."""
    scales = part.scales.of(role)
    if not isinstance(scales, str):
        return []
    heads = shard_of(part.heads, f"{part.scales.prefix}head_start") if scales == PAGE else part.heads
    shape = (part.pages, heads.count)
    return [
        Entry(
            component=part.component,
            role=f"{role}_scale",
            layer=layer,
            base=0,
            pages=part.pages,
            page_bytes=page_bytes_of(
                shape,
                SCALE_DTYPE,
                part.pages,
                heads.count * dtype_bytes(SCALE_DTYPE),
                f"{part.component}/{role}_scale/{layer}",
            ),
            head_start=heads.start,
            heads=heads.count,
            total_heads=heads.total,
            dtype=SCALE_DTYPE,
            shape=shape,
            format=PAGE_HEADS,
            replicas=heads.replicas if heads.replicas > 1 else None,
        )
        for layer in part.layers
    ]


def _shape(part: Paged, dim: int) -> tuple[int, ...]:
    if part.view == "fia":
        return (part.pages * part.page_size, 1, part.heads.count, dim)
    if part.view == "paged":
        return (part.pages, part.page_size, part.heads.count, dim)
    fractal = FRACTAL_BYTES // dtype_bytes(part.dtype)
    if dim % fractal:
        raise InvalidFieldError(
            f"{dim} is not a multiple of {fractal}, the width of a fractal in {part.dtype}", field="view"
        )
    return (part.pages, part.heads.count, dim // fractal, part.page_size, fractal)
