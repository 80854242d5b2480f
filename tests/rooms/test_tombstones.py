"""A half that comes after the other one has ended hears it at once; whoever tries again meets, in either order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import pytest

from kvferry.daemon.rooms.effects import TellEnded
from kvferry.daemon.rooms.remote import Incarnation
from kvferry.daemon.rooms.sides import SideKey
from kvferry.daemon.rooms.tombstones import Half, Tombstones
from kvferry.pools.pool import Pool
from kvferry.pools.runs import PageIds
from kvferry.protocol.error_info import ErrorInfo
from kvferry.protocol.errors import DeadlineError, PeerCancelledError, PeerLostError, RoomExistsError
from kvferry.protocol.peer_messages import Announce, RoomName
from tests.rooms.peer_world import Node, PeerWorld
from tests.rooms.room_world import REQUEST, RoomWorld, SideName, layers

pytestmark = pytest.mark.any_device

PAGES: Final = 2
ENDS: Final = {"deadline": "DEADLINE", "cancel": "PEER_CANCELLED", "death": "PEER_LOST"}
SIDES: Final = pytest.mark.parametrize("first", ["send", "receive"])
HOW: Final = pytest.mark.parametrize("how", ENDS)


# -- one daemon


class Halves:
    """A prefill and a decode engine of one daemon; ``first`` is the half that comes first."""

    def __init__(self, first: SideName = "send") -> None:
        self.world = RoomWorld()
        self.first: SideName = first
        self.late: SideName = "receive" if first == "send" else "send"
        self.pools = {"send": self.world.pool("prefill"), "receive": self.world.pool("decode")}
        self.sessions = {side: self.world.session() for side in self.pools}
        self.pages = {side: self.filled(side) for side in self.pools}

    def filled(self, side: str) -> PageIds:
        """Return fresh pages of a side."""
        return self.world.filled(self.pools[side], self.sessions[side], PAGES)

    def come(self, side: SideName, *, deadline_s: float = 30.0, last: bool = True, count: int = 1) -> None:
        """SEND or RECEIVE; ``count``: of the other side."""
        session, pool, ids = self.sessions[side], self.pools[side], self.pages[side]
        self.world.acknowledge(session, pool, side)
        if side == "send":
            self.world.send(session, pool, ids, last=last, destinations=count, deadline_s=deadline_s)
        else:
            self.world.receive(session, pool, ids, sources=count, deadline_s=deadline_s)

    def end(self, side: SideName, how: str) -> None:
        """Let a side end by itself."""
        if how == "deadline":
            self.world.pass_time(30.0)
        elif how == "cancel":
            self.world.cancel(self.sessions[side], self.pools[side], side)
        else:
            self.world.lose(self.sessions[side])
            self.sessions[side] = self.world.session()
            self.pages[side] = self.filled(side)

    def told(self, side: SideName) -> list[str]:
        """Return what a side was told."""
        return self.world.outcomes(self.sessions[side])


@SIDES
@HOW
def test_the_late_half_hears_at_once_how_the_other_one_ended_and_when(first: SideName, how: str) -> None:
    both = Halves(first)
    both.come(first, last=how != "death")
    both.end(first, how)
    both.world.pass_time(7.0)
    both.come(both.late)
    assert both.told(both.late) == [ENDS[how], "settled"]
    error = both.world.finished(both.sessions[both.late]).error
    assert error is not None
    assert error.detail.startswith("the other side ended 7.0 s ago: ")
    assert (error.request_id, error.retryable) == (REQUEST, how != "cancel")
    assert not list(both.world.book.sides)
    assert both.pools[both.late].allocator.busy_count == 0


@SIDES
@pytest.mark.parametrize("again", ["first", "late"])
def test_both_try_again_and_meet_in_either_order(first: SideName, again: str) -> None:
    both = Halves(first)
    both.come(first)
    both.end(first, "deadline")
    both.come(both.late)
    for side in (both.first, both.late) if again == "first" else (both.late, both.first):
        both.come(side)
    both.world.transport.finish_all()
    assert both.told(first)[-2:] == ["OK", "settled"]
    assert both.told(both.late) == ["DEADLINE", "settled", "OK", "settled"]
    assert both.world.content(both.pools["receive"], both.pages["receive"]) == both.world.content(
        both.pools["send"], both.pages["send"]
    )


@SIDES
def test_a_half_that_has_begun_anew_is_met_whatever_ended_before(first: SideName) -> None:
    both = Halves(first)
    for _ in range(3):
        both.come(first)
        both.end(first, "deadline")
    both.come(first)
    both.come(both.late)
    both.world.transport.finish_all()
    assert both.told(both.late) == ["OK", "settled"]


def test_who_heard_and_waits_longer_than_the_other_leaves_word_in_his_turn() -> None:
    both = Halves()
    both.come("send")
    both.end("send", "deadline")
    both.come("receive")
    both.come("receive", deadline_s=5.0)
    assert len(both.world.book.sides.rooms) == 1, "it heard once, and waits now"
    both.world.pass_time(5.0)
    both.come("send")
    assert both.told("send") == ["DEADLINE", "settled"] * 2
    both.come("send")
    both.come("receive")
    both.world.transport.finish_all()
    assert (both.told("send")[-2:], both.told("receive")[-2:]) == (["OK", "settled"],) * 2


@SIDES
def test_success_leaves_nothing(first: SideName) -> None:
    both = Halves(first)
    for side in (both.first, both.late):
        both.come(side)
    both.world.transport.finish_all()
    assert not len(both.world.book.sides.tombstones)
    both.come(both.late)
    assert both.told(both.late) == ["OK", "settled"], "a late duplicate waits, as somebody may come again"


def test_a_room_is_armed_again_after_its_source_died_whoever_comes_first() -> None:
    """The room was told; the new source must not hear of it."""
    orders: tuple[tuple[SideName, SideName], ...] = (("send", "receive"), ("receive", "send"))
    for order in orders:
        both = Halves("receive")
        both.come("receive")
        both.come("send", last=False)
        both.end("send", "death")
        both.world.transport.finish_all()
        assert both.told("receive") == ["PEER_LOST", "settled"]
        for side in order:
            both.come(side)
        both.world.transport.finish_all()
        assert both.told("receive") == ["PEER_LOST", "settled", "OK", "settled"]


def test_chunks_after_the_first_are_refused_with_the_reason() -> None:
    both = Halves("receive")
    both.come("receive")
    both.end("receive", "cancel")
    both.come("send", last=False)
    assert both.told("send") == ["PEER_CANCELLED", "settled"]
    with pytest.raises(RoomExistsError, match="failed with PEER_CANCELLED"):
        both.world.send(both.sessions["send"], both.pools["send"], both.filled("send"), first_page=PAGES)


class Stages:
    """Two pipeline stages, one destination."""

    def __init__(self) -> None:
        self.world = RoomWorld()
        self.session, self.decode = self.world.session(), self.world.session()
        self.stages = [self.world.pool("stage0", layers(1)), self.world.pool("stage1", layers(1, first=1))]
        self.destination = self.world.pool("decode")
        self.pages = [self.world.filled(pool, self.session, PAGES) for pool in self.stages]
        self.received = self.world.filled(self.destination, self.decode, PAGES)

    def send(self, stage: int, deadline_s: float = 30.0) -> None:
        """SEND from a stage, which has seen the end of what it sent before."""
        self.world.acknowledge(self.session, self.stages[stage], "send")
        self.world.send(self.session, self.stages[stage], self.pages[stage], deadline_s=deadline_s)

    def receive(self) -> None:
        """RECEIVE from both stages."""
        self.world.receive(self.decode, self.destination, self.received, sources=2)


def test_a_room_that_lacks_a_stage_fails_with_those_that_came() -> None:
    both = Stages()
    both.send(1, deadline_s=60.0)
    both.send(0)
    both.world.pass_time(30.0)
    both.receive()
    assert both.world.outcomes(both.decode) == ["DEADLINE", "settled"]
    assert both.world.outcomes(both.session) == ["DEADLINE", "settled"] * 2, "stage 1 need not wait either"
    assert not both.world.transport.under_way, "nothing was copied in vain"
    for stage in (0, 1):
        both.send(stage)
    both.receive()
    both.world.transport.finish_all()
    assert both.world.outcomes(both.decode)[-2:] == ["OK", "settled"]


def test_a_source_that_took_the_place_of_one_that_ended_is_waited_for() -> None:
    both = Stages()
    both.send(0)
    both.world.cancel(both.session, both.stages[0], "send")
    both.send(1)  # the request is being sent again
    both.receive()
    both.send(0)
    both.world.transport.finish_all()
    assert both.world.outcomes(both.decode) == ["OK", "settled"]


def test_both_stages_of_a_room_that_ended_hear_of_it() -> None:
    both = Stages()
    both.receive()
    both.world.cancel(both.decode, both.destination, "receive")
    for stage in (0, 1):
        both.send(stage)
    assert both.world.outcomes(both.session) == ["PEER_CANCELLED", "settled"] * 2


def test_a_stage_that_was_told_hears_it_not_again() -> None:
    both = Stages()
    both.send(0)
    both.receive()
    both.world.cancel(both.decode, both.destination, "receive")
    both.world.transport.finish_all()
    both.world.acknowledge(both.session, both.stages[0], "send")
    both.send(0)  # anew, for a room that is to come
    assert len(both.world.book.sides.offers) == 1


@pytest.mark.parametrize("gone", [1, 2])
def test_an_offer_for_two_ends_only_where_both_have(gone: int) -> None:
    world = RoomWorld()
    prefill, decode = world.session(), world.session()
    source = world.pool("prefill")
    rooms = [world.pool(name) for name in ("decode0", "decode1")]
    for pool in rooms:
        world.receive(decode, pool, world.filled(pool, decode, PAGES))
    for pool in rooms[:gone]:
        world.cancel(decode, pool, "receive")
    world.send(prefill, source, world.filled(source, prefill, PAGES), destinations=2)
    world.transport.finish_all()
    assert world.outcomes(decode)[-2:] == (["OK", "settled"] if gone == 1 else ["CANCELLED", "settled"])
    assert world.outcomes(prefill) == ([] if gone == 1 else ["PEER_CANCELLED", "settled"])


def test_one_of_two_rooms_comes_after_the_offer_has_ended() -> None:
    world = RoomWorld()
    prefill, decode = world.session(), world.session()
    source = world.pool("prefill")
    rooms = [world.pool(name) for name in ("decode0", "decode1")]
    received = [world.filled(pool, decode, PAGES) for pool in rooms]
    world.send(prefill, source, world.filled(source, prefill, PAGES), destinations=2)
    world.receive(decode, rooms[0], received[0])
    world.cancel(prefill, source, "send")
    world.transport.finish_all()
    for again in (False, True):
        for pool, ids in zip(rooms, received, strict=True):
            if not world.book.side(decode, SideKey(7, REQUEST, pool.name, "receive")):
                world.receive(decode, pool, ids)
        live = {one.pool.name for one in world.book.sides}
        assert live == ({"decode0", "decode1"} if again else {"decode0"}), "the other one heard it only now"


def test_a_daemon_takes_the_bounds_that_it_is_given() -> None:
    none = Tombstones(most=0)
    assert RoomWorld(tombstones=none).book.sides.tombstones is none


def test_an_offer_for_two_waits_where_one_has_ended_and_one_is_to_come() -> None:
    world = RoomWorld()
    prefill, decode = world.session(), world.session()
    source = world.pool("prefill")
    gone, comes = (world.pool(name) for name in ("decode0", "decode1"))
    world.receive(decode, gone, world.filled(gone, decode, PAGES))
    world.cancel(decode, gone, "receive")
    world.send(prefill, source, world.filled(source, prefill, PAGES), destinations=2)
    world.receive(decode, comes, world.filled(comes, decode, PAGES))
    world.transport.finish_all()
    assert world.outcomes(decode)[-2:] == ["OK", "settled"]


def test_a_send_that_a_room_takes_hears_of_no_other_room() -> None:
    world = RoomWorld()
    prefill, decode = world.session(), world.session()
    source = world.pool("prefill")
    lives, gone = (world.pool(name) for name in ("decode0", "decode1"))
    for pool in (lives, gone):
        world.receive(decode, pool, world.filled(pool, decode, PAGES))
    world.cancel(decode, gone, "receive")
    world.send(prefill, source, world.filled(source, prefill, PAGES))
    world.transport.finish_all()
    assert world.outcomes(prefill) == ["OK", "settled"]


def test_a_room_that_all_sources_had_joined_leaves_no_word_for_others() -> None:
    both = Halves("receive")
    for side in (both.first, both.late):
        both.come(side)
    both.end("receive", "cancel")
    assert not len(both.world.book.sides.tombstones)


def test_other_tenants_hear_nothing() -> None:
    both = Halves()
    both.come("send")
    both.end("send", "cancel")
    stranger, foreign = both.world.session(), both.world.pool("foreign", tenant=8)
    both.world.receive(stranger, foreign, both.world.filled(foreign, stranger, PAGES))
    assert both.world.outcomes(stranger) == []


# -- two daemons


class Apart:
    """A prefill engine at one daemon, a decode engine at another, and a third daemon with a prefill engine."""

    def __init__(self) -> None:
        self.world = PeerWorld("source", "home", "other")
        self.source, self.home, self.other = self.world.nodes.values()
        self.pools: dict[Node, Pool] = {}
        self.sessions: dict[Node, int] = {}
        self.pages: dict[Node, PageIds] = {}
        for node in self.world.nodes.values():
            pool = self.pools[node] = node.pool("decode" if node is self.home else "prefill")
            session = self.sessions[node] = node.session()
            self.pages[node] = node.filled(pool, session, PAGES)

    def send(self, node: Node | None = None, deadline_s: float = 30.0) -> None:
        """SEND at a daemon, whose engine has seen the end of what it sent before."""
        node = node or self.source
        node.acknowledge(self.sessions[node], self.pools[node], "send")
        node.send(self.sessions[node], self.pools[node], self.pages[node], deadline_s=deadline_s)
        self.world.run()

    def receive(self, *nodes: Node, deadline_s: float = 30.0) -> None:
        """RECEIVE from some daemons."""
        daemons = tuple(one.ipc for one in nodes or (self.source,))
        home = self.home
        home.receive(
            self.sessions[home], self.pools[home], self.pages[home], source_daemons=daemons, deadline_s=deadline_s
        )
        self.world.run()

    def cancel(self, node: Node) -> None:
        """CANCEL what a daemon's engine has begun."""
        node.cancel(self.sessions[node], self.pools[node], "receive" if node is self.home else "send")
        self.world.run()

    def told(self, node: Node) -> list[str]:
        """Return what a daemon's engine was told."""
        return node.outcomes(self.sessions[node])


