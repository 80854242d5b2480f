"""Scales of 8-bit keys and values: what a spec may say, what stands on the entries, and whom they pair with."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.planning.geometry import PAGE_HEADS
from kvferry.pools.planning.pairing import pair_entries
from kvferry.protocol.errors import GeometryMismatchError, InvalidFieldError, KvferryError, ScaleMismatchError
from kvferry.protocol.manifests import DraftSpec, Entry, Manifest, PoolSpec
from tests.kit import pool_specs as kit
from tests.kit.pool_specs import changed

MHA = replace(kit.MHA, layers=2, first_layer=3, total_heads=4, v_head_dim=None, dtype="int8")
MLA = replace(kit.MLA, layers=2, first_layer=0, index_head_dim=None, dtype="int8")
SWA = replace(kit.SWA, full_layers=(0,), window_layers=(1, 2), dtype="int8")
MAMBA = replace(kit.MAMBA, state_layers=(0,), attention_layers=(1,), dtype="int8")


def scales_of(manifest: Manifest) -> dict[str, tuple[float, ...] | None]:
    return {entry.name: entry.scales for entry in manifest.entries}


# -- fixed ones


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
    found = scales_of(changed(MHA, v_scale=said))
    assert found == {"main/k/3": None, "main/k/4": None, "main/v/3": third, "main/v/4": fourth}


@pytest.mark.parametrize(
    ("spec", "fields", "field"),
    [
        (MHA, {"dtype": "bfloat16", "k_scale": 1.0}, "k_scale"),
        (MHA, {"dtype": "bfloat16", "v_scale": "page"}, "v_scale"),
        (MHA, {"k_scale": (1.0,)}, "k_scale"),
        (MHA, {"v_scale": (1.0, (1.0, 2.0, 3.0))}, "v_scale[1]"),
        (MHA, {"k_scale": 0.0}, "k_scale"),
        (MHA, {"k_scale": (1.0, -1.0)}, "k_scale[1]"),
        (MHA, {"k_scale": math.nan}, "k_scale"),
        (MHA, {"k_scale": 1e39}, "k_scale"),
        (MHA, {"k_scale": 1e-50}, "k_scale"),
        (MHA, {"k_scale": (1.0, 2.0), "draft": DraftSpec(layers=1)}, "draft.k_scale"),
        (MHA, {"k_scale": 1.0, "draft": DraftSpec(layers=1, k_scale=(1.0, 2.0))}, "draft.k_scale"),
        (MHA, {"head_start": 1, "k_scale": "page"}, "head_start"),
        (MLA, {"k_scale": (1.0, 2.0), "draft": DraftSpec(layers=1)}, "draft.k_scale"),
        (MLA, {"draft": DraftSpec(layers=1, v_scale=1.0)}, "draft.v_scale"),
        (MLA, {"draft": DraftSpec(layers=1, k_scale="page")}, "draft.k_scale"),
        (MLA, {"packed": "ds_mla", "dtype": "float8_e4m3fn", "kv_lora_rank": 128, "k_scale": 1.0}, "k_scale"),
        (SWA, {"k_scale": (1.0,)}, "window_k_scale"),
    ],
)
def test_what_makes_no_sense_is_refused(spec: PoolSpec, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        changed(spec, **fields)
    assert caught.value.field == field


@pytest.mark.parametrize("scale", ["0", '"layer"', "[[]]", "{}"])
def test_what_makes_no_sense_on_the_wire_is_refused(scale: str) -> None:
    text = msgspec.json.encode(MHA).decode().removesuffix("}") + f', "k_scale": {scale}}}'
    with pytest.raises(msgspec.ValidationError, match="k_scale"):
        msgspec.json.decode(text, type=PoolSpec)


def test_parts_take_the_models_scales_unless_they_have_their_own() -> None:
    draft = DraftSpec(layers=1, v_scale=4.0)
    found = scales_of(changed(MHA, k_scale=0.5, v_scale=(1.0, 2.0), draft=draft))
    assert (found["draft/k/0"], found["draft/v/0"]) == ((0.5,), (4.0,))
    found = scales_of(changed(MHA, k_scale=0.5, draft=DraftSpec(layers=1, dtype="bfloat16")))
    assert (found["draft/k/0"], found["draft/v/0"]) == (None, None)
    found = scales_of(changed(SWA, k_scale=0.5, v_scale=(1.0,), window_v_scale=(3.0, 4.0)))
    assert (found["swa/k/1"], found["swa/v/1"], found["swa/v/2"]) == ((0.5,), (3.0,), (4.0,))
    assert scales_of(changed(MAMBA, k_scale=0.5))["main/k/1"] == (0.5,)
    assert scales_of(changed(MHA, k_scale=0.1))["main/k/3"] == (0.10000000149011612,), "what it is as float32"
    latent = replace(MLA, k_scale=(0.5, 0.25), index_head_dim=4, draft=DraftSpec(layers=1, k_scale=2.0))
    found = scales_of(manifest_of(latent))
    assert (found["main/k/1"], found["main/v/1"], found["main/index_k/1"]) == ((0.25,), (0.25,), None)
    assert found["draft/v/0"] == (2.0,)
    assert scales_of(changed(SWA, window_layers=(), k_scale=(1.0,)))["main/k/0"] == (1.0,)


# -- those that travel


def entries_of(manifest: Manifest, role: str) -> list[Entry]:
    return [entry for entry in manifest.entries if entry.role == role]


def test_a_scale_a_page_and_head_is_an_array_of_its_own() -> None:
    manifest = changed(MHA, k_scale="page_head", view="fia")
    assert [entry.name for entry in manifest.entries][4:] == ["main/k_scale/3", "main/k_scale/4"]
    first = entries_of(manifest, "k_scale")[0]
    assert (first.shape, first.dtype, first.page_bytes, first.format) == ((3, 2), "float32", 8, PAGE_HEADS)
    assert (first.head_start, first.heads, first.total_heads, first.page_tokens) == (0, 2, 4, None)
    assert scales_of(manifest)["main/k/3"] is None
    manifest = changed(MHA, head_start=2, v_scale="page", replicas=2)
    first = entries_of(manifest, "v_scale")[0]
    assert (first.shape, first.page_bytes) == ((3, 1), 4), "a scale a page is its rank's own"
    assert (first.head_start, first.heads, first.total_heads, first.replicas) == (1, 1, 2, 2)


# -- pairing


def side(start: int, count: int, scales: Any = None) -> list[Entry]:  # noqa: ANN401  any scales
    """Return the entries of a rank that holds some of four heads, with scales of k in its layers."""
    return list(changed(MHA, head_start=start, kv_heads=count, k_scale=scales).entries)


def heads(*scales: float) -> tuple[tuple[float, ...], ...]:
    return (scales, scales)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (side(0, 2, 0.5), side(0, 2, 0.5)),
        (side(0, 2, 0.5), side(0, 2, heads(0.5, 0.5))),
        (side(0, 4, heads(1, 2, 3, 4)), side(2, 2, heads(3, 4))),
        (side(0, 4, heads(1, 2, 3, 3)), side(2, 2, 3.0)),
        (side(0, 2, heads(1, 2)), side(1, 2, heads(2, 9))),
        (side(0, 2, heads(1, 2)), side(2, 2, heads(3, 4))),
    ],
    ids=["same", "one for all", "slice", "slice of one", "overlap", "nothing in common"],
)
def test_what_is_exchanged_must_have_one_scale(ours: list[Entry], theirs: list[Entry]) -> None:
    assert pair_entries(ours, theirs) is not None


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (side(0, 2, 0.5), side(0, 2, 0.25), "main/k/3, heads 0..1: the scale of each head is 0.5 .* 0.25"),
        (side(0, 2, (0.5, 1.0)), side(0, 2, (0.5, 2.0)), "main/k/4, heads 0..1: the scale of each head is 1 .* 2"),
        (side(0, 2, heads(1, 2)), side(0, 2, heads(1, 3)), "main/k/3, heads 0..1: the scale of head 1 is 2 .* 3"),
        (side(0, 4, heads(1, 2, 3, 4)), side(2, 2, heads(3, 5)), "heads 2..3: the scale of head 3 is 4 .* 5"),
        (side(0, 2, 0.5), side(0, 2), "heads 0..1 has scales at the source, but none at the destination"),
        (side(2, 2), side(0, 4, 0.5), "heads 2..3 has scales at the destination, but none at the source"),
    ],
)
def test_scales_that_differ_are_refused_by_entry_and_head(ours: list[Entry], theirs: list[Entry], said: str) -> None:
    with pytest.raises(ScaleMismatchError, match=said) as caught:
        pair_entries(ours, theirs)
    assert caught.value.field.startswith("destination.entries[")
    assert caught.value.field.endswith("].scales")


INDEXED = replace(
    MLA, draft=DraftSpec(layers=1, index_head_dim=4), index_head_dim=4, index_dtype="float8_e4m3fn", index_layers=(1,)
)


@pytest.mark.parametrize(
    ("spec", "with_scales", "name"),
    [
        (MHA, {"k_scale": "page"}, "main/k/3"),
        (MHA, {"v_scale": "page_head"}, "main/v/3"),
        (SWA, {"window_v_scale": "page"}, "swa/v/1"),
        (MAMBA, {"k_scale": "page"}, "main/k/1"),
        (MHA, {"draft": DraftSpec(layers=1, k_scale="page")}, "draft/k/0"),
        (INDEXED, {"index_scale": True}, "main/index_k/1"),
    ],
    ids=str,
)
def test_scales_that_travel_from_or_to_one_side_only_are_refused(
    spec: PoolSpec, with_scales: dict[str, Any], name: str
) -> None:
    bare = replace(spec, draft=spec.draft or DraftSpec(layers=1))
    plain, scaled = manifest_of(bare).entries, changed(bare, **with_scales).entries
    for ours, theirs, there in ((scaled, plain, "source"), (plain, scaled, "destination")):
        with pytest.raises(ScaleMismatchError, match=f"^.*{name} has scales that travel.* at the {there}") as caught:
            pair_entries(ours, theirs)
        index = [entry.name for entry in theirs].index(name)
        assert caught.value.field == f"destination.entries[{index}].scales"


def test_a_scale_a_page_does_not_go_to_another_split() -> None:
    with pytest.raises(GeometryMismatchError, match="main/k_scale/3: total_heads is 1 at the source, 2 at"):
        pair_entries(side(0, 4, "page"), side(2, 2, "page"))
    assert len(pair_entries(side(2, 2, "page"), side(2, 2, "page")).pairs) == 6


# -- entries from outside

ENTRY = side(0, 2, heads(1, 2))[0]


@pytest.mark.parametrize(
    "change",
    [
        {"scales": (1.0, 2.0, 3.0)},
        {"scales": (0.0,)},
        {"scales": (math.inf, 1.0)},
        {"heads": None},
        {"dtype": None},
        {"dtype": "bfloat16", "shape": None},
    ],
)
def test_scales_of_an_entry_from_outside_are_checked(change: dict[str, Any]) -> None:
    check_entry(ENTRY, "entries[4]")
    with pytest.raises(KvferryError) as caught:
        check_entry(replace(ENTRY, **change), "entries[4]")
    assert caught.value.field == "entries[4].scales"
