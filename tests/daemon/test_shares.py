"""What one user may have of what all share: nearly all of it, but never what the next one, or root, begins with."""

from __future__ import annotations

import contextlib
import os

import pytest

from kvferry.daemon.process.descriptors import Descriptors
from kvferry.daemon.process.shares import share
from kvferry.protocol.errors import OutOfDescriptorsError

FIRST, SECOND, THIRD, ROOT = 1001, 1002, 1003, 0


@pytest.mark.parametrize(
    ("user", "size", "of_others", "expected"),
    [
        (FIRST, 1024, 0, 960),
        (SECOND, 1024, 960, 60),
        (THIRD, 1024, 1000, 20),
        (THIRD, 1024, 1020, 0),
        (THIRD, 100, 96, 3),
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


def test_descriptors_are_left_for_root_however_many_users_there_are() -> None:
    descriptors = Descriptors(1024, lambda: 0)
    users = [Holder() for _ in range(3)]
    for user, one in zip((FIRST, SECOND, THIRD), users, strict=True):
        with contextlib.suppress(OutOfDescriptorsError):
            while True:
                descriptors.take(one, user, "sessions", 1)
    root = Holder()
    descriptors.take(root, ROOT, "sessions", 2)
    with pytest.raises(OutOfDescriptorsError, match="user 1004"):
        descriptors.take(users[0], 1004, "sessions", 100)


class Holder:
    """Has descriptors."""
