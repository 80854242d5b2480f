"""Tables lie in their region one after the other, aligned, and the views are over the same bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.attention.graph_tables import TableChange
from kvferry.attention.row_ranges import NONE
from kvferry.attention.table_layout import ALIGNMENT_BYTES, table_layout, table_shape, views


@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([None, 1, 512]))
def test_tables_are_aligned_and_apart(max_batch: int, context: int, window: int | None) -> None:
    shape = table_shape(max_batch=max_batch, max_context_tokens=context, page_size=16, window=window)
    layout = table_layout(shape)
    region = np.zeros(layout.size_bytes, np.uint8)
    made = views(shape, region)
    assert (made.block_tables_swa is None) == (window is None) == (layout.block_tables_swa is None)
    starts = [layout.block_tables, layout.block_tables_swa, layout.seq_lens]
    for value, (start, table) in enumerate(zip(starts, made, strict=True), 1):
        if start is not None and table is not None:
            assert start % ALIGNMENT_BYTES == 0
            assert table.ctypes.data == region.ctypes.data + start
            assert not table.any(), "tables overlap"
            table[:] = value
    assert layout.size_bytes % ALIGNMENT_BYTES == 0
    assert made.block_tables.shape == (max_batch, shape.columns)
    assert made.seq_lens.shape == (max_batch,)


def test_a_region_that_is_too_small() -> None:
    shape = table_shape(max_batch=4, max_context_tokens=5000, page_size=16)
    with pytest.raises(ValueError, match="reshape"):
        views(shape, np.zeros(512, np.uint8))


@given(st.data(), st.sampled_from([None, 5]))
def test_a_changes_bytes_are_its_elements(data: st.DataObject, window: int | None) -> None:
    shape = table_shape(max_batch=5, max_context_tokens=50, page_size=10, window=window)
    some = st.sets(st.integers(0, 24)).map(lambda found: np.array(sorted(found), np.int64))
    change = TableChange(
        batch=0,
        replayed_rows=0,
        block_tables=data.draw(some),
        block_tables_swa=NONE if window is None else data.draw(some),
        length_rows=data.draw(st.integers(0, 5)),
    )
    layout = table_layout(shape)
    by_bytes, by_elements = np.zeros(layout.size_bytes, np.uint8), np.zeros(layout.size_bytes, np.uint8)
    pairs = change.byte_spans(layout).pairs()
    for start, end in pairs:
        by_bytes[start:end] = 255
    tables = views(shape, by_elements)
    tables.block_tables.reshape(-1)[change.block_tables] = -1
    if tables.block_tables_swa is not None:
        tables.block_tables_swa.reshape(-1)[change.block_tables_swa] = -1
    tables.seq_lens[: change.length_rows] = -1
    assert by_bytes.tolist() == by_elements.tolist()
    assert all(one_end < other_start for (_, one_end), (other_start, _) in pairwise(pairs))
