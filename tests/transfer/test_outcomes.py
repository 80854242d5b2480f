"""What happens to both sides of a transfer: a test for each row of the table in ``transfer.transitions``.

Each is tried with SEND before RECEIVE and after it, before the copy begins and while it is under way: the outcome is
known at once, but pages are held, and nobody is told ``settled``, until the copy has ended.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvferry.pools.planning.runs import PageIds
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import (
    CancelledError,
    NotOwnerError,
    PageBusyError,
    TransferFailedError,
    UnknownTransferError,
)
from tests.transfer.transfer_harness import TransferHarness

pytestmark = pytest.mark.any_device

FIRST = pytest.mark.parametrize("first", ["send", "receive"])


class OutcomeHarness(NamedTuple):
    """A harness with one transfer between two pools."""

    harness: TransferHarness
    prefill: int
    decode: int
    source: Pool
    destination: Pool
    source_pages: PageIds
    destination_pages: PageIds

    def send(self, *, last: bool = True) -> None:
        """SEND the source's pages."""
        self.harness.send(self.prefill, self.source, self.source_pages, last=last)

    def receive(self) -> None:
        """RECEIVE into the destination's pages."""
        self.harness.receive(self.decode, self.destination, self.destination_pages)

    def begin(self, first: str) -> int:
        """Bring both sides together, in either order; return the copy that is under way now."""
        for step in (self.send, self.receive) if first == "send" else (self.receive, self.send):
            step()
        (op,) = self.harness.transport.under_way
        return op

    def told(self) -> tuple[list[str], list[str]]:
        """Return what prefill and decode were told; () for the dead."""
        return self.outcomes(self.prefill), self.outcomes(self.decode)

    def outcomes(self, session: int) -> list[str]:
        """Return what a session was told; a dead one nothing."""
        return self.harness.outcomes(session) if session in self.harness.told else []

    def same_bytes(self) -> bool:
        """Return whether the destination's pages hold what the source's hold."""
        return self.harness.content(self.source, self.source_pages) == self.harness.content(
            self.destination, self.destination_pages
        )

    def held(self) -> tuple[int, int]:
        """Return how many pages are held at the source and at the destination."""
        return self.source.allocator.busy_count, self.destination.allocator.busy_count


@pytest.fixture
def both() -> OutcomeHarness:
    """Return a harness with pages filled on the source side and allocated on the destination side."""
    harness = TransferHarness()
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    source.allocator.allocate(prefill, 2)  # so that the page numbers differ
    source_pages, destination_pages = harness.filled(source, prefill, 3), harness.filled(destination, decode, 3)
    return OutcomeHarness(harness, prefill, decode, source, destination, source_pages, destination_pages)


# -- success


@FIRST
def test_a_transfer(both: OutcomeHarness, first: str) -> None:
    op = both.begin(first)
    assert both.told() == ([], [])
    assert both.held() == (3, 3)
    both.harness.transport.finish(op)
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.held() == (0, 0)
    assert both.same_bytes()


def test_the_events_count_pages_bytes_and_time(both: OutcomeHarness) -> None:
    both.harness.send(both.prefill, both.source, both.source_pages, first_token=5, payload=b"more")
    both.harness.pass_time(2.0)
    both.receive()
    both.harness.pass_time(0.5)
    both.harness.transport.finish_all()
    sent, received = both.harness.finished(both.prefill), both.harness.finished(both.decode)
    for event in (sent, received):
        assert (event.pages, event.moved_bytes, event.moved_us) == (3, 3 * 4 * 8, 500_000)
    assert (sent.waited_us, received.waited_us) == (2_000_000, 0)
    assert (received.first_token, received.payload) == (5, b"more")
    assert (sent.first_token, sent.payload) == (None, b"")


def test_bytes_of_a_failed_copy_are_not_counted(both: OutcomeHarness) -> None:
    op = both.begin("send")
    both.harness.transport.copy(op)
    both.harness.transport.end(op, TransferFailedError("no"))
    assert both.harness.finished(both.decode).moved_bytes == 0


