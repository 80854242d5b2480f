"""Wire structs of pool specs, entries and manifests; ``kvferry.pools`` interprets them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import ComponentName

Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
LayerCount = Annotated[int, Meta(ge=1, le=4096)]
Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
Size = Annotated[int, Meta(ge=1, lt=1 << 62)]
Offset = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
RoleName = ComponentName
LayerNumbers = Annotated[tuple[Annotated[int, Meta(ge=0, lt=(1 << 31) - 1)], ...], Meta(max_length=4096)]
"""Layer numbers of the model, ascending."""

LayerGroups = Annotated[tuple[LayerNumbers, ...], Meta(max_length=16)]
"""Layer numbers per group, ascending; each layer of the pool is in one group. A stage may have none of a group."""

Parts = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=16)]
"""Elements of each of the parts that lie side by side in a row."""

ComponentNames = Annotated[tuple[ComponentName, ...], Meta(max_length=16)]
View = Literal["paged", "fia", "nz", "hnd"]
HostView = Literal["page_first", "page_first_direct"]
"""Orders of a host cache's bytes, as SGLang names them: a page of a role holds all layers."""

Packing = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]*\\Z", max_length=32)]
Scale = Annotated[float, Meta(gt=0)]
MAX_SCALES = 4096
"""Per entry."""

HeadScales = Annotated[tuple[Scale, ...], Meta(min_length=1, max_length=MAX_SCALES)]
LayerScales = Annotated[tuple[Scale, ...], Meta(min_length=1, max_length=4096)]
LayerHeadScales = Annotated[tuple[Scale | HeadScales, ...], Meta(min_length=1, max_length=4096)]
Scales = Scale | LayerHeadScales | Literal["page", "page_head"]
"""Factors that dequantize 8-bit keys or values: one for all layers, one per layer, or per layer one per head held here.
``page`` and ``page_head`` are separate float32 arrays, one number per page or per page and head, that travel too.
"""


class DraftSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The draft model's layers: component ``draft``, numbered from 0, on the pages of ``main``.

    Omitted fields default to the model's, except that a draft has an indexer only with its own ``index_head_dim``, and
    that scales per layer must be given for it. Beside multi-head attention, fields of latent attention are refused;
    beside MLA the draft is MLA too, unless ``kv_heads`` is given.
    """

    layers: LayerCount
    kv_heads: Count | None = None
    head_start: Index | None = None
    total_heads: Count | None = None
    head_dim: Count | None = None
    v_head_dim: Count | None = None
    kv_lora_rank: Count | None = None
    qk_rope_head_dim: Count | None = None
    index_head_dim: Count | None = None
    replicas: Count | None = None
    dtype: str | None = None
    k_scale: Scales | None = None
    v_scale: Scales | None = None


class _Spec(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True, forbid_unknown_fields=True
):
    """Base of specs: tagged by ``kind``; unknown fields are refused."""


class MhaSpec(_Spec, frozen=True, kw_only=True, tag="mha"):
    """A pool of multi-head (or grouped-query) attention: k and v of every layer, paged.

    ``tokens`` is the capacity in tokens without the padding page, a whole number of pages; ``kv_heads`` the heads held
    here, of ``total_heads`` (default: all) starting at ``head_start``; ``first_layer`` the model's number of the first
    layer; ``replicas`` the number of ranks that hold the same heads. ``view`` is how engines see the same bytes, per
    layer: ``paged`` ``(pages, page_size, heads, dim)`` or ``fia`` ``(pages * page_size, 1, heads, dim)``; ``nz`` is
    another order of the bytes, ``(pages, heads, dim / 16, page_size, 16)`` for 2-byte elements, and so is ``hnd``,
    ``(pages, heads, page_size, dim)``. ``page_first`` ``(pages, page_size, layers, heads, dim)`` and
    ``page_first_direct`` ``(pages, layers, page_size, heads, dim)`` have one array per role, whose pages hold all
    layers; without draft, groups and scales per layer. ``joined`` stores k and v of a token's head side by side in one
    row of k, of ``head_dim + v_head_dim`` elements, without v and scales. ``k_scale`` and ``v_scale`` apply to 8-bit
    dtypes only. ``packing`` names an engine's own order of the bytes of a head within a page, with ``joined`` and
    ``hnd`` only: such pages pair with those of the same name, and can be cut by heads.

    ``index_head_dim``, ``index_layers`` and ``index_dtype`` are an indexer's keys, one head on the same pages that all
    ranks hold alike, see ``MlaSpec``.

    ``groups`` are the KV cache groups of an engine with a block table per group and page ids from one allocator:
    components ``main``, ``group1``, ``group2`` and so on, all in the page space ``main``. A page belongs to one group
    at a time; the layers at the same index of their groups share an array.
    """

    layers: LayerCount
    first_layer: Index = 0
    tokens: Size
    page_size: Count
    kv_heads: Count
    head_start: Index = 0
    total_heads: Count | None = None
    head_dim: Count
    v_head_dim: Count | None = None
    dtype: str
    view: View | HostView = "paged"
    replicas: Count = 1
    draft: DraftSpec | None = None
    optional_components: ComponentNames = ("draft",)
    k_scale: Scales | None = None
    v_scale: Scales | None = None
    groups: LayerGroups = ()
    joined: bool = False
    packing: Packing | None = None
    index_head_dim: Count | None = None
    index_layers: LayerNumbers | LayerCount | None = None
    index_dtype: str | None = None


class MlaSpec(_Spec, frozen=True, kw_only=True, tag="mla"):
    """A pool of multi-head latent attention: the latent as k, the rope part as v, and the indexer's arrays.

    ``index_layers`` are the numbers of the layers with an indexer, ascending, or the count of leading layers with one;
    by default all layers have one if ``index_head_dim`` is given. ``index_scale`` adds one float32 per token.
    ``index_dtype`` defaults to ``dtype``. ``packed`` stores latent (float8), its scales and rope (bfloat16) of a token
    in one row of k, without v: ``ds_mla`` in this order, ``ascend`` with the scales last. ``joined`` stores latent and
    rope of a token, both in ``dtype``, in one row of k of ``kv_lora_rank + qk_rope_head_dim`` elements; ``packing``
    names an engine's own order of the bytes of a page of such rows, which pairs with the same name. ``replicas`` is
    the number of tensor-parallel ranks, which all hold the same content. ``k_scale`` applies to latent and rope, one
    for all layers or one per layer; packed tokens contain their scales, the indexer's keys use ``index_scale``.
    ``groups`` and ``view``: see ``MhaSpec``; ``page_first`` and ``page_first_direct`` without an indexer too.
    """

    layers: LayerCount
    first_layer: Index = 0
    tokens: Size
    page_size: Count
    kv_lora_rank: Count
    qk_rope_head_dim: Count
    index_head_dim: Count | None = None
    index_layers: LayerNumbers | LayerCount | None = None
    index_scale: bool = False
    index_dtype: str | None = None
    dtype: str
    packed: Literal["ds_mla", "ascend"] | None = None
    joined: bool = False
    view: Literal["paged", "nz"] | HostView = "paged"
    replicas: Count = 1
    draft: DraftSpec | None = None
    optional_components: ComponentNames = ("draft",)
    k_scale: Scale | LayerScales | None = None
    groups: LayerGroups = ()
    packing: Packing | None = None


class HybridSwaSpec(_Spec, frozen=True, kw_only=True, tag="hybrid_swa"):
    """A pool of full and sliding-window attention: components ``main`` and ``swa``, each in its own page space.

    Layers keep the model's numbers; a pipeline stage may have layers of one kind only. ``window`` is the sliding window
    in tokens, if known, ``window_tokens`` the capacity of the window pages in tokens. The window layers' heads and
    scales default to those of the full layers; scales per layer have no default.
    """

    full_layers: LayerNumbers = ()
    window_layers: LayerNumbers = ()
    tokens: Size
    window_tokens: Size
    window: Count | None = None
    page_size: Count
    kv_heads: Count
    head_start: Index = 0
    total_heads: Count | None = None
    head_dim: Count
    v_head_dim: Count | None = None
    window_kv_heads: Count | None = None
    window_head_start: Index | None = None
    window_total_heads: Count | None = None
    window_head_dim: Count | None = None
    window_v_head_dim: Count | None = None
    window_replicas: Count | None = None
    dtype: str
    view: View = "paged"
    replicas: Count = 1
    draft: DraftSpec | None = None
    optional_components: ComponentNames = ("draft",)
    k_scale: Scales | None = None
    v_scale: Scales | None = None
    window_k_scale: Scales | None = None
    window_v_scale: Scales | None = None


class MambaSpec(_Spec, frozen=True, kw_only=True, tag="mamba"):
    """A pool of per-request state of Mamba or gated delta nets, with or without attention layers.

    Component ``mamba`` has one slot per request (``slots`` excludes the padding slot 0) with conv ``(conv_window,
    conv_channels)`` and ssm ``ssm_shape`` in each state layer; either may be omitted. ``ssm_shape`` begins with the
    heads held here, of ``state_total_heads`` (default: all) starting at ``state_head_start``; ``state_replicas`` is the
    number of ranks that hold the same states. ``conv_channels_first`` is the order ``(conv_channels, conv_window)``.
    ``conv_parts`` are the channels held here of each part that lies side by side in ``conv_channels`` (q, k and v) and
    is split over the ranks by itself, in proportion to the heads (without ssm: to the first part's channels, which the
    head fields then count). Ranks of unequal splits exchange conv only if both give it. The attention layers are
    component ``main``; ``tokens``, ``page_size``, ``kv_heads`` and ``head_dim`` apply to them. In the views
    ``page_first`` and ``page_first_direct``, see ``MhaSpec``, a slot holds all state layers, too.
    """

    state_layers: LayerNumbers = ()
    slots: Count
    conv_window: Count | None = None
    conv_channels: Count | None = None
    conv_channels_first: bool = False
    conv_parts: Parts | None = None
    conv_dtype: str | None = None
    ssm_shape: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4)] | None = None
    ssm_dtype: str = "float32"
    state_head_start: Index = 0
    state_total_heads: Count | None = None
    state_replicas: Count = 1
    attention_layers: LayerNumbers = ()
    tokens: Size | None = None
    page_size: Count | None = None
    kv_heads: Count | None = None
    head_start: Index = 0
    total_heads: Count | None = None
    head_dim: Count | None = None
    v_head_dim: Count | None = None
    dtype: str
    view: View | HostView = "paged"
    replicas: Count = 1
    draft: DraftSpec | None = None
    optional_components: ComponentNames = ("draft",)
    k_scale: Scales | None = None
    v_scale: Scales | None = None


PoolSpec = MhaSpec | MlaSpec | HybridSwaSpec | MambaSpec
"""Every kind of spec, tagged by ``kind``."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One array of a pool: (component, role, layer).

    ``base`` is a byte offset in the region in a manifest, an address in an engine's pointer list; ``layer`` is the
    model's number (from 0 in components like draft). Pages are contiguous, ``page_bytes`` apart. Fields with a None
    default may be omitted if an engine does not know them; fields that two paired entries both give must agree, except
    ``replicas``: the number of ranks that hold the same content (MLA under tensor parallelism, replicated KV heads).
    ``scales`` are those of 8-bit keys or values, one or ``heads`` of them; none is not equal to some.
    """

    component: ComponentName
    role: RoleName
    layer: Index
    base: Offset
    pages: Count
    page_bytes: Size
    page_tokens: Count | None = None
    head_start: Index | None = None
    heads: Count | None = None
    total_heads: Count | None = None
    dtype: str | None = None
    shape: tuple[Size, ...] | None = None
    format: str | None = None
    replicas: Count | None = None
    scales: Annotated[tuple[Scale, ...], Meta(min_length=1, max_length=MAX_SCALES)] | None = None

    @property
    def name(self) -> str:
        """Return ``component/role/layer``, the entry's name in errors and logs."""
        return f"{self.component}/{self.role}/{self.layer}"


ComponentKind = Literal["paged", "window", "state"]
"""``paged``: one page for each ``page_tokens`` tokens of a request from its first on; ``window``: the same for its last
tokens only; ``state``: independent of tokens, a few slots per request."""


class Component(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The common properties of a component's entries.

    ``space`` names the page space: components of one space each have a page under the same id, and ``pages`` pages
    (including the padding page); each space has its own allocator. ``window`` is the window in tokens, if known. A
    ``group`` uses other pages of its space than the space's first component, and so has its own page list; a component
    that is not a group uses the pages of the first one.
    """

    name: str
    space: str
    pages: int
    kind: ComponentKind = "paged"
    window: int | None = None
    group: bool = False


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's entries, the number of pages of its first space (including the padding page) and the layout digest."""

    pages: int
    region_bytes: int
    layout_digest: str
    entries: tuple[Entry, ...]
    optional_components: tuple[str, ...] = ("draft",)
    components: tuple[Component, ...] = ()
