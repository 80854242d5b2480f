"""What holds for the manifest of every kind of spec: places, sizes, components, the digest, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.planning.geometry import DTYPE_BYTES, PAGE_HEADS
from kvferry.pools.planning.manifest import component_of, space_sizes, spaces_of
from kvferry.pools.planning.pairing import pair_entries
from kvferry.protocol.errors import GeometryMismatchError, InvalidFieldError
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, Manifest, MhaSpec, MlaSpec, PoolSpec
from tests.kit.pool_specs import (
    JOINED,
    JOINED_MHA,
    MAMBA,
    MHA,
    MLA,
    PACKED,
    SWA,
    changed,
    hybrid_swa_specs,
    mamba_specs,
    mha_specs,
    mla_specs,
    page_first_specs,
    pool_specs,
)

PAGE_FIRST = msgspec.structs.replace(MHA, view="page_first")
PAGE_FIRST_LATENT = msgspec.structs.replace(JOINED, index_head_dim=None, view="page_first")


@given(pool_specs())
def test_entries_lie_apart_within_the_region_where_a_tensor_may_begin(spec: PoolSpec) -> None:
    manifest = manifest_of(spec)
    end = 0
    for entry in manifest.entries:
        assert entry.dtype is not None
        assert end <= entry.base < end + 8
        assert entry.base % DTYPE_BYTES[entry.dtype] == 0
        end = entry.base + entry.pages * entry.page_bytes
    assert end == manifest.region_bytes


@given(pool_specs())
def test_page_bytes_are_the_arrays(spec: PoolSpec) -> None:
    for entry in manifest_of(spec).entries:
        check_entry(entry, "entry")
        assert entry.shape is not None
        assert entry.dtype is not None
        assert math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] == entry.pages * entry.page_bytes


@given(pool_specs())
def test_every_entry_has_a_component_whose_pages_it_has(spec: PoolSpec) -> None:
    manifest = manifest_of(spec)
    for entry in manifest.entries:
        component = component_of(manifest, entry.component)
        assert component is not None
        assert entry.pages == component.pages == spaces_of(manifest)[component.space]
        assert (entry.page_tokens is None) == (component.kind == "state" or entry.format == PAGE_HEADS)
    assert {one.name for one in manifest.components} >= {one.component for one in manifest.entries}
    assert manifest.pages == manifest.entries[0].pages


@given(pool_specs())
def test_sizes_add_up(spec: PoolSpec) -> None:
    manifest = manifest_of(spec)
    sizes = space_sizes(manifest)
    used = sum(entry.pages * entry.page_bytes for entry in manifest.entries)
    assert sum(one.total_bytes for one in sizes) == used
    for one in sizes:
        if one.page_tokens is not None:
            assert one.token_bytes == math.ceil(one.page_bytes / one.page_tokens)


@given(pool_specs())
def test_a_manifest_and_its_spec_can_be_read_by_whoever_receives_them(spec: PoolSpec) -> None:
    manifest = manifest_of(spec)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest
    assert msgspec.json.decode(msgspec.json.encode(spec), type=PoolSpec) == spec


@given(pool_specs())
def test_a_layout_pairs_with_itself(spec: PoolSpec) -> None:
    entries = manifest_of(spec).entries
    assert len(pair_entries(entries, entries).pairs) == len(entries)


@given(mha_specs() | mla_specs() | hybrid_swa_specs())
def test_the_digest_leaves_out_sizes_and_replicas(spec: MhaSpec | MlaSpec | HybridSwaSpec) -> None:
    other = msgspec.structs.replace(spec, tokens=spec.tokens + 3 * spec.page_size, replicas=spec.replicas + 1)
    assert manifest_of(other).layout_digest == manifest_of(spec).layout_digest


@given(mamba_specs())
def test_the_digest_leaves_out_slots(spec: MambaSpec) -> None:
    other = msgspec.structs.replace(spec, slots=spec.slots + 1)
    assert manifest_of(other).layout_digest == manifest_of(spec).layout_digest


@given(hybrid_swa_specs())
def test_the_digest_leaves_out_the_window_and_its_capacity(spec: HybridSwaSpec) -> None:
    other = msgspec.structs.replace(spec, window=1, window_tokens=spec.window_tokens + spec.page_size)
    assert manifest_of(other).layout_digest == manifest_of(spec).layout_digest


@given(mha_specs())
def test_the_fia_view_is_the_same_layout_and_fia_nz_is_not(spec: MhaSpec) -> None:
    wide = msgspec.structs.replace(spec, head_dim=32, v_head_dim=64, draft=None, packing=None)
    paged, fia, nz = [manifest_of(msgspec.structs.replace(wide, view=view)) for view in ("paged", "fia", "nz")]
    assert paged.layout_digest == fia.layout_digest != nz.layout_digest
    assert [one.page_bytes for one in paged.entries] == [one.page_bytes for one in nz.entries]
    assert len(pair_entries(paged.entries, fia.entries).pairs) == len(paged.entries)
    with pytest.raises(GeometryMismatchError) as refused:
        pair_entries(nz.entries, paged.entries)
    assert refused.value.field == "destination.entries[0].format"


@given(pool_specs())
def test_the_optional_components_are_the_specs(spec: PoolSpec) -> None:
    assert manifest_of(spec).optional_components == ("draft",)
    other = msgspec.structs.replace(spec, optional_components=())
    assert manifest_of(other).optional_components == ()
    assert manifest_of(other).layout_digest == manifest_of(spec).layout_digest


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (MHA, {"layers": 4}),
        (MHA, {"first_layer": 1}),
        (MHA, {"page_size": 64}),
        (MHA, {"kv_heads": 1}),
        (MHA, {"kv_heads": 1, "page_size": 256}),  # the same bytes a page
        (MHA, {"head_start": 2}),
        (MHA, {"total_heads": 4}),
        (MHA, {"head_dim": 16}),
        (MHA, {"v_head_dim": 8}),
        (MHA, {"v_head_dim": None}),
        (MHA, {"head_dim": 4, "v_head_dim": 8}),  # the same bytes in all
        (MHA, {"dtype": "bfloat16"}),  # the same bytes a page
        (MHA, {"dtype": "float32"}),
        (MHA, {"view": "hnd"}),
        (MHA, {"joined": True}),
        (JOINED_MHA, {"view": "hnd"}),
        (msgspec.structs.replace(JOINED_MHA, view="hnd"), {"packing": "amx"}),
        (msgspec.structs.replace(MLA, joined=True, packed=None, dtype="float16"), {"packing": "amx"}),
        (JOINED_MHA, {"head_dim": 4, "v_head_dim": 8}),  # the same bytes a row
        (MLA, {"layers": 3}),
        (MLA, {"kv_lora_rank": 256}),
        (MLA, {"qk_rope_head_dim": 32}),
        (MLA, {"index_head_dim": None}),
        (MLA, {"index_layers": 3}),
        (MLA, {"index_scale": True}),
        (MLA, {"index_dtype": "float16"}),
        (MLA, {"dtype": "float16"}),
        (MLA, {"view": "nz"}),
        (MLA, {"joined": True}),
        (MLA, {"page_size": 64}),
        (MLA, {"draft": DraftSpec(layers=1)}),
        (PAGE_FIRST, {"view": "paged"}),
        (PAGE_FIRST, {"view": "page_first_direct"}),
        (PAGE_FIRST, {"layers": 6, "head_dim": 4, "v_head_dim": 2}),  # the same bytes a page
        (PAGE_FIRST, {"layers": 1, "first_layer": 2, "kv_heads": 6}),  # the same entries with the same bytes
        (PAGE_FIRST_LATENT, {"view": "paged"}),
        (PAGE_FIRST_LATENT, {"view": "page_first_direct"}),
        (PAGE_FIRST_LATENT, {"kv_lora_rank": 448, "qk_rope_head_dim": 128}),
        (PAGE_FIRST_LATENT, {"joined": False, "kv_lora_rank": 576}),
    ],
    ids=str,
)
def test_the_digest_covers_the_geometry(spec: PoolSpec, fields: dict[str, Any]) -> None:
    assert changed(spec, **fields).layout_digest != manifest_of(spec).layout_digest


STATES_ONLY = msgspec.structs.replace(
    MAMBA, attention_layers=(), tokens=None, page_size=None, kv_heads=None, head_dim=None
)
"""Of attention it says no more than it must; what it says all the same has to make sense."""


@pytest.mark.parametrize(
    ("spec", "field", "fields"),
    [
        (MHA, "tokens", {"tokens": 127}),
        (MHA, "tokens", {"tokens": 257}),
        (MHA, "tokens", {"tokens": 1 << 61}),
        (MHA, "tokens", {"tokens": 1 << 40, "page_size": 1 << 20, "head_dim": 1 << 30}),
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
        (MLA, "index_layers[1]", {"index_layers": (11, 11)}),
        (MLA, "index_layers[0]", {"index_layers": (9, 10)}),
        (MLA, "index_layers", {"index_head_dim": None, "index_layers": 1}),
        (MLA, "index_scale", {"index_head_dim": None, "index_scale": True}),
        (MLA, "index_dtype", {"index_head_dim": None, "index_dtype": "int8"}),
        (PACKED, "dtype", {"dtype": "bfloat16"}),
        (PACKED, "view", {"view": "nz"}),
        (PACKED, "kv_lora_rank", {"kv_lora_rank": 500}),
        (PACKED, "joined", {"joined": True}),
        (JOINED, "view", {"view": "nz", "kv_lora_rank": 500}),
        (MLA, "view", {"view": "nz", "qk_rope_head_dim": 40}),
        (MLA, "dtype", {"index_dtype": "float5"}),
        (MLA, "first_layer", {"first_layer": (1 << 31) - 1}),
        (MLA, "tokens", {"tokens": 100}),
        (MLA, "tokens", {"tokens": 1025}),
        (MLA, "draft.head_dim", {"draft": DraftSpec(layers=1, kv_heads=2)}),
        (MLA, "draft.head_start", {"draft": DraftSpec(layers=1, kv_heads=2, head_dim=2, total_heads=8)}),
        (MLA, "draft.total_heads", {"draft": DraftSpec(layers=1, kv_heads=2, head_dim=2), "replicas": 2}),
        (MLA, "draft.total_heads", {"draft": DraftSpec(layers=1, kv_heads=1, head_dim=2), "replicas": 2}),
        (MLA, "draft.head_dim", {"draft": DraftSpec(layers=1, head_dim=2)}),
        (MLA, "draft.kv_lora_rank", {"draft": DraftSpec(layers=1, kv_heads=2, head_dim=2, kv_lora_rank=8)}),
        (SWA, "full_layers", {"full_layers": (), "window_layers": ()}),
        (SWA, "window_layers", {"full_layers": (5, 6)}),
        (SWA, "full_layers[1]", {"full_layers": (11, 5)}),
        (SWA, "window_layers[1]", {"window_layers": (3, 3)}),
        (SWA, "window_tokens", {"window_tokens": 199}),
        (SWA, "window_tokens", {"window_tokens": 127, "window": 1}),
        (SWA, "window_tokens", {"window_tokens": 257}),
        (SWA, "tokens", {"tokens": 127}),
        (SWA, "tokens", {"tokens": 1025}),
        (SWA, "total_heads", {"total_heads": 3}),
        (SWA, "window_total_heads", {"window_kv_heads": 4, "window_total_heads": 3}),
        (SWA, "draft.kv_lora_rank", {"draft": DraftSpec(layers=1, kv_lora_rank=8)}),
        (SWA, "draft.total_heads", {"draft": DraftSpec(layers=1, head_start=2, kv_heads=2, total_heads=3)}),
        (MAMBA, "state_layers", {"state_layers": (), "attention_layers": ()}),
        (MAMBA, "attention_layers", {"attention_layers": (2,)}),
        (MAMBA, "state_layers[2]", {"state_layers": (0, 2, 1)}),
        (MAMBA, "conv_channels", {"conv_channels": None}),
        (MAMBA, "conv_window", {"conv_window": None}),
        (MAMBA, "ssm_shape", {"conv_window": None, "conv_channels": None, "ssm_shape": None}),
        (MAMBA, "state_total_heads", {"state_head_start": 8, "state_total_heads": 11}),
        (MAMBA, "state_head_start", {"state_head_start": 2, "state_total_heads": 8}),
        (MAMBA, "state_head_start", {"state_head_start": 0, "state_total_heads": 6}),
        (MAMBA, "tokens", {"tokens": None}),
        (MAMBA, "tokens", {"tokens": 257}),
        (MAMBA, "page_size", {"page_size": None}),
        (MAMBA, "kv_heads", {"kv_heads": None}),
        (MAMBA, "head_dim", {"head_dim": None}),
        (MAMBA, "slots", {"slots": (1 << 31) - 1}),
        (MAMBA, "dtype", {"ssm_dtype": "float31"}),
        (PAGE_FIRST, "draft", {"draft": DraftSpec(layers=1)}),
        (PAGE_FIRST, "groups", {"groups": ((0, 1), (2,))}),
        (PAGE_FIRST, "k_scale", {"k_scale": (0.5, 0.5, 0.5), "dtype": "int8"}),
        (PAGE_FIRST, "v_scale", {"v_scale": "page_head", "dtype": "int8"}),
        (PAGE_FIRST_LATENT, "index_head_dim", {"index_head_dim": 128}),
        (PAGE_FIRST_LATENT, "draft", {"draft": DraftSpec(layers=1)}),
        (PACKED, "view", {"view": "page_first", "index_head_dim": None, "index_scale": False}),
        (STATES_ONLY, "tokens", {"tokens": 65, "page_size": 16}),
        (STATES_ONLY, "k_scale", {"k_scale": 2.0}),
        (STATES_ONLY, "v_scale", {"v_scale": "page"}),
        (STATES_ONLY, "k_scale", {"k_scale": (2.0,), "dtype": "int8"}),
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
def test_k_of_all_layers_comes_before_v(spec: MhaSpec) -> None:
    layers = range(spec.first_layer, spec.first_layer + spec.layers)
    expected = [(role, layer) for role in (("k",) if spec.joined else ("k", "v")) for layer in layers]
    found = [(one.role, one.layer) for one in manifest_of(spec).entries if one.component == "main"]
    assert found[: len(expected)] == expected


@given(mha_specs())
def test_page_bytes_are_the_formula(spec: MhaSpec) -> None:
    for entry in manifest_of(spec).entries:
        if entry.component == "main" and entry.role in {"k", "v"}:
            widths = {"k": spec.head_dim, "v": spec.v_head_dim or spec.head_dim}
            dim = sum(widths.values()) if spec.joined else widths[entry.role]
            assert entry.page_bytes == spec.page_size * spec.kv_heads * dim * DTYPE_BYTES[spec.dtype]


def test_a_million_pages_is_a_matter_of_numbers() -> None:
    assert changed(MHA, tokens=128 << 20).layout_digest == manifest_of(MHA).layout_digest


# -- pages that hold all layers


def _by_hand(spec: MhaSpec | MlaSpec, width: int) -> npt.NDArray[np.uint8]:
    """Return what SGLang's host pool of this layout has in place of a role: shape (pages, ...), each byte its place."""
    heads = spec.kv_heads if isinstance(spec, MhaSpec) else 1
    pages = spec.tokens // spec.page_size + 1
    inner = (pages * spec.page_size, spec.layers) if spec.view == "page_first" else (pages, spec.layers, spec.page_size)
    shape = (*inner, heads, width * DTYPE_BYTES[spec.dtype])
    return np.random.default_rng(width).integers(0, 256, shape, np.uint8)


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
    for entry, width in zip(manifest.entries, widths.values(), strict=True):
        array = _by_hand(spec, width)
        assert entry.shape is not None
        inner = (spec.page_size, spec.layers) if spec.view == "page_first" else (spec.layers, spec.page_size)
        assert entry.shape[:3] == (entry.pages, *inner)
        page = array.reshape((*entry.shape[:-1], -1))[1]
        flat = array.reshape(-1)
        assert np.array_equal(flat[entry.page_bytes : 2 * entry.page_bytes], page.reshape(-1))
        tokens = spec.page_size if spec.view == "page_first" else 1
        assert np.array_equal(page.reshape(-1), array[tokens : 2 * tokens].reshape(-1))
        assert (entry.layer, entry.page_tokens) == (spec.first_layer + spec.layers - 1, spec.page_size)


@pytest.mark.parametrize("spec", [PAGE_FIRST, PAGE_FIRST_LATENT])
def test_a_page_that_holds_all_layers_pairs_with_no_other_order_and_is_not_cut_by_heads(
    spec: MhaSpec | MlaSpec,
) -> None:
    ours = manifest_of(spec)
    for other in ("paged", "page_first_direct"):
        theirs = changed(spec, view=other)
        last = [one for one in theirs.entries if one.layer == ours.entries[0].layer]
        with pytest.raises(GeometryMismatchError) as refused:
            pair_entries(ours.entries, last)
        assert refused.value.field == "destination.entries[0].format"
    if isinstance(spec, MhaSpec):
        with pytest.raises(GeometryMismatchError) as refused:
            pair_entries(ours.entries, changed(spec, kv_heads=1, total_heads=2).entries)
        assert refused.value.field == "destination.entries[0].format"