@pytest.fixture
def apart() -> Apart:
    return Apart()


@SIDES
@HOW
def test_the_late_half_hears_at_once_at_another_daemon(apart: Apart, first: str, how: str) -> None:
    node, late = (apart.source, apart.home) if first == "send" else (apart.home, apart.source)
    come: dict[Node, Callable[[], None]] = {apart.source: apart.send, apart.home: apart.receive}
    if first == "send" and how == "death":
        pages = apart.pages[node]
        node.send(apart.sessions[node], apart.pools[node], pages[:1], last=False)
    else:
        come[node]()
    if how == "deadline":
        apart.world.pass_time(30.0)
    elif how == "cancel":
        apart.cancel(node)
    else:
        node.lose(apart.sessions[node])
    apart.world.run()
    apart.world.pass_time(2.0)
    come[late]()
    assert apart.told(late) == [ENDS[how], "settled"]
    error = late.finished(apart.sessions[late]).error
    assert error is not None
    assert "the other side ended 2.0 s ago" in error.detail
    apart.world.check_nothing_left()


@SIDES
def test_both_try_again_across_daemons_in_either_order(first: str) -> None:
    for again in itertools.permutations(("send", "receive")):
        apart = Apart()
        come: dict[str, Callable[[], None]] = {"send": apart.send, "receive": apart.receive}
        come[first]()
        apart.world.pass_time(30.0)
        apart.world.run()
        come["receive" if first == "send" else "send"]()
        for side in again:
            come[side]()
        for node in (apart.source, apart.home):
            assert apart.told(node)[-2:] == ["OK", "settled"], again
        apart.world.check_nothing_left()


