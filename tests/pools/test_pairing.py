"""Pairing by (component, role, layer), and what a pair must agree in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.planning.pairing import MUST_AGREE, MUST_AGREE_SLICED, check_covered, pair_entries
from kvferry.protocol.errors import DuplicateEntryError, GeometryMismatchError, UncoveredEntryError
from kvferry.protocol.manifests import Entry

NAMES = st.tuples(st.sampled_from(["main", "draft"]), st.sampled_from(["k", "v", "index_k"]), st.integers(0, 3))
FULL = Entry(
    component="main", role="k", layer=0, base=0, pages=5, page_bytes=256, page_tokens=4, head_start=2, heads=2,
    total_heads=8, dtype="float16", shape=(5, 4, 2, 16), format="ND",
)  # fmt: skip
OTHER = {
    "page_bytes": 512,
    "page_tokens": 8,
    "head_start": 0,
    "heads": 1,
    "total_heads": 4,
    "dtype": "bfloat16",
    "format": "NZ",
}


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
    with pytest.raises(UncoveredEntryError, match=expected) as refused:
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
    with pytest.raises(GeometryMismatchError, match=f"main/k/0: {field} is") as refused:
        pair_entries([ours], [msgspec.structs.replace(FULL, layer=1), other])
    assert refused.value.field == f"destination.entries[1].{field}"


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_name_given_twice_is_refused(side: str) -> None:
    once, twice = [FULL], [FULL, FULL]
    with pytest.raises(DuplicateEntryError) as refused:
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
    with pytest.raises(GeometryMismatchError, match=f"main/k/0: {field} is") as refused:
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
    with pytest.raises(GeometryMismatchError, match=what) as refused:
        pair_entries([FULL], [other])
    assert refused.value.field == f"destination.entries[0].{field}"


def test_pages_that_are_not_ordered_by_tokens_are_not_cut() -> None:
    for same in ({"replicas": 4}, {"shape": (20, 1, 2, 16)}):  # the other view of one layout
        assert pair_entries([FULL], [msgspec.structs.replace(FULL, **same)]).pairs[0].heads is None
    nz = msgspec.structs.replace(FULL, format="NZ")
    assert pair_entries([nz], [nz]).pairs[0].heads is None
    with pytest.raises(GeometryMismatchError, match="pages of format NZ cannot be cut by heads") as refused:
        pair_entries([nz], [rank(0, 8, format="NZ")])
    assert refused.value.field == "destination.entries[0].format"
