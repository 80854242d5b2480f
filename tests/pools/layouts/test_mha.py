"""The manifest of multi-head attention: where entries lie, and what the layout digest covers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.planning.geometry import DTYPE_BYTES
from kvferry.pools.planning.manifest import bytes_per_page
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import Manifest, MhaSpec

SPEC = MhaSpec(layers=3, tokens=256, page_size=128, kv_heads=2, head_dim=8, v_head_dim=4, dtype="float16")


@st.composite
def specs(draw: st.DrawFn) -> MhaSpec:
    page_size, heads, start = draw(st.integers(1, 64)), draw(st.integers(1, 8)), draw(st.integers(0, 8))
    return MhaSpec(
        layers=draw(st.integers(1, 5)),
        first_layer=draw(st.integers(0, 40)),
        tokens=page_size * draw(st.integers(1, 9)),
        page_size=page_size,
        kv_heads=heads,
        head_start=start,
        total_heads=draw(st.none() | st.integers(start + heads, 32)),
        head_dim=draw(st.integers(1, 16)),
        v_head_dim=draw(st.none() | st.integers(1, 16)),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        view=draw(st.sampled_from(["paged", "fia"])),
    )


def changed(**fields: Any) -> Manifest:  # noqa: ANN401  any field of a spec
    return manifest_of(msgspec.structs.replace(SPEC, **fields))


@given(specs())
def test_entries_fill_the_region_one_after_another(spec: MhaSpec) -> None:
    manifest = manifest_of(spec)
    assert manifest.pages == spec.tokens // spec.page_size + 1
    base = 0
    for entry in manifest.entries:
        assert entry.base == base
        base += entry.pages * entry.page_bytes
        check_entry(entry, "entry")
    assert base == manifest.region_bytes == manifest.pages * bytes_per_page(manifest)


@given(specs())
def test_k_of_all_layers_comes_before_v(spec: MhaSpec) -> None:
    layers = range(spec.first_layer, spec.first_layer + spec.layers)
    expected = [("main", role, layer) for role in ("k", "v") for layer in layers]
    assert [(one.component, one.role, one.layer) for one in manifest_of(spec).entries] == expected


@given(specs())
def test_page_bytes_are_the_formula_and_the_array(spec: MhaSpec) -> None:
    size = DTYPE_BYTES[spec.dtype]
    for entry in manifest_of(spec).entries:
        dim = spec.head_dim if entry.role == "k" or spec.v_head_dim is None else spec.v_head_dim
        assert entry.page_bytes == spec.page_size * spec.kv_heads * dim * size
        assert entry.shape is not None
        assert math.prod(entry.shape) * size == entry.pages * entry.page_bytes


@given(specs(), st.sampled_from(["paged", "fia"]), st.integers(1, 9))
def test_the_digest_leaves_out_view_and_size(spec: MhaSpec, view: str, more_pages: int) -> None:
    other = msgspec.structs.replace(spec, view=view, tokens=spec.tokens + more_pages * spec.page_size)
    assert manifest_of(other).layout_digest == manifest_of(spec).layout_digest


def test_a_million_pages_is_a_matter_of_numbers() -> None:
    assert changed(tokens=128 << 20).layout_digest == changed().layout_digest


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": 4},
        {"first_layer": 1},
        {"page_size": 64},
        {"kv_heads": 1},
        {"kv_heads": 1, "page_size": 256},  # the same bytes a page
        {"head_start": 2},
        {"total_heads": 4},
        {"head_dim": 16},
        {"v_head_dim": 8},
        {"v_head_dim": None},
        {"head_dim": 4, "v_head_dim": 8},  # the same bytes in all
        {"dtype": "bfloat16"},  # the same bytes a page
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_the_digest_covers_the_geometry(fields: dict[str, Any]) -> None:
    assert changed(**fields).layout_digest != changed().layout_digest


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tokens", {"tokens": 127}),
        ("tokens", {"tokens": 257}),
        ("tokens", {"tokens": 1 << 61}),
        ("tokens", {"tokens": 1 << 40, "page_size": 1 << 20, "head_dim": 1 << 30}),
        ("total_heads", {"head_start": 3, "total_heads": 4}),
        ("dtype", {"dtype": "float7"}),
        ("first_layer", {"first_layer": (1 << 31) - 1}),
        ("head_start", {"head_start": (1 << 31) - 1}),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        changed(**fields)
    assert refused.value.field == field


@given(specs())
def test_a_manifest_can_be_read_by_whoever_receives_it(spec: MhaSpec) -> None:
    manifest = manifest_of(spec)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest
