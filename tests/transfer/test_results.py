"""Results kept until they are acknowledged, re-armed receive requests and their generations."""

from __future__ import annotations

import pytest

from kvferry.daemon.transfer.endpoints import EndpointKey
from kvferry.daemon.transfer.kept import GENERATIONS_KEPT, Generations, KeptPayloads, Results
from kvferry.protocol.errors import TransferExistsError, UnknownTransferError
from kvferry.protocol.events import Settled
from kvferry.protocol.transfer_messages import TransferResult
from tests.transfer.transfer_harness import REQUEST, TransferHarness


@pytest.fixture
def harness() -> TransferHarness:
    """Return an empty harness."""
    return TransferHarness()


def key(pool: str, direction: str, request: str = REQUEST) -> EndpointKey:
    return EndpointKey(7, request, pool, "send" if direction == "send" else "receive")


def test_a_result_follows_its_side_and_stays_until_acknowledged(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    with pytest.raises(UnknownTransferError):
        harness.state_machine.result(prefill, key("prefill", "send"))
    harness.send(prefill, source, harness.filled(source, prefill, 2))
    assert harness.state_machine.result(prefill, key("prefill", "send")) == TransferResult(state="open")
    harness.receive(decode, destination, harness.filled(destination, decode, 2))
    harness.cancel(decode, destination, "receive")
    finished = harness.state_machine.result(prefill, key("prefill", "send"))
    assert (finished.state, finished.settled) == ("finished", None)
    assert finished.finished == harness.told[prefill][0]
    harness.transport.finish_all()
    settled = harness.state_machine.result(prefill, key("prefill", "send"))
    assert settled == TransferResult(
        state="settled", finished=finished.finished, settled=last_settled(harness, prefill)
    )
    assert harness.state_machine.results.count(prefill) == 1
    harness.acknowledge(prefill, source, "send")
    with pytest.raises(UnknownTransferError):
        harness.state_machine.result(prefill, key("prefill", "send"))
    assert harness.state_machine.results.count(prefill) == 0


def last_settled(harness: TransferHarness, session: int) -> Settled:
    event = harness.told[session][-1]
    assert isinstance(event, Settled)
    return event


def test_results_are_the_sessions_own(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source = harness.pool("prefill")
    harness.send(prefill, source, harness.filled(source, prefill, 2))
    with pytest.raises(UnknownTransferError):
        harness.state_machine.result(decode, key("prefill", "send"))


def test_nothing_is_kept_for_a_lost_session(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    harness.send(prefill, source, harness.filled(source, prefill, 2))
    harness.lose(prefill)
    harness.receive(decode, destination, harness.filled(destination, decode, 2))
    harness.transport.finish_all()
    assert harness.state_machine.results.total == 1
    harness.lose(decode)
    assert harness.state_machine.results.total == 0


def test_a_receive_is_begun_anew_with_the_same_pages_and_another_source(harness: TransferHarness) -> None:
    first, second, decode = harness.session(), harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    received = harness.filled(destination, decode, 2)
    assert harness.receive(decode, destination, received).generation == 1
    harness.send(first, source, harness.filled(source, first, 2)[:1], last=False)
    harness.lose(first)
    with pytest.raises(TransferExistsError):
        harness.receive(decode, destination, received)  # a byte may still land
    harness.transport.finish_all()
    assert harness.outcomes(decode) == ["PEER_LOST", "settled"]
    assert harness.receive(decode, destination, received).generation == 2
    sent = harness.filled(source, second, 2)
    harness.send(second, source, sent)
    harness.transport.finish_all()
    assert harness.outcomes(decode) == ["PEER_LOST", "settled", "OK", "settled"]
    assert [event.generation for event in harness.told[decode]] == [1, 1, 2, 2]
    assert harness.content(destination, received) == harness.content(source, sent)


def test_a_late_chunk_does_not_start_a_failed_transfer_anew(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent = harness.filled(source, prefill, 2)
    harness.receive(decode, destination, harness.filled(destination, decode, 2))
    harness.send(prefill, source, sent[:1], last=False)
    harness.cancel(decode, destination, "receive")
    for settled in (False, True):
        if settled:
            harness.transport.finish_all()
        with pytest.raises(TransferExistsError, match="failed with PEER_CANCELLED"):
            harness.send(prefill, source, sent[1:], first_page=1)
    harness.acknowledge(prefill, source, "send")
    harness.send(prefill, source, sent)
    assert [direction.direction for direction in harness.state_machine.endpoints] == ["send"]


def test_a_transfer_that_begins_anew_drops_the_old_result(harness: TransferHarness) -> None:
    decode, destination = harness.session(), harness.pool("decode")
    received = harness.filled(destination, decode, 2)
    harness.receive(decode, destination, received)
    harness.cancel(decode, destination, "receive")
    harness.receive(decode, destination, received)
    assert harness.state_machine.result(decode, key("decode", "receive")) == TransferResult(state="open")
    assert harness.state_machine.results.count(decode) == 1


def test_results_of_unknown_sessions_are_not_kept() -> None:
    results = Results(KeptPayloads())
    results.begin(5, key("prefill", "send"))
    results.add(5, key("prefill", "send"), TransferResult(state="settled"))
    assert (results.total, results.count(5), results.get(5, key("prefill", "send"))) == (0, 0, None)


def test_generations_count_by_session_and_receive_and_are_bounded() -> None:
    generations, receive_request = Generations(), key("decode", "receive")
    assert [
        generations.next(1, receive_request),
        generations.next(1, receive_request),
        generations.next(2, receive_request),
    ] == [1, 2, 1]
    generations.forget_session(1)
    assert (generations.next(1, receive_request), generations.next(2, receive_request)) == (1, 2)
    for number in range(GENERATIONS_KEPT):
        generations.next(3, key("decode", "receive", f"{number:032x}"))
    assert generations.next(1, receive_request) == 1
