"""Pairing by (component, role, layer), heads of ranks, and what an independent implementation plans (``golden/``)."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.geometry import (
    DTYPE_BYTES,
    RankHeads,
    dtype_bytes,
    intersect,
    rank_heads,
    ranks_with_heads,
)
from kvferry.pools.planning.page_ids import coalesce
from kvferry.pools.planning.pairing import (
    MUST_AGREE,
    MUST_AGREE_SLICED,
    HeadSlice,
    Pairing,
    check_covered,
    pair_entries,
)
from kvferry.pools.planning.plan import make_plan
from kvferry.protocol import errors
from kvferry.protocol.manifests import DraftSpec, Entry, PoolSpec
from tests.kit.pool_specs import MAMBA, MHA, MLA, SWA, changed

NAMES = st.tuples(st.sampled_from(["main", "draft"]), st.sampled_from(["k", "v", "index_k"]), st.integers(0, 3))
FULL = Entry(
    component="main", role="k", layer=0, base=0, pages=5, page_bytes=256, page_tokens=4, head_start=2, heads=2,
    total_heads=8, dtype="float16", shape=(5, 4, 2, 16), format="ND",
)  # fmt: skip
OTHER = {
    "page_bytes": 512, "page_tokens": 8, "head_start": 0, "heads": 1, "total_heads": 4, "dtype": "bfloat16",
    "format": "NZ",
}  # fmt: skip


def entries_of(names: list[tuple[str, str, int]]) -> list[Entry]:
    return [
        Entry(component=component, role=role, layer=layer, base=1000 * at, pages=2, page_bytes=8)
        for at, (component, role, layer) in enumerate(names)
    ]


@given(st.lists(NAMES, unique=True), st.lists(NAMES, unique=True))
def test_the_names_alone_decide_and_only_optional_components_may_stay_uncovered(
    source: list[tuple[str, str, int]], destination: list[tuple[str, str, int]]
) -> None:
    pairing = pair_entries(entries_of(source), entries_of(destination))
    assert [pair.destination_index for pair in pairing.pairs] == [
        at for at, name in enumerate(destination) if name in source
    ]
    for pair in pairing.pairs:
        name = destination[pair.destination_index]
        assert pair.destination.base == 1000 * pair.destination_index
        assert pair.source.base == 1000 * source.index(name)
    assert [entry.base // 1000 for entry in pairing.uncovered] == [
        at for at, name in enumerate(destination) if name not in source
    ]
    assert pairing.skipped_source_entries == len(set(source) - set(destination))
    bare = [name for name in destination if name not in source and name[0] != "draft"]
    if not bare:
        check_covered(pairing, ["draft"])
        return
    expected = f"no source entry for {'/'.join(map(str, bare[0]))} .{len(bare)} required"
    with pytest.raises(errors.UncoveredEntryError, match=expected) as refused:
        check_covered(pairing, ["draft"])
    assert refused.value.field == "destination.entries"


@pytest.mark.parametrize("field", MUST_AGREE)
def test_a_field_must_agree_where_both_give_it(field: str) -> None:
    # Where one side does not say of how many heads its own are, other heads are no slice.
    ours = msgspec.structs.replace(FULL, total_heads=None) if field in {"head_start", "heads"} else FULL
    other = msgspec.structs.replace(FULL, shape=None, **{field: OTHER[field]})
    if field != "page_bytes":  # what one side leaves out is taken as it is
        silent = msgspec.structs.replace(FULL, **{field: None})
        assert len(pair_entries([FULL], [silent]).pairs) == len(pair_entries([silent], [FULL]).pairs) == 1
    with pytest.raises(errors.GeometryMismatchError, match=f"main/k/0: {field} is") as refused:
        pair_entries([ours], [msgspec.structs.replace(FULL, layer=1), other])
    assert refused.value.field == f"destination.entries[1].{field}"


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_name_given_twice_is_refused(side: str) -> None:
    once, twice = [FULL], [FULL, FULL]
    with pytest.raises(errors.DuplicateEntryError) as refused:
        pair_entries(twice if side == "source" else once, twice if side == "destination" else once)
    assert refused.value.field == f"{side}.entries[1]"


def rank(start: int, count: int, **others: Any) -> Entry:  # noqa: ANN401  any field of an entry
    """Return FULL with other heads of the same width."""
    held = {"head_start": start, "heads": count, "page_bytes": 128 * count, "shape": (5, 4, count, 16)}
    return msgspec.structs.replace(FULL, **{**held, **others})


@given(st.tuples(st.integers(0, 7), st.integers(1, 8)), st.tuples(st.integers(0, 7), st.integers(1, 8)))
def test_the_heads_of_both_sides_are_exchanged(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    held, wanted = (set(range(start, start + count)) for start, count in (ours, theirs))
    pairing = pair_entries([rank(*ours)], [rank(*theirs)])
    if not held & wanted:
        assert (pairing.pairs, pairing.skipped_source_entries) == ((), 1)
        assert pairing.uncovered == (rank(*theirs),)
        return
    (pair,) = pairing.pairs
    assert (pairing.uncovered, pairing.skipped_source_entries) == ((), 0)
    if held == wanted:
        assert pair.heads is None
        return
    assert pair.heads is not None
    sent = {ours[0] + pair.heads.source + head for head in range(pair.heads.count)}
    assert sent == {theirs[0] + pair.heads.destination + head for head in range(pair.heads.count)} == held & wanted


@pytest.mark.parametrize("field", MUST_AGREE_SLICED)
def test_sides_with_other_heads_must_agree_too(field: str) -> None:
    other = rank(0, 8, shape=None, **{field: {**OTHER, "total_heads": 16}[field]})
    with pytest.raises(errors.GeometryMismatchError, match=f"main/k/0: {field} is") as refused:
        pair_entries([FULL], [other])
    assert refused.value.field == f"destination.entries[0].{field}"


@pytest.mark.parametrize(
    ("other", "field", "what"),
    [
        (rank(0, 8, page_bytes=2048, shape=None), "page_bytes", "a head of one token has 32 bytes at the source, 64"),
        (rank(0, 8, page_bytes=1025, shape=None), "page_bytes", "do not divide into 4 tokens x 8 heads"),
        (
            msgspec.structs.replace(FULL, heads=None, shape=(5, 4, 4, 8)),
            "shape",
            "a token is .2, 16. at the source, .4, 8.",
        ),
        (rank(0, 8, shape=(5, 4, 4, 32)), "shape", "a head is 16 wide at the source, 32"),
        (rank(0, 8, page_tokens=None), "page_tokens", "both sides give page_tokens"),
    ],
)
def test_heads_of_another_width_are_refused(other: Entry, field: str, what: str) -> None:
    with pytest.raises(errors.GeometryMismatchError, match=what) as refused:
        pair_entries([FULL], [other])
    assert refused.value.field == f"destination.entries[0].{field}"


def test_pages_that_are_not_ordered_by_tokens_are_not_cut() -> None:
    for same in ({"replicas": 4}, {"shape": (20, 1, 2, 16)}):  # the other view of one layout
        assert pair_entries([FULL], [msgspec.structs.replace(FULL, **same)]).pairs[0].heads is None
    nz = msgspec.structs.replace(FULL, format="NZ")
    assert pair_entries([nz], [nz]).pairs[0].heads is None
    with pytest.raises(errors.GeometryMismatchError, match="pages of format NZ cannot be cut by heads") as refused:
        pair_entries([nz], [rank(0, 8, format="NZ")])
    assert refused.value.field == "destination.entries[0].format"


# -- scales

INT8_MHA = msgspec.structs.replace(MHA, layers=2, first_layer=3, total_heads=4, v_head_dim=None, dtype="int8")
INT8_MLA = msgspec.structs.replace(MLA, layers=2, first_layer=0, index_head_dim=None, dtype="int8")
INT8_SWA = msgspec.structs.replace(SWA, full_layers=(0,), window_layers=(1, 2), dtype="int8")
INT8_MAMBA = msgspec.structs.replace(MAMBA, state_layers=(0,), attention_layers=(1,), dtype="int8")


def side(start: int, count: int, scales: Any = None) -> list[Entry]:  # noqa: ANN401  any scales
    """Return the entries of a rank that holds some of four heads, with scales of k in its layers."""
    return list(changed(INT8_MHA, head_start=start, kv_heads=count, k_scale=scales).entries)


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
    with pytest.raises(errors.ScaleMismatchError, match=said) as caught:
        pair_entries(ours, theirs)
    assert caught.value.field.startswith("destination.entries[")
    assert caught.value.field.endswith("].scales")


INDEXED = msgspec.structs.replace(
    INT8_MLA,
    draft=DraftSpec(layers=1, index_head_dim=4),
    index_head_dim=4,
    index_dtype="float8_e4m3fn",
    index_layers=(1,),
)


@pytest.mark.parametrize(
    ("spec", "with_scales", "name"),
    [
        (INT8_MHA, {"k_scale": "page"}, "main/k/3"),
        (INT8_MHA, {"v_scale": "page_head"}, "main/v/3"),
        (INT8_SWA, {"window_v_scale": "page"}, "swa/v/1"),
        (INT8_MAMBA, {"k_scale": "page"}, "main/k/1"),
        (INT8_MHA, {"draft": DraftSpec(layers=1, k_scale="page")}, "draft/k/0"),
        (INDEXED, {"index_scale": True}, "main/index_k/1"),
    ],
    ids=str,
)
def test_scales_that_travel_from_or_to_one_side_only_are_refused(
    spec: PoolSpec, with_scales: dict[str, Any], name: str
) -> None:
    bare = msgspec.structs.replace(spec, draft=spec.draft or DraftSpec(layers=1))
    plain, scaled = manifest_of(bare).entries, changed(bare, **with_scales).entries
    for ours, theirs, there in ((scaled, plain, "source"), (plain, scaled, "destination")):
        with pytest.raises(
            errors.ScaleMismatchError, match=f"^.*{name} has scales that travel.* at the {there}"
        ) as caught:
            pair_entries(ours, theirs)
        index = [entry.name for entry in theirs].index(name)
        assert caught.value.field == f"destination.entries[{index}].scales"


def test_a_scale_a_page_does_not_go_to_another_split() -> None:
    with pytest.raises(errors.GeometryMismatchError, match="main/k_scale/3: total_heads is 1 at the source, 2 at"):
        pair_entries(side(0, 4, "page"), side(2, 2, "page"))
    assert len(pair_entries(side(2, 2, "page"), side(2, 2, "page")).pairs) == 6


# -- numbers of tokens and pages


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_dtypes_are_torchs(dtype: str) -> None:
    assert dtype_bytes(dtype) == getattr(torch, dtype).itemsize


# -- heads of ranks, and what two ranks share.


DIVISORS = st.tuples(st.integers(1, 16), st.integers(1, 16))


@given(DIVISORS)
def test_ranks_tile_the_heads_or_every_head_has_as_many_ranks(drawn: tuple[int, int]) -> None:
    tp_size, each = drawn
    held = [rank_heads(tp_size * each, tp_size, rank) for rank in range(tp_size)]
    assert [one.start for one in held] == [rank * each for rank in range(tp_size)]
    assert {(one.count, one.replicas) for one in held} == {(each, 1)}

    heads, replicas = drawn
    held = [rank_heads(heads, heads * replicas, rank) for rank in range(heads * replicas)]
    assert [one.start for one in held] == [head for head in range(heads) for _ in range(replicas)]
    assert {(one.count, one.replicas) for one in held} == {(1, replicas)}


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12])
def test_each_rank_of_decode_takes_the_ranks_that_have_its_heads(heads: int) -> None:
    def has(size: int, rank: int) -> set[int]:
        mine = rank_heads(heads, size, rank)
        return set(range(mine.start, mine.start + mine.count))

    sizes = [one for one in (1, 2, 3, 4, 6, 8, 16, 24) if heads % one == 0 or one % heads == 0]
    for prefill, decode in itertools.product(sizes, sizes):
        fills: Counter[int] = Counter()
        said = set()
        for rank in range(decode):
            numbers, each = ranks_with_heads(rank, decode, prefill)
            assert set().union(*(has(prefill, number) for number in numbers)) >= has(decode, rank)
            fills.update(numbers)
            said.add(each)
            assert len(numbers) == max(1, prefill // decode) or prefill % decode
            assert each == max(1, decode // prefill) or decode % prefill
        assert set(fills) == set(range(prefill)), "each one is taken"
        assert set(fills.values()) == said


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
