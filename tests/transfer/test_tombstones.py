"""A half that comes after the other one has ended hears it at once; whoever tries again meets, in either order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import pytest

from kvferry.daemon.transfer.endpoints import EndpointKey, Half, Incarnation
from kvferry.daemon.transfer.kept import Tombstones
from kvferry.daemon.transfer.registry import SendToPeer
from kvferry.pools.planning.runs import PageIds
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import DeadlineError, ErrorInfo, PeerCancelledError, PeerLostError, TransferExistsError
from kvferry.protocol.peer_messages import Announce, ReceiveName, SendWithdrawn
from tests.transfer.peer_harness import Node, PeerHarness
from tests.transfer.transfer_harness import REQUEST, Direction, TransferHarness, layers

pytestmark = pytest.mark.any_device

PAGES: Final = 2
ENDS: Final = {"deadline": "DEADLINE", "cancel": "PEER_CANCELLED", "death": "PEER_LOST"}
SIDES: Final = pytest.mark.parametrize("first", ["send", "receive"])
HOW: Final = pytest.mark.parametrize("how", ENDS)


# -- one daemon


class Halves:
    """A prefill and a decode engine of one daemon; ``first`` is the half that comes first."""

    def __init__(self, first: Direction = "send") -> None:
        self.harness = TransferHarness()
        self.first: Direction = first
        self.late: Direction = "receive" if first == "send" else "send"
        self.pools = {"send": self.harness.pool("prefill"), "receive": self.harness.pool("decode")}
        self.sessions = {direction: self.harness.session() for direction in self.pools}
        self.pages = {direction: self.filled(direction) for direction in self.pools}

    def filled(self, direction: str) -> PageIds:
        """Return fresh pages of a side."""
        return self.harness.filled(self.pools[direction], self.sessions[direction], PAGES)

    def come(self, direction: Direction, *, deadline_s: float = 30.0, last: bool = True, count: int = 1) -> None:
        """SEND or RECEIVE; ``count``: of the other side."""
        session, pool, ids = self.sessions[direction], self.pools[direction], self.pages[direction]
        self.harness.acknowledge(session, pool, direction)
        if direction == "send":
            self.harness.send(session, pool, ids, last=last, destinations=count, deadline_s=deadline_s)
        else:
            self.harness.receive(session, pool, ids, sources=count, deadline_s=deadline_s)

    def end(self, direction: Direction, how: str) -> None:
        """Let a side end by itself."""
        if how == "deadline":
            self.harness.pass_time(30.0)
        elif how == "cancel":
            self.harness.cancel(self.sessions[direction], self.pools[direction], direction)
        else:
            self.harness.lose(self.sessions[direction])
            self.sessions[direction] = self.harness.session()
            self.pages[direction] = self.filled(direction)

    def told(self, direction: Direction) -> list[str]:
        """Return what a side was told."""
        return self.harness.outcomes(self.sessions[direction])


@SIDES
@HOW
def test_the_late_half_hears_at_once_how_the_other_one_ended_and_when(first: Direction, how: str) -> None:
    both = Halves(first)
    both.come(first, last=how != "death")
    both.end(first, how)
    both.harness.pass_time(7.0)
    both.come(both.late)
    assert both.told(both.late) == [ENDS[how], "settled"]
    error = both.harness.finished(both.sessions[both.late]).error
    assert error is not None
    assert error.detail.startswith("the other side ended 7.0 s ago: ")
    assert (error.request_id, error.retryable) == (REQUEST, how != "cancel")
    assert not list(both.harness.state_machine.endpoints)
    assert both.pools[both.late].allocator.busy_count == 0


@SIDES
@pytest.mark.parametrize("again", ["first", "late"])
def test_both_try_again_and_meet_in_either_order(first: Direction, again: str) -> None:
    both = Halves(first)
    both.come(first)
    both.end(first, "deadline")
    both.come(both.late)
    for direction in (both.first, both.late) if again == "first" else (both.late, both.first):
        both.come(direction)
    both.harness.transport.finish_all()
    assert both.told(first)[-2:] == ["OK", "settled"]
    assert both.told(both.late) == ["DEADLINE", "settled", "OK", "settled"]
    assert both.harness.content(both.pools["receive"], both.pages["receive"]) == both.harness.content(
        both.pools["send"], both.pages["send"]
    )


@SIDES
def test_a_half_that_has_begun_anew_is_met_whatever_ended_before(first: Direction) -> None:
    both = Halves(first)
    for _ in range(3):
        both.come(first)
        both.end(first, "deadline")
    both.come(first)
    both.come(both.late)
    both.harness.transport.finish_all()
    assert both.told(both.late) == ["OK", "settled"]


def test_who_heard_and_waits_longer_than_the_other_leaves_word_in_his_turn() -> None:
    both = Halves()
    both.come("send")
    both.end("send", "deadline")
    both.come("receive")
    both.come("receive", deadline_s=5.0)
    assert len(both.harness.state_machine.endpoints.receive_requests) == 1, "it heard once, and waits now"
    both.harness.pass_time(5.0)
    both.come("send")
    assert both.told("send") == ["DEADLINE", "settled"] * 2
    both.come("send")
    both.come("receive")
    both.harness.transport.finish_all()
    assert (both.told("send")[-2:], both.told("receive")[-2:]) == (["OK", "settled"],) * 2


@SIDES
def test_success_leaves_nothing(first: Direction) -> None:
    both = Halves(first)
    for direction in (both.first, both.late):
        both.come(direction)
    both.harness.transport.finish_all()
    assert not len(both.harness.state_machine.endpoints.tombstones)
    both.come(both.late)
    assert both.told(both.late) == ["OK", "settled"], "a late duplicate waits, as somebody may come again"


def test_a_receive_is_begun_anew_after_its_source_died_whoever_comes_first() -> None:
    """The receive request was told; the new source must not hear of it."""
    orders: tuple[tuple[Direction, Direction], ...] = (("send", "receive"), ("receive", "send"))
    for order in orders:
        both = Halves("receive")
        both.come("receive")
        both.come("send", last=False)
        both.end("send", "death")
        both.harness.transport.finish_all()
        assert both.told("receive") == ["PEER_LOST", "settled"]
        for direction in order:
            both.come(direction)
        both.harness.transport.finish_all()
        assert both.told("receive") == ["PEER_LOST", "settled", "OK", "settled"]


def test_chunks_after_the_first_are_refused_with_the_reason() -> None:
    both = Halves("receive")
    both.come("receive")
    both.end("receive", "cancel")
    both.come("send", last=False)
    assert both.told("send") == ["PEER_CANCELLED", "settled"]
    with pytest.raises(TransferExistsError, match="failed with PEER_CANCELLED"):
        both.harness.send(both.sessions["send"], both.pools["send"], both.filled("send"), first_page=PAGES)


class Stages:
    """Two pipeline stages, one destination."""

    def __init__(self) -> None:
        self.harness = TransferHarness()
        self.session, self.decode = self.harness.session(), self.harness.session()
        self.stages = [self.harness.pool("stage0", layers(1)), self.harness.pool("stage1", layers(1, first=1))]
        self.destination = self.harness.pool("decode")
        self.pages = [self.harness.filled(pool, self.session, PAGES) for pool in self.stages]
        self.received = self.harness.filled(self.destination, self.decode, PAGES)

    def send(self, stage: int, deadline_s: float = 30.0) -> None:
        """SEND from a stage, which has seen the end of what it sent before."""
        self.harness.acknowledge(self.session, self.stages[stage], "send")
        self.harness.send(self.session, self.stages[stage], self.pages[stage], deadline_s=deadline_s)

    def receive(self) -> None:
        """RECEIVE from both stages."""
        self.harness.receive(self.decode, self.destination, self.received, sources=2)


def test_a_receive_that_lacks_a_stage_fails_with_those_that_came() -> None:
    both = Stages()
    both.send(1, deadline_s=60.0)
    both.send(0)
    both.harness.pass_time(30.0)
    both.receive()
    assert both.harness.outcomes(both.decode) == ["DEADLINE", "settled"]
    assert both.harness.outcomes(both.session) == ["DEADLINE", "settled"] * 2, "stage 1 need not wait either"
    assert not both.harness.transport.under_way, "nothing was copied in vain"
    for stage in (0, 1):
        both.send(stage)
    both.receive()
    both.harness.transport.finish_all()
    assert both.harness.outcomes(both.decode)[-2:] == ["OK", "settled"]


def test_a_source_that_took_the_place_of_one_that_ended_is_waited_for() -> None:
    both = Stages()
    both.send(0)
    both.harness.cancel(both.session, both.stages[0], "send")
    both.send(1)  # the request is being sent again
    both.receive()
    both.send(0)
    both.harness.transport.finish_all()
    assert both.harness.outcomes(both.decode) == ["OK", "settled"]


def test_both_stages_of_a_receive_that_ended_hear_of_it() -> None:
    both = Stages()
    both.receive()
    both.harness.cancel(both.decode, both.destination, "receive")
    for stage in (0, 1):
        both.send(stage)
    assert both.harness.outcomes(both.session) == ["PEER_CANCELLED", "settled"] * 2


def test_a_stage_that_was_told_hears_it_not_again() -> None:
    both = Stages()
    both.send(0)
    both.receive()
    both.harness.cancel(both.decode, both.destination, "receive")
    both.harness.transport.finish_all()
    both.harness.acknowledge(both.session, both.stages[0], "send")
    both.send(0)  # anew, for a receive request that is to come
    assert len(both.harness.state_machine.endpoints.send_requests) == 1


@pytest.mark.parametrize("gone", [1, 2])
def test_an_send_for_two_ends_only_where_both_have(gone: int) -> None:
    harness = TransferHarness()
    prefill, decode = harness.session(), harness.session()
    source = harness.pool("prefill")
    receive_requests = [harness.pool(name) for name in ("decode0", "decode1")]
    for pool in receive_requests:
        harness.receive(decode, pool, harness.filled(pool, decode, PAGES))
    for pool in receive_requests[:gone]:
        harness.cancel(decode, pool, "receive")
    harness.send(prefill, source, harness.filled(source, prefill, PAGES), destinations=2)
    harness.transport.finish_all()
    assert harness.outcomes(decode)[-2:] == (["OK", "settled"] if gone == 1 else ["CANCELLED", "settled"])
    assert harness.outcomes(prefill) == ([] if gone == 1 else ["PEER_CANCELLED", "settled"])


def test_one_of_two_receives_comes_after_the_send_has_ended() -> None:
    harness = TransferHarness()
    prefill, decode = harness.session(), harness.session()
    source = harness.pool("prefill")
    receive_requests = [harness.pool(name) for name in ("decode0", "decode1")]
    received = [harness.filled(pool, decode, PAGES) for pool in receive_requests]
    harness.send(prefill, source, harness.filled(source, prefill, PAGES), destinations=2)
    harness.receive(decode, receive_requests[0], received[0])
    harness.cancel(prefill, source, "send")
    harness.transport.finish_all()
    for again in (False, True):
        for pool, ids in zip(receive_requests, received, strict=True):
            if not harness.state_machine.endpoint(decode, EndpointKey(7, REQUEST, pool.name, "receive")):
                harness.receive(decode, pool, ids)
        live = {one.pool.name for one in harness.state_machine.endpoints}
        assert live == ({"decode0", "decode1"} if again else {"decode0"}), "the other one heard it only now"


def test_a_daemon_takes_the_bounds_that_it_is_given() -> None:
    none = Tombstones(most=0)
    assert TransferHarness(tombstones=none).state_machine.endpoints.tombstones is none


def test_an_send_for_two_waits_where_one_has_ended_and_one_is_to_come() -> None:
    harness = TransferHarness()
    prefill, decode = harness.session(), harness.session()
    source = harness.pool("prefill")
    gone, comes = (harness.pool(name) for name in ("decode0", "decode1"))
    harness.receive(decode, gone, harness.filled(gone, decode, PAGES))
    harness.cancel(decode, gone, "receive")
    harness.send(prefill, source, harness.filled(source, prefill, PAGES), destinations=2)
    harness.receive(decode, comes, harness.filled(comes, decode, PAGES))
    harness.transport.finish_all()
    assert harness.outcomes(decode)[-2:] == ["OK", "settled"]


def test_a_send_that_a_receive_takes_hears_of_no_other_receive() -> None:
    harness = TransferHarness()
    prefill, decode = harness.session(), harness.session()
    source = harness.pool("prefill")
    lives, gone = (harness.pool(name) for name in ("decode0", "decode1"))
    for pool in (lives, gone):
        harness.receive(decode, pool, harness.filled(pool, decode, PAGES))
    harness.cancel(decode, gone, "receive")
    harness.send(prefill, source, harness.filled(source, prefill, PAGES))
    harness.transport.finish_all()
    assert harness.outcomes(prefill) == ["OK", "settled"]


def test_a_receive_that_all_sources_had_joined_leaves_no_word_for_others() -> None:
    both = Halves("receive")
    for direction in (both.first, both.late):
        both.come(direction)
    both.end("receive", "cancel")
    assert not len(both.harness.state_machine.endpoints.tombstones)


def test_other_tenants_hear_nothing() -> None:
    both = Halves()
    both.come("send")
    both.end("send", "cancel")
    stranger, foreign = both.harness.session(), both.harness.pool("foreign", tenant=8)
    both.harness.receive(stranger, foreign, both.harness.filled(foreign, stranger, PAGES))
    assert both.harness.outcomes(stranger) == []


# -- two daemons


class Apart:
    """A prefill engine at one daemon, a decode engine at another, and a third daemon with a prefill engine."""

    def __init__(self) -> None:
        self.harness = PeerHarness("source", "home", "other")
        self.source, self.home, self.other = self.harness.nodes.values()
        self.pools: dict[Node, Pool] = {}
        self.sessions: dict[Node, int] = {}
        self.pages: dict[Node, PageIds] = {}
        for node in self.harness.nodes.values():
            pool = self.pools[node] = node.pool("decode" if node is self.home else "prefill")
            session = self.sessions[node] = node.session()
            self.pages[node] = node.filled(pool, session, PAGES)

    def send(self, node: Node | None = None, deadline_s: float = 30.0) -> None:
        """SEND at a daemon, whose engine has seen the end of what it sent before."""
        node = node or self.source
        node.acknowledge(self.sessions[node], self.pools[node], "send")
        node.send(self.sessions[node], self.pools[node], self.pages[node], deadline_s=deadline_s)
        self.harness.run()

    def receive(self, *nodes: Node, deadline_s: float = 30.0) -> None:
        """RECEIVE from some daemons."""
        daemons = tuple(one.ipc for one in nodes or (self.source,))
        home = self.home
        home.receive(
            self.sessions[home], self.pools[home], self.pages[home], source_daemons=daemons, deadline_s=deadline_s
        )
        self.harness.run()

    def cancel(self, node: Node) -> None:
        """CANCEL what a daemon's engine has begun."""
        node.cancel(self.sessions[node], self.pools[node], "receive" if node is self.home else "send")
        self.harness.run()

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
        apart.harness.pass_time(30.0)
    elif how == "cancel":
        apart.cancel(node)
    else:
        node.lose(apart.sessions[node])
    apart.harness.run()
    apart.harness.pass_time(2.0)
    come[late]()
    assert apart.told(late) == [ENDS[how], "settled"]
    error = late.finished(apart.sessions[late]).error
    assert error is not None
    assert "the other side ended 2.0 s ago" in error.detail
    apart.harness.check_nothing_left()


