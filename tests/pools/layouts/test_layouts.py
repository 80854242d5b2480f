"""What holds for the manifest of every kind of spec: places, sizes, components, the digest, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.planning.geometry import DTYPE_BYTES, PAGE_HEADS
from kvferry.pools.planning.manifest import component_of, space_sizes, spaces_of
from kvferry.pools.planning.pairing import pair_entries
from kvferry.protocol.errors import GeometryMismatchError, InvalidFieldError
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, Manifest, MhaSpec, MlaSpec, PoolSpec
from tests.pools.layouts.pool_specs import (
    JOINED,
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
    pool_specs,
)


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
    wide = msgspec.structs.replace(spec, head_dim=32, v_head_dim=64, draft=None)
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
    expected = [(role, layer) for role in ("k", "v") for layer in layers]
    found = [(one.role, one.layer) for one in manifest_of(spec).entries if one.component == "main"]
    assert found[: len(expected)] == expected


@given(mha_specs())
def test_page_bytes_are_the_formula(spec: MhaSpec) -> None:
    for entry in manifest_of(spec).entries:
        if entry.component == "main" and entry.role in {"k", "v"}:
            dim = spec.head_dim if entry.role == "k" or spec.v_head_dim is None else spec.v_head_dim
            assert entry.page_bytes == spec.page_size * spec.kv_heads * dim * DTYPE_BYTES[spec.dtype]


def test_a_million_pages_is_a_matter_of_numbers() -> None:
    assert changed(MHA, tokens=128 << 20).layout_digest == manifest_of(MHA).layout_digest
