"""Full and window attention side by side: layers keep their numbers, each kind its own pages."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.pools.layouts import manifest_of
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import Component, DraftSpec, Manifest
from tests.kit.pool_specs import SWA, changed


def layers(manifest: Manifest, component: str, role: str) -> tuple[int, ...]:
    return tuple(one.layer for one in manifest.entries if (one.component, one.role) == (component, role))


def test_layers_keep_the_models_numbers() -> None:
    manifest = manifest_of(SWA)
    assert layers(manifest, "main", "k") == layers(manifest, "main", "v") == SWA.full_layers
    assert layers(manifest, "swa", "k") == layers(manifest, "swa", "v") == SWA.window_layers


def test_each_kind_has_pages_of_its_own() -> None:
    manifest = changed(SWA, draft=DraftSpec(layers=1))
    assert manifest.components == (
        Component(name="main", space="main", pages=9),
        Component(name="draft", space="main", pages=9),
        Component(name="swa", space="swa", pages=3, kind="window", window=SWA.window),
    )
    assert manifest.pages == 9
    assert {one.pages for one in manifest.entries if one.component == "swa"} == {3}


def test_heads_and_widths_of_the_window_layers_may_differ() -> None:
    same = manifest_of(SWA)
    for component in ("main", "swa"):
        widths = {one.page_bytes for one in same.entries if one.component == component}
        assert widths == {128 * 4 * 16 * 2, 128 * 4 * 8 * 2}
    other = changed(SWA, window_kv_heads=8, window_head_dim=32)
    assert {one.page_bytes for one in other.entries if one.component == "main"} == {128 * 4 * 16 * 2, 128 * 4 * 8 * 2}
    assert {one.page_bytes for one in other.entries if one.component == "swa"} == {128 * 8 * 32 * 2}
    assert other.layout_digest != same.layout_digest


RANK: dict[str, Any] = {"kv_heads": 2, "head_start": 2, "total_heads": 4, "replicas": 2}
"""Of four ranks one that holds the second half of four heads, as another one does."""

WHOLE: dict[str, Any] = {"kv_heads": 4, "head_start": 0, "total_heads": None, "replicas": 1}


@pytest.mark.parametrize(
    ("full", "own", "held"),
    [
        (RANK, {}, (2, 2, 4, 2)),
        (RANK, {"replicas": 3}, (2, 2, 4, 3)),
        (RANK, {"head_start": 0}, (0, 2, 4, 2)),
        (RANK, {"kv_heads": 2}, (2, 2, 4, 2)),
        (RANK, {"total_heads": 4}, (2, 2, 4, 2)),
        (RANK, {"total_heads": 8, "head_start": 6}, (6, 2, 8, 1)),
        (RANK, {"kv_heads": 1, "total_heads": 4, "head_start": 3}, (3, 1, 4, 1)),
        (RANK, {"kv_heads": 1, "total_heads": 2, "head_start": 1}, (1, 1, 2, 2)),
        (RANK, {"kv_heads": 1, "total_heads": 1}, (0, 1, 1, 4)),
        (RANK, {"kv_heads": 1, "total_heads": 1, "replicas": 8}, (0, 1, 1, 8)),
        (WHOLE, {"kv_heads": 2}, (0, 2, 2, 1)),
        (WHOLE, {"kv_heads": 8, "replicas": 2}, (0, 8, 8, 2)),
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


@pytest.mark.parametrize(
    ("full", "own", "missing"),
    [
        (RANK, {"kv_heads": 1}, "total_heads"),
        (RANK, {"kv_heads": 4, "head_start": 0}, "total_heads"),
        ({**WHOLE, "replicas": 2}, {"kv_heads": 2}, "total_heads"),
        (RANK, {"kv_heads": 1, "total_heads": 2}, "head_start"),
        (RANK, {"kv_heads": 1, "total_heads": 4}, "head_start"),
        (RANK, {"total_heads": 8}, "head_start"),
        (WHOLE, {"total_heads": 8}, "head_start"),
    ],
    ids=str,
)
def test_which_heads_of_another_split_are_meant_must_be_said(
    full: dict[str, Any], own: dict[str, Any], missing: str
) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        changed(SWA, **full, **{f"window_{name}": value for name, value in own.items()})
    assert refused.value.field == f"window_{missing}"
    with pytest.raises(InvalidFieldError) as refused:
        changed(SWA, **full, draft=DraftSpec(layers=1, **own))
    assert refused.value.field == f"draft.{missing}"


@pytest.mark.parametrize(("missing", "present"), [("full_layers", "swa"), ("window_layers", "main")])
def test_a_stage_may_have_layers_of_one_kind_only(missing: str, present: str) -> None:
    manifest = changed(SWA, **{missing: ()})
    assert [one.name for one in manifest.components] == [present]
    assert manifest.pages == manifest.components[0].pages


def test_the_drafts_pages_are_there_without_full_layers() -> None:
    manifest = changed(SWA, full_layers=(), draft=DraftSpec(layers=1))
    assert [one.name for one in manifest.components] == ["main", "draft", "swa"]
    assert manifest.pages == 9