# -- what can end a transfer, and what both sides are told then


def sender_cancels(both: OutcomeHarness) -> None:
    both.harness.cancel(both.prefill, both.source, "send")


def receiver_cancels(both: OutcomeHarness) -> None:
    both.harness.cancel(both.decode, both.destination, "receive")


def sender_dies(both: OutcomeHarness) -> None:
    both.harness.lose(both.prefill)


def receiver_dies(both: OutcomeHarness) -> None:
    both.harness.lose(both.decode)


def time_runs_out(both: OutcomeHarness) -> None:
    both.harness.pass_time(30.0)


Ending = Callable[[OutcomeHarness], None]
ENDINGS: list[tuple[Ending, list[str], list[str]]] = [
    (sender_cancels, ["CANCELLED"], ["PEER_CANCELLED"]),
    (receiver_cancels, ["PEER_CANCELLED"], ["CANCELLED"]),
    (time_runs_out, ["DEADLINE"], ["DEADLINE"]),
    (receiver_dies, ["PEER_LOST"], []),
]


@FIRST
@pytest.mark.parametrize(("ending", "sender_notified", "receiver_notified"), ENDINGS)
def test_an_end_while_a_copy_is_under_way(
    both: OutcomeHarness, first: str, ending: Ending, sender_notified: list[str], receiver_notified: list[str]
) -> None:
    op = both.begin(first)
    ending(both)
    assert both.told() == (sender_notified, receiver_notified)
    assert both.held() == (3, 3)
    assert both.harness.transport.stopped == {op}
    both.harness.transport.copy(op)  # its last bytes still land
    both.harness.transport.end(op, CancelledError("stopped"))
    assert both.told() == ([*sender_notified, "settled"], [*receiver_notified, "settled"] if receiver_notified else [])
    assert both.held() == (0, 0)


@FIRST
@pytest.mark.parametrize(("ending", "sender_notified", "receiver_notified"), ENDINGS)
def test_a_copy_that_was_done_when_it_was_stopped_changes_nothing(
    both: OutcomeHarness, first: str, ending: Ending, sender_notified: list[str], receiver_notified: list[str]
) -> None:
    op = both.begin(first)
    ending(both)
    both.harness.transport.finish(op)
    assert both.told() == ([*sender_notified, "settled"], [*receiver_notified, "settled"] if receiver_notified else [])


@FIRST
@pytest.mark.parametrize(
    ("ending", "sender_notified", "receiver_notified"), [*ENDINGS, (sender_dies, [], ["PEER_LOST"])]
)
def test_an_end_before_the_last_chunk(
    both: OutcomeHarness, first: str, ending: Ending, sender_notified: list[str], receiver_notified: list[str]
) -> None:
    if first == "receive":
        both.receive()
    both.send(last=False)
    if first == "send":
        both.receive()
    (op,) = both.harness.transport.under_way
    ending(both)
    assert both.told() == (sender_notified, receiver_notified)
    both.harness.transport.end(op, CancelledError("stopped"))
    assert both.told() == (
        [*sender_notified, "settled"] if sender_notified else [],
        [*receiver_notified, "settled"] if receiver_notified else [],
    )
    assert both.held() == (0, 0)


@pytest.mark.parametrize(("ending", "told"), [(sender_cancels, "CANCELLED"), (time_runs_out, "DEADLINE")])
def test_a_send_that_no_one_waits_for(both: OutcomeHarness, ending: Ending, told: str) -> None:
    both.send()
    assert both.held() == (3, 0)
    ending(both)
    assert both.told() == ([told, "settled"], [])
    assert both.held() == (0, 0)


@pytest.mark.parametrize(("ending", "told"), [(receiver_cancels, "CANCELLED"), (time_runs_out, "DEADLINE")])
def test_a_receive_that_no_one_sends_to(both: OutcomeHarness, ending: Ending, told: str) -> None:
    both.receive()
    assert both.held() == (0, 3)
    ending(both)
    assert both.told() == ([], [told, "settled"])
    assert both.held() == (0, 0)