@SIDES
def test_both_try_again_across_daemons_in_either_order(first: str) -> None:
    for again in itertools.permutations(("send", "receive")):
        apart = Apart()
        come: dict[str, Callable[[], None]] = {"send": apart.send, "receive": apart.receive}
        come[first]()
        apart.harness.pass_time(30.0)
        apart.harness.run()
        come["receive" if first == "send" else "send"]()
        for direction in again:
            come[direction]()
        for node in (apart.source, apart.home):
            assert apart.told(node)[-2:] == ["OK", "settled"], again
        apart.harness.check_nothing_left()


def test_a_word_that_is_lost_is_said_again(apart: Apart) -> None:
    apart.send()
    apart.cancel(apart.source)
    home = apart.home
    home.receive(apart.sessions[home], apart.pools[home], apart.pages[home], source_daemons=(apart.source.ipc,))
    while not isinstance(apart.harness.network.deliver(apart.harness.network.busy()[0]), Announce):
        pass
    apart.harness.cut(apart.home, apart.source)
    for one, other in itertools.permutations((apart.home, apart.source)):
        apart.harness.notice(one, other)
    assert apart.told(home) == [], "it was lost"
    apart.harness.heal()
    assert apart.told(home) == ["PEER_CANCELLED", "settled"]


def test_a_receive_that_may_be_filled_by_another_daemon_goes_on(apart: Apart) -> None:
    apart.send()
    apart.cancel(apart.source)
    apart.receive(apart.source, apart.other)
    assert apart.told(apart.home) == []
    apart.send(apart.other)
    assert apart.told(apart.home) == ["OK", "settled"]


