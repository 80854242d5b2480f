"""What happens to both sides of a hand-off: a test for each row of the table in ``kvferry.daemon.rooms.book``.

Each is tried with SEND before RECEIVE and after it, before the copy begins and while it is under way: the outcome is
known at once, but pages are held, and nobody is told ``settled``, until the copy has ended.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvferry.pools.pool import Pool
from kvferry.pools.runs import PageIds
from kvferry.protocol.errors import (
    CancelledError,
    NotOwnerError,
    PageBusyError,
    TransferFailedError,
    UnknownRoomError,
)
from tests.rooms.room_world import RoomWorld

pytestmark = pytest.mark.any_device

FIRST = pytest.mark.parametrize("first", ["send", "receive"])


class HandOffWorld(NamedTuple):
    """A world with one hand-off between two pools."""

    world: RoomWorld
    prefill: int
    decode: int
    source: Pool
    destination: Pool
    source_pages: PageIds
    destination_pages: PageIds

    def send(self, *, last: bool = True) -> None:
        """SEND the source's pages."""
        self.world.send(self.prefill, self.source, self.source_pages, last=last)

    def receive(self) -> None:
        """RECEIVE into the destination's pages."""
        self.world.receive(self.decode, self.destination, self.destination_pages)

    def begin(self, first: str) -> int:
        """Bring both sides together, in either order; return the copy that is under way now."""
        for step in (self.send, self.receive) if first == "send" else (self.receive, self.send):
            step()
        (piece,) = self.world.transport.under_way
        return piece

    def told(self) -> tuple[list[str], list[str]]:
        """Return what prefill and decode were told; () for the dead."""
        return self.outcomes(self.prefill), self.outcomes(self.decode)

    def outcomes(self, session: int) -> list[str]:
        """Return what a session was told; a dead one nothing."""
        return self.world.outcomes(session) if session in self.world.told else []

    def same_bytes(self) -> bool:
        """Return whether the destination's pages hold what the source's hold."""
        return self.world.content(self.source, self.source_pages) == self.world.content(
            self.destination, self.destination_pages
        )

    def held(self) -> tuple[int, int]:
        """Return how many pages are held at the source and at the destination."""
        return self.source.allocator.busy_count, self.destination.allocator.busy_count


@pytest.fixture
def both() -> HandOffWorld:
    """Return a world with pages filled on the source side and allocated on the destination side."""
    world = RoomWorld()
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    source.allocator.allocate(prefill, 2)  # so that the page numbers differ
    source_pages, destination_pages = world.filled(source, prefill, 3), world.filled(destination, decode, 3)
    return HandOffWorld(world, prefill, decode, source, destination, source_pages, destination_pages)


# -- success


@FIRST
def test_a_hand_off(both: HandOffWorld, first: str) -> None:
    piece = both.begin(first)
    assert both.told() == ([], [])
    assert both.held() == (3, 3)
    both.world.transport.finish(piece)
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.held() == (0, 0)
    assert both.same_bytes()


def test_the_events_count_pages_bytes_and_time(both: HandOffWorld) -> None:
    both.world.send(both.prefill, both.source, both.source_pages, first_token=5, payload=b"more")
    both.world.pass_time(2.0)
    both.receive()
    both.world.pass_time(0.5)
    both.world.transport.finish_all()
    sent, received = both.world.finished(both.prefill), both.world.finished(both.decode)
    for event in (sent, received):
        assert (event.pages, event.moved_bytes, event.moved_us) == (3, 3 * 4 * 8, 500_000)
    assert (sent.waited_us, received.waited_us) == (2_000_000, 0)
    assert (received.first_token, received.payload) == (5, b"more")
    assert (sent.first_token, sent.payload) == (None, b"")


def test_bytes_of_a_failed_copy_are_not_counted(both: HandOffWorld) -> None:
    piece = both.begin("send")
    both.world.transport.copy(piece)
    both.world.transport.end(piece, TransferFailedError("no"))
    assert both.world.finished(both.decode).moved_bytes == 0


# -- what can end a hand-off, and what both sides are told then


def sender_cancels(both: HandOffWorld) -> None:
    both.world.cancel(both.prefill, both.source, "send")


def receiver_cancels(both: HandOffWorld) -> None:
    both.world.cancel(both.decode, both.destination, "receive")


def sender_dies(both: HandOffWorld) -> None:
    both.world.lose(both.prefill)


def receiver_dies(both: HandOffWorld) -> None:
    both.world.lose(both.decode)


def time_runs_out(both: HandOffWorld) -> None:
    both.world.pass_time(30.0)


