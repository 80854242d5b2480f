"""What holds for the manifest of every kind of spec: places, sizes, components, the digest, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.planning.geometry import DTYPE_BYTES, PAGE_HEADS
from kvferry.pools.planning.manifest import component_of, space_sizes, spaces_of
from kvferry.pools.planning.pairing import pair_entries
from kvferry.protocol.errors import GeometryMismatchError, InvalidFieldError
from kvferry.protocol.manifests import DraftSpec, Entry, HybridSwaSpec, MambaSpec, Manifest, MhaSpec, MlaSpec, PoolSpec
from tests.kit.pool_specs import (
    JOINED,
    JOINED_MHA,
    MAMBA,
    MHA,
    MLA,
    PACKED,
    SWA,
    changed,
    mha_specs,
    mla_specs,
    page_first_specs,
    pool_specs,
)
from tests.kit.tables import with_tables
from tests.pools.layouts.docs_tables import DOCUMENT, TABLES

PAGE_FIRST = msgspec.structs.replace(MHA, view="page_first")
PAGE_FIRST_LATENT = msgspec.structs.replace(JOINED, index_head_dim=None, view="page_first")


@given(pool_specs())
def test_entries_lie_apart_hold_their_arrays_and_are_of_a_component(spec: PoolSpec) -> None:
    manifest = manifest_of(spec)
    end = 0
    for entry in manifest.entries:
        check_entry(entry, "entry")
        assert entry.dtype is not None
        assert entry.shape is not None
        assert math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] == entry.pages * entry.page_bytes
        component = component_of(manifest, entry.component)
        assert component is not None
        assert entry.pages == component.pages == spaces_of(manifest)[component.space]
        assert (entry.page_tokens is None) == (component.kind == "state" or entry.format == PAGE_HEADS)
        assert end <= entry.base < end + 8
        assert entry.base % DTYPE_BYTES[entry.dtype] == 0
        end = entry.base + entry.pages * entry.page_bytes
    assert end == manifest.region_bytes
    assert manifest.pages == manifest.entries[0].pages
    assert sum(one.total_bytes for one in space_sizes(manifest)) == sum(
        entry.pages * entry.page_bytes for entry in manifest.entries
    )
    for one in space_sizes(manifest):
        assert one.page_tokens is None or one.token_bytes == math.ceil(one.page_bytes / one.page_tokens)
    assert len(pair_entries(manifest.entries, manifest.entries).pairs) == len(manifest.entries)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest
    assert msgspec.json.decode(msgspec.json.encode(spec), type=PoolSpec) == spec


@given(pool_specs())
def test_the_digest_leaves_out_sizes_replicas_windows_and_what_is_optional(spec: PoolSpec) -> None:
    fields: dict[str, Any] = {"optional_components": ()}
    if isinstance(spec, MambaSpec):
        fields["slots"] = spec.slots + 1
    else:
        fields |= {"tokens": spec.tokens + 3 * spec.page_size, "replicas": spec.replicas + 1}
    if isinstance(spec, HybridSwaSpec):
        fields |= {"window": 1, "window_tokens": spec.window_tokens + spec.page_size}
    other = changed(spec, **fields)
    assert other.layout_digest == manifest_of(spec).layout_digest
    assert (other.optional_components, manifest_of(spec).optional_components) == ((), ("draft",))


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (MHA, {"kv_heads": 1, "page_size": 256}),  # the same bytes a page
        (MHA, {"head_start": 2}),
        (MHA, {"head_dim": 4, "v_head_dim": 8}),  # the same bytes in all
        (MHA, {"dtype": "bfloat16"}),  # the same bytes a page
        (MHA, {"view": "hnd"}),
        (msgspec.structs.replace(MHA, head_dim=32, v_head_dim=64), {"view": "nz"}),  # the same bytes a page
        (MHA, {"joined": True}),
        (msgspec.structs.replace(JOINED_MHA, view="hnd"), {"packing": "amx"}),
        (msgspec.structs.replace(MLA, joined=True, packed=None, dtype="float16"), {"packing": "amx"}),
        (JOINED_MHA, {"head_dim": 4, "v_head_dim": 8}),  # the same bytes a row
        (MLA, {"index_layers": 3}),
        (MLA, {"index_scale": True}),
        (MLA, {"index_dtype": "float16"}),
        (MLA, {"view": "nz"}),
        (MLA, {"joined": True}),
        (MLA, {"draft": DraftSpec(layers=1)}),
        (PAGE_FIRST, {"view": "paged"}),
        (PAGE_FIRST, {"layers": 6, "head_dim": 4, "v_head_dim": 2}),  # the same bytes a page
        (PAGE_FIRST, {"layers": 1, "first_layer": 2, "kv_heads": 6}),  # the same entries with the same bytes
        (PAGE_FIRST_LATENT, {"view": "page_first_direct"}),
        (PAGE_FIRST_LATENT, {"kv_lora_rank": 448, "qk_rope_head_dim": 128}),
        (PAGE_FIRST_LATENT, {"joined": False, "kv_lora_rank": 576}),
    ],
    ids=str,
)
def test_the_digest_covers_the_geometry(spec: PoolSpec, fields: dict[str, Any]) -> None:
    assert changed(spec, **fields).layout_digest != manifest_of(spec).layout_digest
    assert changed(MHA, view="fia").layout_digest == manifest_of(MHA).layout_digest


INT8_MHA = msgspec.structs.replace(MHA, layers=2, first_layer=3, total_heads=4, v_head_dim=None, dtype="int8")
INT8_MLA = msgspec.structs.replace(MLA, layers=2, first_layer=0, index_head_dim=None, dtype="int8")
STATES_ONLY = msgspec.structs.replace(
    MAMBA, attention_layers=(), tokens=None, page_size=None, kv_heads=None, head_dim=None
)
"""Of attention it says no more than it must; what it says all the same has to make sense."""


PAGE_FIRST_STATES = msgspec.structs.replace(STATES_ONLY, view="page_first")
PAGE_FIRST_SSM = msgspec.structs.replace(PAGE_FIRST_STATES, conv_window=None, conv_channels=None)


RANK: dict[str, Any] = {"kv_heads": 2, "head_start": 2, "total_heads": 4, "replicas": 2}
"""Of four ranks one that holds the second half of four heads, as another one does."""

WHOLE: dict[str, Any] = {"kv_heads": 4, "head_start": 0, "total_heads": None, "replicas": 1}


def of_another_split(
    full: dict[str, Any], own: dict[str, Any], missing: str
) -> list[tuple[PoolSpec, str, dict[str, Any]]]:
    """Return windows and a draft that do not say which heads of another split than the full layers' they have."""
    window = {f"window_{name}": value for name, value in own.items()}
    draft = DraftSpec(layers=1, **own)
    return [(SWA, f"window_{missing}", {**full, **window}), (SWA, f"draft.{missing}", {**full, "draft": draft})]