def test_a_receive_ends_once_no_daemon_is_left_that_may_fill_it(apart: Apart) -> None:
    for node in (apart.source, apart.other):
        apart.send(node)
        apart.cancel(node)
    apart.receive(apart.source, apart.other)
    assert apart.told(apart.home) == ["PEER_CANCELLED", "settled"]


def test_a_receive_is_begun_anew_on_another_daemon_after_one_here_ended(apart: Apart) -> None:
    here = apart.home.pool("prefill")
    pages = apart.home.filled(here, apart.sessions[apart.home], PAGES)
    apart.home.send(apart.sessions[apart.home], here, pages)
    apart.home.cancel(apart.sessions[apart.home], here, "send")
    apart.receive()
    apart.send()
    assert apart.told(apart.home)[-2:] == ["OK", "settled"]


def test_a_receive_that_began_anew_takes_back_the_word_of_its_end(apart: Apart) -> None:
    """The first epoch was cancelled; the second one's source died, and another one may come before the third."""
    apart.receive()
    apart.cancel(apart.home)
    apart.receive()
    source = apart.source
    source.send(apart.sessions[source], apart.pools[source], apart.pages[source][:1], last=False)
    apart.harness.run()
    source.lose(apart.sessions[source])
    apart.harness.run()
    another = source.pool("another")
    apart.sessions[source] = source.session()
    source.send(apart.sessions[source], another, source.filled(another, apart.sessions[source], PAGES))
    apart.receive()
    assert apart.told(source) == ["OK", "settled"]
    assert apart.told(apart.home)[-2:] == ["OK", "settled"]


