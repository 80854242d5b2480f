"""Which units of an expandable segment registered tensors lie on, and in which order those are mapped."""

from __future__ import annotations

import struct
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.devices.npu_segments import Units, joined, units_of
from kvferry.protocol.errors import InvalidFieldError

UNIT = 20 << 20


def test_torchs_handle_is_read() -> None:
    handle = b"\x01e" + struct.pack("<4Q", UNIT, 2, 7, 9)
    assert units_of(handle) == Units(UNIT, (7, 9))
    assert units_of(b"\x01c" + bytes(65)) is None, "one allocation, by its key"
    for wrong in (handle[:-1], handle + b"x", b"\x01e" + struct.pack("<2Q", UNIT, 0), handle[:4] + handle):
        with pytest.raises(InvalidFieldError):
            units_of(wrong)


@given(st.lists(st.integers(1, 3), min_size=2, max_size=8), st.integers(0, 7), st.randoms())
def test_neighbours_are_one_run_in_their_order(sizes: list[int], which: int, random: Random) -> None:
    """Each tensor begins in the unit that the one before it ends in; another segment's are left out."""
    pieces, last = [], 0
    for size in sizes:
        pieces.append(Units(UNIT, tuple(range(last, last + size))))
        last += size - 1
    other = Units(UNIT, (100, 101))
    one, shuffled = pieces[which % len(pieces)], [*pieces, other]
    random.shuffle(shuffled)
    run = joined(one, shuffled)
    assert run.handles == tuple(range(last + 1))
    assert joined(other, shuffled) == other
    assert all(right == left + 1 for left, right in pairwise(run.handles))


@pytest.mark.parametrize("handles", [((1, 2), (2, 1)), ((1, 2), (1, 3)), ((1, 2), (3, 2)), ((1, 1),), ((1, 2, 3, 1),)])
def test_what_contradicts_itself_is_refused(handles: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidFieldError, match="the same units"):
        joined(Units(UNIT, handles[0]), [Units(UNIT, one) for one in handles[1:]])