@pytest.mark.parametrize(
    ("spec", "field", "fields"),
    [
        (MHA, "tokens", {"tokens": 127}),
        (MHA, "tokens", {"tokens": 257}),
        (MHA, "tokens", {"tokens": 1 << 61}),
        (MHA, "total_heads", {"head_start": 3, "total_heads": 4}),
        (MHA, "dtype", {"dtype": "float7"}),
        (MHA, "first_layer", {"first_layer": (1 << 31) - 1}),
        (MHA, "head_start", {"head_start": (1 << 31) - 1}),
        (JOINED_MHA, "k_scale", {"dtype": "int8", "k_scale": 0.5}),
        (JOINED_MHA, "v_scale", {"dtype": "int8", "v_scale": "page_head"}),
        (JOINED_MHA, "packing", {"packing": "amx"}),
        (MHA, "packing", {"view": "hnd", "packing": "amx"}),
        (MLA, "packing", {"packing": "amx"}),
        (MLA, "index_layers", {"index_layers": 5}),
        (MLA, "index_layers[1]", {"index_layers": (10, 14)}),
        (MLA, "index_layers[0]", {"index_layers": (9, 10)}),
        *((MLA, "index_layers[1]", {"index_layers": layers}) for layers in ((11, 11), (12, 11))),
        (MLA, "index_layers", {"index_head_dim": None, "index_layers": 1}),
        (MLA, "index_scale", {"index_head_dim": None, "index_scale": True}),
        (MLA, "index_dtype", {"index_head_dim": None, "index_dtype": "int8"}),
        (MHA, "index_dtype", {"index_dtype": "int8"}),
        (MHA, "index_layers[1]", {"index_head_dim": 16, "index_layers": (0, 3)}),
        (PACKED, "dtype", {"dtype": "bfloat16"}),
        (PACKED, "view", {"view": "nz"}),
        (PACKED, "kv_lora_rank", {"kv_lora_rank": 500}),
        (PACKED, "joined", {"joined": True}),
        (JOINED, "view", {"view": "nz", "kv_lora_rank": 500}),
        (MLA, "view", {"view": "nz", "qk_rope_head_dim": 40}),
        (MLA, "dtype", {"index_dtype": "float5"}),
        (MLA, "tokens", {"tokens": 100}),
        (MLA, "draft.head_dim", {"draft": DraftSpec(layers=1, kv_heads=2)}),
        (MLA, "draft.head_start", {"draft": DraftSpec(layers=1, kv_heads=2, head_dim=2, total_heads=8)}),
        (MLA, "draft.total_heads", {"draft": DraftSpec(layers=1, kv_heads=2, head_dim=2), "replicas": 2}),
        (MLA, "draft.kv_lora_rank", {"draft": DraftSpec(layers=1, kv_heads=2, head_dim=2, kv_lora_rank=8)}),
        (SWA, "full_layers", {"full_layers": (), "window_layers": ()}),
        (SWA, "window_layers", {"full_layers": (5, 6)}),
        (SWA, "full_layers[1]", {"full_layers": (11, 5)}),
        (SWA, "window_tokens", {"window_tokens": 199}),
        (SWA, "window_tokens", {"window_tokens": 127, "window": 1}),
        (SWA, "total_heads", {"total_heads": 3}),
        (SWA, "window_total_heads", {"window_kv_heads": 4, "window_total_heads": 3}),
        (SWA, "draft.total_heads", {"draft": DraftSpec(layers=1, head_start=2, kv_heads=2, total_heads=3)}),
        *of_another_split(RANK, {"kv_heads": 1}, "total_heads"),
        *of_another_split({**WHOLE, "replicas": 2}, {"kv_heads": 2}, "total_heads"),
        *of_another_split(RANK, {"kv_heads": 1, "total_heads": 2}, "head_start"),
        *of_another_split(WHOLE, {"total_heads": 8}, "head_start"),
        (MAMBA, "state_layers", {"state_layers": (), "attention_layers": ()}),
        (MAMBA, "attention_layers", {"attention_layers": (2,)}),
        (MAMBA, "state_layers[2]", {"state_layers": (0, 2, 1)}),
        (MAMBA, "conv_channels", {"conv_channels": None}),
        (MAMBA, "conv_window", {"conv_window": None}),
        (MAMBA, "ssm_shape", {"conv_window": None, "conv_channels": None, "ssm_shape": None}),
        (MAMBA, "state_total_heads", {"state_head_start": 8, "state_total_heads": 11}),
        (MAMBA, "state_head_start", {"state_head_start": 2, "state_total_heads": 8}),
        (MAMBA, "state_head_start", {"state_head_start": 0, "state_total_heads": 6}),
        (MAMBA, "conv_parts", {"conv_parts": (16, 16, 16)}),
        (MAMBA, "conv_parts", {"conv_parts": (32, 30, 2)}),
        (MAMBA, "tokens", {"tokens": None}),
        (MAMBA, "head_dim", {"head_dim": None}),
        (MAMBA, "slots", {"slots": (1 << 31) - 1}),
        (PAGE_FIRST, "draft", {"draft": DraftSpec(layers=1)}),
        (PAGE_FIRST, "groups", {"groups": ((0, 1), (2,))}),
        (PAGE_FIRST, "k_scale", {"k_scale": (0.5, 0.5, 0.5), "dtype": "int8"}),
        (PAGE_FIRST, "v_scale", {"v_scale": "page_head", "dtype": "int8"}),
        (PAGE_FIRST, "index_head_dim", {"index_head_dim": 16}),
        (PAGE_FIRST_LATENT, "index_head_dim", {"index_head_dim": 128}),
        (PAGE_FIRST_STATES, "draft", {"draft": DraftSpec(layers=1)}),
        (PACKED, "view", {"view": "page_first", "index_head_dim": None, "index_scale": False}),
        (MHA, "k_scale", {"dtype": "bfloat16", "k_scale": 1.0}),
        (MHA, "v_scale", {"dtype": "bfloat16", "v_scale": "page"}),
        (INT8_MHA, "k_scale", {"k_scale": (1.0,)}),
        (INT8_MHA, "v_scale[1]", {"v_scale": (1.0, (1.0, 2.0, 3.0))}),
        (INT8_MHA, "k_scale", {"k_scale": 0.0}),
        (INT8_MHA, "k_scale[1]", {"k_scale": (1.0, -1.0)}),
        (INT8_MHA, "k_scale", {"k_scale": math.nan}),
        (INT8_MHA, "k_scale", {"k_scale": 1e39}),
        (INT8_MHA, "k_scale", {"k_scale": 1e-50}),
        (INT8_MHA, "draft.k_scale", {"k_scale": (1.0, 2.0), "draft": DraftSpec(layers=1)}),
        (INT8_MHA, "draft.k_scale", {"k_scale": 1.0, "draft": DraftSpec(layers=1, k_scale=(1.0, 2.0))}),
        (INT8_MHA, "head_start", {"head_start": 1, "k_scale": "page"}),
        (INT8_MLA, "draft.k_scale", {"k_scale": (1.0, 2.0), "draft": DraftSpec(layers=1)}),
        (INT8_MLA, "draft.v_scale", {"draft": DraftSpec(layers=1, v_scale=1.0)}),
        (INT8_MLA, "draft.k_scale", {"draft": DraftSpec(layers=1, k_scale="page")}),
        (PACKED, "k_scale", {"k_scale": 1.0}),
        (SWA, "window_k_scale", {"dtype": "int8", "k_scale": (1.0, 1.0)}),
        (STATES_ONLY, "tokens", {"tokens": 65, "page_size": 16}),
        (STATES_ONLY, "v_scale", {"v_scale": "page"}),
        (STATES_ONLY, "total_heads", {"head_start": 3, "kv_heads": 2, "total_heads": 4}),
        (STATES_ONLY, "view", {"view": "nz", "head_dim": 40}),
        (STATES_ONLY, "dtype", {"dtype": "float31", "conv_dtype": "float16"}),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(spec: PoolSpec, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        changed(spec, **fields)
    assert refused.value.field == field


# -- multi-head attention in all layers


@given(mha_specs())
def test_k_of_all_layers_comes_before_v_and_page_bytes_are_the_formula(spec: MhaSpec) -> None:
    layers = range(spec.first_layer, spec.first_layer + spec.layers)
    expected = [(role, layer) for role in (("k",) if spec.joined else ("k", "v")) for layer in layers]
    found = [(one.role, one.layer) for one in manifest_of(spec).entries if one.component == "main"]
    assert found[: len(expected)] == expected
    widths = {"k": spec.head_dim, "v": spec.v_head_dim or spec.head_dim}
    for entry in manifest_of(spec).entries:
        if entry.component == "main" and entry.role in widths:
            dim = sum(widths.values()) if spec.joined else widths[entry.role]
            assert entry.page_bytes == spec.page_size * spec.kv_heads * dim * DTYPE_BYTES[spec.dtype]


# -- pages that hold all layers


@given(page_first_specs())
def test_a_page_that_holds_all_layers_is_where_sglangs_host_pool_has_it(spec: MhaSpec | MlaSpec) -> None:
    manifest = manifest_of(spec)
    if isinstance(spec, MhaSpec):
        widths = {"k": spec.head_dim, "v": spec.v_head_dim or spec.head_dim}
    elif spec.joined:
        widths = {"k": spec.kv_lora_rank + spec.qk_rope_head_dim}
    else:
        widths = {"k": spec.kv_lora_rank, "v": spec.qk_rope_head_dim}
    assert [one.role for one in manifest.entries] == list(widths)
    heads, pages = spec.kv_heads if isinstance(spec, MhaSpec) else 1, spec.tokens // spec.page_size + 1
    for entry, width in zip(manifest.entries, widths.values(), strict=True):
        # What SGLang's host pool of this layout has in place of a role: each byte is its place.
        tokens_first = (pages * spec.page_size, spec.layers)
        outer = tokens_first if spec.view == "page_first" else (pages, spec.layers, spec.page_size)
        shape = (*outer, heads, width * DTYPE_BYTES[spec.dtype])
        array = np.random.default_rng(width).integers(0, 256, shape, np.uint8)
        assert entry.shape is not None
        inner = (spec.page_size, spec.layers) if spec.view == "page_first" else (spec.layers, spec.page_size)
        assert entry.shape[:3] == (entry.pages, *inner)
        page = array.reshape((*entry.shape[:-1], -1))[1]
        flat = array.reshape(-1)
        assert np.array_equal(flat[entry.page_bytes : 2 * entry.page_bytes], page.reshape(-1))
        tokens = spec.page_size if spec.view == "page_first" else 1
        assert np.array_equal(page.reshape(-1), array[tokens : 2 * tokens].reshape(-1))
        assert (entry.layer, entry.page_tokens) == (spec.first_layer + spec.layers - 1, spec.page_size)


def test_a_slot_that_holds_all_layers_is_where_sglangs_host_pool_has_it() -> None:
    ours, paged = manifest_of(PAGE_FIRST_STATES), manifest_of(STATES_ONLY)
    count = len(STATES_ONLY.state_layers)
    assert [one.role for one in ours.entries] == ["conv", "ssm"]
    for entry, of_a_layer in zip(ours.entries, paged.entries[count - 1 :: count], strict=True):
        assert of_a_layer.shape is not None
        assert entry.shape == (of_a_layer.shape[0], count, *of_a_layer.shape[1:])
        assert (entry.layer, entry.page_bytes) == (of_a_layer.layer, count * of_a_layer.page_bytes)


@pytest.mark.parametrize("spec", [PAGE_FIRST, PAGE_FIRST_LATENT, PAGE_FIRST_SSM])
def test_a_page_that_holds_all_layers_pairs_with_no_other_order_and_is_not_cut_by_heads(
    spec: MhaSpec | MlaSpec | MambaSpec,
) -> None:
    ours = manifest_of(spec)
    others = [changed(spec, view=view) for view in ("paged", "page_first_direct")]
    if isinstance(spec, MhaSpec):
        others.append(changed(spec, kv_heads=1, total_heads=2))
    if isinstance(spec, MambaSpec):
        others.append(changed(spec, ssm_shape=(2, 8, 16), state_total_heads=4))
    for theirs in others:
        last = [one for one in theirs.entries if one.layer == ours.entries[0].layer]
        with pytest.raises(GeometryMismatchError) as refused:
            pair_entries(ours.entries, last)
        assert refused.value.field == "destination.entries[0].format"


# -- latent attention, and other kinds beside full attention


def role_of(manifest: Manifest, role: str, component: str = "main") -> list[Entry]:
    return [one for one in manifest.entries if (one.component, one.role) == (component, role)]


LATENT_ROPE: dict[str, Any] = {"kv_lora_rank": 448, "qk_rope_head_dim": 128}
ODD_DRAFT = DraftSpec(layers=1, kv_lora_rank=384, qk_rope_head_dim=130)


@pytest.mark.parametrize(
    ("spec", "fields", "role", "page_bytes", "shape", "form"),
    [
        (MLA, {}, "k", 131072, (9, 128, 1, 512), "ND"),
        (MLA, {}, "v", 16384, (9, 128, 1, 64), "ND"),
        (MLA, {}, "index_k", 32768, (9, 128, 1, 128), "ND"),
        (MLA, {"index_scale": True}, "index_scale", 512, (9, 128, 1), "ND"),
        (MHA, {"index_head_dim": 16, "index_dtype": "float32"}, "index_k", 128 * 16 * 4, (3, 128, 1, 16), "ND"),
        (MLA, {"view": "nz"}, "k", 131072, (9, 1, 32, 128, 16), "FIA_NZ"),
        (MLA, {"view": "nz", "index_scale": True}, "index_scale", 512, (9, 128, 1), "ND"),
        (MLA, {"draft": DraftSpec(layers=1, kv_heads=2, head_dim=64, v_head_dim=32, total_heads=2)}, "draft/v",
         128 * 2 * 32 * 2, (9, 128, 2, 32), "ND"),
        (PACKED, {}, "k", 656 * 128, (9, 128, 1, 656), "FP8_ASCEND_MLA"),
        (PACKED, {"packed": "ds_mla"}, "k", 656 * 128, (9, 128, 1, 656), "FP8_DS_MLA"),
        (PACKED, {"draft": ODD_DRAFT}, "draft/k", 656 * 128, (9, 128, 1, 656), "FP8_ASCEND_MLA_384_130"),
        (JOINED, {}, "k", 576 * 128 * 2, (9, 128, 1, 576), "LATENT_ROPE_512_64"),
        (JOINED, {"view": "nz"}, "k", 576 * 128 * 2, (9, 1, 36, 128, 16), "FIA_NZ_LATENT_ROPE_512_64"),
        (JOINED, {"draft": DraftSpec(layers=1, **LATENT_ROPE)}, "draft/k", 576 * 128 * 2, (9, 128, 1, 576),
         "LATENT_ROPE_448_128"),
        (MAMBA, {}, "mamba/conv", 3 * 64 * 2, (7, 3, 64), "ND"),
        (MAMBA, {"conv_channels_first": True}, "mamba/conv", 3 * 64 * 2, (7, 64, 3), "CHANNELS_FIRST"),
        (MAMBA, {}, "mamba/ssm", 4 * 8 * 16 * 4, (7, 4, 8, 16), "ND"),
        (SWA, {"window_kv_heads": 8, "window_head_dim": 32}, "swa/k", 128 * 8 * 32 * 2, (3, 128, 8, 32), "ND"),
    ],
)  # fmt: skip
def test_arrays_of_each_form(
    spec: PoolSpec, fields: dict[str, Any], role: str, page_bytes: int, shape: tuple[int, ...], form: str
) -> None:
    *component, name = role.split("/")
    entry = role_of(changed(spec, **fields), name, *component)[0]
    assert (entry.page_bytes, entry.shape, entry.format) == (page_bytes, shape, form)


@pytest.mark.parametrize(
    ("spec", "other"),
    [
        *((JOINED, other) for other in ({"joined": False, "kv_lora_rank": 576}, LATENT_ROPE, {"view": "nz"})),
        (JOINED, {"joined": False}),
        (JOINED, {"dtype": "float16"}),
        (PACKED, {"packed": "ds_mla"}),
        (PACKED, {"kv_lora_rank": 384, "qk_rope_head_dim": 130}),
        (MAMBA, {"conv_window": 6, "conv_channels": 32}),
        (MAMBA, {"conv_parts": (64,)}),
        (MAMBA, {"conv_channels_first": True}),
        (MAMBA, {"ssm_shape": (4, 16, 8)}),
    ],
    ids=str,
)
def test_as_many_bytes_in_another_form_pair_with_none(spec: PoolSpec, other: dict[str, Any]) -> None:
    """Each is a layout of its own, also for a draft."""
    draft = None if spec is PACKED else DraftSpec(layers=1)
    ours, theirs = changed(spec, draft=draft), changed(spec, draft=draft, **other)
    assert ours.layout_digest != theirs.layout_digest
    if spec is not MAMBA:
        for source, destination in itertools.permutations((ours.entries, theirs.entries)):
            with pytest.raises(GeometryMismatchError):
                pair_entries(source, destination)


@given(mla_specs())
def test_latents_have_an_entry_a_role_and_layer_and_a_packed_token_has_the_formulas_bytes(spec: MlaSpec) -> None:
    """Packed or joined, the rope is in k's row, and has no entry beside it."""
    layers = list(range(spec.first_layer, spec.first_layer + spec.layers))
    indexed = spec.index_layers if isinstance(spec.index_layers, tuple) else layers[: spec.index_layers]
    latent, rope, size = spec.kv_lora_rank, spec.qk_rope_head_dim, DTYPE_BYTES[spec.dtype]
    packed = latent + latent // 128 * 4 + 2 * rope if spec.packed else (latent + rope) * size
    token_bytes = {"k": packed} if spec.packed or spec.joined else {"k": latent * size, "v": rope * size}
    expected = [(role, layer, spec.page_size * token_bytes[role]) for role in token_bytes for layer in layers]
    if spec.index_head_dim is not None:
        width = spec.index_head_dim * DTYPE_BYTES[spec.index_dtype or spec.dtype]
        widths = {"index_k": width, "index_scale": 4} if spec.index_scale else {"index_k": width}
        expected += [(role, layer, spec.page_size * width) for role, width in widths.items() for layer in indexed]
    main = [one for one in manifest_of(spec).entries if one.component == "main"]
    assert [(one.role, one.layer, one.page_bytes) for one in main] == expected


@pytest.mark.parametrize("spec", [MLA, PACKED, JOINED])
def test_the_draft_is_as_the_model_and_numbered_from_0(spec: MlaSpec) -> None:
    manifest = changed(spec, draft=DraftSpec(layers=2, index_head_dim=128), replicas=4)
    roles = {one.role for one in manifest.entries}
    for role in roles:
        own, draft = role_of(manifest, role), role_of(manifest, role, "draft")
        assert [one.layer for one in draft] == [0, 1]
        assert draft[0] == msgspec.structs.replace(own[0], component="draft", layer=0, base=draft[0].base)
        assert (own[0].head_start, own[0].heads, own[0].total_heads, own[0].replicas) == (0, 1, 1, 4)
    assert not role_of(changed(spec, draft=DraftSpec(layers=1)), "index_k", "draft")


@pytest.mark.parametrize(
    ("given_", "layers"), [(None, [10, 11, 12, 13]), (2, [10, 11]), ((11, 13), [11, 13]), ((), [])]
)
def test_the_indexer_may_have_fewer_layers(given_: Any, layers: list[int]) -> None:  # noqa: ANN401  every form
    manifest = changed(MLA, index_layers=given_, index_scale=True)
    for role in ("index_k", "index_scale"):
        assert [one.layer for one in role_of(manifest, role)] == layers
    assert len(role_of(manifest, "k")) == 4


def test_ranks_with_some_heads_each_have_all_of_the_index() -> None:
    manifest = changed(MHA, head_start=2, total_heads=8, replicas=2, index_head_dim=16, index_layers=(0, 2))
    keys = role_of(manifest, "index_k")
    assert [one.layer for one in keys] == [0, 2]
    assert {(one.head_start, one.heads, one.total_heads, one.replicas) for one in keys} == {(0, 1, 1, 8)}


@pytest.mark.parametrize(
    ("spec", "fields", "components"),
    [
        (SWA, {}, "main:9 swa:3"),
        (SWA, {"draft": DraftSpec(layers=1)}, "main:9 draft:9 swa:3"),
        (SWA, {"full_layers": (), "draft": DraftSpec(layers=1)}, "main:9 draft:9 swa:3"),
        (SWA, {"full_layers": ()}, "swa:3"),
        (SWA, {"window_layers": ()}, "main:9"),
        (MAMBA, {"draft": DraftSpec(layers=1)}, "main:3 draft:3 mamba:7"),
        (MAMBA, {"state_layers": ()}, "main:3"),
        (STATES_ONLY, {"head_dim": 32, "dtype": "int8", "k_scale": 2.0, "view": "nz", "tokens": None}, "mamba:7"),
    ],
    ids=str,
)
def test_each_kind_has_pages_of_its_own(spec: PoolSpec, fields: dict[str, Any], components: str) -> None:
    manifest = changed(spec, **fields)
    assert " ".join(f"{one.name}:{one.pages}" for one in manifest.components) == components
    assert manifest.pages == manifest.components[0].pages
    for one in manifest.components:
        window = SWA.window if one.name == "swa" else None
        assert (one.kind, one.window) == ({"swa": "window", "mamba": "state"}.get(one.name, "paged"), window)
    if isinstance(spec, HybridSwaSpec) and not fields:
        assert tuple(one.layer for one in role_of(manifest, "v")) == SWA.full_layers
        assert tuple(one.layer for one in role_of(manifest, "v", "swa")) == SWA.window_layers


# -- scales


def scales_of(manifest: Manifest) -> dict[str, tuple[float, ...] | None]:
    return {entry.name: entry.scales for entry in manifest.entries}


@pytest.mark.parametrize(
    ("said", "third", "fourth"),
    [
        (0.5, (0.5,), (0.5,)),
        ((0.5, 0.25), (0.5,), (0.25,)),
        (((0.5, 0.25), (1.0, 2.0)), (0.5, 0.25), (1.0, 2.0)),
        ((0.5, (1.0, 2.0)), (0.5,), (1.0, 2.0)),
        (None, None, None),
    ],
    ids=["one for all", "one a layer", "one a head", "mixed", "none"],
)
def test_fixed_scales_stand_on_their_entries(said: Any, third: Any, fourth: Any) -> None:  # noqa: ANN401
    found = scales_of(changed(INT8_MHA, v_scale=said))
    assert found == {"main/k/3": None, "main/k/4": None, "main/v/3": third, "main/v/4": fourth}


@pytest.mark.parametrize("scale", ["0", '"layer"', "[[]]", "{}"])
def test_what_makes_no_sense_on_the_wire_is_refused(scale: str) -> None:
    text = msgspec.json.encode(INT8_MHA).decode().removesuffix("}") + f', "k_scale": {scale}}}'
    with pytest.raises(msgspec.ValidationError, match="k_scale"):
        msgspec.json.decode(text, type=PoolSpec)


def test_parts_take_the_models_scales_unless_they_have_their_own() -> None:
    swa = msgspec.structs.replace(SWA, full_layers=(0,), window_layers=(1, 2), dtype="int8")
    draft = DraftSpec(layers=1, v_scale=4.0)
    found = scales_of(changed(INT8_MHA, k_scale=0.5, v_scale=(1.0, 2.0), draft=draft))
    assert (found["draft/k/0"], found["draft/v/0"]) == ((0.5,), (4.0,))
    found = scales_of(changed(INT8_MHA, k_scale=0.5, draft=DraftSpec(layers=1, dtype="bfloat16")))
    assert (found["draft/k/0"], found["draft/v/0"]) == (None, None)
    found = scales_of(changed(swa, k_scale=0.5, v_scale=(1.0,), window_v_scale=(3.0, 4.0)))
    assert (found["swa/k/1"], found["swa/v/1"], found["swa/v/2"]) == ((0.5,), (3.0,), (4.0,))
    assert scales_of(changed(MAMBA, dtype="int8", k_scale=0.5))["main/k/3"] == (0.5,)
    assert scales_of(changed(INT8_MHA, k_scale=0.1))["main/k/3"] == (0.10000000149011612,), "what it is as float32"
    latent = msgspec.structs.replace(
        INT8_MLA, k_scale=(0.5, 0.25), index_head_dim=4, draft=DraftSpec(layers=1, k_scale=2.0)
    )
    found = scales_of(manifest_of(latent))
    assert (found["main/k/1"], found["main/v/1"], found["main/index_k/1"]) == ((0.25,), (0.25,), None)
    assert found["draft/v/0"] == (2.0,)
    assert scales_of(changed(swa, window_layers=(), k_scale=(1.0,)))["main/k/0"] == (1.0,)


def test_a_scale_a_page_and_head_is_an_array_of_its_own() -> None:
    manifest = changed(INT8_MHA, k_scale="page_head", view="fia")
    assert [entry.name for entry in manifest.entries][4:] == ["main/k_scale/3", "main/k_scale/4"]
    first = role_of(manifest, "k_scale")[0]
    assert (first.shape, first.dtype, first.page_bytes, first.format) == ((3, 2), "float32", 8, PAGE_HEADS)
    assert (first.head_start, first.heads, first.total_heads, first.page_tokens) == (0, 2, 4, None)
    assert scales_of(manifest)["main/k/3"] is None
    manifest = changed(INT8_MHA, head_start=2, v_scale="page", replicas=2)
    first = role_of(manifest, "v_scale")[0]
    assert (first.shape, first.page_bytes) == ((3, 1), 4), "a scale a page is its rank's own"
    assert (first.head_start, first.heads, first.total_heads, first.replicas) == (1, 1, 2, 2)


# -- heads


@pytest.mark.parametrize(
    ("full", "own", "held"),
    [
        (RANK, {}, (2, 2, 4, 2)),
        (RANK, {"replicas": 3}, (2, 2, 4, 3)),
        (RANK, {"head_start": 0}, (0, 2, 4, 2)),
        (RANK, {"total_heads": 8, "head_start": 6}, (6, 2, 8, 1)),
        (RANK, {"kv_heads": 1, "total_heads": 4, "head_start": 3}, (3, 1, 4, 1)),
        (RANK, {"kv_heads": 1, "total_heads": 2, "head_start": 1}, (1, 1, 2, 2)),
        (RANK, {"kv_heads": 1, "total_heads": 1, "replicas": 8}, (0, 1, 1, 8)),
        (WHOLE, {"kv_heads": 2}, (0, 2, 2, 1)),
        (WHOLE, {"kv_heads": 2, "total_heads": 4, "head_start": 2}, (2, 2, 4, 1)),
    ],
    ids=str,
)
def test_heads_of_windows_and_drafts_are_as_the_full_ones_where_they_are_left_out(
    full: dict[str, Any], own: dict[str, Any], held: tuple[int, ...]
) -> None:
    window = {f"window_{name}": value for name, value in own.items()}
    for entry in changed(SWA, **full, **window, draft=DraftSpec(layers=1, **own)).entries:
        if entry.component != "main":
            assert (entry.head_start, entry.heads, entry.total_heads, entry.replicas or 1) == held


def test_ranks_of_window_layers_only_are_told_apart() -> None:
    of_ranks = [
        changed(SWA, full_layers=(), kv_heads=2, total_heads=4, head_start=start, window_replicas=2) for start in (0, 2)
    ]
    assert len({one.layout_digest for one in of_ranks}) == 2


def rank_of(ranks: int, rank: int, total: int = 8) -> Manifest:
    heads = total // ranks
    return changed(
        MAMBA,
        ssm_shape=(heads, 8, 16),
        conv_channels=32 * heads,
        state_head_start=rank * heads,
        state_total_heads=total,
    )


def test_ranks_of_one_split_pair_with_themselves_only() -> None:
    state = [one for one in rank_of(2, 1).entries if one.component == "mamba"]
    assert len(pair_entries(state, state).pairs) == len(state)
    other = [one for one in rank_of(2, 0).entries if one.component == "mamba"]
    assert pair_entries(other, state).pairs == ()


@pytest.mark.parametrize(("source", "destination"), [((1, 0), (2, 0)), ((2, 0), (1, 0)), ((4, 1), (2, 0))])
def test_another_split_is_refused(source: tuple[int, int], destination: tuple[int, int]) -> None:
    """Which channels are of which part, side by side, is not said: no slice of them is known to be another rank's."""
    with pytest.raises(GeometryMismatchError, match="mamba/conv/0"):
        pair_entries(
            [one for one in rank_of(*source).entries if one.component == "mamba"],
            [one for one in rank_of(*destination).entries if one.component == "mamba"],
        )


WITH_PARTS = {"conv_parts": (16, 16, 32)}
CONV = changed(MAMBA, **WITH_PARTS).entries[2]


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "ssm"},
        {"page_tokens": 3},
        {"heads": None},
        {"shape": None},
        {"shape": (7, 192)},
        {"format": "CONV_4_4_4"},
        {"format": "CHANNELS_FIRST_4_4_8"},
    ],
    ids=str,
)
def test_parts_that_are_not_the_channels_of_a_convolution_are_refused(fields: dict[str, Any]) -> None:
    check_entry(CONV, "entries[2]")
    with pytest.raises(InvalidFieldError) as refused:
        check_entry(msgspec.structs.replace(CONV, **fields), "entries[2]")
    assert refused.value.field == "entries[2].format"


