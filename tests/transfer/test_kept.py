"""What is kept of transfers, and for how long: results, payloads, generations, tombstones, deadlines."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.quota import Quota
from kvferry.daemon.transfer import state_machine
from kvferry.daemon.transfer.endpoints import EndpointKey, Half
from kvferry.daemon.transfer.kept import GENERATIONS_KEPT, Generations, Tombstones
from kvferry.daemon.transfer.registry import FEW, Deadlines
from kvferry.daemon.transfer.transitions import State
from kvferry.protocol import errors
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES, Limits
from kvferry.protocol.transfer_messages import LayerStep, TransferResult
from tests.kit.peers import Transfer
from tests.kit.transfers import FIRST, ORDERS, REQUEST, Direction, Engine, Lists, TransferHarness


class Three(NamedTuple):
    """A sender and two receivers of one daemon."""

    harness: TransferHarness
    prefill: Engine
    decode: Engine
    second: Engine

    def result(self, engine: Engine, direction: Direction) -> TransferResult:
        key = EndpointKey(engine.pool.tenant, REQUEST, engine.pool.name, direction)
        return self.harness.state_machine.result(engine.session, key)

    def told_of(self) -> list[tuple[int, int]]:
        """Return what the sender was told of: (matched, destinations) of each event."""
        assert all(session == self.prefill.session for session, _ in self.harness.matched)
        return [(one.matched, one.destinations) for _, one in self.harness.matched]


@pytest.fixture
def three() -> Three:
    harness = TransferHarness()
    return Three(harness, *(harness.engine(name) for name in ("prefill", "decode", "second")))


def key(pool: str, direction: Direction, request: str = REQUEST) -> EndpointKey:
    return EndpointKey(7, request, pool, direction)


def test_a_result_follows_its_side_and_stays_until_acknowledged(three: Three) -> None:
    prefill, results = three.prefill, three.harness.state_machine.results
    with pytest.raises(errors.UnknownTransferError):
        three.result(prefill, "send")
    prefill.send()
    assert three.result(prefill, "send") == TransferResult(state="open")
    with pytest.raises(errors.UnknownTransferError):  # it is the session's own
        three.harness.state_machine.result(three.decode.session, key("prefill", "send"))
    three.decode.receive()
    three.decode.cancel("receive")
    finished = three.result(prefill, "send")
    assert (finished.state, finished.settled) == ("finished", None)
    three.harness.transport.finish_all()
    told = three.harness.told[prefill.session]
    settled = three.result(prefill, "send")
    assert [settled.state, settled.finished, settled.settled, settled.matched] == ["settled", *told, 0]
    assert finished.finished == settled.finished
    assert results.count(prefill.session) == 1
    prefill.acknowledge("send")
    with pytest.raises(errors.UnknownTransferError):
        three.result(prefill, "send")
    assert results.count(prefill.session) == 0


def test_nothing_is_kept_for_a_lost_session(three: Three) -> None:
    three.prefill.send()
    three.prefill.lose()
    three.decode.receive()
    three.harness.transport.finish_all()
    assert three.harness.state_machine.results.total == 1
    three.decode.lose()
    assert three.harness.state_machine.results.total == 0


def test_a_late_chunk_does_not_start_a_failed_transfer_anew(three: Three) -> None:
    three.decode.receive()
    three.prefill.send(0, 1, last=False)
    three.decode.cancel("receive")
    for settled in (False, True):
        if settled:
            three.harness.transport.finish_all()
        with pytest.raises(errors.TransferExistsError, match="failed with PEER_CANCELLED"):
            three.prefill.send(1)
    three.prefill.acknowledge("send")
    three.prefill.send()
    assert [one.direction for one in three.harness.state_machine.endpoints] == ["send"]


def test_generations_count_by_session_and_receive_and_are_bounded() -> None:
    generations, receive_request = Generations(), key("decode", "receive")
    assert [generations.next(session, receive_request) for session in (1, 1, 2)] == [1, 2, 1]
    generations.forget_session(1)
    assert [generations.next(session, receive_request) for session in (1, 2)] == [1, 2]
    for number in range(GENERATIONS_KEPT):
        generations.next(3, key("decode", "receive", f"{number:032x}"))
    assert generations.next(1, receive_request) == 1


def test_a_send_request_may_be_opened_to_wait_for_its_receivers(three: Three) -> None:
    assert three.prefill.send(ids={}, last=False).matched == 0
    assert three.decode.receive(destinations=2).matched == 1
    assert three.told_of() == [(1, 2)]
    assert three.result(three.prefill, "send").matched == 1
    assert three.second.receive(destinations=2).matched == 1
    assert three.told_of() == [(1, 2), (2, 2)]
    assert not three.harness.transport.under_way
    assert three.prefill.send().matched == 2
    assert len(three.harness.transport.under_way) == 2
    assert three.told_of() == [(1, 2), (2, 2)]


def test_receivers_that_are_there_already_are_in_the_reply(three: Three) -> None:
    assert three.decode.receive(destinations=2).matched == 0
    assert three.prefill.send().matched == 1
    assert three.told_of() == []
    assert three.result(three.decode, "receive").matched == 1
    three.second.receive(destinations=2)
    assert three.told_of() == [(2, 2)]


def test_a_receiver_that_hears_of_an_end_is_no_match(three: Three) -> None:
    three.prefill.send(ids={}, last=False)
    three.prefill.cancel("send")
    three.decode.receive()
    assert three.told_of() == []


@pytest.mark.parametrize("first", ["send", "receive"])
def test_between_daemons_an_announcement_counts(first: str) -> None:
    apart = Transfer("tcp")
    if first == "receive":
        apart.announce()
    assert apart.prefill.send(ids={}, last=False).matched == int(first == "receive")
    if first == "send":
        apart.announce()
    assert [one.matched for _, one in apart.source.matched] == ([1] if first == "send" else [])
    assert apart.home.matched == []
    assert apart.prefill.send().matched == 1
    apart.succeeds()


@FIRST
def test_a_transfer_that_is_over_leaves_no_work_for_a_garbage_collection(both: Transfer, first: str) -> None:
    both.begin(first)
    endpoints = [
        weakref.ref(one)
        for node in {both.source, both.home}
        for of_kind in ("send_requests", "receive_requests", "remote_sends", "remote_endpoints")
        for one in getattr(node.state_machine.endpoints, of_kind).values()
    ]
    assert len(endpoints) == (2 if both.way == "here" else 4)
    gc.disable()
    try:
        both.succeeds()
        assert [one() for one in endpoints if one() is not None] == []
    finally:
        gc.enable()


# -- payloads, also of transfers without pages

EMPTY: Final[Lists] = {"main": np.empty(0, np.int64)}


@pytest.mark.parametrize(
    ("sent", "wanted"), [({}, {}), (EMPTY, EMPTY), (None, {})], ids=["no lists", "empty lists", "pages nobody wants"]
)
@FIRST
def test_a_payload_comes_without_pages(both: Transfer, sent: Lists | None, wanted: Lists, first: str) -> None:
    for direction in ORDERS[first]:
        if direction == "send":
            both.send(ids=sent, payload=b"logits")
        else:
            both.receive(ids=wanted)
        both.harness.deliver_all()
    both.check_over("OK", "OK")
    finished = both.decode.finished
    assert (finished.payload, finished.moved_bytes, finished.pages) == (b"logits", 0, 0)
    if sent is None:
        assert finished.skipped_source_entries == len(both.prefill.pool.manifest.entries)


def test_a_payload_after_the_last_pages(both: Transfer) -> None:
    """The last SEND of chunks may have no page of its own."""
    both.begin("receive", last=False)
    both.harness.run()
    assert both.decode.told == ""
    both.send(ids={}, payload=b"x")
    both.succeeds()
    assert both.decode.finished.payload == b"x"


def test_steps_need_pages(here: Transfer) -> None:
    with pytest.raises(errors.InvalidFieldError) as refused:
        here.send(ids={}, steps=(LayerStep(first_layer=0, layers=2, event=0, value=1),))
    assert refused.value.field == "steps"


OF_SESSION, OF_ALL = 100, 250


class Engines:
    """One engine that sends and one that receives; payloads are bounded by few bytes."""

    def __init__(self) -> None:
        self.harness = TransferHarness(payloads=Quota("payload", OF_SESSION, OF_ALL, field="payload"))
        self.prefill = self.harness.engine("prefill", max_payload_bytes=80)
        self.decode = self.harness.engine("decode", max_payload_bytes=60)

    @property
    def kept(self) -> int:
        return self.harness.state_machine.payloads.total

    def send(self, number: int, size: int, engine: Engine | None = None) -> None:
        (engine or self.prefill).send(ids={}, request=f"{number:032x}", payload=bytes(size))

    def receive(self, number: int, sources: int = 1) -> None:
        self.decode.receive(ids={}, request=f"{number:032x}", sources=sources)

    def acknowledge(self, number: int) -> None:
        self.decode.acknowledge("receive", f"{number:032x}")


@pytest.fixture
def engines() -> Engines:
    return Engines()


def test_a_payload_over_its_own_pools_bound_is_refused(engines: Engines) -> None:
    engines.send(1, 80)
    with pytest.raises(errors.TooLargeError, match="81 bytes; pool 'prefill' takes 80") as refused:
        engines.send(2, 81)
    assert refused.value.field == "payload"
    assert engines.kept == 80


@FIRST
def test_a_payload_over_a_receiving_pools_bound_is_refused(engines: Engines, first: str) -> None:
    steps: list[Callable[[], None]] = [lambda: engines.send(1, 61), lambda: engines.receive(1)]
    early, late = steps if first == "send" else steps[::-1]
    early()
    with pytest.raises(errors.TooLargeError, match="61 bytes; pool 'decode' takes 60") as refused:
        late()
    assert refused.value.field == "payload"
    assert (engines.prefill.told, engines.decode.told) == ("", "")


def test_a_home_refuses_a_payload_that_its_pool_does_not_take() -> None:
    apart = Transfer("tcp")
    apart.decode.pool.max_payload_bytes = 3
    apart.receive(ids={})
    apart.send(ids={}, payload=b"more")
    apart.harness.deliver_all()
    error = apart.prefill.finished.error
    assert error is not None
    assert (error.code, error.field) == ("TOO_LARGE", "payload")
    assert "pool 'decode' takes 3" in error.detail
    assert apart.decode.told == ""
    apart.source.engine("other").send(ids={}, payload=b"few")
    apart.ends("TOO_LARGE", "OK")
    assert apart.decode.finished.payload == b"few"
    assert [node.state_machine.payloads.total for node in (apart.home, apart.source)] == [3, 0]


def test_payloads_of_a_session_are_bounded_until_they_settle_or_are_acknowledged(engines: Engines) -> None:
    engines.send(1, 60)
    with pytest.raises(errors.OverloadedError, match="60 payload bytes of session 1") as refused:
        engines.send(2, 41)
    assert refused.value.field == "payload"
    engines.receive(1)
    assert engines.kept == 60, "the SEND has settled, the event is not acknowledged"
    engines.send(2, 41)
    with pytest.raises(errors.OverloadedError, match="of session 2"):
        engines.receive(2)
    engines.acknowledge(1)
    assert engines.kept == 41
    engines.receive(2)
    engines.acknowledge(2)
    assert engines.kept == 0


def test_a_payload_counts_for_all_its_receivers_together(engines: Engines) -> None:
    for number in range(3):
        engines.harness.receive(engines.decode.session, engines.harness.pool(f"decode{number}"), {}, destinations=3)
    with pytest.raises(errors.OverloadedError, match="0 payload bytes of session 2") as refused:
        engines.prefill.send(ids={}, payload=bytes(34))
    assert refused.value.field == "payload"
    assert engines.kept == 0
    engines.prefill.send(ids={}, payload=bytes(33))
    assert engines.kept == 99, "the SEND has settled"


def test_payloads_of_all_sessions_are_bounded(engines: Engines) -> None:
    others = [engines.harness.engine(f"p{number}", max_payload_bytes=80) for number in range(3)]
    for number, engine in enumerate((*others[:2], engines.prefill)):
        engines.send(number, 80, engine)
    with pytest.raises(errors.OverloadedError, match="240 payload bytes of all sessions"):
        engines.send(3, 11, others[2])


def test_a_transfer_that_ends_keeps_no_payload(engines: Engines) -> None:
    for number in (1, 2):
        engines.send(number, 50)
    engines.prefill.cancel("send", f"{1:032x}")
    engines.prefill.lose()
    assert engines.kept == 50, "the SEND lives on"
    engines.harness.pass_time(31)
    assert engines.kept == 0


def test_a_receiver_that_dies_or_fails_keeps_no_payload(engines: Engines) -> None:
    for number in (1, 2):
        engines.receive(number, sources=number)
        engines.send(number, 30)
    assert engines.kept == 3 * 30
    engines.decode.cancel("receive", f"{2:032x}")
    assert engines.kept == 30
    engines.decode.lose()
    assert engines.kept == 0


FRAMES: Final = {128 << 10: 64 << 10, 4 << 20: 2 << 20, 1 << 30: LARGEST_PAYLOAD_BYTES}


@pytest.mark.parametrize("frame_bytes", FRAMES)
def test_the_largest_payload_leaves_half_of_a_frame(frame_bytes: int) -> None:
    assert Limits(max_frame_bytes=frame_bytes).largest_payload_bytes == FRAMES[frame_bytes]
    assert Limits(max_frame_bytes=frame_bytes).largest_payload_bytes >= MAX_PAYLOAD_BYTES


# -- tombstones


def half(number: int = 0, tenant: int = 7) -> Half:
    return Half(tenant, f"{number:032x}", "send")


def test_each_pool_hears_once_the_latest_end_first() -> None:
    stones = Tombstones()
    stones.bury(half(), "p0", errors.DeadlineError("first"), 10.0, notified=["told"])
    stones.bury(half(), "p1", errors.PeerLostError("second"), 11.0)
    assert [str(one.detail) for one in stones.notices_for(half(), "a", 12.5)] == [
        "the other side ended 1.5 s ago: second",
        "the other side ended 2.5 s ago: first",
    ]
    assert stones.notices_for(half(), "a", 12.5) == []
    assert [one.code for one in stones.notices_for(half(), "told", 12.5)] == ["PEER_LOST"]
    assert stones.notices_for(half(tenant=8), "b", 12.5) == []
    stones.renewed(half())
    assert stones.notices_for(half(), "b", 12.5) == []
    assert repr(stones) == "<Tombstones 0 of 16384>"


def test_the_same_message_hears_it_again() -> None:
    stones = Tombstones()
    stones.bury(half(), "p0", errors.PeerCancelledError("gone"), 10.0)
    for _ in range(2):
        (error,) = stones.notices_for(half(), "a", 11.0, ("boot", 1))
        assert isinstance(error, errors.PeerCancelledError)
        detail = "the other side ended 1.0 s ago: gone"
        remedy = errors.PeerCancelledError.remedy
        assert error.info() == errors.ErrorInfo(code="PEER_CANCELLED", detail=detail, remedy=remedy, fault="peer")
    assert stones.notices_for(half(), "a", 11.0, ("boot", 2)) == []


def test_they_are_bounded_by_number_and_age() -> None:
    stones = Tombstones(most=3, kept_s=60.0)
    for number in range(5):
        stones.bury(half(number), "p0", errors.DeadlineError("late"), 10.0 + number)
    assert len(stones) == 3
    assert [len(stones.notices_for(half(number), "a", 20.0)) for number in range(5)] == [0, 0, 1, 1, 1]
    assert [len(stones.notices_for(half(number), "b", 73.5)) for number in range(5)] == [0, 0, 0, 0, 1]
    assert len(stones) == 1


def test_an_old_end_is_forgotten_though_its_request_had_a_later_one() -> None:
    stones = Tombstones(kept_s=60.0)
    stones.bury(half(), "p0", errors.DeadlineError("old"), 10.0)
    stones.bury(half(), "p1", errors.DeadlineError("new"), 60.0)
    assert [one.detail for one in stones.notices_for(half(), "a", 70.0)] == ["the other side ended 10.0 s ago: new"]
    assert stones.notices_for(half(), "b", 120.0) == []
    assert len(stones) == 0


def test_one_request_leaves_no_more_than_it_has_pools() -> None:
    stones = Tombstones()
    for number in range(1000):
        stones.bury(half(), number, errors.DeadlineError("late"), 10.0)
    assert 2 < len(stones.notices_for(half(), "a", 10.0)) < 100


@pytest.mark.parametrize("ask", [Tombstones.notices_for, Tombstones.abandoned])
def test_no_more_pools_are_told_than_a_request_has(ask: Callable[[Tombstones, Half, str, float], object]) -> None:
    stones = Tombstones()
    stones.abandon(half(), errors.PeerCancelledError("gone"), 10.0)
    told = [bool(ask(stones, half(), f"p{number}", 10.0)) for number in range(1000)]
    assert told[:2] == [True, True]
    assert sum(told) < 100


# -- deadlines

NAMES = st.sampled_from("abcdef")
TIMES = st.integers(0, 20).map(float)
STEPS = st.one_of(
    st.tuples(st.just("set"), NAMES, TIMES),
    st.tuples(st.just("drop"), NAMES, st.none()),
    st.tuples(st.just("due"), st.none(), TIMES),
)


@given(st.lists(STEPS, max_size=60))
def test_each_has_one_deadline(steps: list[tuple[str, str, float]]) -> None:
    deadlines, known = Deadlines[str](), dict[str, float]()
    for what, name, at in steps:
        if what == "set":
            deadlines.set(name, at)
            known[name] = at
        elif what == "drop":
            deadlines.drop(name)
            known.pop(name, None)
        else:
            due = list(deadlines.due(at))
            assert sorted(due) == sorted(one for one, its in known.items() if its <= at)
            times = [known.pop(one) for one in due]
            assert times == sorted(times)
        assert deadlines.next() == min(known.values(), default=None)
        assert repr(deadlines) == f"<Deadlines {len(known)}>"


def test_what_is_dropped_while_others_are_due_is_not() -> None:
    deadlines = Deadlines[str]()
    for name in "abc":
        deadlines.set(name, 1.0)
    found = []
    for name in deadlines.due(1.0):
        found.append(name)
        deadlines.drop("b")
    assert found == ["a", "c"]


class Thing:
    """Something that can be seen to be gone."""


def test_nothing_is_kept_for_what_is_dropped() -> None:
    deadlines = Deadlines[Thing]()
    first = Thing()
    deadlines.set(first, 0.0)
    gone = []
    for number in range(1000):
        thing = Thing()
        deadlines.set(thing, 3600.0 + number)
        deadlines.set(thing, 7200.0)
        gone.append(weakref.ref(thing))
        deadlines.drop(thing)
        del thing
    gc.collect()
    assert not any(one() for one in gone)
    assert len(deadlines.__dict__["_heap"]) <= FEW + 4
    assert list(deadlines.due(0.0)) == [first]


def test_deadlines_that_pass_together_end_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_machine, "EXPIRED_AT_ONCE", 2)
    harness = TransferHarness()
    pool, session = harness.pool("decode"), harness.session()
    for number in range(5):
        harness.receive(session, pool, harness.filled(pool, session, 1), request=f"{number:032x}")
    now, left = harness.now + 30.0, list[int]()
    while (due_at := harness.state_machine.next_deadline()) is not None:
        assert due_at <= now
        harness.state_machine.expire(now)
        left.append(sum(one.state is State.OPEN for one in harness.state_machine.endpoints))
    assert left == [3, 1, 0]
