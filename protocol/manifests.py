"""Pool specs, entries and manifests as they travel. What they mean is computed in ``kvferry.pools``."""

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
"""The model's own numbers of layers, ascending."""

LayerGroups = Annotated[tuple[LayerNumbers, ...], Meta(max_length=16)]
"""Numbers of layers, ascending; each layer of the pool in one group. A pipeline stage may have none of a group."""

ComponentNames = Annotated[tuple[ComponentName, ...], Meta(max_length=16)]
View = Literal["paged", "fia", "nz"]
Scale = Annotated[float, Meta(gt=0)]
MAX_SCALES = 4096
"""Of one entry."""

HeadScales = Annotated[tuple[Scale, ...], Meta(min_length=1, max_length=MAX_SCALES)]
LayerScales = Annotated[tuple[Scale, ...], Meta(min_length=1, max_length=4096)]
LayerHeadScales = Annotated[tuple[Scale | HeadScales, ...], Meta(min_length=1, max_length=4096)]
Scales = Scale | LayerHeadScales | Literal["page", "page_head"]
"""What 8-bit keys or values are to be multiplied with: one for all; one a layer; in each layer one a head held here;
``page``, ``page_head``: float32 arrays of their own, a number a page, or a page and head, which travel with the pages.
"""


class DraftSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The draft model's layers: component ``draft``, numbered from 0, on the pages of ``main``.

    What is left out is as in the model itself, but for the indexer, which a draft model has only where
    ``index_head_dim`` says so, and for scales a layer, which it must have of its own. Beside multi-head attention
    ``kv_lora_rank`` and its like make no sense; beside MLA the draft is MLA too, unless ``kv_heads`` is given.
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
    """What every spec is: told apart by ``kind``, without fields that nobody knows."""


class MhaSpec(_Spec, frozen=True, kw_only=True, tag="mha"):
    """A pool of multi-head (or grouped-query) attention: k and v of every layer, paged.

    ``tokens`` is the capacity in tokens without the padding page, a whole number of pages; ``kv_heads`` the heads held
    here, of ``total_heads`` (default: all) starting at ``head_start``; ``first_layer`` the model's number of the first
    layer; ``replicas`` how many ranks hold these very heads. ``view`` says how engines see the same bytes: ``paged``
    ``(pages, page_size, heads, dim)`` a layer, ``fia`` ``(pages * page_size, 1, heads, dim)``. ``nz`` is another order
    of the bytes, ``(pages, heads, dim / 16, page_size, 16)`` for elements of 2 bytes. ``k_scale`` and ``v_scale`` are
    those of a dtype of 8 bits.

    ``groups`` are the KV cache groups of an engine that gives each of them a block table of its own, with page ids of
    one allocator: components ``main``, ``group1``, ``group2`` and so on, all in the page space ``main``. A page is one
    group's at a time; the layers at one place of their groups share an array.
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
    view: View = "paged"
    replicas: Count = 1
    draft: DraftSpec | None = None
    optional_components: ComponentNames = ("draft",)
    k_scale: Scales | None = None
    v_scale: Scales | None = None
    groups: LayerGroups = ()


class MlaSpec(_Spec, frozen=True, kw_only=True, tag="mla"):
    """A pool of multi-head latent attention: the latent as k, the rope part as v, and the indexer's arrays.

    ``index_layers`` are the model's numbers of the layers that have an indexer, ascending, or how many of the first
    ones have; by default all do where ``index_head_dim`` is given. ``index_scale`` adds one float32 a token.
    ``index_dtype`` is ``dtype`` unless given. ``packed`` stores latent (float8), its scales and rope (bfloat16) of a
    token in one row of k, without v: ``ds_mla`` in this order, ``ascend`` with the scales last. ``joined`` stores
    latent and rope of a token, both in ``dtype``, in one row of k of ``kv_lora_rank + qk_rope_head_dim`` elements.
    ``replicas`` is the number of tensor-parallel ranks: each holds the same. ``k_scale`` is the latent's and the rope
    part's, one for all or one a layer; packed tokens have their own, the indexer's keys ``index_scale``. ``groups``: as
    ``MhaSpec`` has them.
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
    view: Literal["paged", "nz"] = "paged"
    replicas: Count = 1
    draft: DraftSpec | None = None
    optional_components: ComponentNames = ("draft",)
    k_scale: Scale | LayerScales | None = None
    groups: LayerGroups = ()


