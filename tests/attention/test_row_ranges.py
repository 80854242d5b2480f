"""Which rows move: the lengths between which a row stays are those of equal columns, for every length there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.attention.row_ranges import RowRanges, Shown
from kvferry.attention.state_windows import window_of
from kvferry.attention.table_layout import TableShape, table_shape
from kvferry.attention.table_step import touched_by_few, touched_by_many

SHAPES = st.builds(
    lambda page_size, draft, window: table_shape(
        max_batch=3, max_context_tokens=30, page_size=page_size, draft_tokens=draft, window=window
    ),
    st.integers(1, 9),
    st.integers(0, 5),
    st.one_of(st.none(), st.integers(1, 12)),
)


def columns_of(length: int, extra: int, shape: TableShape) -> tuple[int, int]:
    """Return the columns by the definitions."""
    if not length:
        return 0, 0
    end = window_of(0, length + extra, 1, shape.page_size).end_page
    return (window_of(0, length, shape.window, shape.page_size).first_page if shape.window else 0), end


def shown(ranges: RowRanges, row: int) -> tuple[int, int]:
    return int(ranges.shown.first[row]), int(ranges.shown.end[row])


@pytest.mark.parametrize("at_once", [True, False])
@given(shape=SHAPES, data=st.data())
def test_a_row_moves_when_its_columns_change(shape: TableShape, data: st.DataObject, *, at_once: bool) -> None:
    extra = data.draw(st.integers(0, shape.draft_tokens))
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=3, max_size=3))
    ranges = RowRanges(shape)
    ranges.show(ranges.after(np.zeros(3, np.int64), extra), 3, extra)
    if at_once:
        ranges.show(ranges.after(np.array(lengths), extra), 3, extra)
    else:
        moves = ranges.moves(np.array(lengths), extra)
        assert moves is not None
        ranges.move(moves, 3)
    assert [shown(ranges, row) for row in range(3)] == [columns_of(one, extra, shape) for one in lengths]
    for length in range(31):
        found = ranges.moves(np.full(3, length), extra)
        assert found is not None
        changed = [row for row in range(3) if columns_of(length, extra, shape) != shown(ranges, row)]
        assert [one.row for one in found] == changed
        assert all((one.new_first, one.new_end) == columns_of(length, extra, shape) for one in found)


@given(shape=SHAPES, data=st.data())
def test_few_and_many_find_the_same_entries(shape: TableShape, data: st.DataObject) -> None:
    lengths = st.lists(st.integers(0, 30), max_size=3)
    before, then = sorted((data.draw(lengths), data.draw(lengths)), key=len)
    every = st.integers(0, 3 * shape.columns - 1)
    entries = data.draw(st.lists(every, unique=True, max_size=6))
    ranges = RowRanges(shape)
    ranges.show(ranges.after(np.array(before, np.int64), 0), len(before), 0)
    moves = ranges.moves(np.array(then, np.int64), 0)
    assert moves is not None
    few = touched_by_few(moves, ranges.shown, entries, shape.columns)
    after = ranges.after(np.array(then, np.int64), 0)
    many = touched_by_many(ranges.shown, after, np.empty(0, np.int64), np.array(entries, np.int64), shape.columns)
    assert (few.positions.tolist(), few.visible.tolist()) == (many.positions.tolist(), many.visible.tolist())
    assert few.positions.dtype == np.int64
    assert few.visible.dtype == np.bool_
    changed = entries_shown(ranges.shown, shape) ^ entries_shown(after, shape)
    stayed = set(entries) & entries_shown(ranges.shown, shape) & entries_shown(after, shape)
    assert changed | stayed <= set(few.positions.tolist())


def entries_shown(what: Shown, shape: TableShape) -> set[int]:
    return {
        row * shape.columns + column
        for row in range(shape.max_batch)
        for column in range(what.first[row], what.end[row])
    }