def test_a_word_that_is_lost_is_said_again(apart: Apart) -> None:
    apart.send()
    apart.cancel(apart.source)
    home = apart.home
    home.receive(apart.sessions[home], apart.pools[home], apart.pages[home], source_daemons=(apart.source.ipc,))
    while not isinstance(apart.world.network.deliver(apart.world.network.busy()[0]), Announce):
        pass
    apart.world.cut(apart.home, apart.source)
    for one, other in itertools.permutations((apart.home, apart.source)):
        apart.world.notice(one, other)
    assert apart.told(home) == [], "it was lost"
    apart.world.heal()
    assert apart.told(home) == ["PEER_CANCELLED", "settled"]


def test_a_room_that_may_be_filled_by_another_daemon_goes_on(apart: Apart) -> None:
    apart.send()
    apart.cancel(apart.source)
    apart.receive(apart.source, apart.other)
    assert apart.told(apart.home) == []
    apart.send(apart.other)
    assert apart.told(apart.home) == ["OK", "settled"]


def test_a_room_ends_once_no_daemon_is_left_that_may_fill_it(apart: Apart) -> None:
    for node in (apart.source, apart.other):
        apart.send(node)
        apart.cancel(node)
    apart.receive(apart.source, apart.other)
    assert apart.told(apart.home) == ["PEER_CANCELLED", "settled"]


