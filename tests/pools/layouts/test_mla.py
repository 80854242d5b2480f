"""Latent attention: widths, the indexer's layers, the packed and the joined forms, the draft."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.mla import packed_token_bytes
from kvferry.pools.planning.pairing import pair_entries
from kvferry.protocol.errors import GeometryMismatchError
from kvferry.protocol.manifests import DraftSpec, Entry, Manifest, MlaSpec
from tests.kit.pool_specs import JOINED, MLA, PACKED, changed, mla_specs


def by_role(manifest: Manifest, component: str = "main") -> dict[str, list[Entry]]:
    roles: dict[str, list[Entry]] = {}
    for entry in manifest.entries:
        if entry.component == component:
            roles.setdefault(entry.role, []).append(entry)
    return roles


def test_the_documented_page_bytes() -> None:
    roles = by_role(manifest_of(MLA))
    assert {role: entries[0].page_bytes for role, entries in roles.items()} == {
        "k": 131072,
        "v": 16384,
        "index_k": 32768,
    }
    assert roles["k"][0].shape == (9, 128, 1, 512)
    assert all([one.layer for one in entries] == [10, 11, 12, 13] for entries in roles.values())


def test_every_rank_holds_the_same_head() -> None:
    for entry in changed(MLA, replicas=8).entries:
        assert (entry.head_start, entry.heads, entry.total_heads, entry.replicas) == (0, 1, 1, 8)


@pytest.mark.parametrize(("given_", "layers"), [(None, [10, 11, 12, 13]), (2, [10, 11]), ((11, 13), [11, 13])])
def test_the_indexer_may_have_fewer_layers(given_: Any, layers: list[int]) -> None:  # noqa: ANN401  every form
    roles = by_role(changed(MLA, index_layers=given_, index_scale=True))
    assert [one.layer for one in roles["index_k"]] == [one.layer for one in roles["index_scale"]] == layers
    assert len(roles["k"]) == 4


def test_a_scale_is_one_float32_a_token() -> None:
    (scale, *_) = by_role(changed(MLA, index_scale=True))["index_scale"]
    assert (scale.page_bytes, scale.dtype, scale.shape) == (512, "float32", (9, 128, 1))


def test_a_packed_token_is_one_row() -> None:
    assert packed_token_bytes(512, 64) == 656
    roles = by_role(manifest_of(PACKED))
    assert set(roles) == {"k", "index_k", "index_scale"}
    (k, *_) = roles["k"]
    assert (k.page_bytes, k.shape, k.dtype) == (656 * 128, (9, 128, 1, 656), "float8_e4m3fn")
    assert roles["index_k"][0].page_bytes == 128 * 128


def test_packed_forms_are_formats_of_their_own() -> None:
    ascend, ds_mla = manifest_of(PACKED), changed(PACKED, packed="ds_mla")
    assert ascend.layout_digest != ds_mla.layout_digest
    with pytest.raises(GeometryMismatchError) as refused:
        pair_entries(ds_mla.entries, ascend.entries)
    assert refused.value.field == "destination.entries[0].format"


@pytest.mark.parametrize(("packed", "form"), [("ds_mla", "FP8_DS_MLA"), ("ascend", "FP8_ASCEND_MLA")])
def test_packed_tokens_of_as_many_bytes_in_other_parts_are_another_format(packed: str, form: str) -> None:
    splits = [(512, 64), (384, 130), (256, 196)]
    made = [changed(PACKED, packed=packed, kv_lora_rank=latent, qk_rope_head_dim=rope) for latent, rope in splits]
    keys = [by_role(one)["k"][0] for one in made]
    assert {key.page_bytes for key in keys} == {656 * 128}
    assert [key.format for key in keys] == [form, f"{form}_384_130", f"{form}_256_196"]
    assert len({one.layout_digest for one in made}) == len(made)
    for one, other in itertools.permutations(made, 2):
        with pytest.raises(GeometryMismatchError) as refused:
            pair_entries(one.entries, other.entries)
        assert refused.value.field == "destination.entries[0].format"


def test_a_packed_draft_of_another_split_is_another_format() -> None:
    draft = DraftSpec(layers=1, kv_lora_rank=384, qk_rope_head_dim=130)
    (key,) = by_role(changed(PACKED, draft=draft), "draft")["k"]
    assert (key.page_bytes, key.format) == (656 * 128, "FP8_ASCEND_MLA_384_130")


def test_a_joined_token_is_one_row() -> None:
    roles = by_role(manifest_of(JOINED))
    assert set(roles) == {"k", "index_k"}
    (k, *_) = roles["k"]
    assert (k.page_bytes, k.shape, k.dtype) == ((512 + 64) * 128 * 2, (9, 128, 1, 576), "bfloat16")
    assert k.format == "LATENT_ROPE_512_64"


@pytest.mark.parametrize(
    "other",
    [
        {"joined": False},
        {"joined": False, "kv_lora_rank": 576},
        {"kv_lora_rank": 448, "qk_rope_head_dim": 128},
        {"view": "nz"},
        {"dtype": "float16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("draft", [None, DraftSpec(layers=1)], ids=["alone", "draft"])
def test_a_joined_token_pairs_with_no_other_form(other: dict[str, Any], draft: DraftSpec | None) -> None:
    ours, theirs = changed(JOINED, draft=draft), changed(JOINED, draft=draft, **other)
    assert ours.layout_digest != theirs.layout_digest
    for component in {entry.component for entry in ours.entries}:
        of_ours, of_theirs = ([one for one in side.entries if one.component == component] for side in (ours, theirs))
        for source, destination in itertools.permutations((of_ours, of_theirs)):
            with pytest.raises(GeometryMismatchError):
                pair_entries(source, destination)


def test_the_scales_of_a_joined_row_are_a_layers() -> None:
    manifest = changed(JOINED, dtype="float8_e4m3fn", k_scale=(0.5, 0.25, 0.125, 1.0))
    assert [entry.scales for entry in by_role(manifest)["k"]] == [(0.5,), (0.25,), (0.125,), (1.0,)]


def test_a_joined_row_in_fractals() -> None:
    (k, *_) = by_role(changed(JOINED, view="nz"))["k"]
    assert (k.shape, k.format) == ((9, 1, 36, 128, 16), "FIA_NZ_LATENT_ROPE_512_64")


def test_a_joined_draft_of_another_split() -> None:
    (k,) = by_role(changed(JOINED, draft=DraftSpec(layers=1, kv_lora_rank=448, qk_rope_head_dim=128)), "draft")["k"]
    assert (k.shape, k.format) == ((9, 128, 1, 576), "LATENT_ROPE_448_128")


def test_fia_nz_is_in_fractals() -> None:
    roles = by_role(changed(MLA, view="nz", index_scale=True))
    assert roles["k"][0].shape == (9, 1, 32, 128, 16)
    assert [entries[0].format for entries in roles.values()] == ["FIA_NZ", "FIA_NZ", "FIA_NZ", "ND"]


@pytest.mark.parametrize("spec", [MLA, PACKED, JOINED])
def test_the_draft_is_as_the_model_and_numbered_from_0(spec: MlaSpec) -> None:
    manifest = changed(spec, draft=DraftSpec(layers=2, index_head_dim=128), replicas=4)
    own, draft = by_role(manifest), by_role(manifest, "draft")
    assert set(own) == set(draft)
    for role, entries in draft.items():
        assert [one.layer for one in entries] == [0, 1]
        first = msgspec.structs.replace(own[role][0], component="draft", layer=0, base=entries[0].base)
        assert entries[0] == first
    assert [(one.name, one.space, one.pages) for one in manifest.components] == [
        ("main", "main", 9),
        ("draft", "main", 9),
    ]


def test_the_draft_of_another_kind() -> None:
    manifest = changed(
        MLA, draft=DraftSpec(layers=1, kv_heads=2, head_start=4, head_dim=64, v_head_dim=32, total_heads=8)
    )
    k, v = [one for one in manifest.entries if one.component == "draft"]
    assert (k.page_bytes, v.page_bytes, k.heads, k.total_heads) == (128 * 2 * 64 * 2, 128 * 2 * 32 * 2, 2, 8)


def test_a_draft_without_an_indexer() -> None:
    assert set(by_role(changed(MLA, draft=DraftSpec(layers=1)), "draft")) == {"k", "v"}


@given(mla_specs())
def test_roles_come_one_after_another(spec: MlaSpec) -> None:
    order = [entry.role for entry in manifest_of(spec).entries if entry.component == "main"]
    assert order == sorted(order, key=["k", "v", "index_k", "index_scale"].index)