@pytest.mark.parametrize("last", [False, True])
def test_a_lonely_side_of_a_dead_session(both: OutcomeHarness, *, last: bool) -> None:
    both.send(last=last)
    both.harness.lose(both.prefill)
    # A complete send request waits on for its receiver; another is forgotten with its pages.
    assert both.held() == ((3, 0) if last else (0, 0))
    both.receive()
    both.harness.lose(both.decode)
    both.harness.transport.finish_all()
    assert both.source.allocator.idle
    assert both.destination.allocator.idle


@FIRST
def test_prefill_may_die_after_its_last_send(both: OutcomeHarness, first: str) -> None:
    op = both.begin(first)
    sent = both.harness.content(both.source, both.source_pages)
    both.harness.lose(both.prefill)
    assert both.told() == ([], [])
    newcomer = both.harness.session()
    taken = both.harness.filled(both.source, newcomer, both.source.allocator.free_count)
    assert not set(taken.tolist()) & set(both.source_pages.tolist())
    both.harness.transport.finish(op)
    assert both.told() == ([], ["OK", "settled"])
    assert both.harness.content(both.destination, both.destination_pages) == sent
    assert both.source.allocator.free_count == 3


def test_prefill_may_die_before_decode_asks(both: OutcomeHarness) -> None:
    both.send()
    both.harness.lose(both.prefill)
    both.receive()
    both.harness.transport.finish_all()
    assert both.told() == ([], ["OK", "settled"])
    assert both.same_bytes()
    assert both.source.allocator.idle


def test_an_send_of_the_dead_still_has_its_deadline(both: OutcomeHarness) -> None:
    both.send()
    both.harness.lose(both.prefill)
    both.harness.pass_time(29.9)
    assert both.held() == (3, 0)
    both.harness.pass_time(0.1)
    assert both.source.allocator.idle


def test_pages_of_a_dead_receiver_are_not_reused_while_a_copy_may_land(both: OutcomeHarness) -> None:
    op = both.begin("send")
    both.harness.lose(both.decode)
    newcomer = both.harness.session()
    taken = both.harness.filled(both.destination, newcomer, both.destination.allocator.free_count)
    before = both.harness.content(both.destination, taken)
    both.harness.transport.finish(op)
    assert both.harness.content(both.destination, taken) == before
    assert both.destination.allocator.free_count == 3


@FIRST
def test_a_copy_fails(both: OutcomeHarness, first: str) -> None:
    op = both.begin(first)
    both.harness.transport.end(op, TransferFailedError("copying 3 blocks: Bad address"))
    assert both.told() == (["TRANSFER_FAILED", "settled"], ["TRANSFER_FAILED", "settled"])
    assert both.held() == (0, 0)


def test_one_of_two_copies_fails(both: OutcomeHarness) -> None:
    both.receive()
    harness, pages = both.harness, both.source_pages
    harness.send(both.prefill, both.source, pages[:1], last=False)
    harness.send(both.prefill, both.source, pages[1:], first_page=1)
    first, second = harness.transport.under_way
    harness.transport.end(first, TransferFailedError("no"))
    assert both.told() == (["TRANSFER_FAILED"], ["TRANSFER_FAILED"])
    assert harness.transport.stopped == {second}
    harness.transport.end(second, TransferFailedError("no"))
    assert both.told() == (["TRANSFER_FAILED", "settled"], ["TRANSFER_FAILED", "settled"])


# -- deadlines