Ending = Callable[[HandOffWorld], None]
ENDINGS: list[tuple[Ending, list[str], list[str]]] = [
    (sender_cancels, ["CANCELLED"], ["PEER_CANCELLED"]),
    (receiver_cancels, ["PEER_CANCELLED"], ["CANCELLED"]),
    (time_runs_out, ["DEADLINE"], ["DEADLINE"]),
    (receiver_dies, ["PEER_LOST"], []),
]


@FIRST
@pytest.mark.parametrize(("ending", "sender_told", "receiver_told"), ENDINGS)
def test_an_end_while_a_copy_is_under_way(
    both: HandOffWorld, first: str, ending: Ending, sender_told: list[str], receiver_told: list[str]
) -> None:
    piece = both.begin(first)
    ending(both)
    assert both.told() == (sender_told, receiver_told)
    assert both.held() == (3, 3)
    assert both.world.transport.stopped == {piece}
    both.world.transport.copy(piece)  # its last bytes still land
    both.world.transport.end(piece, CancelledError("stopped"))
    assert both.told() == ([*sender_told, "settled"], [*receiver_told, "settled"] if receiver_told else [])
    assert both.held() == (0, 0)


@FIRST
@pytest.mark.parametrize(("ending", "sender_told", "receiver_told"), ENDINGS)
def test_a_copy_that_was_done_when_it_was_stopped_changes_nothing(
    both: HandOffWorld, first: str, ending: Ending, sender_told: list[str], receiver_told: list[str]
) -> None:
    piece = both.begin(first)
    ending(both)
    both.world.transport.finish(piece)
    assert both.told() == ([*sender_told, "settled"], [*receiver_told, "settled"] if receiver_told else [])


@FIRST
@pytest.mark.parametrize(("ending", "sender_told", "receiver_told"), [*ENDINGS, (sender_dies, [], ["PEER_LOST"])])
def test_an_end_before_the_last_chunk(
    both: HandOffWorld, first: str, ending: Ending, sender_told: list[str], receiver_told: list[str]
) -> None:
    if first == "receive":
        both.receive()
    both.send(last=False)
    if first == "send":
        both.receive()
    (piece,) = both.world.transport.under_way
    ending(both)
    assert both.told() == (sender_told, receiver_told)
    both.world.transport.end(piece, CancelledError("stopped"))
    assert both.told() == (
        [*sender_told, "settled"] if sender_told else [],
        [*receiver_told, "settled"] if receiver_told else [],
    )
    assert both.held() == (0, 0)


@pytest.mark.parametrize(("ending", "told"), [(sender_cancels, "CANCELLED"), (time_runs_out, "DEADLINE")])
def test_a_send_that_no_one_waits_for(both: HandOffWorld, ending: Ending, told: str) -> None:
    both.send()
    assert both.held() == (3, 0)
    ending(both)
    assert both.told() == ([told, "settled"], [])
    assert both.held() == (0, 0)


@pytest.mark.parametrize(("ending", "told"), [(receiver_cancels, "CANCELLED"), (time_runs_out, "DEADLINE")])
def test_a_receive_that_no_one_sends_to(both: HandOffWorld, ending: Ending, told: str) -> None:
    both.receive()
    assert both.held() == (0, 3)
    ending(both)
    assert both.told() == ([], [told, "settled"])
    assert both.held() == (0, 0)


@pytest.mark.parametrize("last", [False, True])
def test_a_lonely_side_of_a_dead_session(both: HandOffWorld, *, last: bool) -> None:
    both.send(last=last)
    both.world.lose(both.prefill)
    # A complete offer waits on for its receiver; another is forgotten with its pages.
    assert both.held() == ((3, 0) if last else (0, 0))
    both.receive()
    both.world.lose(both.decode)
    both.world.transport.finish_all()
    assert both.source.allocator.idle
    assert both.destination.allocator.idle


@FIRST
def test_prefill_may_die_after_its_last_send(both: HandOffWorld, first: str) -> None:
    piece = both.begin(first)
    sent = both.world.content(both.source, both.source_pages)
    both.world.lose(both.prefill)
    assert both.told() == ([], [])
    newcomer = both.world.session()
    taken = both.world.filled(both.source, newcomer, both.source.allocator.free_count)
    assert not set(taken.tolist()) & set(both.source_pages.tolist())
    both.world.transport.finish(piece)
    assert both.told() == ([], ["OK", "settled"])
    assert both.world.content(both.destination, both.destination_pages) == sent
    assert both.source.allocator.free_count == 3


def test_prefill_may_die_before_decode_asks(both: HandOffWorld) -> None:
    both.send()
    both.world.lose(both.prefill)
    both.receive()
    both.world.transport.finish_all()
    assert both.told() == ([], ["OK", "settled"])
    assert both.same_bytes()
    assert both.source.allocator.idle


def test_an_offer_of_the_dead_still_has_its_deadline(both: HandOffWorld) -> None:
    both.send()
    both.world.lose(both.prefill)
    both.world.pass_time(29.9)
    assert both.held() == (3, 0)
    both.world.pass_time(0.1)
    assert both.source.allocator.idle


