"""Multi-head latent attention: the latent as k, the rope part as v, and the indexer's arrays on the same pages.

Device arrays are k ``(layers, pages, page_size, 1, kv_lora_rank)``, v ``(layers, pages, page_size, 1,
qk_rope_head_dim)``, index_k ``(index layers, pages, page_size, 1, index_head_dim)`` and index_scale ``(index layers,
pages, page_size, 1)`` float32. All tensor-parallel ranks hold the same content. Source: SGLang's
``NPUMLATokenToKVPool``.

Packed: a token is one row of bytes: the latent in float8, a float32 scale per 128 elements of it, and the rope part in
bfloat16. FlashMLA's kernels (``fp8_ds_mla``) put the scales in the middle, Ascend's at the end: two formats.

Joined: a token is one row of k with ``kv_lora_rank + qk_rope_head_dim`` elements of one dtype, the rope part last, as
in SGLang's ``MLATokenToKVPool`` and vLLM's MLA caches. The format names the two widths, so that it pairs neither with
another split nor with separate latent and rope.
"""

from __future__ import annotations

import itertools
from typing import cast

import msgspec

from kvferry.pools.layouts.parts import (
    DRAFT,
    SCALE_DTYPE,
    Paged,
    check_absent,
    check_view,
    index_entries,
    lay_out_groups,
    layers_from,
    mha_draft_entries,
    packed_as,
    paged_entries,
    paged_entry,
)
from kvferry.pools.planning.geometry import RankHeads, dtype_bytes, page_count
from kvferry.pools.planning.scales import fixed_scales, inherited
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.manifests import DraftSpec, Entry, LayerScales, Manifest, MlaSpec, Scale

PACKED_FORMATS = {"ds_mla": "FP8_DS_MLA", "ascend": "FP8_ASCEND_MLA"}
PACKED_SPLIT = (512, 64)
"""Latent and rope widths of the format names above; other splits append theirs, as the sum alone is ambiguous."""

JOINED_FORMATS = {"paged": "LATENT_ROPE", "nz": "FIA_NZ_LATENT_ROPE"}
"""Format names by view; the two widths are appended."""

PACKED_DTYPE = "float8_e4m3fn"
HEAD_FIELDS = ("head_start", "total_heads", "head_dim", "v_head_dim", "v_scale")
SCALE_GROUP = 128
"""Elements of the latent that share one scale."""


def manifest_of(spec: MlaSpec) -> Manifest:
    """Return the manifest: k, v, index_k and index_scale, each of all its layers, then the draft's.

    Raises:
        InvalidFieldError: the layers, dtypes, size, view, groups, or the packed or joined form are invalid.
    """
    check_view(spec)
    if spec.packing is not None and not spec.joined:
        raise InvalidFieldError("a packing is of joined rows: omit it", field="packing")
    part = Paged(
        component=MAIN,
        layers=layers_from(spec.first_layer, spec.layers),
        pages=page_count(spec.tokens, spec.page_size),
        page_size=spec.page_size,
        heads=RankHeads(0, 1, 1, spec.replicas),
        dtype=spec.dtype,
        view=spec.view,
    )
    return lay_out_groups(spec, part, [*_attention(spec, part), *index_entries(spec, part)], _draft_entries(spec, part))


