"""Planning against results of an independent implementation: ``golden/transfer_planning.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from kvferry.pools.planning.geometry import RankHeads, intersect, rank_heads
from kvferry.pools.planning.page_ids import coalesce
from kvferry.pools.planning.pairing import HeadSlice, Pairing, check_covered, pair_entries
from kvferry.pools.planning.plan import make_plan
from kvferry.protocol.manifests import Entry

GOLDEN: Final[dict[str, list[dict[str, Any]]]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "transfer_planning.json").read_text()
)
ROLES: Final = ("k", "v", "index_k")
PAGE_BYTES: Final = 1024
MANY_PAGES: Final = 1 << 20


def entry(role: str, layer: int, base: int, *, component: str = "main", page_bytes: int = PAGE_BYTES) -> Entry:
    return Entry(component=component, role=role, layer=layer, base=base, pages=MANY_PAGES, page_bytes=page_bytes)


def stage_entries(pointers: list[int], roles: tuple[str, ...], layers: range, draft_layers: int) -> list[Entry]:
    """Name pointers that come group by group over the main layers, then group by group over the draft layers."""
    names = [("main", role, layer) for role in roles for layer in layers]
    names += [("draft", role, layer) for role in roles for layer in range(draft_layers)]
    return [
        entry(role, layer, base, component=component)
        for (component, role, layer), base in zip(names, pointers, strict=True)
    ]


def pointer_pairing(case: dict[str, Any]) -> Pairing:
    roles = ROLES[: case["groups"]]
    stage = range(case["stage_start"], case["stage_end"])
    source = stage_entries(case["src_ptrs"], roles, stage, case["draft_layers"] if case["last_stage"] else 0)
    destination = stage_entries(case["dst_ptrs"], roles, range(case["decode_layers"]), case["draft_layers"])
    return pair_entries(source, destination)


def buffers(pointers: list[int], item_lens: list[int]) -> list[Entry]:
    return [
        entry("k", number, base, page_bytes=size)
        for number, (base, size) in enumerate(zip(pointers, item_lens, strict=True))
    ]


@pytest.mark.parametrize("case", GOLDEN["coalesce"])
def test_coalesce(case: dict[str, Any]) -> None:
    runs = coalesce(np.array(case["src"], np.int64), np.array(case["dst"], np.int64))
    assert np.stack(runs, axis=1).tolist() == case["runs"]


@pytest.mark.parametrize("case", GOLDEN["mla_pp_pointers"])
def test_a_stage_pairs_with_its_own_layers(case: dict[str, Any]) -> None:
    pairing = pointer_pairing(case)
    pairs = pairing.pairs
    found = {pair.source.base: pair.destination.base for pair in pairs}
    assert found == dict(zip(case["src_ptrs"], case["sliced_dst_ptrs"], strict=True))
    assert [pair.destination.base for pair in pairs] == [
        pointer for pointer in case["dst_ptrs"] if pointer in set(case["sliced_dst_ptrs"])
    ]
    assert pairing.skipped_source_entries == 0
    layers = {entry.layer for entry in pairing.uncovered if entry.component == "main"}
    assert layers == set(range(case["decode_layers"])) - set(range(case["stage_start"], case["stage_end"]))
    if not layers:
        check_covered(pairing, {"draft"})


@pytest.mark.parametrize("case", GOLDEN["address_plan"])
def test_address_plan(case: dict[str, Any]) -> None:
    pairing = pair_entries(buffers(case["src_ptrs"], case["item_lens"]), buffers(case["dst_ptrs"], case["item_lens"]))
    plan = make_plan(pairing, np.array(case["src_pages"], np.int64), np.array(case["dst_pages"], np.int64))
    assert plan.blocks().tolist() == case["blocks"]
    assert plan.total_bytes == sum(block[2] for block in case["blocks"])


@pytest.mark.parametrize("case", GOLDEN["head_slices"])
def test_head_slices(case: dict[str, Any]) -> None:
    source, destination = (
        rank_heads(case["total_heads"], case[f"{side}_tp"], case[f"{side}_rank"]) for side in ("src", "dst")
    )
    common = intersect(source, destination)
    assert common is not None
    expected = HeadSlice(case["src_head_start"], case["dst_head_start"], case["heads"])
    assert HeadSlice(common.start - source.start, common.start - destination.start, common.count) == expected
    (pair,) = pair_entries([of_heads(source)], [of_heads(destination)]).pairs
    assert pair.heads == (None if source == destination else expected)


def of_heads(held: RankHeads) -> Entry:
    whole = entry("k", 0, 0, page_bytes=4 * 32 * held.count)
    return msgspec.structs.replace(
        whole, page_tokens=4, head_start=held.start, heads=held.count, total_heads=16, replicas=held.replicas
    )