@pytest.mark.parametrize(("send_s", "receive_s"), [(5.0, 50.0), (50.0, 5.0)])
@FIRST
def test_the_earlier_deadline_ends_both(both: OutcomeHarness, first: str, send_s: float, receive_s: float) -> None:
    harness = both.harness
    steps: list[Callable[[], object]] = [
        lambda: harness.send(both.prefill, both.source, both.source_pages, deadline_s=send_s),
        lambda: harness.receive(both.decode, both.destination, both.destination_pages, deadline_s=receive_s),
    ]
    for step in steps if first == "send" else steps[::-1]:
        step()
    assert harness.state_machine.next_deadline() == harness.now + 5
    harness.pass_time(4.9)
    assert both.told() == ([], [])
    harness.pass_time(0.1)
    assert both.told() == (["DEADLINE"], ["DEADLINE"])
    detail = harness.finished(both.decode).error
    assert detail is not None
    assert f"the {'send' if send_s < receive_s else 'receive'} side's deadline passed; missing: copies" in detail.detail


@pytest.mark.parametrize(
    ("direction", "missing"),
    [("send", "1 of 1 destinations: no RECEIVE yet"), ("receive", "1 of 1 sources: no SEND yet")],
)
def test_a_deadline_says_which_side_was_missing(both: OutcomeHarness, direction: str, missing: str) -> None:
    (both.send if direction == "send" else both.receive)()
    both.harness.pass_time(30.0)
    error = both.harness.finished(both.prefill if direction == "send" else both.decode).error
    assert error is not None
    assert missing in error.detail


def test_a_deadline_says_that_the_last_chunk_is_missing(both: OutcomeHarness) -> None:
    both.receive()
    both.harness.send(both.prefill, both.source, both.source_pages[:1], last=False, deadline_s=60)
    both.harness.transport.finish_all()
    both.harness.pass_time(30.0)
    error = both.harness.finished(both.decode).error
    assert error is not None
    assert "a source's last SEND" in error.detail


def test_every_chunk_may_extend_the_deadline(both: OutcomeHarness) -> None:
    harness, pages = both.harness, both.source_pages
    harness.send(both.prefill, both.source, pages[:1], last=False, deadline_s=10)
    harness.pass_time(9)
    harness.send(both.prefill, both.source, pages[1:], first_page=1, deadline_s=10)
    harness.pass_time(9)
    assert both.told() == ([], [])
    both.receive()
    harness.transport.finish_all()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])


def test_a_chunk_does_not_shorten_the_deadline(both: OutcomeHarness) -> None:
    harness, pages = both.harness, both.source_pages
    harness.send(both.prefill, both.source, pages[:1], last=False, deadline_s=60)
    harness.send(both.prefill, both.source, pages[1:], first_page=1, deadline_s=1)
    harness.pass_time(59)
    assert both.told() == ([], [])
    harness.pass_time(1)
    assert both.told() == (["DEADLINE", "settled"], [])


def test_a_deadline_after_the_end_means_nothing(both: OutcomeHarness) -> None:
    both.harness.transport.finish(both.begin("send"))
    assert both.harness.state_machine.next_deadline() is None
    both.harness.pass_time(1000)
    assert both.told() == (["OK", "settled"], ["OK", "settled"])


# -- the daemon ends


def test_draining_fails_what_waits_for_a_message(both: OutcomeHarness) -> None:
    both.send(last=False)
    both.receive()
    other = both.harness.filled(both.source, both.prefill, 1)
    both.harness.send(both.prefill, both.source, other, request="f" * 32)
    (op,) = both.harness.transport.under_way
    both.harness.drain()
    assert both.told() == (["SHUTTING_DOWN", "SHUTTING_DOWN", "settled"], ["SHUTTING_DOWN"])
    both.harness.transport.end(op)
    assert not list(both.harness.state_machine.endpoints)


def test_draining_lets_running_transfers_finish(both: OutcomeHarness) -> None:
    op = both.begin("send")
    both.harness.drain()
    assert both.told() == ([], [])
    both.harness.transport.finish(op)
    assert both.told() == (["OK", "settled"], ["OK", "settled"])


# -- cancelling what is not there, pages in use