def test_a_room_is_armed_again_on_another_daemon_after_one_here_ended(apart: Apart) -> None:
    here = apart.home.pool("prefill")
    pages = apart.home.filled(here, apart.sessions[apart.home], PAGES)
    apart.home.send(apart.sessions[apart.home], here, pages)
    apart.home.cancel(apart.sessions[apart.home], here, "send")
    apart.receive()
    apart.send()
    assert apart.told(apart.home)[-2:] == ["OK", "settled"]


def test_a_room_that_began_anew_takes_back_the_word_of_its_end(apart: Apart) -> None:
    """The first arming was cancelled; the second one's source died, and another one may come before the third."""
    apart.receive()
    apart.cancel(apart.home)
    apart.receive()
    source = apart.source
    source.send(apart.sessions[source], apart.pools[source], apart.pages[source][:1], last=False)
    apart.world.run()
    source.lose(apart.sessions[source])
    apart.world.run()
    another = source.pool("another")
    apart.sessions[source] = source.session()
    source.send(apart.sessions[source], another, source.filled(another, apart.sessions[source], PAGES))
    apart.receive()
    assert apart.told(source) == ["OK", "settled"]
    assert apart.told(apart.home)[-2:] == ["OK", "settled"]


def test_a_room_that_has_its_source_goes_on_though_another_one_ended(apart: Apart) -> None:
    apart.send()
    source = apart.source
    another = source.pool("another")
    source.send(apart.sessions[source], another, source.filled(another, apart.sessions[source], PAGES))
    source.cancel(apart.sessions[source], another, "send")
    apart.receive()
    assert apart.told(apart.home) == ["OK", "settled"]


