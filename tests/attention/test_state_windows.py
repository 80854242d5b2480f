"""The pages of a sliding window, against an oracle that knows tokens only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.attention.state_windows import window_of
from kvferry.protocol.errors import InvalidFieldError


@given(st.integers(0, 200), st.integers(1, 80), st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 7, 8, 16]))
def test_a_window_is_the_pages_of_its_tokens(prefix: int, beyond: int, window: int, page_size: int) -> None:
    seq_len = prefix + beyond
    found = window_of(prefix, seq_len, window, page_size)
    pages = {position // page_size for position in range(max(prefix, seq_len - window), seq_len)}
    assert (list(range(*found)), found.pages) == (sorted(pages), len(pages))


@pytest.mark.parametrize(
    ("given_", "pages"),
    [
        ((0, 0, 128, 128), (0, 0)),
        ((0, 1, 128, 128), (0, 1)),
        ((0, 512, 256, 128), (2, 4)),
        ((0, 513, 256, 128), (2, 5)),
        ((0, 639, 256, 128), (2, 5)),
        ((0, 640, 256, 128), (3, 5)),
        ((384, 513, 256, 128), (3, 5)),
        ((256, 256, 256, 128), (2, 2)),
        ((0, 100, 1 << 40, 128), (0, 1)),
    ],
)
def test_both_ends_move_with_the_length(given_: tuple[int, int, int, int], pages: tuple[int, int]) -> None:
    assert window_of(*given_) == pages


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
    with pytest.raises(InvalidFieldError) as caught:
        window_of(*given_)
    assert caught.value.field == field
