"""Building blocks of layouts: the heads a pool holds, the entries of one component on pages of tokens, groups, drafts.

Defines shape and bytes of a page in each view. Which arrays a model has is up to each layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvferry.pools.planning.geometry import HND, PAGE_HEADS, RankHeads, dtype_bytes, page_bytes_of, page_count
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.planning.scales import PAGE, KeyValueScales, fixed_scales, inherited
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.manifests import (
    Component,
    DraftSpec,
    Entry,
    HostView,
    HybridSwaSpec,
    MambaSpec,
    Manifest,
    MhaSpec,
    MlaSpec,
    View,
)

DRAFT = "draft"
ND = "ND"
"""Row-major: a page is ``(page_size, heads, dim)``."""

FIA_NZ = "FIA_NZ"
"""Fractals: a page is ``(heads, dim / n, page_size, n)``, n elements in 32 bytes. Pairs only with itself."""

JOINED = "KV"
"""Is in the formats whose rows of k are a token's k and v, before the two widths."""

PAGE_FIRST_FORMATS = {"page_first": "PAGE_FIRST", "page_first_direct": "PAGE_FIRST_DIRECT"}
"""Format names by view; the number of layers in a page is appended."""

FRACTAL_BYTES = 32
SCALE_DTYPE = "float32"
MAX_NUMBER = (1 << 31) - 1
"""Layers and heads are numbered below this: the wire's bound on a manifest's fields."""


