"""The tables' width is the formula, and what makes no sense is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.attention.table_layout import table_shape
from kvferry.protocol.errors import InvalidFieldError


@pytest.mark.parametrize(
    ("context", "draft", "request_row", "columns"),
    [
        (32768, 16, 0, 257),
        (32752, 16, 0, 256),
        (32753, 16, 0, 257),
        (32768, 0, 0, 256),
        (32768, 16, 32784, 257),
        (32768, 16, 32897, 258),
        (1, 0, 0, 1),
    ],
)
def test_the_width(context: int, draft: int, request_row: int, columns: int) -> None:
    shape = table_shape(
        max_batch=8, max_context_tokens=context, page_size=128, draft_tokens=draft, request_row_tokens=request_row
    )
    assert (shape.columns, shape.row_tokens, shape.draft_tokens) == (columns, columns * 128, draft)


@given(st.integers(1, 10**6), st.integers(0, 64), st.integers(0, 10**6), st.integers(1, 512))
def test_the_last_token_fits_and_no_page_is_too_many(
    context: int, draft: int, request_row: int, page_size: int
) -> None:
    shape = table_shape(
        max_batch=1,
        max_context_tokens=context,
        page_size=page_size,
        draft_tokens=draft,
        request_row_tokens=request_row,
    )
    longest = max(context + draft, request_row)
    assert shape.row_tokens - page_size < longest <= shape.row_tokens


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
