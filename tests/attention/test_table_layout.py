"""Tables lie in their region one after the other, aligned, and the views are over the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.attention.table_layout import ALIGNMENT_BYTES, table_layout, table_shape, views
from kvferry.protocol.errors import InvalidFieldError


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


@given(st.integers(1, 10**6), st.integers(0, 64), st.integers(0, 10**6), st.integers(1, 512))
@example(32768, 16, 0, 128)
@example(32752, 16, 0, 128)  # just full
@example(32753, 16, 0, 128)  # one token more
@example(32768, 16, 32897, 128)
@example(1, 0, 0, 128)
def test_the_last_token_fits_and_no_page_is_too_many(
    context: int, draft: int, request_row: int, page_size: int
) -> None:
    shape = table_shape(
        max_batch=1, max_context_tokens=context, page_size=page_size, draft_tokens=draft, request_row_tokens=request_row
    )
    longest = max(context + draft, request_row)
    assert shape.row_tokens - page_size < longest <= shape.row_tokens == shape.columns * page_size
    assert shape.draft_tokens == draft


def test_the_captured_size_that_holds_a_batch() -> None:
    shape = table_shape(max_batch=16, max_context_tokens=64, page_size=16, captured=(8, 1, 4))
    assert shape.captured == (1, 4, 8)
    assert [shape.replayed_rows(batch) for batch in (0, 1, 2, 4, 5, 8, 9, 16)] == [1, 1, 4, 4, 8, 8, 9, 16]
    assert table_shape(max_batch=16, max_context_tokens=64, page_size=16).replayed_rows(5) == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch", 0),
        ("max_context_tokens", 0),
        ("page_size", 0),
        ("draft_tokens", -1),
        ("request_row_tokens", -1),
        ("window", 0),
        ("captured", (0, 1)),
        ("captured", (1, 9)),
        ("captured", (2, 2)),
        ("max_context_tokens", 1 << 31),
        ("max_context_tokens", 1 << 29),
    ],
)
def test_what_makes_no_sense(field: str, value: object) -> None:
    right: dict[str, Any] = {"max_batch": 8, "max_context_tokens": 64, "page_size": 1}
    table_shape(**right)
    with pytest.raises(InvalidFieldError) as caught:
        table_shape(**right | {field: value})
    assert caught.value.field == field
