"""From bytes to a handler and back, without a socket: every request is answered, once, whatever it is.

What a BATCH answers is what its requests would have been answered one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any, Final
from unittest.mock import patch

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.daemon.control import first_step
from kvferry.daemon.control.dispatch import TOGETHER_BYTES, Answer, Call, Dispatcher
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import Peer, Session, SessionRegistry
from kvferry.daemon.control.zmtp import ReceivedMessage
from kvferry.daemon.services import leases
from kvferry.daemon.tiers import host_tier, operations
from kvferry.protocol import tier_messages as tier
from kvferry.protocol.base import Busy, ErrorReply, PageList, RequestBody
from kvferry.protocol.codec import Frames, PageIds, decode_from_daemon, encode
from kvferry.protocol.envelope import MAX_BATCH, Batch, Batched, Event, Reply, Request
from kvferry.protocol.errors import KvferryError, OverloadedError, PoolFullError
from kvferry.protocol.events import Finished, Settled, SingleEvent, Together
from kvferry.protocol.ids import NO_BOOT, BootId, new_boot_id
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import Allocate, Allocated, DeletePool, Free, Freed, PoolDeleted
from tests.kit.devices import DEVICE
from tests.kit.tiers import POOL, Engine, harness, names, settle, until

LIMITS = Limits(max_requests_per_session=4, default_deadline_ms=60_000, max_message_bytes=64 << 10)
BOOT = new_boot_id()
DEALER = b"dealer"
ALLOCATE = Allocate(pool="a", count=1)
DELETE = DeletePool(pool="a")
FREE = Free(pool="a", pages=2)


SNAPSHOT = tier.SnapshotStatus(
    snapshot="0" * 32, pool="p" * 120, layout_digest="", lists=(), tokens=None, chunks=1, size_bytes=1, checksum="",
    age_ms=1, session=None, state="ready", restores=0,
)  # fmt: skip


class Dispatching:
    """A dispatcher without sockets, with one session: all is answered at once, DELETE_POOL when the test says so."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.sessions = SessionRegistry(LIMITS)
        self.session = self.sessions.open("engine", Peer(1, 2, 3))
        self.dispatcher = Dispatcher(BOOT, LIMITS, self.sessions, self.counters, self.send)
        self.said = asyncio.Event()
        self.dispatcher.handle("ALLOCATE", self.allocate)
        self.dispatcher.handle("DELETE_POOL", self.deferred_call)
        self.dispatcher.handle("FREE", self.free)
        self.dispatcher.handle("SNAPSHOTS", lambda _call: Answer(tier.SnapshotReport(snapshots=(SNAPSHOT,) * 100)))
        self.sent: list[tuple[bytes, Reply | Event, tuple[PageIds, ...]]] = []
        self.calls: list[Call] = []
        self.deferred: list[Call] = []
        self.freed: list[list[int]] = []
        self.accepts = True
        self.on_deferred: Callable[[], object] = lambda: None
        self.on_call: Callable[[Call], object] = lambda _call: None
        self.raises: Exception | None = None

    def send(self, identity: bytes, frames: Frames, *, more: bool = False) -> bool:  # noqa: ARG002
        self.said.set()
        if self.accepts:
            self.sent.append((identity, *decode_from_daemon([bytes(one) for one in frames])))
        return self.accepts

    def allocate(self, call: Call) -> Answer:
        self.calls.append(call)
        self.on_call(call)
        if self.raises is not None:
            raise self.raises
        count = call.body.count  # type: ignore[attr-defined]
        return Answer(Allocated(pages=count), (np.arange(count),))

    def free(self, call: Call) -> Answer:
        self.freed.append(call.ids[0].tolist())
        return Answer(Freed(freed=len(call.ids[0]), deferred=0))

    def deferred_call(self, call: Call) -> None:
        self.deferred.append(call)
        self.on_deferred()

    def answer(self, number: int, pool: str = "a") -> None:
        self.dispatcher.answer(self.session, number, Answer(PoolDeleted(pool=pool)))

    def take(
        self,
        body: RequestBody,
        *ids: npt.ArrayLike,
        number: int = 1,
        boot: BootId = BOOT,
        secret: bytes | None = None,
        deadline_ms: int = 0,
        acknowledged: int = 0,
        identity: bytes = DEALER,
    ) -> list[Reply | Event]:
        """Let a request arrive; return what is sent because of it."""
        known = self.session.secret if secret is None else secret
        request = Request(number, boot, known, deadline_ms, acknowledged, body)
        frames = encode(request, [np.array(one, np.int64) for one in ids])
        return self.take_frames([bytes(one) for one in frames], identity=identity)

    def take_frames(self, frames: list[bytes], *, identity: bytes = DEALER) -> list[Reply | Event]:
        before = len(self.sent)
        self.dispatcher.on_message(ReceivedMessage(identity, frames, too_large=False))
        return self.messages[before:]

    @property
    def messages(self) -> list[Reply | Event]:
        return [message for _, message, _ in self.sent]

    @property
    def results(self) -> list[Any]:
        (reply,) = self.messages
        assert isinstance(reply.body, Batched), reply.body
        return unfolded(reply.body)

    @property
    def codes(self) -> list[str]:
        return [one.error.code if isinstance(one, ErrorReply) else "" for one in self.results]