def test_pages_of_a_dead_receiver_are_not_reused_while_a_copy_may_land(both: HandOffWorld) -> None:
    piece = both.begin("send")
    both.world.lose(both.decode)
    newcomer = both.world.session()
    taken = both.world.filled(both.destination, newcomer, both.destination.allocator.free_count)
    before = both.world.content(both.destination, taken)
    both.world.transport.finish(piece)
    assert both.world.content(both.destination, taken) == before
    assert both.destination.allocator.free_count == 3


@FIRST
def test_a_copy_fails(both: HandOffWorld, first: str) -> None:
    piece = both.begin(first)
    both.world.transport.end(piece, TransferFailedError("copying 3 blocks: Bad address"))
    assert both.told() == (["TRANSFER_FAILED", "settled"], ["TRANSFER_FAILED", "settled"])
    assert both.held() == (0, 0)


def test_one_of_two_copies_fails(both: HandOffWorld) -> None:
    both.receive()
    world, pages = both.world, both.source_pages
    world.send(both.prefill, both.source, pages[:1], last=False)
    world.send(both.prefill, both.source, pages[1:], first_page=1)
    first, second = world.transport.under_way
    world.transport.end(first, TransferFailedError("no"))
    assert both.told() == (["TRANSFER_FAILED"], ["TRANSFER_FAILED"])
    assert world.transport.stopped == {second}
    world.transport.end(second, TransferFailedError("no"))
    assert both.told() == (["TRANSFER_FAILED", "settled"], ["TRANSFER_FAILED", "settled"])


# -- deadlines


@pytest.mark.parametrize(("send_s", "receive_s"), [(5.0, 50.0), (50.0, 5.0)])
@FIRST
def test_the_earlier_deadline_ends_both(both: HandOffWorld, first: str, send_s: float, receive_s: float) -> None:
    world = both.world
    steps: list[Callable[[], object]] = [
        lambda: world.send(both.prefill, both.source, both.source_pages, deadline_s=send_s),
        lambda: world.receive(both.decode, both.destination, both.destination_pages, deadline_s=receive_s),
    ]
    for step in steps if first == "send" else steps[::-1]:
        step()
    assert world.book.next_deadline() == world.now + 5
    world.pass_time(4.9)
    assert both.told() == ([], [])
    world.pass_time(0.1)
    assert both.told() == (["DEADLINE"], ["DEADLINE"])
    detail = world.finished(both.decode).error
    assert detail is not None
    assert f"the {'send' if send_s < receive_s else 'receive'} side's deadline passed; missing: copies" in detail.detail


@pytest.mark.parametrize(
    ("side", "missing"),
    [("send", "1 of 1 rooms: no RECEIVE yet"), ("receive", "1 of 1 sources: no SEND yet")],
)
def test_a_deadline_says_which_side_was_missing(both: HandOffWorld, side: str, missing: str) -> None:
    (both.send if side == "send" else both.receive)()
    both.world.pass_time(30.0)
    error = both.world.finished(both.prefill if side == "send" else both.decode).error
    assert error is not None
    assert missing in error.detail


def test_a_deadline_says_that_the_last_chunk_is_missing(both: HandOffWorld) -> None:
    both.receive()
    both.world.send(both.prefill, both.source, both.source_pages[:1], last=False, deadline_s=60)
    both.world.transport.finish_all()
    both.world.pass_time(30.0)
    error = both.world.finished(both.decode).error
    assert error is not None
    assert "a source's last SEND" in error.detail


def test_every_chunk_may_extend_the_deadline(both: HandOffWorld) -> None:
    world, pages = both.world, both.source_pages
    world.send(both.prefill, both.source, pages[:1], last=False, deadline_s=10)
    world.pass_time(9)
    world.send(both.prefill, both.source, pages[1:], first_page=1, deadline_s=10)
    world.pass_time(9)
    assert both.told() == ([], [])
    both.receive()
    world.transport.finish_all()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])


def test_a_chunk_does_not_shorten_the_deadline(both: HandOffWorld) -> None:
    world, pages = both.world, both.source_pages
    world.send(both.prefill, both.source, pages[:1], last=False, deadline_s=60)
    world.send(both.prefill, both.source, pages[1:], first_page=1, deadline_s=1)
    world.pass_time(59)
    assert both.told() == ([], [])
    world.pass_time(1)
    assert both.told() == (["DEADLINE", "settled"], [])


def test_a_deadline_after_the_end_means_nothing(both: HandOffWorld) -> None:
    both.world.transport.finish(both.begin("send"))
    assert both.world.book.next_deadline() is None
    both.world.pass_time(1000)
    assert both.told() == (["OK", "settled"], ["OK", "settled"])