@pytest.mark.parametrize(
    ("fields", "field", "what"),
    [
        ({"conv_parts": (24, 8)}, "format", "format is CONV_4_4_8 at the source, CONV_12_4 at the destination"),
        ({"conv_parts": (8, 8, 24), "conv_channels": 40}, "format", "format is CONV_4_4_8 at the source, CONV_4_4_12"),
        ({"conv_parts": None}, "format", "give conv_parts on both sides"),
        ({"conv_window": 4}, "shape", "a head is .3,. at the source"),
        ({"conv_channels_first": True}, "format", "format is CONV_4_4_8 at the source"),
        ({"ssm_shape": (2, 16, 8)}, "shape", "a head is .8, 16. at the source, .16, 8. at the destination"),
    ],
    ids=str,
)
def test_states_of_another_split_that_differ_are_refused(fields: dict[str, Any], field: str, what: str) -> None:
    half = {"ssm_shape": (2, 8, 16), "conv_channels": 32, "conv_parts": (8, 8, 16), "state_total_heads": 4}
    assert pair_entries(changed(MAMBA, **WITH_PARTS).entries, changed(MAMBA, **half).entries).uncovered == ()
    with pytest.raises(GeometryMismatchError, match=what) as refused:
        pair_entries(changed(MAMBA, **WITH_PARTS).entries, changed(MAMBA, **{**half, **fields}).entries)
    assert refused.value.field.endswith(f"].{field}")


def test_states_of_equal_splits_have_the_same_parts() -> None:
    with pytest.raises(GeometryMismatchError, match="format is CONV_4_4_8 at the source, CONV_8_4_4"):
        pair_entries(changed(MAMBA, **WITH_PARTS).entries, changed(MAMBA, conv_parts=(32, 16, 16)).entries)


def test_the_documents_tables_are_current() -> None:
    text = DOCUMENT.read_text()
    assert with_tables(text, TABLES) == text, "python -m tests.pools.layouts.docs_tables"
