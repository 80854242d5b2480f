"""Multi-head attention: k and v of every layer, paged or in the FIA view of the same bytes.

Device arrays are k ``(layers, pages, page_size, heads, head_dim)`` and v ``(layers, pages, page_size, heads,
v_head_dim)``; an entry is one layer of one of them. The FIA view of a layer is ``(pages * page_size, 1, heads, dim)``:
the same bytes, but one row is one token. Source: SGLang's Ascend pools (``ASCEND_USE_FIA``).
"""

from __future__ import annotations

import msgspec

from kvferry.pools.geometry import dtype_bytes, page_bytes_of, page_count
from kvferry.pools.manifest import lay_out
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import Entry, Manifest, MhaSpec

COMPONENT = "main"
FORMAT = "ND"
MAX_NUMBER = (1 << 31) - 1
"""Layers and heads are numbered below this, so that whoever receives the manifest can read it."""


class _Heads(msgspec.Struct, frozen=True):
    """Which of the model's KV heads a pool holds."""

    start: int
    count: int
    total: int


def manifest_of(spec: MhaSpec) -> Manifest:
    """Return the manifest: k of all layers, then v of all layers.

    Raises:
        InvalidFieldError: the layers, the heads, the dtype or the size make no sense.
    """
    pages = page_count(spec.tokens, spec.page_size)
    if spec.first_layer + spec.layers > MAX_NUMBER:
        raise InvalidFieldError(f"layers {spec.first_layer}..; at most {MAX_NUMBER - 1}", field="first_layer")
    heads = _heads_of(spec)
    v_head_dim = spec.head_dim if spec.v_head_dim is None else spec.v_head_dim
    entries = [
        _entry(spec, role, layer, dim, pages, heads)
        for role, dim in (("k", spec.head_dim), ("v", v_head_dim))
        for layer in range(spec.first_layer, spec.first_layer + spec.layers)
    ]
    return lay_out(entries)


def _heads_of(spec: MhaSpec) -> _Heads:
    total = spec.head_start + spec.kv_heads if spec.total_heads is None else spec.total_heads
    if spec.head_start + spec.kv_heads > total:
        raise InvalidFieldError(
            f"heads {spec.head_start}..{spec.head_start + spec.kv_heads - 1} of {total}", field="total_heads"
        )
    if total > MAX_NUMBER:
        raise InvalidFieldError(f"{total} heads; at most {MAX_NUMBER}", field="head_start")
    return _Heads(spec.head_start, spec.kv_heads, total)


def _entry(spec: MhaSpec, role: str, layer: int, dim: int, pages: int, heads: _Heads) -> Entry:
    shape = (
        (pages, spec.page_size, heads.count, dim)
        if spec.view == "paged"
        else (pages * spec.page_size, 1, heads.count, dim)
    )
    formula = spec.page_size * heads.count * dim * dtype_bytes(spec.dtype)
    return Entry(
        component=COMPONENT,
        role=role,
        layer=layer,
        base=0,
        pages=pages,
        page_bytes=page_bytes_of(shape, spec.dtype, pages, formula, f"{COMPONENT}/{role}/{layer}"),
        page_tokens=spec.page_size,
        head_start=heads.start,
        heads=heads.count,
        total_heads=heads.total,
        dtype=spec.dtype,
        shape=shape,
        format=FORMAT,
    )
