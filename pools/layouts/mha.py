"""Multi-head attention: k and v of every layer, paged or in the FIA view of the same bytes.

Device arrays are k ``(layers, pages, page_size, heads, head_dim)`` and v ``(layers, pages, page_size, heads,
v_head_dim)``; an entry is one layer of one of them. The FIA view of a layer is ``(pages * page_size, 1, heads, dim)``:
the same bytes, but one row is one token. Source: SGLang's Ascend pools (``ASCEND_USE_FIA``).
"""

from __future__ import annotations

from kvferry.pools.layouts.draft import draft_components, mha_draft_entries
from kvferry.pools.layouts.groups import lay_out_groups
from kvferry.pools.layouts.parts import Paged, attention_entries, heads_of, layers_from
from kvferry.pools.planning.geometry import page_count
from kvferry.pools.planning.scales import KeyValueScales
from kvferry.protocol.ids import MAIN
from kvferry.protocol.manifests import Manifest, MhaSpec


def manifest_of(spec: MhaSpec) -> Manifest:
    """Return the manifest: k of all layers, then v of all layers, then the draft's.

    Raises:
        InvalidFieldError: the layers, heads, dtype, groups or size are invalid.
    """
    pages = page_count(spec.tokens, spec.page_size)
    part = Paged(
        component=MAIN,
        layers=layers_from(spec.first_layer, spec.layers),
        pages=pages,
        page_size=spec.page_size,
        heads=heads_of(spec.head_start, spec.kv_heads, spec.total_heads, spec.replicas),
        dtype=spec.dtype,
        view=spec.view,
        scales=KeyValueScales(spec.k_scale, spec.v_scale),
    )
    draft_entries = mha_draft_entries(spec.draft, part, spec.head_dim, spec.v_head_dim)
    return lay_out_groups(
        spec.groups,
        part,
        attention_entries(part, spec.head_dim, spec.v_head_dim),
        (draft_entries, draft_components(spec.draft, pages)),
        spec.optional_components,
    )
