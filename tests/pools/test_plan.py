"""Plans, what they cover and how they are copied, against the byte-level oracle and plain sets of cells."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools import copy_kernel
from kvferry.pools.planning.copies import (
    MAX_VECTOR,
    CopyBlocks,
    CopyChunk,
    FlatCopies,
    cells_of,
    chunk_bounds,
    copy_by_size,
    copy_one_by_one,
    copy_vectored,
    cut_copy_chunks,
    digest_of,
    gather,
    offset_of,
    scatter,
    segments_that_fit,
    split_blocks,
    total_segments,
    vectored_copy_works,
)
from kvferry.pools.planning.coverage import Cells, Coverage
from kvferry.pools.planning.geometry import Heads
from kvferry.pools.planning.page_ids import coalesce
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.planning.plan import BlockParts, Plan, make_plan
from kvferry.pools.planning.sides import PlanSide, entries_between, make_side
from kvferry.protocol import errors
from kvferry.protocol.manifests import Entry
from tests.kit.sides import ENTRY_BYTES, bytes_of, extents, side_of, sides
from tests.kit.tagged_memory import UNTOUCHED, Memory, TransferCase, cases, expected_memory, plans_of

MARGIN = 16
WAYS = ("plain", "one by one", "copy chunks", "rows", *(["vectored"] if vectored_copy_works() else []))


def best_copy() -> CopyBlocks:
    return copy_by_size if vectored_copy_works() else copy_one_by_one


def copied(way: str, plan: Plan, source: Memory, destination: Memory, data: st.DataObject) -> None:
    """Copy as plainly as can be, or one of the daemon's ways."""
    blocks, at = plan.blocks(), (source.ctypes.data, destination.ctypes.data)
    if way == "plain":
        assert plan.total_bytes == int(blocks[:, 2].sum())
        assert (blocks[:, 2] > 0).all()
        assert int((blocks[:, 0] + blocks[:, 2]).max()) <= len(source), "no block leaves its region"
        assert int((blocks[:, 1] + blocks[:, 2]).max()) <= len(destination)
        for start, to, size in blocks.tolist():
            destination[to : to + size] = source[start : start + size]
    elif way == "copy chunks":
        max_bytes = int(plan.source.segment_bytes.max()) + data.draw(st.integers(0, 500))
        chunks = cut_copy_chunks(plan.source, max_bytes)
        assert chunks == cut_copy_chunks(plan.destination, max_bytes)
        for chunk in chunks[::-1]:
            sent = copy_chunk_of(source, plan.source, chunk, data.draw(st.integers(0, 9)))
            scatter(plan.destination, at[1], chunk.first, chunk.stop, sent.ctypes.data, best_copy())
    elif way == "rows":
        total = total_segments(plan.source)
        for first, stop in itertools.pairwise(
            sorted(data.draw(st.sets(st.integers(1, total), max_size=4)) | {0, total})
        ):
            listed = plan.listed(first, stop, at)
            assert len(listed) <= stop - first
            assert listed.shape[1] == (3 if plan.is_whole else 6)
            copy_kernel.copy(listed)
    else:
        blocks[:, :2] += np.array(at, np.uint64)
        block_bytes, chunk_bytes = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 200))
        split = split_blocks(blocks, block_bytes)
        assert int(split[:, 2].max()) <= block_bytes
        bounds = chunk_bounds(split, chunk_bytes).tolist()
        assert len(bounds) - 1 <= -(-plan.total_bytes // chunk_bytes), "small blocks share a chunk"
        for start, stop in itertools.pairwise(bounds):
            assert int(split[start : stop - 1, 2].sum()) < chunk_bytes, "too large by less than a block"
            (copy_vectored if way == "vectored" else copy_one_by_one)(split[start:stop])


def copy_chunk_of(source: Memory, side: PlanSide, copy_chunk: CopyChunk, offset: int) -> Memory:
    """Gather a copy chunk, and check that only it was written."""
    staging = np.full(copy_chunk.size_bytes + 2 * MARGIN, UNTOUCHED, np.uint8)
    start = MARGIN + offset
    gather(side, source.ctypes.data, copy_chunk.first, copy_chunk.stop, staging.ctypes.data + start, best_copy())
    around = np.delete(staging, np.arange(start, start + copy_chunk.size_bytes))
    assert (around == UNTOUCHED).all()
    return staging[start : start + copy_chunk.size_bytes]


@pytest.mark.parametrize("way", WAYS)
@given(case=cases(), data=st.data())
def test_every_byte_arrives_and_no_other_changes(way: str, case: TransferCase, data: st.DataObject) -> None:
    destination = np.full(case.region_bytes, UNTOUCHED, np.uint8)
    for source, _, plan in plans_of(case):
        before = source.memory.copy()
        assert plan.pages == len(case.pages)
        copied(way, plan, source.memory, destination, data)
        assert (source.memory == before).all()
    assert (destination == expected_memory(case)).all()


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
        (errors.LengthMismatchError, "destination_pages", [1, 2], [1]),
        (errors.EmptyPagesError, "source_pages", [], []),
        (errors.PageOutOfRangeError, "source_pages", [0], [1]),
        (errors.PageOutOfRangeError, "source_pages", [6], [1]),  # the smallest entry of the source has 6 pages
        (errors.PageOutOfRangeError, "destination_pages", [1], [0]),
        (errors.PageOutOfRangeError, "destination_pages", [1], [7]),
        (errors.DuplicatePageError, "destination_pages", [1, 2], [4, 4]),
    ],
)
def test_refused_lists(error: type[errors.KvferryError], field: str, source: list[int], destination: list[int]) -> None:
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
    with pytest.raises(errors.UncoveredEntryError) as refused:
        make_plan(pair_entries([entry()], [entry(role="v")]), np.array([1]), np.array([1]))
    assert refused.value.field == "source.entries"


