"""What sessions keep has a bound for each session, for each user and for all; and what one user may have of it."""

from __future__ import annotations

import os

import pytest

from kvferry.daemon.process.shares import Shares, share
from kvferry.daemon.quota import Quota
from kvferry.protocol.config.tenants import number_of
from kvferry.protocol.errors import OverloadedError

SMALL = 1 << 14
FIRST, SECOND, THIRD, ROOT = 1001, 1002, 1003, 0


def test_bytes_are_counted_by_session_and_in_all() -> None:
    kept = Quota("request", 3 * SMALL, 4 * SMALL, small=SMALL)
    kept.keep(1, 7, 2 * SMALL)
    kept.keep(1, "stays", SMALL)
    with pytest.raises(OverloadedError, match=r"of session 1 are kept.*max_kept_session_request_bytes"):
        kept.check(1, SMALL + 1)
    kept.check(1, SMALL)  # what is small is always taken: it may be what ends the others
    kept.keep(2, 1, 1)
    with pytest.raises(OverloadedError, match=r"of all sessions are kept.*max_kept_request_bytes"):
        kept.check(2, SMALL + 1)
    kept.drop_all(1, lambda key: key != "stays")
    assert (kept.of(1), kept.total) == (SMALL, SMALL + 1)
    kept.drop(1, "stays")
    kept.drop(1, "stays")
    kept.drop_all(2)
    assert (kept.of(1), kept.of(2), kept.total) == (0, 0, 0)


def test_what_a_user_keeps_leaves_the_next_one_its_part() -> None:
    users = {1: 1001, 2: 1001, 3: 1002, 4: 0}
    most = 64 * SMALL
    kept = Quota("request", most, most, users.__getitem__, small=SMALL)
    payloads = Quota("payload", most, most, users.__getitem__, field="payload", part_of=kept)
    kept.keep(1, 7, 40 * SMALL)
    payloads.keep(2, 7, 20 * SMALL)
    with pytest.raises(OverloadedError, match=f"the share of user 1001, who has {60 * SMALL}"):
        kept.check(2, SMALL + 1)
    with pytest.raises(OverloadedError, match="request bytes of all sessions"):
        payloads.check(2, SMALL + 1)
    kept.check(3, 3 * SMALL)
    payloads.check(3, 3 * SMALL)
    with pytest.raises(OverloadedError):
        payloads.check(3, SMALL, beside=3 * SMALL)
    kept.check(4, 4 * SMALL)
    kept.check(2, SMALL)  # what is small has a quarter more
    assert (kept.of(2), payloads.of(2)) == (0, 20 * SMALL), (
        "a part's bytes count to the whole, not to a session's bound"
    )
    kept.keep(1, 8, 16 * SMALL)
    with pytest.raises(OverloadedError):
        kept.check(2, SMALL)
    kept.check(3, SMALL)
    users.clear()  # the sessions have ended
    kept.drop_all(1)
    payloads.drop(2, 7)
    assert (kept.total, payloads.total) == (0, 0)


def test_the_worst_is_the_largest_session_of_the_user_who_keeps_most() -> None:
    users = {1: 1001, 2: 1001, 3: 1002}
    kept = Quota("reply", 9, 10, users.__getitem__)
    for session, key, size in ((1, "a", 3), (2, "b", 4), (2, "c", 1), (3, "d", 6)):
        kept.keep(session, key, size)
    assert (kept.worst(), kept.oldest(2)) == (2, "b")
    kept.drop(2, "b")
    assert kept.worst() == 3


# -- nearly all of what all share, but never what the next user, or root, begins with


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


A, B = number_of("a"), number_of("b")


@pytest.mark.parametrize(
    ("tenant", "used", "most"),
    [
        (FIRST, {}, 1024 - 510 - 33),  # of what is not kept for others a 16th stays
        (FIRST, {A: 510}, 1024 - 510 - 33),
        (FIRST, {A: 600}, 1024 - 600 - 27),
        (A, {}, 1024 - 64),
        (A, {FIRST: 481}, 510),  # what is kept for it, though a 16th of what is left would stay
        (A, {FIRST: 900}, 124),
        (ROOT, {FIRST: 481, A: 510}, 33),
    ],
)
def test_what_is_kept_for_a_tenant_nobody_else_gets(tenant: int, used: dict[int, int], most: int) -> None:
    assert Shares({A: 0.5}).most(tenant, 1024, used) == most


def test_a_tenant_with_a_share_gets_it_though_another_was_there_first() -> None:
    shares, used = Shares({A: 0.5, B: 0.25}), dict[int, int]()
    for tenant in (FIRST, A, B, ROOT):
        used[tenant] = shares.most(tenant, 1024, used)
    assert used == {FIRST: 1024 - 765 - 17, A: 510, B: 255, ROOT: 17}


def test_a_quota_keeps_what_is_kept_for_a_tenant() -> None:
    tenants = {1: FIRST, 2: A}
    kept = Quota("request", 1024, 1024, tenants.__getitem__, shares=Shares({A: 0.5}))
    assert kept.fits(1, 481)
    assert not kept.fits(1, 482)
    kept.keep(1, "first", 481)
    assert kept.fits(2, 510)
