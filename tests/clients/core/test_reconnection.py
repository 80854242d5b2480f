"""When a client tries to reach its daemon again: the decisions, by a clock of the test's own."""

from __future__ import annotations

import pytest

from kvferry.clients.core.reconnection import FIRST_PAUSE_S, LONGEST_PAUSE_S, Reconnection
from kvferry.protocol import errors

GONE = errors.DaemonLostError("the daemon closed the session")


@pytest.mark.parametrize(
    "error",
    [
        GONE,
        errors.OverloadedError("too many connect"),
        errors.AccessDeniedError("the folder is being made"),
        errors.NoSessionError("session 1 still has its socket", retryable=True),
    ],
)
def test_what_passes_is_tried_again_at_growing_intervals_until_the_time_is_over(error: errors.KvferryError) -> None:
    one = Reconnection(GONE, 100.0, 10.0)
    assert one.pause_s(100.0) == 0.0
    now, pauses = 100.0, []
    while (ended := one.failed(error, now)) is None:
        pauses.append(one.pause_s(now))
        assert one.overdue(now) is None
        now += pauses[-1]
    assert pauses[:2] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S])
    assert pauses == sorted(pauses)
    assert max(pauses) == pytest.approx(LONGEST_PAUSE_S)
    assert now >= 110.0
    assert isinstance(ended, errors.DaemonLostError)
    assert error.detail in ended.detail
    assert one.attempts == len(pauses) + 1


def test_what_does_not_pass_ends_it_at_once() -> None:
    one = Reconnection(GONE, 100.0, 10.0)
    assert isinstance(one.failed(errors.NoSessionError("it has ended"), 100.0), errors.SessionLostError)
    for error in (errors.SessionLostError("nothing of it"), errors.VersionMismatchError("protocol 3")):
        assert one.failed(error, 100.0) is error
    assert isinstance(one.overdue(110.0), errors.DaemonLostError)
