"""From bytes to a handler and back, without a socket: every request is answered, once, whatever it is."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from kvferry.daemon.control.dispatch import TOGETHER_BYTES, Answer, Call
from kvferry.daemon.control.sessions import Session
from kvferry.protocol.base import Busy
from kvferry.protocol.envelope import Batch, Event, Reply
from kvferry.protocol.errors import KvferryError, OverloadedError, PoolFullError
from kvferry.protocol.events import Finished, Settled, SingleEvent, Together
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import Allocated, PoolDeleted
from tests.daemon.dispatching import ALLOCATE, BOOT, DEALER, DELETE, Dispatching, error_of

LIMITS = Limits(max_requests_per_session=4, default_deadline_ms=10)


@pytest.fixture
def daemon() -> Dispatching:
    """Return a dispatcher and its surroundings."""
    return Dispatching(LIMITS)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"secret": b""}, "NO_SESSION", "secret"),
        ({"secret": b"x" * 16}, "NO_SESSION", "secret"),
        ({"boot": BootId("f" * 32)}, "STALE_BOOT", "boot_id"),
        ({"boot": NO_BOOT}, "INVALID_FIELD", "boot_id"),
        ({"deadline_ms": LIMITS.max_deadline_ms + 1}, "INVALID_FIELD", "deadline_ms"),
    ],
)
def test_refused(daemon: Dispatching, fields: dict[str, bytes], code: str, field: str) -> None:
    assert error_of(daemon.take(ALLOCATE, **fields)) == (1, code, field)  # type: ignore[arg-type]
    assert not daemon.calls
    assert daemon.counters.snapshot()[f"requests.refused.{code.lower()}"] == 1
    (reply,) = daemon.take(ALLOCATE)
    assert isinstance(reply.body, Allocated), "a refused number may be used again"


def test_a_retry_is_done_once_and_answered_again(daemon: Dispatching) -> None:
    first = daemon.take(ALLOCATE, number=5)
    again = daemon.take(ALLOCATE, number=5, identity=b"after a reconnect")
    assert first == again
    assert len(daemon.calls) == 1
    assert [identity for identity, _, _ in daemon.sent] == [DEALER, b"after a reconnect"]


@pytest.mark.parametrize(
    ("error", "code", "field"),
    [(PoolFullError("3 of 16 free", field="count"), "POOL_FULL", "count"), (KeyError("/etc/passwd"), "INTERNAL", "")],
)
def test_an_error_is_kept_for_a_retry_too_and_a_bug_tells_no_secrets(
    daemon: Dispatching, error: Exception, code: str, field: str
) -> None:
    def fail(_call: Call) -> None:
        raise error

    daemon.on_call = fail
    assert error_of(daemon.take(ALLOCATE)) == error_of(daemon.take(ALLOCATE)) == (1, code, field)
    assert len(daemon.calls) == 1
    assert "passwd" not in repr(daemon.sent)


@pytest.mark.anyio
async def test_a_deferred_reply_goes_where_the_session_is_now(daemon: Dispatching) -> None:
    assert daemon.take(DELETE, number=3, deadline_ms=60_000) == []
    assert daemon.take(DELETE, number=3, deadline_ms=60_000, identity=b"new") == []
    (call,) = daemon.deferred
    assert (call.message_id, call.deadline_s) == (3, 60.0)
    daemon.answer(3)
    daemon.answer(3, "b")
    assert daemon.sent == [(b"new", Reply(3, BOOT, PoolDeleted(pool="a")), ())]
    assert daemon.take(DELETE, number=3) == [Reply(3, BOOT, PoolDeleted(pool="a"))]


@pytest.mark.anyio
async def test_a_deferred_request_has_a_deadline_and_counts_as_what_it_was_answered_with(daemon: Dispatching) -> None:
    daemon.said.clear()
    daemon.take(DELETE, number=3)
    await daemon.said.wait()
    assert error_of(daemon.messages) == (3, "DEADLINE", "")
    daemon.answer(3)
    daemon.dispatcher.answer_error(daemon.session, 3, PoolFullError("0 free"))
    assert len(daemon.sent) == 1, "the late reply is dropped"
    assert refused(daemon) == {"deadline": 1}


def refused(daemon: Dispatching) -> dict[str, int]:
    """Return what is counted of refused requests, by code."""
    counted = daemon.counters.snapshot()
    return {name.rpartition(".")[2]: n for name, n in counted.items() if name.startswith("requests.refused.")}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "code"), [(PoolFullError("0 free"), "pool_full"), (OverloadedError("too many"), "busy")]
)
async def test_a_refusal_counts_once_whether_at_once_deferred_or_in_a_batch(
    daemon: Dispatching, error: KvferryError, code: str
) -> None:
    def fail(call: Call) -> Answer:  # noqa: ARG001
        raise error

    daemon.on_call = fail
    daemon.take(ALLOCATE, number=1)
    daemon.take(ALLOCATE, number=1)
    assert refused(daemon) == {code: 1}, "the repeated answer of a retry is no other refusal"
    daemon.take(DELETE, number=2, deadline_ms=60_000)
    daemon.dispatcher.answer_error(daemon.session, 2, error)
    assert refused(daemon) == {code: 2}
    daemon.take(Batch(requests=(ALLOCATE, DELETE)), number=4, deadline_ms=60_000)
    daemon.dispatcher.answer_error(daemon.session, daemon.deferred[1].message_id, error)
    assert refused(daemon) == {code: 4}


@pytest.mark.anyio
async def test_busy_once_too_much_is_in_flight(daemon: Dispatching) -> None:
    for number in range(1, 5):
        daemon.take(DELETE, number=number, deadline_ms=60_000)
    (busy,) = daemon.take(ALLOCATE, number=5)
    assert isinstance(busy, Reply)
    assert isinstance(busy.body, Busy)
    assert busy.body.retry_after_ms > 0
    daemon.answer(2)
    (reply,) = daemon.take(ALLOCATE, number=5)
    assert isinstance(reply.body, Allocated), "the same request, unchanged, after a while"
    daemon.dispatcher.forget_session(daemon.session)


class Waiting:
    """A handler that is a coroutine, and waits for what the test says."""

    def __init__(self, daemon: Dispatching) -> None:
        self.daemon, self.may_go, self.cancelled = daemon, asyncio.Event(), 0
        daemon.dispatcher.handle("DELETE_POOL", self.handle)

    async def handle(self, call: Call) -> Answer:
        """Wait, and answer."""
        self.daemon.deferred.append(call)
        try:
            await self.may_go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.daemon.on_deferred()
        return Answer(PoolDeleted(pool="a"))


@pytest.mark.anyio
async def test_a_coroutine_answers_at_once_or_later(daemon: Dispatching) -> None:
    def fail() -> None:
        raise PoolFullError("0 free")

    waiting = Waiting(daemon)
    assert daemon.take(DELETE, number=1, deadline_ms=60_000) == []
    assert daemon.take(Batch(requests=(ALLOCATE, DELETE)), number=2, deadline_ms=60_000) == []
    assert len(daemon.deferred) == 2, "the first step comes before the next request"
    daemon.said.clear()
    waiting.may_go.set()
    assert daemon.take(DELETE, number=3) == [Reply(3, BOOT, PoolDeleted(pool="a"))]
    while len(daemon.sent) < 3:
        await next_turn()
    assert [one.message_id for one in daemon.messages if isinstance(one, Reply)] == [3, 1, 2]
    daemon.on_deferred = fail
    assert error_of(daemon.take(DELETE, number=4)) == (4, "POOL_FULL", "")
    await daemon.dispatcher.close()
    assert not waiting.cancelled


@pytest.mark.anyio
@pytest.mark.parametrize("what", ["deadline", "another answer", "session", "daemon"])
async def test_a_coroutine_whose_answer_nobody_wants_is_cancelled_once(daemon: Dispatching, what: str) -> None:
    waiting = Waiting(daemon)
    daemon.said.clear()
    daemon.take(DELETE, number=3, deadline_ms=1 if what == "deadline" else 60_000)
    if what == "deadline":
        await daemon.said.wait()
    elif what == "another answer":
        daemon.dispatcher.answer_error(daemon.session, 3, PoolFullError("0 free"))
        daemon.dispatcher.answer_error(daemon.session, 3, PoolFullError("0 free"))
    elif what == "session":
        daemon.dispatcher.forget_session(daemon.session)
    for _ in range(3):
        await next_turn()
    assert waiting.cancelled == (what != "daemon")
    await daemon.dispatcher.close()
    assert waiting.cancelled == 1
    assert len(daemon.sent) == (what in {"deadline", "another answer"})


def settled(number: int) -> Settled:
    return Settled(request_id=f"{number:032x}", pool="decode", direction="receive")


def push(daemon: Dispatching, *numbers: int) -> None:
    for number in numbers:
        daemon.session.add_event(settled(number))
    daemon.dispatcher.push_events(daemon.session)


def cursors(messages: list[Reply | Event]) -> list[int]:
    return [one.cursor for one in messages if isinstance(one, Event)]


def test_events_are_pushed_once_to_each_peer_until_they_are_acknowledged(daemon: Dispatching) -> None:
    seen: list[tuple[Session, Settled]] = []
    daemon.dispatcher.handle_acknowledged(Settled, lambda session, event: seen.append((session, event)))
    push(daemon, 1, 2)
    assert daemon.sent == [], "there is no peer yet"
    for number, identity, acknowledged, pushed in (
        (1, b"a", 0, [2]),
        (2, b"a", 0, []),
        (3, b"b", 0, [2]),
        (4, b"c", 1, [2]),
        (5, b"c", 1, []),
        (6, b"d", 1 << 60, []),  # beyond all events: no harm
    ):
        assert cursors(daemon.take(ALLOCATE, number=number, acknowledged=acknowledged, identity=identity)) == pushed
    assert seen == [(daemon.session, settled(number)) for number in (1, 2)]
    push(daemon, 3)
    assert cursors(daemon.messages)[-1] == 3


async def next_turn() -> None:
    """Return once what was due in the loop's next turn is done."""
    await asyncio.get_running_loop().run_in_executor(None, lambda: None)