def unfolded(reply: Batched) -> list[Any]:
    times = reply.times or (1,) * len(reply.results)
    return [one for one, count in zip(reply.results, times, strict=True) for _ in range(count)]


def error_of(messages: list[Reply | Event]) -> tuple[int, str, str]:
    """Return the one refusal: to which message, its code and field."""
    (message,) = messages
    assert isinstance(message, Reply)
    assert isinstance(message.body, ErrorReply)
    return message.message_id, message.body.error.code, message.body.error.field


@pytest.fixture
def daemon() -> Dispatching:
    return Dispatching()


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
    daemon.take_frames([b"no message"])
    assert daemon.counters.snapshot()["messages.refused.malformed"] == 1


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
    daemon.raises = error
    assert error_of(daemon.take(ALLOCATE)) == error_of(daemon.take(ALLOCATE)) == (1, code, field)
    assert len(daemon.calls) == 1
    assert "passwd" not in repr(daemon.sent)


@pytest.mark.anyio
async def test_a_deferred_reply_goes_where_the_session_is_now(daemon: Dispatching) -> None:
    assert daemon.take(DELETE, number=3) == []
    assert daemon.take(DELETE, number=3, deadline_ms=60_000, identity=b"new") == []
    (call,) = daemon.deferred
    assert (call.message_id, call.deadline_s) == (3, 60.0)
    daemon.answer(3)
    daemon.answer(3, "b")
    assert daemon.sent == [(b"new", Reply(3, BOOT, PoolDeleted(pool="a")), ())]
    assert daemon.take(DELETE, number=3) == [Reply(3, BOOT, PoolDeleted(pool="a"))]


@pytest.mark.anyio
async def test_a_deferred_request_has_a_deadline_and_counts_as_what_it_was_answered_with(daemon: Dispatching) -> None:
    daemon.take(DELETE, number=3, deadline_ms=1)
    await daemon.said.wait()
    assert error_of(daemon.messages) == (3, "DEADLINE", "")
    daemon.answer(3)
    daemon.dispatcher.answer_error(daemon.session, 3, PoolFullError("0 free"))
    assert len(daemon.sent) == 1, "the late reply is dropped"
    assert refused(daemon) == {"deadline": 1}


def refused(daemon: Dispatching) -> dict[str, int]:
    counted = daemon.counters.snapshot()
    return {name.rpartition(".")[2]: n for name, n in counted.items() if name.startswith("requests.refused.")}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "code"), [(PoolFullError("0 free"), "pool_full"), (OverloadedError("too many"), "busy")]
)
async def test_a_refusal_counts_once_whether_at_once_deferred_or_in_a_batch(
    daemon: Dispatching, error: KvferryError, code: str
) -> None:
    daemon.raises = error
    daemon.take(ALLOCATE, number=1)
    daemon.take(ALLOCATE, number=1)
    assert refused(daemon) == {code: 1}, "the repeated answer of a retry is no other refusal"
    daemon.take(DELETE, number=2)
    daemon.dispatcher.answer_error(daemon.session, 2, error)
    assert refused(daemon) == {code: 2}
    daemon.take(Batch(requests=(ALLOCATE, DELETE)), number=4)
    daemon.dispatcher.answer_error(daemon.session, daemon.deferred[1].message_id, error)
    assert refused(daemon) == {code: 4}


@pytest.mark.anyio
async def test_busy_once_too_much_is_in_flight(daemon: Dispatching) -> None:
    for number in range(1, 5):
        daemon.take(DELETE, number=number)
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
    assert daemon.take(DELETE, number=1) == []
    assert daemon.take(Batch(requests=(ALLOCATE, DELETE)), number=2) == []
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