def test_a_receive_that_has_its_source_goes_on_though_another_one_ended(apart: Apart) -> None:
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
    name = ReceiveName(request_id=REQUEST, pool="decode", tenant=7, epoch=1)
    announced = Announce(receive_request=name, deadline_ms=30_000)
    for _ in range(2):
        apart.source.state_machine.peers.announced(Incarnation("ipc:///x", "0" * 32), announced, apart.source.now)
    said = apart.source.state_machine.effects()
    assert [type(one.body) for one in said if isinstance(one, SendToPeer)] == [SendWithdrawn] * 2


def test_a_receive_that_was_met_and_is_not_heard_of_any_more_leaves_no_word(apart: Apart) -> None:
    source = apart.source
    source.send(apart.sessions[source], apart.pools[source], apart.pages[source][:1], last=False, deadline_s=60.0)
    apart.receive()
    apart.harness.cut(apart.home, source)
    apart.harness.pass_time(30.0)
    assert apart.told(source) == ["DEADLINE", "settled"]
    another = source.pool("another")
    source.send(apart.sessions[source], another, source.filled(another, apart.sessions[source], PAGES))
    assert apart.told(source) == ["DEADLINE", "settled"]


def test_a_link_that_was_broken_is_no_end(apart: Apart) -> None:
    apart.receive()
    apart.harness.cut(apart.home, apart.source)
    for one, other in itertools.permutations((apart.home, apart.source)):
        apart.harness.notice(one, other)
    apart.send()
    apart.harness.heal()
    apart.harness.run()
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
    harness = TransferHarness(tombstones=tombstones)
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill", pages=40), harness.pool("decode")
    received = harness.filled(destination, decode, 1)
    requests = [f"{number:032x}" for number in range(REQUESTS)]
    outcomes: list[str] = []
    asked = -1  # the request that decode waits for
    for tick in range(REQUESTS * 2):
        if tick < REQUESTS:
            ids = harness.filled(source, prefill, 1)
            harness.send(prefill, source, ids, request=requests[tick], deadline_s=DEADLINE_S)
            source.allocator.free(prefill, ids)
        harness.transport.finish_all()
        stopped = tick in STALL
        while not stopped and len(outcomes) <= min(tick, REQUESTS - 1):
            if asked < len(outcomes):
                asked = len(outcomes)
                harness.receive(decode, destination, received, request=requests[asked], deadline_s=DEADLINE_S)
                harness.transport.finish_all()
            if harness.outcomes(decode)[-1:] != ["settled"] or len(harness.told[decode]) < 2 * (asked + 1):
                break
            outcomes.append(harness.outcomes(decode)[-2])
        harness.pass_time(EVERY_S)
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
    stones.bury(half(), "p0", DeadlineError("first"), 10.0, notified=["told"])
    stones.bury(half(), "p1", PeerLostError("second"), 11.0)
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
    stones.bury(half(), "p0", PeerCancelledError("gone"), 10.0)
    for _ in range(2):
        assert len(stones.notices_for(half(), "a", 11.0, ("boot", 1))) == 1
    assert stones.notices_for(half(), "a", 11.0, ("boot", 2)) == []


