"""Splitting, cutting and copying blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

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
from kvferry.pools.planning.geometry import Heads
from kvferry.pools.planning.page_ids import coalesce
from kvferry.pools.planning.plan import Blocks, Plan, PlanSide, entries_between, make_side
from kvferry.protocol.errors import BounceBufferTooSmallError, TransferFailedError
from kvferry.protocol.manifests import Entry
from tests.kit.sides import ENTRY_BYTES, SIZES, bytes_of, extents, side_of, sides
from tests.kit.tagged_memory import UNTOUCHED, Memory, TransferCase, cases, expected_memory, plans_of

UNMAPPED = 8  # no process maps its first page


def blocks_of(sizes: list[int]) -> Blocks:
    ends = np.cumsum(np.array(sizes, np.uint64), dtype=np.uint64)
    starts = ends - np.array(sizes, np.uint64)
    return np.stack((starts + np.uint64(1000), starts + np.uint64(5000), np.array(sizes, np.uint64)), axis=1)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 200))
@example([7, 7, 7], 7)
@example([50, 1], 50)
def test_blocks_are_split_in_order_and_chunks_tile_them(sizes: list[int], max_bytes: int) -> None:
    split, whole = split_blocks(blocks_of(sizes), max_bytes).tolist(), blocks_of(sizes).tolist()
    expected = [
        [source + at, to + at, min(max_bytes, size - at)]
        for source, to, size in whole
        for at in range(0, size, max_bytes)
    ]
    assert split == expected
    bounds = chunk_bounds(blocks_of(sizes), max_bytes).tolist()
    assert (bounds[0], bounds[-1]) == (0, len(sizes))
    assert bounds == sorted(set(bounds))
    for start, stop in itertools.pairwise(bounds):
        assert sum(sizes[start:stop]) < max_bytes + sizes[stop - 1], "too large by less than a block"
    assert len(bounds) - 1 <= -(-sum(sizes) // max_bytes), "small blocks share a chunk"


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
    with pytest.raises(TransferFailedError, match="8 of 16 bytes"):
        copy_vectored(np.array([good, bad], np.uint64))
    assert memory[8:16].tolist() == list(range(8)), "blocks before it are copied"


# -- gathering and scattering against the byte-level oracle, copy chunks, and that nothing beside is touched.


MARGIN = 16
SIDES = st.builds(lambda sizes, pages, cut: side_of(sizes, pages, cut=cut), SIZES, st.integers(1, 16), st.booleans())


WIDE = Entry(component="main", role="k", layer=0, base=0, pages=9, page_bytes=48, page_tokens=1, heads=2)


def best_copy() -> CopyBlocks:
    return copy_by_size if vectored_copy_works() else copy_one_by_one


def copy_chunk_of(source: Memory, side: PlanSide, copy_chunk: CopyChunk, offset: int = 0) -> Memory:
    """Gather a copy chunk, and check that only it was written."""
    staging = np.full(copy_chunk.size_bytes + 2 * MARGIN, UNTOUCHED, np.uint8)
    start = MARGIN + offset
    gather(side, source.ctypes.data, copy_chunk.first, copy_chunk.stop, staging.ctypes.data + start, best_copy())
    around = np.delete(staging, np.arange(start, start + copy_chunk.size_bytes))
    assert (around == UNTOUCHED).all()
    return staging[start : start + copy_chunk.size_bytes]


@given(cases(), st.integers(0, 500), st.integers(0, 9))
def test_every_byte_arrives_by_copy_chunks_and_no_other_changes(
    case: TransferCase, extra_bytes: int, offset: int
) -> None:
    destination = np.full(case.region_bytes, UNTOUCHED, np.uint8)
    for source, _, plan in plans_of(case):
        before = source.memory.copy()
        largest = int(plan.source.segment_bytes.max())
        copy_chunks = cut_copy_chunks(plan.source, largest + extra_bytes)
        assert copy_chunks == cut_copy_chunks(plan.destination, largest + extra_bytes)
        for copy_chunk in copy_chunks[::-1]:
            sent = copy_chunk_of(source.memory, plan.source, copy_chunk, offset)
            at = destination.ctypes.data
            scatter(plan.destination, at, copy_chunk.first, copy_chunk.stop, sent.ctypes.data, best_copy())
        assert (source.memory == before).all()
    assert (destination == expected_memory(case)).all()


@given(cases(), st.data())
def test_every_byte_arrives_by_rows_between_the_pools(case: TransferCase, data: st.DataObject) -> None:
    destination = np.full(case.region_bytes, UNTOUCHED, np.uint8)
    for source, _, plan in plans_of(case):
        total = total_segments(plan.source)
        cuts = sorted(data.draw(st.sets(st.integers(1, total), max_size=4)) | {0, total})
        for first, stop in itertools.pairwise(cuts):
            listed = plan.listed(first, stop, (source.memory.ctypes.data, destination.ctypes.data))
            assert len(listed) <= stop - first
            assert listed.shape[1] == (3 if plan.is_whole else 6)
            copy_kernel.copy(listed)
    assert (destination == expected_memory(case)).all()


@pytest.mark.parametrize(("first", "stop"), [(3990, 4010), (3990, 8010)])
def test_rows_across_entries_take_little_more_than_their_own_memory(first: int, stop: int) -> None:
    side = side_of([(2, 2, 8)] * 3, 4000, cut=True)
    plan = Plan(side, side, coalesce(side.ids, side.ids), entries_between(side, side))
    copies = plan.listed(first, stop, (0, 0))
    while isinstance(copies.base, np.ndarray):
        copies = copies.base
    assert copies.nbytes == 48 * (stop - first)


@given(SIDES, st.integers(0, 100))
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
@example(side_of([(2, 3, 4), (1, 4, 5)], 9, cut=True, held=3), None)
@example(side_of([(2, 3, 4), (1, 1, 7)], 9, cut=False), None)
def test_what_is_hashed_as_it_is_gathered_is_all_of_it(side: PlanSide, data: st.DataObject | None) -> None:
    first, stop = data.draw(extents(side)) if data else (0, total_segments(side))
    memory = np.random.default_rng(0).integers(0, 256, ENTRY_BYTES * len(side.base), np.uint8)
    expected, found = (np.zeros(bytes_of(side, first, stop), np.uint8) for _ in range(2))
    gather(side, memory.ctypes.data, first, stop, expected.ctypes.data)
    flat_address = found.ctypes.data - offset_of(side, first)
    listed = FlatCopies.gathering(side).listed(first, stop, memory.ctypes.data, flat_address)
    digest = copy_kernel.copy_with_digest(listed)
    assert (found == expected).all()
    assert digest == xxhash.xxh3_64_intdigest(expected.tobytes())
    assert digest == digest_of(side, memory.ctypes.data, first, stop)


def test_a_segment_that_no_slot_holds_is_refused() -> None:
    side = side_of([(4, 2, 8), (4, 2, 16)], 3, cut=True)
    gather(side, UNMAPPED, 2, 2, UNMAPPED)  # nothing is asked for
    assert len(cut_copy_chunks(side, 64)) == 5
    with pytest.raises(
        BounceBufferTooSmallError, match=r"entry 1 sends 64 bytes per page \(page_bytes 128\); a bounce buffer has 63"
    ):
        cut_copy_chunks(side, 63)


# -- segments as numbered cells: what a device takes by number are the bytes that the host gathers.


@given(sides(), st.data())
@example(side_of([(2, 3, 4)], 9, cut=True), None)
@example(side_of([(2, 3, 4), (1, 4, 5)], 9, cut=True, held=2), None)
@example(side_of([(2, 3, 4), (1, 1, 7)], 9, cut=False), None)
def test_cells_by_number_are_the_bytes_that_the_host_gathers(side: PlanSide, data: st.DataObject | None) -> None:
    first, stop = data.draw(extents(side)) if data else (0, total_segments(side))
    memory = np.random.default_rng(0).integers(0, 256, ENTRY_BYTES * len(side.base), np.uint8)
    expected = np.zeros(bytes_of(side, first, stop), np.uint8)
    gather(side, memory.ctypes.data, first, stop, expected.ctypes.data)
    taken = np.zeros_like(expected)
    written = np.zeros(len(expected), int)
    for cells in cells_of(side, first, stop):
        rows = int(cells.numbers.max()) + 1
        end = cells.offset_bytes + rows * cells.cell_bytes
        assert end <= len(memory), "no byte beyond the last cell is named"
        view = memory[cells.offset_bytes : end].reshape(rows, cells.cell_bytes)
        flat = slice(cells.flat_bytes, cells.flat_bytes + cells.size_bytes)
        taken[flat] = view[cells.numbers].reshape(-1)
        written[flat] += 1
    assert (taken == expected).all()
    assert (written == 1).all()


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
