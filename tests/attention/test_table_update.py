"""Tables lie in their region one after another; an update or a window that makes no sense is refused by field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.attention.state_windows import window_of
from kvferry.attention.table_layout import ALIGNMENT_BYTES, table_layout, table_shape, views
from kvferry.attention.table_update import TableUpdate, check_update
from kvferry.attention.window_table import SwaMap
from kvferry.protocol import errors
from kvferry.protocol.codec import PageIds


@given(st.integers(1, 300), st.integers(1, 500), st.sampled_from([None, 1, 512]))
def test_tables_are_aligned_and_apart(max_batch: int, context: int, window: int | None) -> None:
    shape = table_shape(max_batch=max_batch, max_context_tokens=context, page_size=16, window=window)
    layout = table_layout(shape)
    region = np.zeros(layout.size_bytes, np.uint8)
    made = views(shape, region)
    assert (made.block_tables_swa is None) == (window is None) == (layout.block_tables_swa is None)
    assert made.block_tables_swa is None or made.block_tables_swa.shape == made.block_tables.shape
    starts = [layout.block_tables, layout.block_tables_swa, layout.seq_lens]
    for value, (start, table) in enumerate(zip(starts, made, strict=True), 1):
        if start is not None and table is not None:
            assert start % ALIGNMENT_BYTES == 0
            assert table.ctypes.data == region.ctypes.data + start
            assert not table.any(), "tables overlap"
            table[:] = value
    assert made.block_tables.shape == (max_batch, shape.columns)
    assert made.seq_lens.shape == (max_batch,)
    with pytest.raises(ValueError, match="size"):
        views(shape, region[:3])


@given(st.integers(1, 10**6), st.integers(0, 64), st.integers(0, 10**6), st.integers(1, 512))
@example(32752, 16, 0, 128)  # just full
@example(32753, 16, 0, 128)  # one token more
@example(32768, 16, 32897, 128)
def test_the_last_token_fits_and_no_page_is_too_many(
    context: int, draft: int, request_row: int, page_size: int
) -> None:
    shape = table_shape(
        max_batch=1, max_context_tokens=context, page_size=page_size, draft_tokens=draft, request_row_tokens=request_row
    )
    longest = max(context + draft, request_row)
    assert shape.row_tokens - page_size < longest <= shape.row_tokens == shape.columns * page_size


def test_the_captured_size_that_holds_a_batch() -> None:
    shape = table_shape(max_batch=16, max_context_tokens=64, page_size=16, captured=(8, 1, 4))
    assert [shape.replayed_rows(batch) for batch in (0, 1, 2, 4, 5, 8, 9, 16)] == [1, 1, 4, 4, 8, 8, 9, 16]
    assert table_shape(max_batch=16, max_context_tokens=64, page_size=16).replayed_rows(5) == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, 0) for field in ("max_batch", "max_context_tokens", "page_size", "window")),
        *((field, -1) for field in ("draft_tokens", "request_row_tokens")),
        *(("captured", value) for value in ((0, 1), (1, 9), (2, 2))),
        *(("max_context_tokens", value) for value in (1 << 31, 1 << 29)),
    ],
)
def test_a_shape_that_makes_no_sense(field: str, value: object) -> None:
    right: dict[str, Any] = {"max_batch": 8, "max_context_tokens": 64, "page_size": 1}
    table_shape(**right)
    with pytest.raises(errors.InvalidFieldError) as caught:
        table_shape(**right | {field: value})
    assert caught.value.field == field


SHAPE = table_shape(max_batch=64, max_context_tokens=20, page_size=4, draft_tokens=3)


def one_entry(row: int, column: int, page: int) -> dict[str, list[int]]:
    return {"entry_rows": [row], "entry_columns": [column], "entry_pages": [page]}


WRONG: list[tuple[type[errors.KvferryError], str, dict[str, Any]]] = [
    (errors.TooLargeError, "lengths", {"lengths": [1] * 65}),
    (errors.InvalidFieldError, "extra_tokens", {"extra_tokens": 4}),
    (errors.InvalidFieldError, "extra_tokens", {"extra_tokens": -1}),
    (errors.LengthMismatchError, "entry_pages", one_entry(0, 0, 1) | {"entry_pages": [1, 2]}),
    (errors.LengthMismatchError, "entry_pages", one_entry(0, 0, 1) | {"entry_rows": []}),
    (errors.InvalidFieldError, "entry_rows", one_entry(40, 0, 1)),
    (errors.InvalidFieldError, "entry_rows", one_entry(-1, 0, 1)),
    (errors.InvalidFieldError, "entry_columns", one_entry(0, 6, 1)),
    (errors.InvalidFieldError, "entry_columns", one_entry(1, 1 << 62, 1)),
    (errors.PageOutOfRangeError, "entry_pages", one_entry(0, 0, 0)),
    (errors.PageOutOfRangeError, "entry_pages", one_entry(0, 0, 50)),
    (errors.InvalidFieldError, "entry_rows", {"entry_rows": [3, 3], "entry_columns": [2, 2], "entry_pages": [1, 2]}),
    (errors.InvalidFieldError, "entry_rows", one_entry(3, 0, 1) | {"rows": [3], "row_pages": [1], "pages": [9]}),
    (errors.LengthMismatchError, "row_pages", {"rows": [0, 1], "row_pages": [1], "pages": [1]}),
    (errors.LengthMismatchError, "pages", {"rows": [0, 1], "row_pages": [1, 2], "pages": [1, 2]}),
    (errors.InvalidFieldError, "rows", {"rows": [40], "row_pages": [1], "pages": [1]}),
    (errors.InvalidFieldError, "rows", {"rows": [5, 5], "row_pages": [1, 1], "pages": [1, 2]}),
    (errors.InvalidFieldError, "row_pages", {"rows": [0], "row_pages": [7], "pages": [1] * 7}),
    (errors.InvalidFieldError, "row_pages", {"rows": [0, 1], "row_pages": [2, -1], "pages": [1]}),
    (errors.PageOutOfRangeError, "pages", {"rows": [0], "row_pages": [2], "pages": [1, 0]}),
    (errors.InvalidFieldError, "bound_full", {"bound_full": [1], "bound_window": [1]}),
    (errors.InvalidFieldError, "bound_full", {"released": [1]}),
]


def update_of(fields: dict[str, Any]) -> TableUpdate:
    """Return an update of 40 rows with these fields."""
    made = {name: np.array(value, np.int64) if isinstance(value, list) else value for name, value in fields.items()}
    return TableUpdate(**{"lengths": np.full(40, 4)} | made)


@pytest.mark.parametrize(("error", "field", "fields"), WRONG)
def test_what_is_wrong(error: type[errors.KvferryError], field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(error) as caught:
        check_update(update_of(fields), SHAPE, 50)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "bad"), [("entry_rows", 40), ("entry_columns", -1), ("entry_pages", 50), ("twice", 0)]
)
def test_the_last_of_many_entries(name: str, bad: int) -> None:
    fields = {"entry_rows": np.arange(20), "entry_columns": np.full(20, 2), "entry_pages": np.arange(1, 21)}
    check_update(update_of(fields), SHAPE, 50)
    fields["entry_rows" if name == "twice" else name][-1] = bad
    said = "row 0 column 2 is named more" if name == "twice" else f"{bad} at position 19"
    with pytest.raises(errors.KvferryError, match=said) as caught:
        check_update(update_of(fields), SHAPE, 50)
    assert caught.value.field == ("entry_rows" if name == "twice" else name)


def test_a_row_as_a_whole_may_be_emptied_beside_entries_of_others() -> None:
    check_update(update_of(one_entry(2, 5, 9) | {"rows": [0, 1], "row_pages": [1, 0], "pages": [9]}), SHAPE, 50)


# -- windows, and the map from full to window pages

FULL_PAGES, WINDOW_PAGES = 12, 6


@given(st.integers(0, 200), st.integers(1, 80), st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 7, 8, 16]))
def test_a_window_is_the_pages_of_its_tokens(prefix: int, beyond: int, window: int, page_size: int) -> None:
    seq_len = prefix + beyond
    found = window_of(prefix, seq_len, window, page_size)
    pages = {position // page_size for position in range(max(prefix, seq_len - window), seq_len)}
    assert (list(range(*found)), found.pages) == (sorted(pages), len(pages))


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ((-1, 5, 4, 2), "prefix_tokens"),
        ((6, 5, 4, 2), "prefix_tokens"),
        ((0, -1, 4, 2), "prefix_tokens"),
        ((0, 5, 0, 2), "window"),
        ((0, 5, 4, 0), "page_size"),
    ],
)
def test_a_window_that_makes_no_sense(given_: tuple[int, int, int, int], field: str) -> None:
    assert window_of(256, 256, 256, 128) == (2, 2), "an empty one does"
    with pytest.raises(errors.InvalidFieldError) as caught:
        window_of(*given_)
    assert caught.value.field == field


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int64)


@pytest.mark.parametrize(
    ("full_ids", "window_ids", "error", "field"),
    [
        ((2,), (2, 3), errors.LengthMismatchError, "window_ids"),
        ((2, FULL_PAGES), (2, 3), errors.PageOutOfRangeError, "full_ids"),
        ((2, 3), (2, WINDOW_PAGES), errors.PageOutOfRangeError, "window_ids"),
        ((2, 2), (2, 3), errors.DuplicatePageError, "full_ids"),
        ((2, 3), (2, 2), errors.DuplicatePageError, "window_ids"),
        ((2, 1), (2, 3), errors.DuplicatePageError, "full_ids"),
        ((2, 3), (2, 1), errors.DuplicatePageError, "window_ids"),
        ((1, 2), None, errors.WindowMismatchError, "full_ids"),
        ((1, 1), None, errors.DuplicatePageError, "full_ids"),
        ((1, 0), None, errors.PageOutOfRangeError, "full_ids"),
    ],
)
def test_what_cannot_be_bound_or_released_changes_nothing(
    full_ids: tuple[int, ...], window_ids: tuple[int, ...] | None, error: type[errors.KvferryError], field: str
) -> None:
    swa = SwaMap(FULL_PAGES, WINDOW_PAGES)
    swa.bind(ids(1), ids(1))
    with pytest.raises(error) as caught:
        swa.release(ids(*full_ids)) if window_ids is None else swa.bind(ids(*full_ids), ids(*window_ids))
    assert caught.value.field == field
    assert swa.pages.tolist() == [0, 1] + [0] * (FULL_PAGES - 2)
    swa.check()
    with pytest.raises(ValueError, match="read-only"):
        swa.pages[1] = 2