def test_the_word_is_said_again_with_the_announcement(apart: Apart) -> None:
    apart.send()
    apart.cancel(apart.source)
    name = RoomName(request_id=REQUEST, pool="decode", tenant=7, arming=1)
    for _ in range(2):
        apart.source.book.peers.announced(Incarnation("ipc:///x", "0" * 32), name, 1e9, apart.source.now)
    said = apart.source.book.effects()
    assert [type(one) for one in said] == [TellEnded] * 2


def test_a_room_that_was_met_and_is_not_heard_of_any_more_leaves_no_word(apart: Apart) -> None:
    source = apart.source
    source.send(apart.sessions[source], apart.pools[source], apart.pages[source][:1], last=False, deadline_s=60.0)
    apart.receive()
    apart.world.cut(apart.home, source)
    apart.world.pass_time(30.0)
    assert apart.told(source) == ["DEADLINE", "settled"]
    another = source.pool("another")
    source.send(apart.sessions[source], another, source.filled(another, apart.sessions[source], PAGES))
    assert apart.told(source) == ["DEADLINE", "settled"]


def test_a_link_that_was_broken_is_no_end(apart: Apart) -> None:
    apart.receive()
    apart.world.cut(apart.home, apart.source)
    for one, other in itertools.permutations((apart.home, apart.source)):
        apart.world.notice(one, other)
    apart.send()
    apart.world.heal()
    apart.world.run()
    assert apart.told(apart.source) == ["OK", "settled"]


# -- a load that comes late by more than its deadlines


DEADLINE_S: Final = 5.0
EVERY_S: Final = 1.0
STALL: Final = range(10, 30)
"""Requests sent while decode stands still."""
REQUESTS: Final = 80


def served_in_order(tombstones: Tombstones) -> list[str]:
    """Return the outcome of each request where prefill sends one a second and decode receives one after the other.

    Each has its deadline; decode stands still for a while, as a process that is stopped, and goes on.
    """
    world = RoomWorld(tombstones=tombstones)
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill", pages=40), world.pool("decode")
    received = world.filled(destination, decode, 1)
    requests = [f"{number:032x}" for number in range(REQUESTS)]
    outcomes: list[str] = []
    asked = -1  # the request that decode waits for
    for tick in range(REQUESTS * 2):
        if tick < REQUESTS:
            ids = world.filled(source, prefill, 1)
            world.send(prefill, source, ids, request=requests[tick], deadline_s=DEADLINE_S)
            source.allocator.free(prefill, ids)
        world.transport.finish_all()
        stopped = tick in STALL
        while not stopped and len(outcomes) <= min(tick, REQUESTS - 1):
            if asked < len(outcomes):
                asked = len(outcomes)
                world.receive(decode, destination, received, request=requests[asked], deadline_s=DEADLINE_S)
                world.transport.finish_all()
            if world.outcomes(decode)[-1:] != ["settled"] or len(world.told[decode]) < 2 * (asked + 1):
                break
            outcomes.append(world.outcomes(decode)[-2])
        world.pass_time(EVERY_S)
    return outcomes