@pytest.mark.anyio
async def test_what_a_request_causes_follows_its_reply_but_does_not_wait_for_a_deferred_one(
    daemon: Dispatching,
) -> None:
    daemon.on_call = lambda _call: daemon.session.add_event(settled(1))
    assert [type(one) for one in daemon.take(ALLOCATE)] == [Reply, Event], "an event that a request causes follows it"
    daemon.on_deferred = lambda: daemon.session.add_event(settled(2))
    assert daemon.take(DELETE, number=3) == []
    await next_turn()
    assert cursors(daemon.messages) == [1, 2]
    daemon.dispatcher.forget_session(daemon.session)


def test_events_go_together_in_order_and_a_full_queue_keeps_them_for_later(daemon: Dispatching) -> None:
    daemon.take(ALLOCATE)
    push(daemon, 1)
    daemon.accepts = False
    push(daemon, 2, 3)
    daemon.accepts = True
    push(daemon, 4)
    together = Together(events=tuple(settled(number) for number in (2, 3, 4)))
    assert daemon.messages[1:] == [Event(1, BOOT, settled(1)), Event(4, BOOT, together)]


def test_one_finished_tells_of_all_that_happens_at_once(daemon: Dispatching) -> None:
    daemon.take(ALLOCATE)
    outcome = Finished(request_id=f"{1:032x}", pool="decode", direction="receive")
    for body in (outcome, settled(2), settled(1)):
        daemon.session.add_event(body)
    daemon.dispatcher.push_events(daemon.session)
    assert daemon.messages[-1] == Event(3, BOOT, Together(events=(replace(outcome, settled=True), settled(2))))
    for body in (outcome, settled(1)):
        daemon.session.add_event(body)
    daemon.dispatcher.push_events(daemon.session)
    assert daemon.messages[-1] == Event(5, BOOT, replace(outcome, settled=True)), "and has the cursor of the last one"


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_sent_again_is_not_merged(daemon: Dispatching, count: int) -> None:
    """Whoever has heard a part of it would take one FINISHED for what it knows."""
    daemon.take(ALLOCATE)
    told: list[SingleEvent] = [
        Finished(request_id=f"{one + 1:032x}", pool="decode", direction="receive") for one in range(count)
    ]
    for body in told:
        daemon.session.add_event(body)
    daemon.dispatcher.push_events(daemon.session)
    daemon.session.add_event(settled(1))
    daemon.accepts = False
    daemon.take(ALLOCATE, number=2, identity=b"another connection")
    daemon.accepts = True
    (again, _) = daemon.take(ALLOCATE, number=3, identity=b"another connection")
    assert again == Event(count + 1, BOOT, Together(events=(*told, settled(1))))
    for one in (told[0], settled(1)):
        daemon.session.add_event(one)
    daemon.dispatcher.push_events(daemon.session)
    assert daemon.messages[-1] == Event(count + 3, BOOT, replace(told[0], settled=True)), "what is new is"


def test_events_with_large_payloads_go_by_themselves(daemon: Dispatching) -> None:
    daemon.take(ALLOCATE)
    for size_bytes in (10, TOGETHER_BYTES, 10, 20):
        body = Finished(request_id="f" * 32, pool="decode", direction="receive", payload=bytes(size_bytes))
        daemon.session.add_event(body)
    daemon.dispatcher.push_events(daemon.session)
    assert cursors(daemon.messages) == [1, 2, 4]