class Paged(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the arrays of one attention component, on pages of ``page_size`` tokens."""

    component: str
    layers: Sequence[int]
    pages: int
    page_size: int
    heads: RankHeads
    dtype: str
    view: View | HostView = "paged"
    scales: KeyValueScales = KeyValueScales()
    joined: bool = False
    packing: str | None = None


def heads_of(start: int, count: int, total: int | None, replicas: int, *, prefix: str = "") -> RankHeads:
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
    return RankHeads(start, count, total, replicas)


def heads_beside(
    full: RankHeads, start: int | None, count: int | None, total: int | None, replicas: int | None, *, prefix: str
) -> RankHeads:
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


def check_view(spec: MhaSpec | MlaSpec | MambaSpec) -> None:
    """Check that a spec whose pages hold all layers has nothing that differs between layers.

    Raises:
        InvalidFieldError: it has a draft, groups, an indexer, or other scales than one for all.
    """
    if spec.view not in PAGE_FIRST_FORMATS:
        return
    for field in ("draft", "groups", "index_head_dim"):
        if getattr(spec, field, None):
            raise InvalidFieldError(f"view {spec.view} has one array for all layers: omit {field}", field=field)
    for field in ("k_scale", "v_scale"):
        if isinstance(getattr(spec, field, None), tuple | str):
            raise InvalidFieldError(f"view {spec.view} has one array for all layers: give one scale", field=field)


def main_components(pages: int, draft: DraftSpec | None) -> list[Component]:
    """Return the component ``main``, and ``draft`` where there is one, in the page space ``main``."""
    names = [MAIN] if draft is None else [MAIN, DRAFT]
    return [Component(name=name, space=MAIN, pages=pages) for name in names]


def main_part(
    spec: MhaSpec | HybridSwaSpec | MambaSpec, layers: Sequence[int], tokens: int, page_size: int, kv_heads: int
) -> Paged:
    """Return the component ``main`` of multi-head attention; the numbers are those that a spec may omit.

    Raises:
        InvalidFieldError: the tokens are not whole pages, or the heads are invalid.
    """
    return Paged(
        component=MAIN,
        layers=layers,
        pages=page_count(tokens, page_size),
        page_size=page_size,
        heads=heads_of(spec.head_start, kv_heads, spec.total_heads, spec.replicas),
        dtype=spec.dtype,
        view=spec.view,
        scales=KeyValueScales(spec.k_scale, spec.v_scale),
        joined=isinstance(spec, MhaSpec) and spec.joined,
        packing=spec.packing if isinstance(spec, MhaSpec) else None,
    )


def attention_entries(part: Paged, head_dim: int, v_head_dim: int | None) -> list[Entry]:
    """Return k of all layers, then v of all layers, then the scales that travel with their pages.

    ``v_head_dim`` defaults to ``head_dim``. Where k and v are joined, there is only k.

    Raises:
        InvalidFieldError: the dtype is unknown, a width is not a multiple of a fractal's, or the scales are invalid.
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    if part.packing is not None and not (part.joined and part.view == "hnd"):
        raise InvalidFieldError("a packing is of joined pages with heads outermost: omit it", field="packing")
    if part.joined:
        return _joined_entries(part, head_dim, v_head_dim)
    return [
        *_scaled_entries(part, "k", head_dim),
        *_scaled_entries(part, "v", v_head_dim),
        *_scale_entries(part, "k"),
        *_scale_entries(part, "v"),
    ]


def index_entries(spec: MhaSpec | MlaSpec, part: Paged) -> list[Entry]:
    """Return an indexer's keys, then their scales: one head, on the part's pages, of the layers that have one.

    Raises:
        InvalidFieldError: layers that the part does not have, an unknown dtype, or there is no indexer to have them.
    """
    has_scales = isinstance(spec, MlaSpec) and spec.index_scale
    if spec.index_head_dim is None:
        for field in ("index_layers", "index_dtype"):
            if getattr(spec, field) is not None:
                raise InvalidFieldError("an indexer needs index_head_dim", field=field)
        if has_scales:
            raise InvalidFieldError("an indexer needs index_head_dim", field="index_scale")
        return []
    layers = _index_layers(spec, part.layers)
    keys = msgspec.structs.replace(part, dtype=spec.index_dtype or spec.dtype)
    entries = paged_entries(keys, "index_k", spec.index_head_dim, layers)
    if has_scales:
        scales = msgspec.structs.replace(part, dtype=SCALE_DTYPE)
        shape = (part.pages, part.page_size, 1)
        size = dtype_bytes(SCALE_DTYPE)
        entries += [paged_entry(scales, "index_scale", layer, shape, size, form=ND) for layer in layers]
    return entries


def _index_layers(spec: MhaSpec | MlaSpec, layers: Sequence[int]) -> Sequence[int]:
    if spec.index_layers is None:
        return layers
    if isinstance(spec.index_layers, int):
        if spec.index_layers > len(layers):
            raise InvalidFieldError(f"{spec.index_layers} of {len(layers)} layers", field="index_layers")
        return layers[: spec.index_layers]
    check_ascending(spec.index_layers, "index_layers")
    for index, layer in enumerate(spec.index_layers):
        if layer not in layers:
            raise InvalidFieldError(
                f"layer {layer} is not one of {layers[0]}..{layers[-1]}", field=f"index_layers[{index}]"
            )
    return spec.index_layers


def paged_entries(part: Paged, role: str, dim: int, layers: Sequence[int] | None = None) -> list[Entry]:
    """Return a role's entries: per layer one array ``(pages, page_size, heads, dim)``, in the part's view.

    Where a page holds all layers there is one entry, numbered as the last layer: a step of a SEND that has filled this
    layer has filled the others.

    Args:
        part: the component.
        role: the role of the entries.
        dim: elements of one head of one token.
        layers: the layers that have this role; by default all layers of the part.

    Raises:
        InvalidFieldError: the dtype is unknown, or the width is not a multiple of a fractal's.
    """
    layers = part.layers if layers is None else layers
    token_bytes = part.heads.count * dim * dtype_bytes(part.dtype)
    if part.view in PAGE_FIRST_FORMATS:
        inner = (part.page_size, len(layers)) if part.view == "page_first" else (len(layers), part.page_size)
        shape: tuple[int, ...] = (part.pages, *inner, part.heads.count, dim)
        form = f"{PAGE_FIRST_FORMATS[part.view]}_{len(layers)}"
        token_bytes *= len(layers)
        return [paged_entry(part, role, layer, shape, token_bytes, form=form) for layer in layers[-1:]]
    shape = _shape(part, dim)
    form = {"nz": FIA_NZ, "hnd": HND}.get(part.view, ND)
    return [paged_entry(part, role, layer, shape, token_bytes, form=form) for layer in layers]


def paged_entry(part: Paged, role: str, layer: int, shape: tuple[int, ...], token_bytes: int, *, form: str) -> Entry:
    """Return one entry with ``token_bytes`` bytes per token, in the dtype and with the heads of the part."""
    return entry_of(
        (part.component, role, layer),
        pages=part.pages,
        page_bytes=part.page_size * token_bytes,
        page_tokens=part.page_size,
        heads=part.heads,
        dtype=part.dtype,
        shape=shape,
        form=form,
    )


def entry_of(
    key: tuple[str, str, int],
    *,
    pages: int,
    page_bytes: int,
    heads: RankHeads,
    dtype: str,
    shape: tuple[int, ...],
    form: str,
    page_tokens: int | None = None,
) -> Entry:
    """Return the entry (component, role, layer) at base 0; ``page_bytes`` is checked against its shape."""
    component, role, layer = key
    return Entry(
        component=component,
        role=role,
        layer=layer,
        base=0,
        pages=pages,
        page_bytes=page_bytes_of(shape, dtype, pages, page_bytes, f"{component}/{role}/{layer}"),
        page_tokens=page_tokens,
        head_start=heads.start,
        heads=heads.count,
        total_heads=heads.total,
        dtype=dtype,
        shape=shape,
        format=form,
        replicas=heads.replicas if heads.replicas > 1 else None,
    )


def shard_of(heads: RankHeads, field: str) -> RankHeads:
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
    return RankHeads(heads.start // heads.count, 1, heads.total // heads.count, heads.replicas)


def _joined_entries(part: Paged, head_dim: int, v_head_dim: int) -> list[Entry]:
    """Return k, whose rows are k and v; the format has the two widths, so that it pairs with no other split."""
    for role in ("k", "v"):
        if part.scales.of(role) is not None:
            raise InvalidFieldError("joined rows take no scales: omit it", field=part.scales.field(role))
    rows = paged_entries(part, "k", head_dim + v_head_dim)
    order = "" if rows[0].format == ND else f"{rows[0].format}_"
    form = packed_as(f"{order}{JOINED}_{head_dim}_{v_head_dim}", part.packing)
    return [msgspec.structs.replace(entry, format=form) for entry in rows]


def packed_as(form: str, packing: str | None) -> str:
    """Return the format of pages of such a form in which an engine orders the bytes in a way of its own."""
    return form if packing is None else f"{form}_{packing.upper()}"


def is_joined(form: str) -> bool:
    """Return whether rows of tokens, in this format, are k and v of each head."""
    return form.startswith(f"{JOINED}_")


def _scaled_entries(part: Paged, role: str, dim: int) -> list[Entry]:
    """Return the entries of k or v with the fixed scales of each layer."""
    entries = paged_entries(part, role, dim)
    fixed = fixed_scales(part.scales.of(role), len(entries), part.heads.count, part.dtype, part.scales.field(role))
    return [msgspec.structs.replace(entry, scales=its) for entry, its in zip(entries, fixed, strict=True)]


def _scale_entries(part: Paged, role: str) -> list[Entry]:
    """Return the entries ``(pages, heads)`` of the scales that travel with the pages of k or v, if any."""
    scales = part.scales.of(role)
    if not isinstance(scales, str):
        return []
    heads = shard_of(part.heads, f"{part.scales.prefix}head_start") if scales == PAGE else part.heads
    return [
        entry_of(
            (part.component, f"{role}_scale", layer),
            pages=part.pages,
            page_bytes=heads.count * dtype_bytes(SCALE_DTYPE),
            heads=heads,
            dtype=SCALE_DTYPE,
            shape=(part.pages, heads.count),
            form=PAGE_HEADS,
        )
        for layer in part.layers
    ]


def _shape(part: Paged, dim: int) -> tuple[int, ...]:
    if part.view == "fia":
        return (part.pages * part.page_size, 1, part.heads.count, dim)
    if part.view == "paged":
        return (part.pages, part.page_size, part.heads.count, dim)
    if part.view == "hnd":
        return (part.pages, part.heads.count, part.page_size, dim)
    fractal = FRACTAL_BYTES // dtype_bytes(part.dtype)
    if dim % fractal:
        raise InvalidFieldError(
            f"{dim} is not a multiple of {fractal}, the width of a fractal in {part.dtype}", field="view"
        )
    return (part.pages, part.heads.count, dim // fractal, part.page_size, fractal)


# -- KV cache groups: layers that share a block table; all groups of a pool allocate pages from one page space.
#
# Each group is a component: ``main``, ``group1``, ``group2`` and so on. A page belongs to one group at a time, so the
# layers at the same index of their groups share one array. Source: vLLM's hybrid KV cache manager, whose
# ``KVCacheTensor.shared_by`` names these layers.


def lay_out_groups(
    spec: MhaSpec | MlaSpec, part: Paged, entries: Sequence[Entry], draft_entries: Sequence[Entry]
) -> Manifest:
    """Return the manifest of a pool whose layers are in the spec's groups; without groups, all are in ``main``.

    Args:
        spec: the pool's. A group without layers in this pool is left out, except the first if there is a draft, which
            uses its pages.
        part: the component ``main``, with all layers.
        entries: the entries of all layers, as of ``main``.
        draft_entries: the draft's.

    Raises:
        InvalidFieldError: a layer is in no group, in two groups, or not in the pool; or see ``lay_out``.
    """
    [main, *drafts] = main_components(part.pages, spec.draft)
    if not spec.groups:
        return lay_out([*entries, *draft_entries], [main, *drafts], spec.optional_components)
    group_of = _check_groups(spec.groups, part.layers)
    roles = list(dict.fromkeys(entry.role for entry in entries))
    places = [(roles.index(entry.role), *reversed(group_of[entry.layer])) for entry in entries]
    ordered = sorted(zip(places, entries, strict=True), key=lambda one: one[0])
    grouped = [msgspec.structs.replace(entry, component=_name(group)) for (_, _, group), entry in ordered]
    components = [
        msgspec.structs.replace(main, name=_name(number), group=number > 0)
        for number, layers in enumerate(spec.groups)
        if layers or (number == 0 and drafts)
    ]
    return lay_out(
        [*grouped, *draft_entries],
        [*components, *drafts],
        spec.optional_components,
        [*((role, place) for (role, place, _), _ in ordered), *range(len(draft_entries))],
    )


def _name(group: int) -> str:
    return f"group{group}" if group else MAIN


def _check_groups(groups: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return each layer's group and its index in the group."""
    found: dict[int, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        field = f"groups[{number}]"
        check_ascending(group, field)
        for place, layer in enumerate(group):
            if layer not in layers:
                raise InvalidFieldError(f"layer {layer} is not one of {layers[0]}..{layers[-1]}", field=field)
            if layer in found:
                raise InvalidFieldError(f"layer {layer} is also in group {found[layer][0]}", field=field)
            found[layer] = (number, place)
    left = [layer for layer in layers if layer not in found]
    if left:
        raise InvalidFieldError(f"layer {left[0]} is in no group", field="groups")
    return found


# -- a draft model's layers: a separate component, with layers numbered from 0, on the pages of ``main``.

LATENT_FIELDS = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")


def mha_draft_entries(draft: DraftSpec | None, main: Paged, head_dim: int, v_head_dim: int | None) -> list[Entry]:
    """Return the k and v entries of a draft in a multi-head pool; omitted fields default to those of ``main``.

    Raises:
        InvalidFieldError: the heads or the dtype are invalid, or a field of latent attention is given.
    """
    if draft is None:
        return []
    check_absent(draft, LATENT_FIELDS, "multi-head attention")
    part = msgspec.structs.replace(
        main,
        component=DRAFT,
        layers=range(draft.layers),
        heads=heads_beside(
            main.heads, draft.head_start, draft.kv_heads, draft.total_heads, draft.replicas, prefix="draft."
        ),
        dtype=draft.dtype or main.dtype,
        scales=_draft_scales(draft, main),
    )
    if draft.head_dim is not None:
        return attention_entries(part, draft.head_dim, draft.v_head_dim)
    return attention_entries(part, head_dim, v_head_dim if draft.v_head_dim is None else draft.v_head_dim)


def check_absent(draft: DraftSpec, fields: tuple[str, ...], main_attention: str) -> None:
    """Check that the draft gives none of these fields, which do not apply beside ``main_attention``.

    Raises:
        InvalidFieldError: names the first field that it gives.
    """
    for field in fields:
        if getattr(draft, field) is not None:
            raise InvalidFieldError(f"a draft beside {main_attention} has no {field}", field=f"draft.{field}")


def _draft_scales(draft: DraftSpec, main: Paged) -> KeyValueScales:
    """Return the draft's scales; they default to the model's only if the dtype is the same."""
    if draft.dtype not in {None, main.dtype}:
        return KeyValueScales(draft.k_scale, draft.v_scale, "draft.")
    return KeyValueScales(
        inherited(draft.k_scale, main.scales.k, "draft.k_scale"),
        inherited(draft.v_scale, main.scales.v, "draft.v_scale"),
        "draft.",
    )