def packed_token_bytes(kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Return the bytes of a packed token: 656 for widths 512 and 64.

    Raises:
        InvalidFieldError: ``kv_lora_rank`` is not a multiple of the scale group.
    """
    groups, rest = divmod(kv_lora_rank, SCALE_GROUP)
    if rest:
        raise InvalidFieldError(f"{kv_lora_rank} is not a multiple of {SCALE_GROUP}", field="kv_lora_rank")
    return (
        kv_lora_rank * dtype_bytes(PACKED_DTYPE)
        + groups * dtype_bytes(SCALE_DTYPE)
        + qk_rope_head_dim * dtype_bytes("bfloat16")
    )


def is_one_row(form: str) -> bool:
    """Return whether entries of this format hold a token's latent and rope in one row, packed or joined, of any split.

    False for fractals (``FIA_NZ_…``), which have no rows.
    """
    return form.startswith((*PACKED_FORMATS.values(), JOINED_FORMATS["paged"]))


def _draft_entries(spec: MlaSpec, main: Paged) -> list[Entry]:
    """Return the draft's entries: latent, in the model's form, or k and v if it has ``kv_heads``."""
    draft = spec.draft
    if draft is None:
        return []
    if draft.kv_heads is not None:
        if draft.head_dim is None:
            raise InvalidFieldError("a draft with kv_heads needs a head_dim", field="draft.head_dim")
        if draft.total_heads is None and spec.replicas > 1:  # the latent has no KV heads to derive the total from
            raise InvalidFieldError(
                f"total_heads cannot be derived from {draft.kv_heads} heads on one of {spec.replicas} ranks: give it",
                field="draft.total_heads",
            )
        return mha_draft_entries(draft, main, draft.head_dim, draft.v_head_dim)
    check_absent(draft, HEAD_FIELDS, "latent attention")
    own = msgspec.structs.replace(
        spec,
        kv_lora_rank=draft.kv_lora_rank or spec.kv_lora_rank,
        qk_rope_head_dim=draft.qk_rope_head_dim or spec.qk_rope_head_dim,
        index_head_dim=draft.index_head_dim,
        index_layers=None,
        index_scale=spec.index_scale and draft.index_head_dim is not None,
        index_dtype=spec.index_dtype if draft.index_head_dim is not None and draft.dtype is None else None,
        dtype=draft.dtype or spec.dtype,
        packed=spec.packed if draft.dtype is None else None,
        k_scale=_draft_scale(spec, draft),
    )
    part = msgspec.structs.replace(
        main,
        component=DRAFT,
        layers=range(draft.layers),
        heads=RankHeads(0, 1, 1, draft.replicas or spec.replicas),
        dtype=own.dtype,
    )
    return [*_attention(own, part), *index_entries(own, part)]


def _draft_scale(spec: MlaSpec, draft: DraftSpec) -> Scale | LayerScales | None:
    """Return the scales of a latent draft; they default to the model's only if the dtype is the same."""
    main = None if draft.dtype not in {None, spec.dtype} else spec.k_scale
    scales = inherited(draft.k_scale, main, "draft.k_scale")
    if isinstance(scales, str) or (isinstance(scales, tuple) and any(isinstance(one, tuple) for one in scales)):
        raise InvalidFieldError("latent attention takes one scale, or one per layer", field="draft.k_scale")
    return cast("Scale | LayerScales | None", scales)


def _attention(spec: MlaSpec, part: Paged) -> list[Entry]:
    if spec.packed is None:
        entries = _joined(spec, part) if spec.joined else _separate(spec, part)
        field = f"{'draft.' if part.component == DRAFT else ''}k_scale"
        fixed = itertools.cycle(fixed_scales(spec.k_scale, len(part.layers), 1, part.dtype, field))
        return [msgspec.structs.replace(entry, scales=its) for entry, its in zip(entries, fixed, strict=False)]
    if spec.joined:
        raise InvalidFieldError("packed tokens are one row already: omit joined", field="joined")
    if spec.k_scale is not None:
        raise InvalidFieldError("packed tokens contain their scales: omit k_scale", field="k_scale")
    if spec.dtype != PACKED_DTYPE:
        raise InvalidFieldError(f"packed tokens are {PACKED_DTYPE}, not {spec.dtype}", field="dtype")
    if spec.view != "paged":
        raise InvalidFieldError("packed tokens need view paged", field="view")
    size = packed_token_bytes(spec.kv_lora_rank, spec.qk_rope_head_dim)
    shape = (part.pages, part.page_size, 1, size)
    split = (spec.kv_lora_rank, spec.qk_rope_head_dim)
    form = PACKED_FORMATS[spec.packed] + ("" if split == PACKED_SPLIT else "_{}_{}".format(*split))
    return [paged_entry(part, "k", layer, shape, size, form=form) for layer in part.layers]


def _separate(spec: MlaSpec, part: Paged) -> list[Entry]:
    return [*paged_entries(part, "k", spec.kv_lora_rank), *paged_entries(part, "v", spec.qk_rope_head_dim)]


def _joined(spec: MlaSpec, part: Paged) -> list[Entry]:
    rows = paged_entries(part, "k", spec.kv_lora_rank + spec.qk_rope_head_dim)
    split = f"{spec.kv_lora_rank}_{spec.qk_rope_head_dim}"
    form = f"{JOINED_FORMATS[spec.view]}_{split}" if spec.view in JOINED_FORMATS else f"{rows[0].format}_{split}"
    return [msgspec.structs.replace(entry, format=packed_as(form, spec.packing)) for entry in rows]
