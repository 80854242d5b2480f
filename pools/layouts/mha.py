"""Multi-head attention, in all layers alike or over a sliding window in some.

Device arrays are k ``(layers, pages, page_size, heads, head_dim)`` and v ``(layers, pages, page_size, heads,
v_head_dim)``; an entry is one layer of one of them. The FIA view of a layer is ``(pages * page_size, 1, heads, dim)``:
the same bytes, but one row is one token. Source: SGLang's Ascend pools (``ASCEND_USE_FIA``). In a host cache a page
may hold all layers: ``(pages, page_size, layers, heads, dim)`` or ``(pages, layers, page_size, heads, dim)``, an entry
then is all of k or all of v. Source: SGLang's HiCache layouts ``page_first`` and ``page_first_direct``.

With sliding windows (``HybridSwaSpec``), the component ``main`` holds the full-attention layers, with one page for each
``page_size`` tokens of a request; ``swa`` holds the window layers, in a page space of its own, with pages for the last
tokens only. The engine maps full pages to window pages. Source: SGLang's ``SWAKVPool``.
"""

from __future__ import annotations

import msgspec

from kvferry.pools.layouts.parts import (
    Paged,
    attention_entries,
    check_apart,
    check_ascending,
    check_view,
    heads_beside,
    index_entries,
    lay_out_groups,
    layers_from,
    main_components,
    main_part,
    mha_draft_entries,
)
from kvferry.pools.planning.geometry import RankHeads, page_count
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.planning.scales import KeyValueScales, inherited
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import Component, Entry, HybridSwaSpec, Manifest, MhaSpec

SWA = "swa"


def manifest_of(spec: MhaSpec) -> Manifest:
    """Return the manifest: k of all layers, then v of all layers, an indexer's keys, then the draft's.

    Raises:
        InvalidFieldError: the layers, heads, dtype, view, groups or size are invalid.
    """
    check_view(spec)
    layers = layers_from(spec.first_layer, spec.layers)
    part = main_part(spec, layers, spec.tokens, spec.page_size, spec.kv_heads)
    return lay_out_groups(
        spec,
        part,
        [*attention_entries(part, spec.head_dim, spec.v_head_dim), *_index_entries(spec, part)],
        mha_draft_entries(spec.draft, part, spec.head_dim, spec.v_head_dim),
    )


def _index_entries(spec: MhaSpec, part: Paged) -> list[Entry]:
    """Return the keys of an indexer, of which each rank that has some heads has all."""
    heads = part.heads
    alike = RankHeads(0, 1, 1, heads.total // heads.count * heads.replicas)
    return index_entries(spec, msgspec.structs.replace(part, heads=alike, scales=KeyValueScales(), joined=False))


def hybrid_manifest_of(spec: HybridSwaSpec) -> Manifest:
    """Return the manifest: k and v of the full layers, the draft's, then k and v of the window layers.

    A stage without full layers has no ``main``, unless it has a draft; one without window layers has no ``swa``.

    Raises:
        InvalidFieldError: the layers, heads, window, dtype or sizes are invalid.
    """
    _check_layers(spec)
    full = main_part(spec, spec.full_layers, spec.tokens, spec.page_size, spec.kv_heads)
    window = _window(spec, full)
    components = main_components(full.pages, spec.draft) if spec.full_layers or spec.draft else []
    if spec.window_layers:
        components.append(Component(name=SWA, space=SWA, pages=window.pages, kind="window", window=spec.window))
    return lay_out(
        [
            *attention_entries(full, spec.head_dim, spec.v_head_dim),
            *mha_draft_entries(spec.draft, full, spec.head_dim, spec.v_head_dim),
            *_window_entries(spec, window),
        ],
        components,
        spec.optional_components,
    )


def _check_layers(spec: HybridSwaSpec) -> None:
    check_ascending(spec.full_layers, "full_layers")
    check_ascending(spec.window_layers, "window_layers")
    check_apart(spec.full_layers, spec.window_layers, "window_layers")
    if not spec.full_layers and not spec.window_layers:
        raise InvalidFieldError("neither full nor window layers given", field="full_layers")
    if spec.window is not None and spec.window_tokens < spec.window:
        raise InvalidFieldError(
            f"{spec.window_tokens} tokens cannot hold a window of {spec.window}", field="window_tokens"
        )


def _window(spec: HybridSwaSpec, full: Paged) -> Paged:
    return msgspec.structs.replace(
        full,
        component=SWA,
        layers=spec.window_layers,
        pages=page_count(spec.window_tokens, spec.page_size, "window_tokens"),
        heads=heads_beside(
            full.heads,
            spec.window_head_start,
            spec.window_kv_heads,
            spec.window_total_heads,
            spec.window_replicas,
            prefix="window_",
        ),
        scales=_window_scales(spec),
    )


def _window_scales(spec: HybridSwaSpec) -> KeyValueScales:
    if not spec.window_layers:
        return KeyValueScales()
    return KeyValueScales(
        inherited(spec.window_k_scale, spec.k_scale, "window_k_scale"),
        inherited(spec.window_v_scale, spec.v_scale, "window_v_scale"),
        "window_",
    )


def _window_entries(spec: HybridSwaSpec, window: Paged) -> list[Entry]:
    if spec.window_head_dim is None:
        v_head_dim = spec.window_v_head_dim or spec.v_head_dim
        return attention_entries(window, spec.head_dim, v_head_dim)
    return attention_entries(window, spec.window_head_dim, spec.window_v_head_dim)