def test_a_load_in_order_recovers_by_itself() -> None:
    outcomes = served_in_order(Tombstones())
    late = len(STALL)
    assert outcomes[: STALL.start] == ["OK"] * STALL.start
    assert set(outcomes[STALL.start + late :]) == {"OK"}, "all that were sent after the stall"
    assert outcomes.count("DEADLINE") <= late


def test_without_tombstones_it_never_does() -> None:
    """Each waits for a SEND that has ended, so the next one is late as well."""
    outcomes = served_in_order(Tombstones(most=0))
    assert set(outcomes[STALL.start :]) == {"DEADLINE"}
    assert len(outcomes) < REQUESTS, "and it falls behind further and further"


# -- what is remembered


def half(number: int = 0, tenant: int = 7) -> Half:
    return Half(tenant, f"{number:032x}", "send")


def test_each_pool_hears_once_the_latest_end_first() -> None:
    stones = Tombstones()
    stones.bury(half(), "p0", DeadlineError("first"), 10.0, heard=["told"])
    stones.bury(half(), "p1", PeerLostError("second"), 11.0)
    assert [str(one.detail) for one in stones.heard_by(half(), "a", 12.5)] == [
        "the other side ended 1.5 s ago: second",
        "the other side ended 2.5 s ago: first",
    ]
    assert stones.heard_by(half(), "a", 12.5) == []
    assert [one.code for one in stones.heard_by(half(), "told", 12.5)] == ["PEER_LOST"]
    assert stones.heard_by(half(tenant=8), "b", 12.5) == []
    stones.renewed(half())
    assert stones.heard_by(half(), "b", 12.5) == []
    assert repr(stones) == "<Tombstones 0 of 16384>"


def test_the_same_message_hears_it_again() -> None:
    stones = Tombstones()
    stones.bury(half(), "p0", PeerCancelledError("gone"), 10.0)
    for _ in range(2):
        assert len(stones.heard_by(half(), "a", 11.0, ("boot", 1))) == 1
    assert stones.heard_by(half(), "a", 11.0, ("boot", 2)) == []


def test_they_are_bounded_by_number_and_age() -> None:
    stones = Tombstones(most=3, kept_s=60.0)
    for number in range(5):
        stones.bury(half(number), "p0", DeadlineError("late"), 10.0 + number)
    assert len(stones) == 3
    assert [len(stones.heard_by(half(number), "a", 20.0)) for number in range(5)] == [0, 0, 1, 1, 1]
    assert [len(stones.heard_by(half(number), "b", 73.5)) for number in range(5)] == [0, 0, 0, 0, 1]
    assert len(stones) == 1


def test_an_old_end_is_forgotten_though_its_request_had_a_later_one() -> None:
    stones = Tombstones(kept_s=60.0)
    stones.bury(half(), "p0", DeadlineError("old"), 10.0)
    stones.bury(half(), "p1", DeadlineError("new"), 60.0)
    assert [one.detail for one in stones.heard_by(half(), "a", 70.0)] == ["the other side ended 10.0 s ago: new"]
    assert stones.heard_by(half(), "b", 120.0) == []
    assert len(stones) == 0


def test_one_request_leaves_no_more_than_it_has_pools() -> None:
    stones = Tombstones()
    for number in range(1000):
        stones.bury(half(), number, DeadlineError("late"), 10.0)
    assert 2 < len(stones.heard_by(half(), "a", 10.0)) < 100
    for number in range(1000):
        stones.heard_by(half(), number, 10.0)
    assert stones.heard_by(half(), "b", 10.0) == []


def test_the_error_is_the_ends_own() -> None:
    stones = Tombstones()
    stones.bury(half(), "p0", PeerCancelledError("gone"), 10.0)
    (error,) = stones.heard_by(half(), "a", 10.0)
    assert isinstance(error, PeerCancelledError)
    assert error.info() == ErrorInfo(
        code="PEER_CANCELLED",
        detail="the other side ended 0.0 s ago: gone",
        remedy=PeerCancelledError.remedy,
    )