@pytest.mark.parametrize("heads", [Heads(1, 2), Heads(-1, 1), Heads(0, 0), Heads(2, 1)])
def test_a_side_refuses_heads_that_its_entry_lacks(heads: Heads) -> None:
    with pytest.raises(
        errors.GeometryMismatchError, match="main/k/0: pages of 24 bytes, 4 tokens and 2 heads cannot be cut"
    ):
        make_side([rank(0, 2)], [heads], np.array([1]))


PAGES = 4


def everything_free(coverage: Coverage, cells: Cells) -> bool:
    """Return True, or raise: cells that no other source holds are free all together or not at all."""
    found = coverage.free_extents(cells, np.zeros(len(cells.entries), np.bool_))
    return [(bool(one.rows.all()), one.start, one.stop) for one in found] == [(True, cells.start, cells.stop)]


SPLIT = [
    Entry(
        component=component, role=role, layer=0, base=0, pages=9, page_bytes=8, page_tokens=1, head_start=4,
        heads=heads, total_heads=8,
    )
    for component, role, heads in (("main", "k", 4), ("main", "index_k", 1), ("draft", "k", 2))
]  # fmt: skip


@st.composite
def send_requests(draw: st.DrawFn) -> tuple[Cells, list[bool], bool]:
    """Draw what a source could send, what of it others hold as well, and whether it arrives."""
    rows = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    heads: list[Heads | None] = []
    for entry in rows:
        start = draw(st.integers(0, (SPLIT[entry].heads or 1) - 1))
        some = Heads(start, draw(st.integers(1, (SPLIT[entry].heads or 1) - start)))
        heads.append(draw(st.sampled_from([None, some])))
    start = draw(st.integers(0, PAGES - 1))
    cells = Cells(np.array(rows), start, draw(st.integers(start + 1, PAGES)), tuple(heads))
    if not any(heads) and draw(st.booleans()):
        cells = cells._replace(heads=None)
    return cells, draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), draw(st.booleans())


def split_cells(cells: Cells, row: int) -> set[tuple[int, int, int]]:
    entry = int(cells.entries[row])
    heads = (cells.heads and cells.heads[row]) or Heads(0, SPLIT[entry].heads or 1)
    return {(entry, head, page) for head in range(heads.start, heads.stop) for page in range(cells.start, cells.stop)}


@given(st.lists(send_requests(), max_size=8), st.sampled_from(["withdraw", "waive", "keep"]))
def test_heads_are_counted_apart(sources: list[tuple[Cells, list[bool], bool]], in_the_end: str) -> None:
    coverage = Coverage(SPLIT, PAGES, ["draft"])
    planned, arrived = set[tuple[int, int, int]](), set[tuple[int, int, int]]()
    required = {
        (entry, head, page) for entry, head in [*((0, head) for head in range(4)), (1, 0)] for page in range(PAGES)
    }
    pages = [{one for one in required if one[2] == page} for page in range(PAGES)]
    for cells, replicated, arrives in sources:
        rows = [split_cells(cells, row) for row in range(len(cells.entries))]
        if not all(may_be_sent(row, row - planned, may) for row, may in zip(rows, replicated, strict=True)):
            with pytest.raises(errors.PageOverlapError):
                coverage.free_extents(cells, np.array(replicated))
            continue
        found = coverage.free_extents(cells, np.array(replicated))
        wanted = [cells._replace(start=one.start, stop=one.stop).of(one.rows) for one in found]
        assert sum(len(one.entries) for one in wanted) == sum(bool(row - planned) for row in rows)
        fresh = {cell for one in wanted for row in range(len(one.entries)) for cell in split_cells(one, row)}
        assert fresh == set().union(*rows) - planned
        of_all(coverage.plan, wanted)
        if in_the_end == "withdraw":
            of_all(coverage.withdraw, wanted)
            assert all(everything_free(coverage, one) for one in wanted)
            continue
        planned |= fresh
        if in_the_end == "waive":
            of_all(coverage.waive, wanted)
        if arrives:
            of_all(coverage.arrive, wanted)
            arrived |= fresh
    if in_the_end == "waive":
        required -= planned
    assert coverage.complete == (planned | required <= arrived)
    assert coverage.arrived_pages == sum(page <= arrived for page in pages)
    check_missing(coverage, required - planned)


