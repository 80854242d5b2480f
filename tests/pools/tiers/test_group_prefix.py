"""The longest prefix of several groups, against a definition that tries every length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.tiers.group_prefix import longest_prefix

BLOCKS = 12
GROUPS = st.lists(st.tuples(st.integers(1, BLOCKS + 2), st.lists(st.booleans(), min_size=BLOCKS, max_size=BLOCKS)))


@given(st.integers(0, BLOCKS), GROUPS)
def test_each_group_has_the_last_blocks_of_the_longest_prefix(limit: int, groups: list[tuple[int, list[bool]]]) -> None:
    lengths = [n for n in range(limit + 1) if all(all(has[max(0, n - last) : n]) for last, has in groups)]
    found = longest_prefix(limit, [last for last, _ in groups], [np.array(has) for _, has in groups])
    assert found == max(lengths)


@pytest.mark.parametrize(
    ("last", "there", "expected"),
    [
        (1, "...x....", 4),  # a state
        (3, "...xx.xxx", 9),  # a window
        (3, "xx..xx.xx", 2),  # of a shorter prefix than the window all
        (3, "........", 0),
    ],
)
def test_windows_and_states(last: int, there: str, expected: int) -> None:
    assert longest_prefix(len(there), [last], [np.array([one == "x" for one in there])]) == expected
