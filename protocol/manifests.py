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


class MhaSpec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag="mha",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """A pool of multi-head (or grouped-query) attention: k and v of every layer, paged.

    ``tokens`` is the capacity in tokens without the padding page; ``kv_heads`` the heads held here, of
    ``total_heads`` (default: all) starting at ``head_start``; ``first_layer`` the model's number of the first layer.
    ``view`` says how engines see the same bytes: ``paged`` ``(pages, page_size, heads, dim)`` a layer, ``fia``
    ``(pages * page_size, 1, heads, dim)``.
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
    view: Literal["paged", "fia"] = "paged"


PoolSpec = MhaSpec
"""Every kind of spec, told apart by ``kind``. A union once there are several."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One array of a pool: (component, role, layer).

    ``base`` is in bytes, from the region's start in a manifest, an address in an engine's pointer list; ``layer`` is
    the model's own number (counted from 0 in a component of its own, as draft is). Pages are ``page_bytes`` apart and
    contiguous. The fields with a None default may be left out where an engine does not know them; what two paired
    entries both give must agree.
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

    @property
    def name(self) -> str:
        """Return ``component/role/layer``, as errors and logs name the entry."""
        return f"{self.component}/{self.role}/{self.layer}"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's entries, the pages each of them has (the padding page included) and the layout digest."""

    pages: int
    region_bytes: int
    layout_digest: str
    entries: tuple[Entry, ...]
    optional_components: tuple[str, ...] = ("draft",)
