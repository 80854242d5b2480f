"""What one user may have of what all share: nearly all of it, but never what the next one, or root, begins with."""

from __future__ import annotations

import os

import pytest

from kvferry.daemon.process.shares import share

FIRST, SECOND, THIRD, ROOT = 1001, 1002, 1003, 0


@pytest.mark.parametrize(
    ("user", "size", "of_others", "expected"),
    [
        (FIRST, 1024, 0, 960),
        (SECOND, 1024, 960, 60),
        (THIRD, 1024, 1020, 3),
        (THIRD, 1024, 1023, 0),
        (FIRST, 16, 0, 15),
        (FIRST, 1, 0, 0),
        (ROOT, 1024, 0, 1024),
        (ROOT, 1024, 1023, 1),
        (os.geteuid(), 7, 3, 4),
        (FIRST, 10, 12, 0),
        (ROOT, 10, 12, 0),
    ],
)
def test_a_part_of_what_others_leave_stays(user: int, size: int, of_others: int, expected: int) -> None:
    assert share(user, size, of_others) == expected