def test_they_are_bounded_by_number_and_age() -> None:
    stones = Tombstones(most=3, kept_s=60.0)
    for number in range(5):
        stones.bury(half(number), "p0", DeadlineError("late"), 10.0 + number)
    assert len(stones) == 3
    assert [len(stones.notices_for(half(number), "a", 20.0)) for number in range(5)] == [0, 0, 1, 1, 1]
    assert [len(stones.notices_for(half(number), "b", 73.5)) for number in range(5)] == [0, 0, 0, 0, 1]
    assert len(stones) == 1


def test_an_old_end_is_forgotten_though_its_request_had_a_later_one() -> None:
    stones = Tombstones(kept_s=60.0)
    stones.bury(half(), "p0", DeadlineError("old"), 10.0)
    stones.bury(half(), "p1", DeadlineError("new"), 60.0)
    assert [one.detail for one in stones.notices_for(half(), "a", 70.0)] == ["the other side ended 10.0 s ago: new"]
    assert stones.notices_for(half(), "b", 120.0) == []
    assert len(stones) == 0


def test_one_request_leaves_no_more_than_it_has_pools() -> None:
    stones = Tombstones()
    for number in range(1000):
        stones.bury(half(), number, DeadlineError("late"), 10.0)
    assert 2 < len(stones.notices_for(half(), "a", 10.0)) < 100
    for number in range(1000):
        stones.notices_for(half(), number, 10.0)
    assert stones.notices_for(half(), "b", 10.0) == []


def test_the_error_is_the_ends_own() -> None:
    stones = Tombstones()
    stones.bury(half(), "p0", PeerCancelledError("gone"), 10.0)
    (error,) = stones.notices_for(half(), "a", 10.0)
    assert isinstance(error, PeerCancelledError)
    assert error.info() == ErrorInfo(
        code="PEER_CANCELLED",
        detail="the other side ended 0.0 s ago: gone",
        remedy=PeerCancelledError.remedy,
    )
