"""Segments as numbered cells: what a device takes by number are the bytes that the host gathers."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.planning.copies import cells_of, gather, segments_that_fit, total_segments
from kvferry.pools.planning.plan import PlanSide
from tests.pools.sides import ENTRY_BYTES, bytes_of, extents, side_of, sides


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


def test_a_whole_page_is_one_cell_and_entries_share_their_numbers() -> None:
    side = side_of([(2, 3, 4), (1, 1, 7)], 9, cut=False)
    k, v = cells_of(side, 0, total_segments(side))
    assert (k.cell_bytes, v.cell_bytes) == (24, 7)
    assert k.numbers is v.numbers is side.ids, "their upload is worth once"
    assert (k.flat_bytes, v.flat_bytes) == (0, 9 * 24)
    assert list(cells_of(side, 4, 4)) == []


def test_a_slice_is_cut_into_the_widest_cells() -> None:
    (cells,) = cells_of(side_of([(2, 3, 4)], 1, cut=True), 0, 1)
    assert (cells.offset_bytes, cells.cell_bytes) == (8, 4)
    assert cells.numbers.tolist() == [6, 9], "page 1 begins with row 2 of three heads"
    (cells,) = cells_of(side_of([(1, 3, 4)], 1, cut=True, held=2), 0, 1)
    assert (cells.cell_bytes, cells.numbers.tolist()) == (4, [3, 4]), "two of three heads are no whole part of a row"
