"""What layouts are made of: the heads a pool holds, and the arrays of one component on pages of tokens.

Knows how a page of an array looks in each view and what it weighs. Which arrays a model has is each layout's business.
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
"""Row after row: ``(page_size, heads, dim)`` in a page."""

FIA_NZ = "FIA_NZ"
"""Fractals: ``(heads, dim / n, page_size, n)`` in a page, n elements in 32 bytes. Pairs with itself only."""

FRACTAL_BYTES = 32
SCALE_DTYPE = "float32"
MAX_NUMBER = (1 << 31) - 1
"""Layers and heads are numbered below this, so that whoever receives the manifest can read it."""


class Heads(msgspec.Struct, frozen=True):
    """Which of the model's KV heads a pool holds, and how many ranks hold these very ones."""

    start: int
    count: int
    total: int
    replicas: int = 1


class Paged(msgspec.Struct, frozen=True, kw_only=True):
    """The arrays of one attention component: its layers by number, on pages of ``page_size`` tokens."""

    component: str
    layers: Sequence[int]
    pages: int
    page_size: int
    heads: Heads
    dtype: str
    view: View = "paged"
    scales: KeyValueScales = KeyValueScales()


def heads_of(start: int, count: int, total: int | None, replicas: int, *, prefix: str = "") -> Heads:
    """Return the heads; without ``total`` the model has none beyond these.

    Raises:
        InvalidFieldError: they are not within the model's; fields are named with the prefix.
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
    """Return the heads of a part; what is left out is as in the ``full`` attention.

    Of another number of heads than the full attention's, here or in all, neither where they begin nor how many there
    are follows from it, unless this rank has all of them. ``replicas`` then are those of as many ranks.

    Raises:
        InvalidFieldError: they are not within the model's, or must be given; fields are named with the prefix.
    """
    count = full.count if count is None else count
    if count == full.count and total in {None, full.total}:
        start, total = full.start if start is None else start, full.total
    elif total is None and (full.count < full.total or full.replicas > 1):
        raise InvalidFieldError(
            f"{count} heads here, {full.count} of {full.total} in the full attention, do not say of how many: give it",
            field=f"{prefix}total_heads",
        )
    elif start is None and total is not None and count < total:
        raise InvalidFieldError(
            f"{count} of {total} heads, beside {full.count} of {full.total} in the full attention, do not say which: "
            "give the first",
            field=f"{prefix}head_start",
        )
    found = heads_of(start or 0, count, total, 1, prefix=prefix)
    ranks = full.replicas * full.total * found.count // (full.count * found.total)
    return msgspec.structs.replace(found, replicas=replicas or max(1, ranks))


def layers_from(first: int, count: int) -> range:
    """Return the numbers of ``count`` layers from ``first`` on.

    Raises:
        InvalidFieldError: a number is too large.
    """
    if first + count > MAX_NUMBER:
        raise InvalidFieldError(f"layers {first}..; at most {MAX_NUMBER - 1}", field="first_layer")
    return range(first, first + count)


def check_ascending(layers: Sequence[int], field: str) -> None:
    """Check that the layers are numbered upwards, each once.

    Raises:
        InvalidFieldError: names the first that is not.
    """
    for index in range(1, len(layers)):
        if layers[index] <= layers[index - 1]:
            raise InvalidFieldError(f"layer {layers[index]} after {layers[index - 1]}", field=f"{field}[{index}]")


def check_apart(layers: Iterable[int], others: Iterable[int], field: str) -> None:
    """Check that no layer is of both kinds.

    Raises:
        InvalidFieldError: one is.
    """
    both = sorted({*layers} & {*others})
    if both:
        raise InvalidFieldError(f"layer {both[0]} is of both kinds", field=field)


def main_component(pages: int) -> Component:
    """Return the component ``main``, on pages of its own space."""
    return Component(name=MAIN, space=MAIN, pages=pages)


def attention_entries(part: Paged, head_dim: int, v_head_dim: int | None) -> list[Entry]:
    """Return k of all layers, then v of all layers, then the scales that travel with their pages.

    v is as wide as k where ``v_head_dim`` is None.

    Raises:
        InvalidFieldError: no such dtype, a width that is no multiple of a fractal's, or scales that make no sense.
    """
    return [
        *_scaled_entries(part, "k", head_dim),
        *_scaled_entries(part, "v", head_dim if v_head_dim is None else v_head_dim),
        *_scale_entries(part, "k"),
        *_scale_entries(part, "v"),
    ]


def paged_entries(part: Paged, role: str, dim: int, layers: Sequence[int] | None = None) -> list[Entry]:
    """Return a role's entries, an array ``(pages, page_size, heads, dim)`` a layer, in the part's view.

    Args:
        part: the component.
        role: what the arrays hold.
        dim: elements of one head of one token.
        layers: those that have this role; by default all of the part.

    Raises:
        InvalidFieldError: no such dtype, or the width is no multiple of a fractal's.
    """
    shape = _shape(part, dim)
    token_bytes = part.heads.count * dim * dtype_bytes(part.dtype)
    return [
        paged_entry(part, role, layer, shape, token_bytes, form=FIA_NZ if part.view == "nz" else ND)
        for layer in (part.layers if layers is None else layers)
    ]


def paged_entry(part: Paged, role: str, layer: int, shape: tuple[int, ...], token_bytes: int, *, form: str) -> Entry:
    """Return one entry whose page holds ``page_size`` tokens of ``token_bytes``, after both derivations agree."""
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
    """Return a rank's place as one shard of several: which rank of how many.

    What a rank makes of all its heads together is no interval of another split's: as one head of as many as there are
    ranks it pairs with the same rank of the same split only.

    Raises:
        InvalidFieldError: the heads are no even share.
    """
    if heads.start % heads.count or heads.total % heads.count:
        raise InvalidFieldError(
            f"heads {heads.start}..{heads.start + heads.count - 1} are no even share of {heads.total}", field=field
        )
    return Heads(heads.start // heads.count, 1, heads.total // heads.count, heads.replicas)


def _scaled_entries(part: Paged, role: str, dim: int) -> list[Entry]:
    """Return k or v with the fixed scales of each layer."""
    entries = paged_entries(part, role, dim)
    fixed = fixed_scales(part.scales.of(role), len(part.layers), part.heads.count, part.dtype, part.scales.field(role))
    return [msgspec.structs.replace(entry, scales=its) for entry, its in zip(entries, fixed, strict=True)]


def _scale_entries(part: Paged, role: str) -> list[Entry]:
    """Return the arrays ``(pages, heads)`` of scales that travel with k's or v's pages, or none."""
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
        raise InvalidFieldError(f"{dim} is no multiple of {fractal}, a fractal's width in {part.dtype}", field="view")
    return (part.pages, part.heads.count, dim // fractal, part.page_size, fractal)