def push(daemon: Dispatching, *events: SingleEvent) -> None:
    for event in events:
        daemon.session.add_event(event)
    daemon.dispatcher.push_events(daemon.session)


def cursors(messages: list[Reply | Event]) -> list[int]:
    return [one.cursor for one in messages if isinstance(one, Event)]


def test_events_are_pushed_once_to_each_peer_until_they_are_acknowledged(daemon: Dispatching) -> None:
    seen: list[tuple[Session, Settled]] = []
    daemon.dispatcher.handle_acknowledged(Settled, lambda session, event: seen.append((session, event)))
    push(daemon, settled(1), settled(2))
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
    push(daemon, settled(3))
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
    push(daemon, settled(1))
    daemon.accepts = False
    push(daemon, settled(2), settled(3))
    daemon.accepts = True
    push(daemon, settled(4))
    together = Together(events=tuple(settled(number) for number in (2, 3, 4)))
    assert daemon.messages[1:] == [Event(1, BOOT, settled(1)), Event(4, BOOT, together)]


def test_one_finished_tells_of_all_that_happens_at_once(daemon: Dispatching) -> None:
    daemon.take(ALLOCATE)
    outcome = Finished(request_id=f"{1:032x}", pool="decode", direction="receive")
    push(daemon, outcome, settled(2), settled(1))
    assert daemon.messages[-1] == Event(3, BOOT, Together(events=(replace(outcome, settled=True), settled(2))))
    push(daemon, outcome, settled(1))
    assert daemon.messages[-1] == Event(5, BOOT, replace(outcome, settled=True)), "and has the cursor of the last one"


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_sent_again_is_not_merged(daemon: Dispatching, count: int) -> None:
    """Whoever has heard a part of it would take one FINISHED for what it knows."""
    daemon.take(ALLOCATE)
    told: list[SingleEvent] = [
        Finished(request_id=f"{one + 1:032x}", pool="decode", direction="receive") for one in range(count)
    ]
    push(daemon, *told)
    daemon.session.add_event(settled(1))
    daemon.accepts = False
    daemon.take(ALLOCATE, number=2, identity=b"another connection")
    daemon.accepts = True
    (again, _) = daemon.take(ALLOCATE, number=3, identity=b"another connection")
    assert again == Event(count + 1, BOOT, Together(events=(*told, settled(1))))
    push(daemon, told[0], settled(1))
    assert daemon.messages[-1] == Event(count + 3, BOOT, replace(told[0], settled=True)), "what is new is"


def test_events_with_large_payloads_go_by_themselves(daemon: Dispatching) -> None:
    daemon.take(ALLOCATE)
    outcome = Finished(request_id="f" * 32, pool="decode", direction="receive")
    push(daemon, *(replace(outcome, payload=bytes(size)) for size in (10, TOGETHER_BYTES, 10, 20)))
    assert cursors(daemon.messages) == [1, 2, 4]


# -- batches


@pytest.mark.anyio
async def test_what_waits_holds_up_the_reply_but_nothing_behind_it(daemon: Dispatching) -> None:
    daemon.take(Batch(requests=(DELETE, FREE, DELETE)), [1, 2])
    assert daemon.freed == [[1, 2]]
    first, last = daemon.deferred
    daemon.answer(last.message_id, "last")
    assert last.session.is_pending(first.message_id)
    assert not last.session.is_pending(last.message_id)
    daemon.take(Batch(requests=(DELETE, FREE, DELETE)), [1, 2])
    assert not daemon.sent, "the retry waits for the same reply"
    assert len(daemon.freed) == 1, "nothing is done twice"
    daemon.answer(first.message_id, "first")
    daemon.answer(first.message_id, "again")
    assert [one.pool for one in daemon.results if isinstance(one, PoolDeleted)] == ["first", "last"]
    daemon.take(Batch(requests=(DELETE, FREE, DELETE)), [1, 2])
    assert daemon.messages == [daemon.messages[0]] * 2
    assert len(daemon.freed) == 1


@pytest.mark.anyio
async def test_each_has_its_deadline(daemon: Dispatching) -> None:
    daemon.take(Batch(requests=(DELETE, DELETE, ALLOCATE), deadlines_ms=(0, 1, 1)))
    first, second = daemon.deferred
    assert (first.deadline_s, second.deadline_s) == (60.0, 0.001)
    await until(lambda: not second.session.is_pending(second.message_id))
    assert not daemon.sent
    daemon.answer(first.message_id, "a")
    assert daemon.codes == ["", "DEADLINE", ""]


