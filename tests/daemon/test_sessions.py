"""Sessions without sockets: replies kept for a retry, events kept until they are acknowledged, limits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.control.sessions import SMALL_REPLY_BYTES, Peer, Session, SessionRegistry
from kvferry.protocol.codec import Frames
from kvferry.protocol.errors import OverloadedError, ReplyGoneError
from kvferry.protocol.events import Settled
from kvferry.protocol.limits import Limits

PEER = Peer(pid=4242, uid=1000, gid=1000)
LIMITS = Limits(max_requests_per_session=4, max_sessions=3)


@pytest.fixture
def session() -> Session:
    """Return a session that may have four requests."""
    return Session(1, "prefill-0", PEER, LIMITS)


def event(number: int) -> Settled:
    return Settled(request_id=f"{number:032x}", pool="decode", direction="receive")


def test_a_retry_is_told_apart_and_gets_the_same_reply(session: Session) -> None:
    assert not session.answered(7, [b"never asked"])
    assert session.reply_to(7) is None
    assert session.begin(7)
    assert session.is_pending(7)
    assert not session.begin(7)
    assert session.reply_to(7) is None
    assert session.answered(7, [b"first"])
    assert not session.answered(7, [b"second"])
    assert not session.is_pending(7)
    assert not session.begin(7)
    assert session.reply_to(7) == [b"first"]


def test_a_user_with_many_sessions_keeps_out_neither_the_next_one_nor_root() -> None:
    registry = SessionRegistry(Limits())
    opened = [sessions_until_refused(registry, user) for user in (1000, 1001, 0)]
    assert opened == [960, 60, 4]


def sessions_until_refused(registry: SessionRegistry, user: int) -> int:
    """Open sessions until one is refused; return how many there are."""
    for number in itertools.count():
        try:
            registry.open("engine", Peer(1, user, user))
        except OverloadedError:
            return number
    raise AssertionError


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


def test_too_many_requests_without_a_reply_are_refused(session: Session) -> None:
    for number in range(1, 5):
        session.begin(number)
    for _ in range(2):
        with pytest.raises(OverloadedError, match="4 requests of the session are in flight"):
            session.begin(5)
    assert not session.is_pending(5)
    session.answered(3, [b"done"])
    assert session.begin(5)
    assert session.reply_to(3) is None, "its place was needed"


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


def test_sessions_are_known_by_number_and_secret_until_they_are_closed() -> None:
    registry = SessionRegistry(LIMITS)
    first, second = registry.open("a", PEER), registry.open("b", Peer(1, 2, 3))
    assert first.session_id != second.session_id
    assert first.secret != second.secret
    assert registry.get(first.session_id) is first
    assert registry.by_secret(second.secret) is second
    assert [registry.by_secret(wrong) for wrong in (b"", first.secret[:-1])] == [None, None]
    assert (list(registry), len(registry)) == ([first, second], 2)
    assert (first.tenant, second.tenant) == (1000, 2)
    assert all(secret not in repr(first) for secret in (first.secret.hex(), str(first.secret)))
    with pytest.raises(OverloadedError, match="2 sessions live"):
        registry.open("c", PEER)
    registry.close(first)
    assert (registry.get(first.session_id), registry.by_secret(first.secret)) == (None, None)
    assert registry.open("c", PEER).session_id not in {first.session_id, second.session_id}
