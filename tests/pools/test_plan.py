"""Plans against the byte-level oracle, and the checks that a plan makes before a byte moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.planning.copies import (
    CopyBlocks,
    chunk_bounds,
    copy_one_by_one,
    copy_vectored,
    split_blocks,
    vectored_copy_works,
)
from kvferry.pools.planning.geometry import Heads
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.planning.plan import BlockParts, Blocks, make_plan, make_side
from kvferry.protocol.errors import (
    DuplicatePageError,
    EmptyPagesError,
    GeometryMismatchError,
    KvferryError,
    LengthMismatchError,
    PageOutOfRangeError,
    UncoveredEntryError,
)
from kvferry.protocol.manifests import Entry
from tests.kit.tagged_memory import UNTOUCHED, Memory, TransferCase, cases, expected_memory, plans_of


def offset_copy(blocks: Blocks, source: Memory, destination: Memory) -> None:
    """Copy blocks of offsets as plainly as can be."""
    for start, to, size in blocks.tolist():
        destination[to : to + size] = source[start : start + size]


def absolute(blocks: Blocks, source: Memory, destination: Memory) -> Blocks:
    moved = blocks.copy()
    moved[:, 0] += np.uint64(source.ctypes.data)
    moved[:, 1] += np.uint64(destination.ctypes.data)
    return moved


def memory_after(case: TransferCase, copy: Callable[[Blocks, Memory, Memory], None]) -> Memory:
    destination = np.full(case.region_bytes, UNTOUCHED, np.uint8)
    for source, _, plan in plans_of(case):
        before, blocks = source.memory.copy(), plan.blocks()
        assert (plan.pages, plan.total_bytes) == (len(case.pages), int(blocks[:, 2].sum()))
        assert (blocks[:, 2] > 0).all()
        assert int((blocks[:, 0] + blocks[:, 2]).max()) <= len(source.memory), "no block leaves its region"
        assert int((blocks[:, 1] + blocks[:, 2]).max()) <= case.region_bytes
        copy(blocks, source.memory, destination)
        assert (source.memory == before).all()
    return destination


@given(cases(), st.integers(1, 40), st.integers(1, 200))
def test_every_byte_arrives_and_no_other_changes(case: TransferCase, block_bytes: int, chunk_bytes: int) -> None:
    """Copied as plainly as can be, and by the daemon's ways without the copy kernel."""
    expected = expected_memory(case)
    assert (memory_after(case, offset_copy) == expected).all()
    copies: list[CopyBlocks] = [copy_one_by_one, *([copy_vectored] if vectored_copy_works() else [])]
    for copy in copies:

        def in_chunks(blocks: Blocks, source: Memory, destination: Memory, copy: CopyBlocks = copy) -> None:
            split = split_blocks(absolute(blocks, source, destination), block_bytes)
            bounds = chunk_bounds(split, chunk_bytes).tolist()
            for start, stop in itertools.pairwise(bounds):
                copy(split[start:stop])

        assert (memory_after(case, in_chunks) == expected).all()


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40, unique=True),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 400),
    st.integers(1, 50),
)
def test_a_plan_expanded_in_parts_is_the_plan_expanded_at_once(
    pages: list[int], sizes: list[int], max_bytes: int, max_blocks: int
) -> None:
    entries = [entry(layer=at, base=1000 * at, pages=61, page_bytes=size) for at, size in enumerate(sizes)]
    ids = np.array(pages)
    plan = make_plan(pair_entries(entries, entries), ids, np.roll(ids, 1))
    whole, expansion, parts = plan.blocks(), BlockParts(plan), []
    while not expansion.is_over:
        part = expansion.take(max_bytes, max_blocks)
        assert 1 <= len(part) <= max_blocks
        assert int(part[:-1, 2].sum()) < max_bytes, "one block more than fits, at most"
        parts.append(part)
    assert np.concatenate(parts).tolist() == whole.tolist()
    if int(whole[:, 2].sum()) <= max_bytes and len(whole) <= max_blocks:
        assert len(parts) == 1


def entry(**fields: Any) -> Entry:  # noqa: ANN401  any field of an entry
    plain = {"component": "main", "role": "k", "layer": 0, "base": 0, "pages": 8, "page_bytes": 4}
    return Entry(**{**plain, **fields})


@pytest.mark.parametrize(
    ("error", "field", "source", "destination"),
    [
        (LengthMismatchError, "destination_pages", [1, 2], [1]),
        (EmptyPagesError, "source_pages", [], []),
        (PageOutOfRangeError, "source_pages", [0], [1]),
        (PageOutOfRangeError, "source_pages", [6], [1]),  # the smallest entry of the source has 6 pages
        (PageOutOfRangeError, "destination_pages", [1], [0]),
        (PageOutOfRangeError, "destination_pages", [1], [7]),
        (DuplicatePageError, "destination_pages", [1, 2], [4, 4]),
    ],
)
def test_refused_lists(error: type[KvferryError], field: str, source: list[int], destination: list[int]) -> None:
    pairing = pair_entries([entry(), entry(role="v", pages=6)], [entry(), entry(role="v", pages=7)])
    make_plan(pairing, np.array([3, 3]), np.array([5, 2]))  # a source page may be sent twice
    with pytest.raises(error) as refused:
        make_plan(pairing, np.array(source, np.int64), np.array(destination, np.int64))
    assert refused.value.field == field


def rank(start: int, heads: int) -> Entry:
    """Return pages of 4 tokens and some of 8 heads of 3 bytes."""
    return entry(page_bytes=12 * heads, page_tokens=4, head_start=start, heads=heads, total_heads=8)


def test_addresses_near_the_end_of_memory_do_not_wrap_and_nothing_in_common_is_refused() -> None:
    high = (1 << 63) - 1 - 8 * 4
    plan = make_plan(pair_entries([entry(base=high)], [entry(base=high)]), np.array([7]), np.array([7]))
    assert plan.blocks().tolist() == [[high + 28, high + 28, 4]]
    with pytest.raises(UncoveredEntryError) as refused:
        make_plan(pair_entries([entry()], [entry(role="v")]), np.array([1]), np.array([1]))
    assert refused.value.field == "source.entries"


@pytest.mark.parametrize("heads", [Heads(1, 2), Heads(-1, 1), Heads(0, 0), Heads(2, 1)])
def test_a_side_refuses_heads_that_its_entry_lacks(heads: Heads) -> None:
    with pytest.raises(GeometryMismatchError, match="main/k/0: pages of 24 bytes, 4 tokens and 2 heads cannot be cut"):
        make_side([rank(0, 2)], [heads], np.array([1]))