@pytest.mark.anyio
async def test_a_session_that_ends_leaves_nothing(daemon: Dispatching) -> None:
    daemon.take(Batch(requests=(DELETE,) * 2))
    daemon.sessions.close(daemon.session)
    daemon.dispatcher.forget_session(daemon.session)
    for one in daemon.deferred:
        daemon.answer(one.message_id)
    assert not daemon.sent


@pytest.mark.anyio
async def test_what_is_in_flight_is_bounded(daemon: Dispatching) -> None:
    for number in range(1, 4):
        daemon.take(Batch(requests=(DELETE,) * 3), number=number)
    assert len(daemon.deferred) == 6
    (reply,) = daemon.messages
    assert isinstance(reply, Reply)
    assert isinstance(reply.body, Busy)
    assert reply.body.detail == "6 requests of the session's batches are in flight"


@pytest.mark.anyio
async def test_results_are_bounded_but_what_was_done_is_said(daemon: Dispatching) -> None:
    daemon.take(Batch(requests=(*(tier.Snapshots(),) * 5, ALLOCATE)))
    assert daemon.codes == ["", "", "TOO_LARGE", "TOO_LARGE", "TOO_LARGE", ""]
    assert len(daemon.sent[0][2]) == 1


@pytest.mark.anyio
async def test_equal_results_in_a_row_are_said_once(daemon: Dispatching) -> None:
    requests = (FREE, FREE, ALLOCATE, ALLOCATE, FREE, FREE, FREE)
    daemon.take(Batch(requests=requests), *[[one, one + 1] for one in range(5)])
    (folded,) = (one.body for one in daemon.messages)
    assert isinstance(folded, Batched)
    assert folded.times == (2, 1, 1, 3), "each ALLOCATE brings pages of its own"
    assert [type(one) for one in folded.results] == [Freed, Allocated, Allocated, Freed]
    assert [len(lists) for *_, lists in daemon.sent] == [2]


FREE_RAW: Final = {"type": "FREE", "pool": "a", "pages": 1}
ID: Final = b"\x01" + 7 * b"\x00"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("requests", "frames", "code", "field"),
    [
        ([FREE_RAW] * 2, [ID], "MALFORMED", "requests"),
        ([FREE_RAW, {**FREE_RAW, "pages": "x"}], [ID, ID], "INVALID_FIELD", "requests[1].pages"),
        ([FREE_RAW, 7], [ID], "INVALID_FIELD", "requests[1]"),
        ([{"type": "BATCH", "requests": [FREE_RAW]}], [ID], "INVALID_FIELD", "requests[0].type"),
        ([FREE_RAW] * (MAX_BATCH + 1), [ID] * (MAX_BATCH + 1), "INVALID_FIELD", "requests"),
        ([], [], "INVALID_FIELD", "requests"),
        *(
            ([FREE_RAW, {"type": name}], [ID], "INVALID_FIELD", "requests[1].type")
            for name in ("ATTACH_POOL", "REGISTER_POOL", "CREATE_TABLES", "OPEN_EVENTS", "PING", "VERIFY", "NONE")
        ),
    ],
)
async def test_what_is_no_batch(daemon: Dispatching, requests: Any, frames: list[bytes], code: str, field: str) -> None:  # noqa: ANN401
    body = {"type": "BATCH", "requests": requests}
    head = msgspec.msgpack.encode([1, BOOT, daemon.session.secret, 0, 0, body])
    assert error_of(daemon.take_frames([head, *frames])) == (1, code, field)
    assert not daemon.freed, "all or nothing is begun"
    late = daemon.take(Batch(requests=(FREE, FREE), deadlines_ms=(1, LIMITS.max_deadline_ms + 1)), [1, 2], [3, 4])
    assert error_of(late) == (1, "INVALID_FIELD", "deadlines_ms[1]")


# -- a batch is the same as its requests one by one

FIRST = st.integers(1, 4).map(lambda count: list(range(1, count + 1)))  # what is allocated first
PAGES = FIRST | st.lists(st.integers(1, 16), min_size=1, max_size=4)
HASHES = st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True).map(lambda some: b"".join(names(*some)))
COUNT = st.integers(1, 6) | st.just(17)  # more than there are
NUMBER = st.integers(1, 4)