def of_all(do: Callable[[Cells], None], some: list[Cells]) -> None:
    for one in some:
        do(one)


def may_be_sent(row: set[tuple[int, int, int]], free: set[tuple[int, int, int]], may: bool) -> bool:  # noqa: FBT001
    """Return whether a row, of which these cells are free, may be sent; ``may``: others hold its content as well."""
    if row == free:
        return True
    pages = sorted({page for _, _, page in free})
    whole = free == {(entry, head, page) for entry, head, page in row if page in pages}
    return may and whole and pages == list(range(pages[0], pages[-1] + 1) if pages else [])


def check_missing(coverage: Coverage, missing: set[tuple[int, int, int]]) -> None:
    if not missing:
        coverage.check_planned()
        return
    with pytest.raises((errors.UncoveredEntryError, errors.IncompleteError)):
        coverage.check_planned()
    told_apart = [Cells(np.array([entry]), page, page + 1, (Heads(head, 1),)) for entry, head, page in sorted(missing)]
    coverage.check_planned(told_apart)
    with pytest.raises((errors.UncoveredEntryError, errors.IncompleteError)):
        coverage.check_planned(told_apart[1:])


UNMAPPED = 8  # no process maps its first page


@pytest.mark.parametrize("copy", [copy_vectored, copy_one_by_one])
@pytest.mark.parametrize("count", [0, MAX_VECTOR - 1, MAX_VECTOR, 3 * MAX_VECTOR + 1])
def test_many_blocks(require: Callable[[object, str], None], copy: CopyBlocks, count: int) -> None:
    require(copy is copy_one_by_one or vectored_copy_works(), "process_vm_readv on ourselves")
    rng = np.random.default_rng(count)
    source = rng.integers(0, 256, 3 * count, np.uint8)
    destination = np.zeros(3 * count, np.uint8)
    places = rng.permutation(count)
    rows = [(source.ctypes.data + 3 * i, destination.ctypes.data + 3 * int(to), 3) for i, to in enumerate(places)]
    copy(np.array(rows, np.uint64).reshape(-1, 3))
    assert (destination.reshape(-1, 3)[places] == source.reshape(-1, 3)).all()


@pytest.mark.parametrize("side", [0, 1])
def test_an_address_that_is_not_mapped_is_an_error(require: Callable[[object, str], None], side: int) -> None:
    require(vectored_copy_works(), "process_vm_readv on ourselves")
    memory = np.arange(24, dtype=np.uint8)
    good = [memory.ctypes.data, memory.ctypes.data + 8, 8]
    bad = [memory.ctypes.data, memory.ctypes.data + 16, 8]
    bad[side] = UNMAPPED
    with pytest.raises(errors.TransferFailedError, match="8 of 16 bytes"):
        copy_vectored(np.array([good, bad], np.uint64))
    assert memory[8:16].tolist() == list(range(8)), "blocks before it are copied"


# -- gathering and scattering


WIDE = Entry(component="main", role="k", layer=0, base=0, pages=9, page_bytes=48, page_tokens=1, heads=2)


@pytest.mark.parametrize(("first", "stop"), [(3990, 4010), (3990, 8010)])
def test_rows_across_entries_take_little_more_than_their_own_memory(first: int, stop: int) -> None:
    side = side_of([(2, 2, 8)] * 3, 4000, cut=True)
    plan = Plan(side, side, coalesce(side.ids, side.ids), entries_between(side, side))
    copies = plan.listed(first, stop, (0, 0))
    while isinstance(copies.base, np.ndarray):
        copies = copies.base
    assert copies.nbytes == 48 * (stop - first)


