"""An update that is wrong in itself is refused by field, before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.attention.table_layout import table_shape
from kvferry.attention.table_update import TableUpdate, check_update
from kvferry.protocol.errors import (
    InvalidFieldError,
    KvferryError,
    LengthMismatchError,
    PageOutOfRangeError,
    TooLargeError,
)

SHAPE = table_shape(max_batch=64, max_context_tokens=20, page_size=4, draft_tokens=3)
WRONG: list[tuple[type[KvferryError], str, dict[str, Any]]] = [
    (TooLargeError, "lengths", {"lengths": [1] * 65}),
    (InvalidFieldError, "extra_tokens", {"extra_tokens": 4}),
    (InvalidFieldError, "extra_tokens", {"extra_tokens": -1}),
    (LengthMismatchError, "entry_pages", {"entry_rows": [0], "entry_columns": [0], "entry_pages": [1, 2]}),
    (LengthMismatchError, "entry_pages", {"entry_rows": [], "entry_columns": [0], "entry_pages": [1]}),
    (InvalidFieldError, "entry_rows", {"entry_rows": [40], "entry_columns": [0], "entry_pages": [1]}),
    (InvalidFieldError, "entry_rows", {"entry_rows": [-1], "entry_columns": [0], "entry_pages": [1]}),
    (InvalidFieldError, "entry_columns", {"entry_rows": [0], "entry_columns": [6], "entry_pages": [1]}),
    (InvalidFieldError, "entry_columns", {"entry_rows": [1], "entry_columns": [-1], "entry_pages": [1]}),
    (InvalidFieldError, "entry_columns", {"entry_rows": [1], "entry_columns": [1 << 62], "entry_pages": [1]}),
    (PageOutOfRangeError, "entry_pages", {"entry_rows": [0], "entry_columns": [0], "entry_pages": [0]}),
    (PageOutOfRangeError, "entry_pages", {"entry_rows": [0], "entry_columns": [0], "entry_pages": [50]}),
    (InvalidFieldError, "entry_rows", {"entry_rows": [3, 3], "entry_columns": [2, 2], "entry_pages": [1, 2]}),
    (LengthMismatchError, "row_pages", {"rows": [0, 1], "row_pages": [1], "pages": [1]}),
    (LengthMismatchError, "pages", {"rows": [0, 1], "row_pages": [1, 2], "pages": [1, 2]}),
    (LengthMismatchError, "pages", {"pages": [1]}),
    (InvalidFieldError, "rows", {"rows": [40], "row_pages": [1], "pages": [1]}),
    (InvalidFieldError, "rows", {"rows": [5, 5], "row_pages": [1, 1], "pages": [1, 2]}),
    (InvalidFieldError, "row_pages", {"rows": [0], "row_pages": [7], "pages": [1] * 7}),
    (InvalidFieldError, "row_pages", {"rows": [0, 1], "row_pages": [2, -1], "pages": [1]}),
    (PageOutOfRangeError, "pages", {"rows": [0], "row_pages": [2], "pages": [1, 0]}),
    (PageOutOfRangeError, "pages", {"rows": [0], "row_pages": [2], "pages": [1, 1 << 40]}),
    (InvalidFieldError, "bound_full", {"bound_full": [1], "bound_window": [1]}),
    (InvalidFieldError, "bound_full", {"released": [1]}),
]


def update_of(fields: dict[str, Any]) -> TableUpdate:
    """Return an update of 40 rows with these fields."""
    made = {name: np.array(value, np.int64) if isinstance(value, list) else value for name, value in fields.items()}
    return TableUpdate(**{"lengths": np.full(40, 4)} | made)


@pytest.mark.parametrize(("error", "field", "fields"), WRONG)
def test_what_is_wrong(error: type[KvferryError], field: str, fields: dict[str, Any]) -> None:
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
    with pytest.raises(KvferryError, match=said) as caught:
        check_update(update_of(fields), SHAPE, 50)
    assert caught.value.field == ("entry_rows" if name == "twice" else name)


def test_a_row_as_a_whole_and_in_entries() -> None:
    fields = {"rows": [3], "row_pages": [1], "pages": [9], "entry_rows": [2], "entry_columns": [5], "entry_pages": [9]}
    check_update(update_of(fields), SHAPE, 50)
    with pytest.raises(InvalidFieldError, match="row 3 is sent as a whole and in entries"):
        check_update(update_of(fields | {"entry_rows": [3]}), SHAPE, 50)
    check_update(update_of(fields | {"rows": [0, 1], "row_pages": [1, 0]}), SHAPE, 50)  # a row may be emptied
