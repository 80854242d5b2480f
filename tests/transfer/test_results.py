"""What an engine may ask for: results until they are acknowledged, who has joined, generations of receive requests."""

from __future__ import annotations

import gc
import weakref
from typing import NamedTuple

import pytest

from kvferry.daemon.quota import Quota
from kvferry.daemon.transfer.endpoints import EndpointKey
from kvferry.daemon.transfer.kept import GENERATIONS_KEPT, Generations, Results
from kvferry.protocol.errors import TransferExistsError, UnknownTransferError
from kvferry.protocol.transfer_messages import TransferResult
from tests.kit.peers import Transfer
from tests.kit.transfers import FIRST, REQUEST, Direction, Engine, TransferHarness


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
    with pytest.raises(UnknownTransferError):
        three.result(prefill, "send")
    prefill.send()
    assert three.result(prefill, "send") == TransferResult(state="open")
    with pytest.raises(UnknownTransferError):  # it is the session's own
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
    with pytest.raises(UnknownTransferError):
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
        with pytest.raises(TransferExistsError, match="failed with PEER_CANCELLED"):
            three.prefill.send(1)
    three.prefill.acknowledge("send")
    three.prefill.send()
    assert [one.direction for one in three.harness.state_machine.endpoints] == ["send"]


def test_results_of_unknown_sessions_are_not_kept() -> None:
    results = Results(Quota("payload", 1, 1))
    results.begin(5, key("prefill", "send"))
    results.add(5, key("prefill", "send"), TransferResult(state="settled"))
    assert (results.total, results.count(5), results.get(5, key("prefill", "send"))) == (0, 0, None)


def test_generations_count_by_session_and_receive_and_are_bounded() -> None:
    generations, receive_request = Generations(), key("decode", "receive")
    assert [generations.next(session, receive_request) for session in (1, 1, 2)] == [1, 2, 1]
    generations.forget_session(1)
    assert [generations.next(session, receive_request) for session in (1, 2)] == [1, 2]
    for number in range(GENERATIONS_KEPT):
        generations.next(3, key("decode", "receive", f"{number:032x}"))
    assert generations.next(1, receive_request) == 1


def test_a_send_request_may_be_opened_to_wait_for_its_receivers(three: Three) -> None:
    assert three.prefill.send(ids={}, last=False, destinations=2).matched == 0
    assert three.decode.receive().matched == 1
    assert three.told_of() == [(1, 2)]
    assert three.result(three.prefill, "send").matched == 1
    assert three.second.receive().matched == 1
    assert three.told_of() == [(1, 2), (2, 2)]
    assert not three.harness.transport.under_way
    assert three.prefill.send().matched == 2
    assert len(three.harness.transport.under_way) == 2
    assert three.told_of() == [(1, 2), (2, 2)]


def test_receivers_that_are_there_already_are_in_the_reply(three: Three) -> None:
    assert three.decode.receive().matched == 0
    assert three.prefill.send(destinations=2).matched == 1
    assert three.told_of() == []
    assert three.result(three.decode, "receive").matched == 1
    three.second.receive()
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