@given(sides(), st.integers(0, 100))
@example(make_side([WIDE], None, np.arange(5, 0, -1)), 24)
@example(make_side([WIDE], [Heads(1, 1)], np.arange(5, 0, -1)), 24)
def test_copy_chunks_tile_the_segments_and_are_as_full_as_can_be(side: PlanSide, extra_bytes: int) -> None:
    segments = np.repeat(side.segment_bytes, len(side.ids)).tolist()
    max_bytes = max(segments) + extra_bytes
    copy_chunks = cut_copy_chunks(side, max_bytes)
    assert [copy_chunk.first for copy_chunk in copy_chunks] == [
        0,
        *(copy_chunk.stop for copy_chunk in copy_chunks[:-1]),
    ]
    assert copy_chunks[-1].stop == len(segments) == total_segments(side)
    for copy_chunk in copy_chunks:
        assert copy_chunk.size_bytes == sum(segments[copy_chunk.first : copy_chunk.stop]) <= max_bytes
        if copy_chunk.stop < len(segments):
            assert copy_chunk.size_bytes + segments[copy_chunk.stop] > max_bytes


@given(sides(), st.data())
@example(side_of([(2, 3, 4)], 9, cut=True), None)
@example(side_of([(2, 3, 4), (1, 4, 5)], 9, cut=True, held=2), None)
@example(side_of([(2, 3, 4), (1, 4, 5)], 9, cut=True, held=3), None)
@example(side_of([(2, 3, 4), (1, 1, 7)], 9, cut=False), None)
def test_what_is_hashed_as_it_is_gathered_and_what_a_device_takes_by_number_is_the_same(
    side: PlanSide, data: st.DataObject | None
) -> None:
    first, stop = data.draw(extents(side)) if data else (0, total_segments(side))
    memory = np.random.default_rng(0).integers(0, 256, ENTRY_BYTES * len(side.base), np.uint8)
    expected, hashed, taken = (np.zeros(bytes_of(side, first, stop), np.uint8) for _ in range(3))
    gather(side, memory.ctypes.data, first, stop, expected.ctypes.data)
    listed = FlatCopies.gathering(side).listed(
        first, stop, memory.ctypes.data, hashed.ctypes.data - offset_of(side, first)
    )
    digest = copy_kernel.copy_with_digest(listed)
    assert (hashed == expected).all()
    assert digest == xxhash.xxh3_64_intdigest(expected.tobytes())
    assert digest == digest_of(side, memory.ctypes.data, first, stop)
    written = np.zeros(len(expected), int)
    for cells in cells_of(side, first, stop):
        rows = int(cells.numbers.max()) + 1
        end = cells.offset_bytes + rows * cells.cell_bytes
        assert end <= len(memory), "no byte beyond the last cell is named"
        flat = slice(cells.flat_bytes, cells.flat_bytes + cells.size_bytes)
        taken[flat] = memory[cells.offset_bytes : end].reshape(rows, cells.cell_bytes)[cells.numbers].reshape(-1)
        written[flat] += 1
    assert (taken == expected).all()
    assert (written == 1).all()


def test_a_segment_that_no_slot_holds_is_refused() -> None:
    side = side_of([(4, 2, 8), (4, 2, 16)], 3, cut=True)
    gather(side, UNMAPPED, 2, 2, UNMAPPED)  # nothing is asked for
    assert len(cut_copy_chunks(side, 64)) == 5
    with pytest.raises(
        errors.BounceBufferTooSmallError,
        match=r"entry 1 sends 64 bytes per page \(page_bytes 128\); a bounce buffer has 63",
    ):
        cut_copy_chunks(side, 63)


@given(sides(), st.data(), st.integers(0, 300))
def test_as_many_segments_as_fit_and_never_none(side: PlanSide, data: st.DataObject, extra_bytes: int) -> None:
    first, stop = data.draw(extents(side))
    max_bytes = data.draw(st.integers(1, 60)) + extra_bytes
    end = segments_that_fit(side, first, stop, max_bytes)
    assert first < end <= stop
    assert end == first + 1 or bytes_of(side, first, end) <= max_bytes
    if end < stop:
        assert bytes_of(side, first, end + 1) > max_bytes


def test_cells_are_as_wide_as_can_be() -> None:
    k, v = cells_of(side_of([(2, 3, 4), (1, 1, 7)], 9, cut=False), 0, 18)
    assert (k.cell_bytes, v.cell_bytes, k.numbers is v.numbers) == (24, 7, True), "a whole page is one, uploaded once"
    (cells,) = cells_of(side_of([(2, 3, 4)], 1, cut=True), 0, 1)
    assert (cells.offset_bytes, cells.cell_bytes) == (8, 4)
    assert cells.numbers.tolist() == [6, 9], "page 1 begins with row 2 of three heads"
    (cells,) = cells_of(side_of([(1, 3, 4)], 1, cut=True, held=2), 0, 1)
    assert (cells.cell_bytes, cells.numbers.tolist()) == (4, [3, 4]), "two of three heads are no whole part of a row"
