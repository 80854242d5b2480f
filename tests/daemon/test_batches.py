"""BATCH: what it answers is what its requests would have been answered one by one, whatever they are."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any, Final
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.control.dispatch import Answer, Call
from kvferry.daemon.services import leases
from kvferry.daemon.tiers import host_tier, operations
from kvferry.protocol import tier_messages as tier
from kvferry.protocol.base import Busy, ErrorReply, PageList, RequestBody
from kvferry.protocol.envelope import MAX_BATCH, Batch, Batched, Reply
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import Allocate, Allocated, DeletePool, Free, Freed, PoolDeleted
from tests.daemon.dispatching import ALLOCATE, BOOT, DELETE, Dispatching, error_of
from tests.kit.devices import DEVICE
from tests.kit.tiers import POOL, Engine, harness, names, settle, until

LIMITS = Limits(max_requests_per_session=4, default_deadline_ms=60_000, max_message_bytes=64 << 10)
FREE = Free(pool="a", pages=2)


class Batching(Dispatching):
    """A dispatcher that also answers FREE and SNAPSHOTS."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.dispatcher.handle("FREE", self._free)
        self.dispatcher.handle("SNAPSHOTS", self._snapshots)
        self.freed: list[list[int]] = []

    def results(self) -> list[Any]:
        (reply,) = self.messages
        assert isinstance(reply.body, Batched), reply.body
        return unfolded(reply.body)

    def _free(self, call: Call) -> Answer:
        self.freed.append(call.ids[0].tolist())
        return Answer(Freed(freed=len(call.ids[0]), deferred=0))

    def _snapshots(self, call: Call) -> Answer:
        del call
        one = tier.SnapshotStatus(
            snapshot="0" * 32, pool="p" * 120, layout_digest="", lists=(), tokens=None, chunks=1, size_bytes=1,
            checksum="", age_ms=1, session=None, state="ready", restores=0,
        )  # fmt: skip
        return Answer(tier.SnapshotReport(snapshots=(one,) * 100))


@pytest.fixture
async def daemon() -> Batching:
    return Batching()


def codes(results: list[Any]) -> list[str]:
    return [one.error.code if isinstance(one, ErrorReply) else "" for one in results]


@pytest.mark.anyio
async def test_what_waits_holds_up_the_reply_but_nothing_behind_it(daemon: Batching) -> None:
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
    assert [one.pool for one in daemon.results() if isinstance(one, PoolDeleted)] == ["first", "last"]
    daemon.take(Batch(requests=(DELETE, FREE, DELETE)), [1, 2])
    assert daemon.messages == [daemon.messages[0]] * 2
    assert len(daemon.freed) == 1


@pytest.mark.anyio
async def test_each_has_its_deadline(daemon: Batching) -> None:
    daemon.take(Batch(requests=(DELETE, DELETE, ALLOCATE), deadlines_ms=(0, 1, 1)))
    first, second = daemon.deferred
    assert (first.deadline_s, second.deadline_s) == (60.0, 0.001)
    await until(lambda: not second.session.is_pending(second.message_id))
    assert not daemon.sent
    daemon.answer(first.message_id, "a")
    assert codes(daemon.results()) == ["", "DEADLINE", ""]


@pytest.mark.anyio
async def test_a_session_that_ends_leaves_nothing(daemon: Batching) -> None:
    daemon.take(Batch(requests=(DELETE,) * 2))
    daemon.sessions.close(daemon.session)
    daemon.dispatcher.forget_session(daemon.session)
    for one in daemon.deferred:
        daemon.answer(one.message_id)
    assert not daemon.sent


@pytest.mark.anyio
async def test_what_is_in_flight_is_bounded(daemon: Batching) -> None:
    for number in range(1, 4):
        daemon.take(Batch(requests=(DELETE,) * 3), number=number)
    assert len(daemon.deferred) == 6
    (reply,) = daemon.messages
    assert isinstance(reply, Reply)
    assert isinstance(reply.body, Busy)
    assert reply.message_id == 3
    assert reply.body.detail == "6 requests of the session's batches are in flight"


@pytest.mark.anyio
async def test_results_are_bounded_but_what_was_done_is_said(daemon: Batching) -> None:
    daemon.take(Batch(requests=(*(tier.Snapshots(),) * 5, ALLOCATE)))
    assert codes(daemon.results()) == ["", "", "TOO_LARGE", "TOO_LARGE", "TOO_LARGE", ""]
    assert len(daemon.sent[0][2]) == 1


@pytest.mark.anyio
async def test_equal_results_in_a_row_are_said_once(daemon: Batching) -> None:
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
        ([FREE_RAW, {**FREE_RAW, "pages": 2}], [ID, ID], "MALFORMED", "requests"),
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
async def test_what_is_no_batch(daemon: Batching, requests: Any, frames: list[bytes], code: str, field: str) -> None:  # noqa: ANN401
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


def unfolded(reply: Batched) -> list[Any]:
    """Return the result of each request."""
    times = reply.times or (1,) * len(reply.results)
    return [one for one, count in zip(reply.results, times, strict=True) for _ in range(count)]


def ended(engine: Engine) -> list[tuple[Any, ...]]:
    """Return what events said, but for names and times."""
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
