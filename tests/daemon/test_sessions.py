"""Sessions without sockets: replies kept for a retry, events kept until they are acknowledged, limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.control.sessions import SMALL_REPLY_BYTES, Peer, Session, SessionRegistry
from kvferry.daemon.process.tenants import Tenants
from kvferry.protocol.codec import Frames
from kvferry.protocol.config.schema import TenantConfig
from kvferry.protocol.config.tenants import number_of
from kvferry.protocol.errors import OverloadedError, ReplyGoneError
from kvferry.protocol.events import Settled
from kvferry.protocol.limits import Limits

PEER = Peer(pid=4242, uid=1000, gid=1000)
LIMITS = Limits(max_requests_per_session=4)


@pytest.fixture
def session() -> Session:
    return Session(1, "prefill-0", PEER, LIMITS)


def event(number: int) -> Settled:
    return Settled(request_id=f"{number:032x}", pool="decode", direction="receive")


def test_a_user_with_many_sessions_keeps_out_neither_the_next_one_nor_root() -> None:
    registry, opened = SessionRegistry(Limits()), dict.fromkeys((1000, 1001, 0), 0)
    for user in opened:
        with pytest.raises(OverloadedError):  # noqa: PT012  once there is no room
            while True:
                registry.open("engine", Peer(1, user, user))
                opened[user] += 1
    assert [*opened.values()] == [960, 60, 4]


def test_sessions_that_are_kept_for_a_tenant_nobody_else_opens() -> None:
    """Half of 1,024; the other half goes to who comes first, but for the 16th that stays."""
    tenants = Tenants({"team": TenantConfig(users=(2000,), share=0.5)})
    registry, opened = SessionRegistry(Limits(), tenants), dict.fromkeys((1000, 2000), 0)
    for user in opened:
        with pytest.raises(OverloadedError):  # noqa: PT012  once there is no room
            while True:
                registry.open("engine", Peer(1, user, user), tenant=number_of("team") if user == 2000 else user)
                opened[user] += 1
    assert [*opened.values()] == [481, 510]


def test_a_secret_is_not_shown(session: Session) -> None:
    assert not [one for one in (session.secret.hex(), str(session.secret)) if one in repr(session)]


def test_the_oldest_replies_are_forgotten(session: Session) -> None:
    for number in range(1, 101):
        assert session.begin(number)
        assert session.answered(number, [b"%d" % number])
    assert [number for number in range(1, 101) if session.reply_to(number)] == [97, 98, 99, 100]
    for forgotten in (1, 96):
        with pytest.raises(ReplyGoneError, match="was handled before"):
            session.begin(forgotten)


def test_of_too_many_bytes_of_replies_the_oldest_go_first() -> None:
    limits = Limits(max_kept_session_reply_bytes=3 * SMALL_REPLY_BYTES, max_kept_reply_bytes=4 * SMALL_REPLY_BYTES)
    registry = SessionRegistry(limits)
    one, other = registry.open("one", PEER), registry.open("other", PEER)
    small: Frames = [b"x" * SMALL_REPLY_BYTES]
    large: Frames = [b"x", b"y" * SMALL_REPLY_BYTES]
    for number, reply in enumerate((large, small, large, large), 1):
        one.begin(number)
        assert one.answered(number, reply)
    assert one.reply_bytes == 2 * SMALL_REPLY_BYTES + 2
    with pytest.raises(ReplyGoneError):
        one.reply_to(1)
    assert not one.begin(1)
    assert one.reply_to(2) == small
    for number in (1, 2):
        other.begin(number)
        other.answered(number, large)
    assert registry.reply_bytes > limits.max_kept_reply_bytes
    registry.bound_replies()
    assert registry.reply_bytes == 3 * (SMALL_REPLY_BYTES + 1)
    registry.close(one)
    assert registry.reply_bytes == other.reply_bytes
    assert not one.answered(9, large)


@given(
    st.lists(
        st.one_of(st.just("event"), st.just("push"), st.just("rebind"), st.just("bind"), st.integers(0, 12)),
        max_size=40,
    )
)
def test_events_stay_until_they_are_acknowledged(steps: list[str | int]) -> None:
    session, made, pushed, acknowledged, identities = Session(1, "", PEER, LIMITS), 0, 0, 0, 0
    session.bind(b"0")
    for step in steps:
        if step == "event":
            made += 1
            session.add_event(event(made))
        elif step == "push":
            while session.unsent:
                assert session.unsent.popleft().cursor == pushed + 1
                pushed += 1
        elif step == "rebind":
            identities += 1
            session.bind(b"%d" % identities)
            pushed = acknowledged
        elif step == "bind":  # the same peer is not told again
            session.bind(b"%d" % identities)
        elif isinstance(step, int):
            seen = list(session.acknowledge(step))
            assert [one.cursor for one in seen] == list(range(acknowledged + 1, min(step, made) + 1))
            acknowledged = max(acknowledged, min(step, made))
            pushed = max(pushed, acknowledged)
        assert [one.cursor for one in session.unacknowledged] == list(range(acknowledged + 1, made + 1))
        assert [one.cursor for one in session.unsent] == list(range(pushed + 1, made + 1))
