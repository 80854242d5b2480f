"""A draft model's layers: a separate component, with layers numbered from 0, on the pages of ``main``."""

from __future__ import annotations

import msgspec

from kvferry.pools.layouts.parts import DRAFT, Heads, Paged, attention_entries, heads_beside
from kvferry.pools.planning.scales import KeyValueScales, inherited
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.manifests import Component, DraftSpec, Entry

LATENT_FIELDS = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")


def draft_components(draft: DraftSpec | None, pages: int) -> list[Component]:
    """Return the component ``draft``, or an empty list without a draft."""
    return [] if draft is None else [Component(name=DRAFT, space=MAIN, pages=pages)]


def mha_draft_entries(draft: DraftSpec | None, main: Paged, head_dim: int, v_head_dim: int | None) -> list[Entry]:
    """Return the k and v entries of a draft in a multi-head pool; omitted fields default to those of ``main``.

    Raises:
        InvalidFieldError: the heads or the dtype are invalid, or a field of latent attention is given.
    """
    if draft is None:
        return []
    check_absent(draft, LATENT_FIELDS, "multi-head attention")
    heads = heads_beside(
        main.heads, draft.head_start, draft.kv_heads, draft.total_heads, draft.replicas, prefix="draft."
    )
    part = _part(draft, main, heads)
    own_width = draft.head_dim is not None
    return attention_entries(
        part,
        head_dim if draft.head_dim is None else draft.head_dim,
        v_head_dim if draft.v_head_dim is None and not own_width else draft.v_head_dim,
    )


def check_absent(draft: DraftSpec, fields: tuple[str, ...], main_attention: str) -> None:
    """Check that the draft gives none of these fields, which do not apply beside ``main_attention``.

    Raises:
        InvalidFieldError: names the first field that it gives.
    """
    for field in fields:
        if getattr(draft, field) is not None:
            raise InvalidFieldError(f"a draft beside {main_attention} has no {field}", field=f"draft.{field}")


def _part(draft: DraftSpec, main: Paged, heads: Heads) -> Paged:
    return msgspec.structs.replace(
        main,
        component=DRAFT,
        layers=range(draft.layers),
        heads=heads,
        dtype=draft.dtype or main.dtype,
        scales=_scales(draft, main),
    )


def _scales(draft: DraftSpec, main: Paged) -> KeyValueScales:
    """Return the draft's scales; they default to the model's only if the dtype is the same."""
    if draft.dtype not in {None, main.dtype}:
        return KeyValueScales(draft.k_scale, draft.v_scale, "draft.")
    return KeyValueScales(
        inherited(draft.k_scale, main.scales.k, "draft.k_scale"),
        inherited(draft.v_scale, main.scales.v, "draft.v_scale"),
        "draft.",
    )