# -- the daemon ends


def test_draining_fails_what_waits_for_a_message(both: HandOffWorld) -> None:
    both.send(last=False)
    both.receive()
    other = both.world.filled(both.source, both.prefill, 1)
    both.world.send(both.prefill, both.source, other, request="f" * 32)
    (piece,) = both.world.transport.under_way
    both.world.drain()
    assert both.told() == (["SHUTTING_DOWN", "SHUTTING_DOWN", "settled"], ["SHUTTING_DOWN"])
    both.world.transport.end(piece)
    assert not list(both.world.book.sides)


def test_draining_lets_running_hand_offs_finish(both: HandOffWorld) -> None:
    piece = both.begin("send")
    both.world.drain()
    assert both.told() == ([], [])
    both.world.transport.finish(piece)
    assert both.told() == (["OK", "settled"], ["OK", "settled"])


# -- cancelling what is not there, pages in use


def test_only_the_owner_cancels(both: HandOffWorld) -> None:
    both.send()
    for session, pool, side in (
        (both.decode, both.source, "send"),
        (both.prefill, both.source, "receive"),
        (both.prefill, both.destination, "send"),
    ):
        with pytest.raises(UnknownRoomError):
            both.world.cancel(session, pool, "send" if side == "send" else "receive")
    assert both.told() == ([], [])


def test_cancelling_twice_is_cancelling_once(both: HandOffWorld) -> None:
    piece = both.begin("send")
    receiver_cancels(both)
    receiver_cancels(both)
    sender_cancels(both)
    both.world.transport.end(piece, CancelledError("stopped"))
    assert both.told() == (["PEER_CANCELLED", "settled"], ["CANCELLED", "settled"])


def test_pages_sent_may_not_be_received_into_until_settled(both: HandOffWorld) -> None:
    piece = both.begin("send")
    world = both.world
    with pytest.raises(PageBusyError, match="is being read"):
        world.receive(both.prefill, both.source, both.source_pages, request="f" * 32)
    with pytest.raises(PageBusyError, match="is being written"):
        world.send(both.decode, both.destination, both.destination_pages, request="f" * 32)
    with pytest.raises(PageBusyError, match="is being written"):
        world.receive(both.decode, both.destination, both.destination_pages, request="f" * 32)
    receiver_cancels(both)
    with pytest.raises(PageBusyError):
        world.receive(both.decode, both.destination, both.destination_pages, request="f" * 32)
    world.transport.end(piece, CancelledError("stopped"))
    world.receive(both.decode, both.destination, both.destination_pages, request="f" * 32)


def test_freeing_busy_pages_is_deferred(both: HandOffWorld) -> None:
    piece = both.begin("send")
    free = both.source.allocator.free_count
    assert both.source.allocator.free(both.prefill, both.source_pages) == (0, 3)
    assert both.destination.allocator.free(both.decode, both.destination_pages) == (0, 3)
    with pytest.raises(NotOwnerError):
        both.world.send(both.prefill, both.source, both.source_pages, request="f" * 32)
    both.world.transport.finish(piece)
    assert both.source.allocator.free_count == free + 3
    assert both.destination.allocator.idle
    assert both.same_bytes()


def test_shared_source_pages_are_read_by_several_rooms(both: HandOffWorld) -> None:
    world = both.world
    requests = [letter * 32 for letter in "abc"]
    for request in requests:
        world.send(both.prefill, both.source, both.source_pages, request=request)
    targets = [world.filled(both.destination, both.decode, 3) for _ in requests]
    for request, pages in zip(requests, targets, strict=True):
        world.receive(both.decode, both.destination, pages, request=request)
    for at, piece in enumerate(list(world.transport.under_way)):
        assert both.held() == (3, 9 - 3 * at)
        world.transport.finish(piece)
    assert both.held() == (0, 0)
    sent = world.content(both.source, both.source_pages)
    assert [world.content(both.destination, pages) for pages in targets] == [sent] * 3


def test_sides_that_are_over_do_not_wait_for_their_deadlines() -> None:
    """One that is due before them and is not over would keep all of them, an hour's worth of pages and cells."""
    world = RoomWorld()
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    world.receive(decode, destination, world.filled(destination, decode, 1), request="f" * 32, deadline_s=1.0)
    sent, received = world.filled(source, prefill, 2), world.filled(destination, decode, 2)
    rooms = []
    for number in range(50):
        request = f"{number:032x}"
        world.receive(decode, destination, received, request=request, deadline_s=3600.0)
        rooms.append(weakref.ref(next(one for one in world.book.sides.rooms.values() if one.request_id == request)))
        world.send(prefill, source, sent, request=request, deadline_s=3600.0)
        world.transport.finish_all()
    gc.collect()
    assert sum(room() is not None for room in rooms) < 25
