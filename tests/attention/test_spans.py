"""Positions and the extents they make, beside sets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.attention.row_ranges import Positions, distinct, expanded, spans_of

POSITIONS = st.sets(st.integers(0, 40)).map(lambda found: np.array(sorted(found), np.int64))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5))))
def test_extents_as_positions(extents: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in extents], np.int64)
    lengths = np.array([length for _, length in extents], np.int64)
    found = expanded(starts, starts + lengths)
    assert found.tolist() == [start + at for start, length in extents for at in range(length)]


@given(st.lists(POSITIONS, max_size=4))
def test_positions_of_any_part(parts: list[Positions]) -> None:
    assert distinct(parts).tolist() == sorted({int(one) for part in parts for one in part})


@given(POSITIONS)
def test_positions_as_extents(positions: Positions) -> None:
    spans = spans_of(positions)
    assert expanded(*spans).tolist() == positions.tolist()
    pairs = spans.pairs()
    assert all(end < following for (_, end), (following, _) in pairwise(pairs)), "none touch"
