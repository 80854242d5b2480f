"""What holds for the manifest of every kind of spec: places, sizes, components, and what the layout digest covers."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.planning.geometry import DTYPE_BYTES, PAGE_HEADS
from kvferry.pools.planning.manifest import component_of, space_sizes, spaces_of
from kvferry.pools.planning.pairing import pair_entries
from kvferry.protocol.errors import GeometryMismatchError
from kvferry.protocol.manifests import HybridSwaSpec, MambaSpec, Manifest, MhaSpec, MlaSpec, PoolSpec
from tests.pools.layouts.pool_specs import hybrid_swa_specs, mamba_specs, mha_specs, mla_specs, pool_specs


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