class HybridSwaSpec(_Spec, frozen=True, kw_only=True, tag="hybrid_swa"):
    """A pool of full and of sliding-window attention: components ``main`` and ``swa``, each with pages of its own.

    Layers keep the model's numbers; a pipeline stage may have layers of one kind only. ``window`` is the sliding window
    in tokens, ``window_tokens`` the capacity of its pages. The window layers' heads are as the full ones' where they
    are left out, and so are their scales, unless those are a layer's each.
    """

    full_layers: LayerNumbers = ()
    window_layers: LayerNumbers = ()
    tokens: Size
    window_tokens: Size
    window: Count
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
    """A pool of per-request state, as Mamba and gated delta nets have it, with attention layers or without.

    Component ``mamba``: a slot a request (``slots`` without the padding slot 0), conv ``(conv_window, conv_channels)``
    and ssm ``ssm_shape`` in each state layer; either may be left out. ``ssm_shape`` begins with the heads held here, of
    ``state_total_heads`` (default: all) starting at ``state_head_start``. The attention layers are component ``main``;
    ``tokens``, ``page_size``, ``kv_heads`` and ``head_dim`` are theirs.
    """

    state_layers: LayerNumbers = ()
    slots: Count
    conv_window: Count | None = None
    conv_channels: Count | None = None
    conv_dtype: str | None = None
    ssm_shape: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4)] | None = None
    ssm_dtype: str = "float32"
    state_head_start: Index = 0
    state_total_heads: Count | None = None
    attention_layers: LayerNumbers = ()
    tokens: Size | None = None
    page_size: Count | None = None
    kv_heads: Count | None = None
    head_start: Index = 0
    total_heads: Count | None = None
    head_dim: Count | None = None
    v_head_dim: Count | None = None
    dtype: str
    view: View = "paged"
    replicas: Count = 1
    draft: DraftSpec | None = None
    optional_components: ComponentNames = ("draft",)
    k_scale: Scales | None = None
    v_scale: Scales | None = None


PoolSpec = MhaSpec | MlaSpec | HybridSwaSpec | MambaSpec
"""Every kind of spec, told apart by ``kind``."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One array of a pool: (component, role, layer).

    ``base`` is in bytes, from the region's start in a manifest, an address in an engine's pointer list; ``layer`` is
    the model's own number (counted from 0 in a component of its own, as draft is). Pages are ``page_bytes`` apart and
    contiguous. The fields with a None default may be left out where an engine does not know them; what two paired
    entries both give must agree. ``replicas``, which need not, is how many ranks hold this very content: MLA under
    tensor parallelism, replicated KV heads. ``scales`` are those of 8-bit keys or values, one or ``heads``; a side that
    has none differs from one that has some.
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
        """Return ``component/role/layer``, as errors and logs name the entry."""
        return f"{self.component}/{self.role}/{self.layer}"


ComponentKind = Literal["paged", "window", "state"]
"""``paged``: one page for each ``page_tokens`` tokens of a request from its first on; ``window``: the same, but only
of its last tokens; ``state``: not by tokens, a few slots a request."""


class Component(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the entries of one component have in common.

    ``space`` names the page ids they use: components of one space have a page each under one id, and ``pages`` pages
    (the padding page included); each space is allocated from by itself. ``window`` is a window's tokens, where known.
    A ``group`` has other pages of its space than the space's first component, and so a list of its own; what is no
    group lies on that one's pages.
    """

    name: str
    space: str
    pages: int
    kind: ComponentKind = "paged"
    window: int | None = None
    group: bool = False


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's entries, the pages of its first space (the padding page included) and the layout digest."""

    pages: int
    region_bytes: int
    layout_digest: str
    entries: tuple[Entry, ...]
    optional_components: tuple[str, ...] = ("draft",)
    components: tuple[Component, ...] = ()
