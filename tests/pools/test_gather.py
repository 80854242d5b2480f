"""Gathering and scattering against the byte-level oracle, copy chunks, and that nothing beside is touched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.planning.copies import (
    MANY_RUNS,
    CopyBlocks,
    CopyChunk,
    copy_by_size,
    copy_one_by_one,
    cut_copy_chunks,
    gather,
    scatter,
    total_segments,
    vectored_copy_works,
)
from kvferry.pools.planning.geometry import Heads
from kvferry.pools.planning.plan import PlanSide, make_side
from kvferry.protocol.errors import BounceBufferTooSmallError
from kvferry.protocol.manifests import Entry
from tests.pools.sides import ENTRY_BYTES, SIZES, side_of
from tests.pools.tagged_memory import UNTOUCHED, Memory, TransferCase, cases, expected_memory, plans_of

MARGIN = 16
WAIT_S = 30.0
SIDES = st.builds(
    lambda sizes, pages, cut: side_of(sizes, pages, cut=cut), SIZES, st.integers(1, 2 * MANY_RUNS), st.booleans()
)


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


@given(cases())
def test_the_order_of_bytes_is_that_of_the_segments(case: TransferCase) -> None:
    for source, _, plan in plans_of(case):
        everything = CopyChunk(0, total_segments(plan.source), plan.total_bytes)
        together = copy_chunk_of(source.memory, plan.source, everything)
        sizes = np.repeat(plan.source.segment_bytes, len(plan.source.ids)).tolist()
        one_by_one = [
            copy_chunk_of(source.memory, plan.source, CopyChunk(number, number + 1, size))
            for number, size in enumerate(sizes)
        ]
        assert (together == np.concatenate(one_by_one)).all()


@given(SIDES, st.data())
def test_scatter_undoes_gather(side: PlanSide, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, total_segments(side) - 1))
    stop = data.draw(st.integers(first, total_segments(side)))
    size_bytes = int(np.repeat(side.segment_bytes, len(side.ids))[first:stop].sum())
    source = np.random.default_rng(0).integers(0, 256, ENTRY_BYTES * len(side.base), np.uint8)
    sent = copy_chunk_of(source, side, CopyChunk(first, stop, size_bytes))
    back = np.full(len(source), UNTOUCHED, np.uint8)
    scatter(side, back.ctypes.data, first, stop, sent.ctypes.data, best_copy())
    assert (copy_chunk_of(back, side, CopyChunk(first, stop, size_bytes)) == sent).all()
    assert np.count_nonzero(back != UNTOUCHED) <= size_bytes


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


def test_a_segment_that_no_slot_holds_is_refused() -> None:
    side = side_of([(4, 2, 8), (4, 2, 16)], 3, cut=True)
    assert len(cut_copy_chunks(side, 64)) == 5
    with pytest.raises(
        BounceBufferTooSmallError, match=r"entry 1 sends 64 bytes per page \(page_bytes 128\); a bounce buffer has 63"
    ):
        cut_copy_chunks(side, 63)


def test_nothing_is_asked_for() -> None:
    side = side_of([(4, 2, 8)], 3, cut=True)
    unmapped = 8
    gather(side, unmapped, 2, 2, unmapped)
    scatter(side, unmapped, 0, 0, unmapped)


@pytest.mark.parametrize("way", [gather, scatter])
def test_slices_are_copied_without_the_lock_of_the_interpreter(way: Callable[..., None]) -> None:
    # Few and long slices: with many, working out where they lie releases it as well.
    side, pages, rounds = side_of([(2, 2, 1 << 19)], 8, cut=True), 8, 50
    memory, flat = np.zeros((pages + 1) << 21, np.uint8), np.zeros(pages << 20, np.uint8)
    begun, done = threading.Event(), [0]

    def copy_on() -> None:
        begun.set()
        for _ in range(rounds):
            way(side, memory.ctypes.data, 0, pages, flat.ctypes.data)
            done[0] += 1

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(WAIT_S)  # the other thread keeps the lock until it gives it away
    try:
        thread = threading.Thread(target=copy_on)
        thread.start()
        begun.wait(WAIT_S)
        done_by_now = done[0]
        thread.join(WAIT_S)
    finally:
        sys.setswitchinterval(interval_s)
    assert done_by_now < done[0] == rounds