def listed(make: Callable[[int], RequestBody]) -> st.SearchStrategy[tuple[RequestBody, list[int] | None]]:
    return PAGES.map(lambda ids: (make(len(ids)), ids))


STEPS = st.lists(
    st.one_of(
        COUNT.map(lambda count: (Allocate(pool=POOL, count=count), None)),
        HASHES.map(lambda hashes: (tier.Lookup(pool=POOL, hashes=hashes), None)),
        NUMBER.map(lambda number: (tier.Unpin(lease=number), None)),
        NUMBER.map(lambda number: (tier.CancelOperation(operation=number), None)),
        st.sampled_from(
            [
                tier.Snapshots(),
                tier.CacheList(),
                DeletePool(pool="none"),
                tier.DropSnapshot(snapshot="0" * 32),
                tier.Restore(snapshot="0" * 32, pool=POOL, allocate=True),
            ]
        ).map(lambda body: (body, None)),
        listed(lambda count: Free(pool=POOL, pages=count)),
        listed(lambda count: tier.Offload(pool=POOL, lists=(PageList(pages=count),))),
        listed(lambda count: tier.Store(pool=POOL, hashes=b"".join(names(*range(1, 1 + count))), pages=count)),
        listed(lambda count: tier.Load(lease=1, pool=POOL, pages=count)),
    ),
    min_size=1,
    max_size=8,
)


def plain(reply: Any) -> Any:  # noqa: ANN401  any reply
    """Return a reply without what is drawn by lot or measured."""
    fields = msgspec.to_builtins(reply)
    text = msgspec.json.encode({**fields, "snapshot": "", "snapshots": len(fields.get("snapshots", ()))})
    return msgspec.json.decode(re.sub(rb"engine-\d+", b"engine", text))


def ended(engine: Engine) -> list[tuple[Any, ...]]:
    bodies: list[Any] = [body for body, _ in engine.events]
    return sorted((one.operation, one.kind, one.error and one.error.code, one.copied_pages) for one in bodies)


@DEVICE.examples(100)
@given(st.lists(STEPS, min_size=1, max_size=3))
def test_a_batch_is_its_requests_one_by_one(
    rounds: list[list[tuple[Any, list[int] | None]]],
) -> None:
    async def run() -> None:
        async with harness() as one, harness() as other:
            single, batched = one.engine(), other.engine()
            for steps in rounds:
                numbers = [single.send(body, *([] if ids is None else [ids])) for body, ids in steps]
                number = batched.send(
                    Batch(requests=tuple(body for body, _ in steps)),
                    *[ids for _, ids in steps if ids is not None],
                )
                for tiers in (one, other):
                    tiers.copier.finish_all()
                await settle()
                reply, ids = batched.replies[number]
                assert [plain(single.replies[at][0]) for at in numbers] == [plain(body) for body in unfolded(reply)]
                expected = [list(its) for at in numbers for its in single.replies[at][1]]
                assert expected == [list(its) for its in ids]
                assert ended(single) == ended(batched)
                assert one.pool().allocator.pages_by_owner() == other.pool().allocator.pages_by_owner()
                other.check()

    with contextlib.ExitStack() as patches:
        for module in (host_tier, leases, operations):  # what both count has the same numbers, from 1
            patches.enter_context(patch.object(module, "new_number", return_value=1))
        asyncio.run(run())


# -- a coroutine that takes its first step at once, and goes on as a task would


@pytest.mark.anyio
async def test_cancel_comes_also_before_the_task_has_begun_and_to_what_it_waits_for() -> None:
    waits_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    said: list[str] = []

    async def work() -> None:
        try:
            await waits_for
        finally:
            said.append("over")

    task = first_step.begin(work())
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert waits_for.cancelled()
    assert said == ["over"]


@pytest.mark.anyio
@pytest.mark.parametrize("others_wait", [True, False])
async def test_it_goes_on_once_what_it_waits_for_is_there(*, others_wait: bool) -> None:
    first, second = asyncio.Event(), asyncio.get_running_loop().create_future()
    said: list[object] = []

    async def work() -> str:
        said.append("begun")
        said.append(await second)
        await first.wait()
        await asyncio.sleep(0)
        return "done"

    task = first_step.begin(work())
    assert said == ["begun"]
    other = first_step.begin(work()) if others_wait else None
    second.set_result(2)
    first.set()
    assert await task == "done"
    assert said[-1] == 2
    assert other is None or await other == "done"