def test_only_the_owner_cancels(both: OutcomeHarness) -> None:
    both.send()
    for session, pool, direction in (
        (both.decode, both.source, "send"),
        (both.prefill, both.source, "receive"),
        (both.prefill, both.destination, "send"),
    ):
        with pytest.raises(UnknownTransferError):
            both.harness.cancel(session, pool, "send" if direction == "send" else "receive")
    assert both.told() == ([], [])


def test_cancelling_twice_is_cancelling_once(both: OutcomeHarness) -> None:
    op = both.begin("send")
    receiver_cancels(both)
    receiver_cancels(both)
    sender_cancels(both)
    both.harness.transport.end(op, CancelledError("stopped"))
    assert both.told() == (["PEER_CANCELLED", "settled"], ["CANCELLED", "settled"])


def test_pages_sent_may_not_be_received_into_until_settled(both: OutcomeHarness) -> None:
    op = both.begin("send")
    harness = both.harness
    with pytest.raises(PageBusyError, match="is being read"):
        harness.receive(both.prefill, both.source, both.source_pages, request="f" * 32)
    with pytest.raises(PageBusyError, match="is being written"):
        harness.send(both.decode, both.destination, both.destination_pages, request="f" * 32)
    with pytest.raises(PageBusyError, match="is being written"):
        harness.receive(both.decode, both.destination, both.destination_pages, request="f" * 32)
    receiver_cancels(both)
    with pytest.raises(PageBusyError):
        harness.receive(both.decode, both.destination, both.destination_pages, request="f" * 32)
    harness.transport.end(op, CancelledError("stopped"))
    harness.receive(both.decode, both.destination, both.destination_pages, request="f" * 32)


def test_freeing_busy_pages_is_deferred(both: OutcomeHarness) -> None:
    op = both.begin("send")
    free = both.source.allocator.free_count
    assert both.source.allocator.free(both.prefill, both.source_pages) == (0, 3)
    assert both.destination.allocator.free(both.decode, both.destination_pages) == (0, 3)
    with pytest.raises(NotOwnerError):
        both.harness.send(both.prefill, both.source, both.source_pages, request="f" * 32)
    both.harness.transport.finish(op)
    assert both.source.allocator.free_count == free + 3
    assert both.destination.allocator.idle
    assert both.same_bytes()


def test_shared_source_pages_are_read_by_several_receives(both: OutcomeHarness) -> None:
    harness = both.harness
    requests = [letter * 32 for letter in "abc"]
    for request in requests:
        harness.send(both.prefill, both.source, both.source_pages, request=request)
    remote_endpoints = [harness.filled(both.destination, both.decode, 3) for _ in requests]
    for request, pages in zip(requests, remote_endpoints, strict=True):
        harness.receive(both.decode, both.destination, pages, request=request)
    for at, op in enumerate(list(harness.transport.under_way)):
        assert both.held() == (3, 9 - 3 * at)
        harness.transport.finish(op)
    assert both.held() == (0, 0)
    sent = harness.content(both.source, both.source_pages)
    assert [harness.content(both.destination, pages) for pages in remote_endpoints] == [sent] * 3


def test_sides_that_are_over_do_not_wait_for_their_deadlines() -> None:
    """One that is due before them and is not over would keep all of them, an hour's worth of pages and cells."""
    harness = TransferHarness()
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    harness.receive(decode, destination, harness.filled(destination, decode, 1), request="f" * 32, deadline_s=1.0)
    sent, received = harness.filled(source, prefill, 2), harness.filled(destination, decode, 2)
    receive_requests = []
    for number in range(50):
        request = f"{number:032x}"
        harness.receive(decode, destination, received, request=request, deadline_s=3600.0)
        receive_requests.append(
            weakref.ref(
                next(
                    one
                    for one in harness.state_machine.endpoints.receive_requests.values()
                    if one.request_id == request
                )
            )
        )
        harness.send(prefill, source, sent, request=request, deadline_s=3600.0)
        harness.transport.finish_all()
    gc.collect()
    assert sum(receive_request() is not None for receive_request in receive_requests) < 25
