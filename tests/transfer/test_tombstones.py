"""A half that comes after the other one has ended, or was given up, hears it at once; whoever tries again meets."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from kvferry.daemon.services import peer_transfers
from kvferry.protocol.peer_messages import Announce
from tests.kit.peers import PAGES, Transfer, Way
from tests.kit.transfers import REQUEST, Direction, Engine, TransferHarness, layers

ENDS: Final = {"deadline": "DEADLINE", "cancel": "PEER_CANCELLED", "death": "PEER_LOST"}
OTHER: Final[dict[Direction, Direction]] = {"send": "receive", "receive": "send"}
BOTH: Final = pytest.mark.parametrize("gone", list(OTHER))
WHERE: Final = pytest.mark.parametrize("way", ["here", "ipc"])
CANCELLED: Final = "PEER_CANCELLED settled"


class Halves(Transfer):
    """The halves of a request, which come again and again, within a daemon or between two."""

    def engine(self, direction: Direction) -> Engine:
        return self.prefill if direction == "send" else self.decode

    def come(self, direction: Direction, *, deadline_s: float = 30.0, last: bool = True) -> None:
        """SEND or RECEIVE, after all earlier events were seen, and let all go on."""
        self.engine(direction).acknowledge(direction)
        if direction == "send":
            self.send(deadline_s=deadline_s, last=last, stop=PAGES if last else 1)
        else:
            self.receive(deadline_s=deadline_s)
        self.harness.run()

    def end(self, direction: Direction, how: str = "cancel") -> None:
        engine = self.engine(direction)
        if how == "deadline":
            self.harness.pass_time(30.0)
        elif how == "cancel":
            engine.cancel(direction)
        else:
            engine.lose()
            engine.session = engine.harness.session()
            engine.pages = engine.harness.filled(engine.pool, engine.session, PAGES)
        self.harness.run()


@pytest.fixture
def here() -> Halves:
    return Halves()


@pytest.fixture
def apart() -> Halves:
    return Halves("ipc")


@WHERE
@BOTH
@pytest.mark.parametrize("how", ENDS)
def test_the_late_half_hears_at_once_how_the_other_one_ended_and_when(way: Way, gone: Direction, how: str) -> None:
    both, late = Halves(way), OTHER[gone]
    both.come(gone, last=how != "death")
    both.end(gone, how)
    both.harness.pass_time(7.0)
    both.come(late)
    told = both.engine(late)
    assert told.told == f"{ENDS[how]} settled"
    assert "the other side ended 7.0 s ago: " in told.reason
    error = told.finished.error
    assert error is not None
    assert (error.request_id, error.retryable) == (REQUEST, how != "cancel")
    both.harness.check_nothing_left()
    assert both.held == (0, 0)


@WHERE
@BOTH
@pytest.mark.parametrize("again", list(OTHER))
def test_both_try_again_and_meet_in_either_order(way: Way, gone: Direction, again: Direction) -> None:
    both, late = Halves(way), OTHER[gone]
    both.come(gone)
    both.end(gone, "deadline")
    both.come(late)
    both.come(again)
    both.come(OTHER[again])
    assert both.engine(gone).told.endswith("OK settled")
    assert both.engine(late).told == "DEADLINE settled OK settled"
    assert both.prefill.content == both.decode.content
    both.harness.check_nothing_left()


@BOTH
def test_success_leaves_nothing(here: Halves, gone: Direction) -> None:
    here.come(gone)
    here.come(OTHER[gone])
    assert not len(here.home.state_machine.endpoints.tombstones)
    here.come(OTHER[gone])
    assert here.engine(OTHER[gone]).told == "OK settled", "a late duplicate waits, as somebody may come again"


def test_a_receive_that_all_sources_had_joined_leaves_no_word_for_others(here: Halves) -> None:
    here.meet("receive")
    here.end("receive")
    assert not len(here.home.state_machine.endpoints.tombstones)


class Several:
    """Engines of one daemon: two pipeline stages of one session, a sender of all layers, two receivers."""

    def __init__(self) -> None:
        self.harness = TransferHarness()
        first, pool = self.harness.engine("stage0", layers(1)), self.harness.pool("stage1", layers(1, first=1))
        pages = self.harness.filled(pool, first.session, PAGES)
        self.stages = (first, Engine(self.harness, first.session, pool, pages))
        self.prefill, self.decode, self.second = (self.harness.engine(name) for name in ("prefill", "decode", "second"))

    def send(self, stage: int, deadline_s: float = 30.0) -> None:
        self.stages[stage].acknowledge("send")
        self.stages[stage].send(deadline_s=deadline_s)

    def told(self, *engines: Engine) -> tuple[str, ...]:
        """Let all copies end; return what these engines were told: by default the first stage and decode."""
        self.harness.transport.finish_all()
        return tuple(one.told for one in engines or (self.stages[0], self.decode))


@pytest.fixture
def several() -> Several:
    return Several()


def test_a_receive_that_lacks_a_stage_fails_with_those_that_came(several: Several) -> None:
    several.send(1, deadline_s=60.0)
    several.send(0)
    several.harness.pass_time(30.0)
    several.decode.receive(sources=2)
    assert not several.harness.transport.under_way, "nothing was copied in vain"
    assert several.told() == ("DEADLINE settled DEADLINE settled", "DEADLINE settled"), "stage 1 need not wait either"
    for stage in (0, 1):
        several.send(stage)
    several.decode.receive(sources=2)
    assert several.told()[1].endswith("OK settled")


@pytest.mark.parametrize(
    ("come", "gone", "destinations", "told"),
    [
        (2, 1, 2, ("", "CANCELLED settled", "OK settled")),
        (2, 2, 2, (CANCELLED, "CANCELLED settled", "CANCELLED settled")),
        (1, 1, 2, ("", "CANCELLED settled", "OK settled")),
        (2, 1, 1, ("OK settled", "CANCELLED settled", "OK settled")),
    ],
    ids=["one is there", "both have ended", "one is to come", "a receive takes it, and it hears of no other"],
)
def test_a_send_for_two_ends_only_where_both_have(
    several: Several, come: int, gone: int, destinations: int, told: tuple[str, str, str]
) -> None:
    receivers = (several.decode, several.second)
    for receiver in receivers[:come]:
        receiver.receive(destinations=destinations)
    for receiver in receivers[:gone]:
        receiver.cancel("receive")
    several.prefill.send()
    for receiver in receivers[come:]:
        receiver.receive(destinations=destinations)
    assert several.told(several.prefill, *receivers) == told


def test_a_source_that_took_the_place_of_one_that_ended_is_waited_for(several: Several) -> None:
    several.send(0)
    several.stages[0].cancel("send")
    several.send(1)  # the request is being sent again
    several.decode.receive(sources=2)
    several.send(0)
    assert several.told()[1] == "OK settled"


def test_a_stage_that_was_told_hears_it_not_again(several: Several) -> None:
    several.send(0)
    several.decode.receive(sources=2)
    several.decode.cancel("receive")
    several.told()
    several.send(0)  # anew, for a receive request that is to come
    assert len(several.harness.state_machine.endpoints.send_requests) == 1


def test_a_word_that_is_lost_is_said_again(apart: Halves) -> None:
    apart.come("send")
    apart.end("send")
    apart.receive()
    while not isinstance(apart.harness.network.deliver(apart.harness.network.busy()[0]), Announce):
        pass
    apart.harness.cut(apart.home, apart.source)
    for one, other in itertools.permutations((apart.home, apart.source)):
        apart.harness.notice(one, other)
    assert apart.decode.told == "", "it was lost"
    apart.harness.heal()
    assert apart.decode.told == CANCELLED


@pytest.mark.parametrize("left", [True, False])
def test_a_receive_ends_once_no_daemon_is_left_that_may_fill_it(apart: Halves, *, left: bool) -> None:
    other = apart.third.engine("prefill")
    for engine in [apart.prefill] if left else [apart.prefill, other]:
        engine.send()
        engine.cancel("send")
    apart.receive(apart.source, apart.third)
    apart.harness.run()
    assert apart.decode.told == ("" if left else CANCELLED)
    if left:
        other.send()
        apart.harness.run()
        assert apart.decode.told == "OK settled"


def test_a_receive_is_begun_anew_on_another_daemon_after_one_here_ended(apart: Halves) -> None:
    here = apart.home.engine("prefill")
    here.send()
    here.cancel("send")
    apart.come("receive")
    apart.come("send")
    assert apart.decode.told.endswith("OK settled")


def test_a_receive_that_began_anew_takes_back_the_word_of_its_end(apart: Halves) -> None:
    """The first epoch was cancelled; the second one's source died, and another one may come before the third."""
    apart.come("receive")
    apart.end("receive")
    apart.come("receive")
    apart.come("send", last=False)
    apart.end("send", "death")
    another = apart.source.engine("another")
    another.send()
    apart.come("receive")
    assert another.told == "OK settled"
    assert apart.decode.told.endswith("OK settled")


def test_a_receive_that_has_its_source_goes_on_though_another_one_ended(apart: Halves) -> None:
    apart.come("send")
    another = apart.source.engine("another")
    another.send()
    another.cancel("send")
    apart.come("receive")
    assert apart.decode.told == "OK settled"


def test_a_receive_that_was_met_and_is_not_heard_of_any_more_leaves_no_word(apart: Halves) -> None:
    apart.come("send", last=False, deadline_s=60.0)
    apart.come("receive")
    apart.harness.cut(apart.home, apart.source)
    apart.harness.pass_time(30.0)
    assert apart.prefill.told == "DEADLINE settled"
    another = apart.source.engine("another")
    another.send()
    assert another.told == ""


def test_a_link_that_was_broken_is_no_end(apart: Halves) -> None:
    apart.come("receive")
    apart.harness.cut(apart.home, apart.source)
    for one, other in itertools.permutations((apart.home, apart.source)):
        apart.harness.notice(one, other)
    apart.come("send")
    apart.harness.heal()
    apart.harness.run()
    assert apart.prefill.told == "OK settled"


@BOTH
def test_who_waits_fails_at_once_with_the_reason(here: Halves, gone: Direction) -> None:
    waiting = here.engine(OTHER[gone])
    waiting.come(OTHER[gone])
    assert here.home.abandon(gone, reason="aborted by its client", tenant=8) == 0
    assert waiting.told == ""
    assert here.home.abandon(gone, reason="aborted by its client") == 1
    assert (waiting.told, waiting.reason, waiting.held) == (CANCELLED, "aborted by its client", 0)


@BOTH
def test_who_comes_after_it_was_given_up_hears_it_at_once_and_once(here: Halves, gone: Direction) -> None:
    late, later = here.engine(OTHER[gone]), here.home.engine("later")
    assert here.home.abandon(gone, reason="aborted") == 0
    for one in (late, later):
        one.come(OTHER[gone])
        assert (one.told, one.reason) == (CANCELLED, "the other side ended 0.0 s ago: aborted")
    here.come(OTHER[gone])
    assert late.told == CANCELLED, "it waits for one that comes after all"


@BOTH
def test_a_half_that_comes_after_all_takes_the_word_back(here: Halves, gone: Direction) -> None:
    here.home.abandon(gone)
    here.meet(gone)
    assert here.told == ("", "")


@BOTH
@pytest.mark.parametrize("others", [1, 2])
def test_only_who_lacks_one_of_the_other_half_fails(here: Halves, gone: Direction, others: int) -> None:
    waiting, came = here.engine(OTHER[gone]), here.engine(gone)
    waiting.come(OTHER[gone], sources=others)
    came.come(gone, destinations=others)
    assert here.home.abandon(gone) == others - 1
    outcome = "" if others == 1 else "PEER_CANCELLED"
    assert (waiting.told, came.told) == (outcome, outcome)


def test_a_receive_at_another_daemon_hears_that_no_send_comes(apart: Halves) -> None:
    apart.come("receive")
    assert apart.source.abandon("send", reason="aborted") == 0
    apart.ends("", "PEER_CANCELLED")
    assert apart.decode.reason == "aborted"


def test_a_receive_that_comes_later_asks_the_source(apart: Halves) -> None:
    apart.source.abandon("send", apart.address(apart.home), reason="aborted")
    apart.harness.deliver_all()
    apart.come("receive")
    assert apart.decode.told == CANCELLED
    assert "aborted" in apart.decode.reason


def test_a_receive_that_expects_nothing_of_a_daemon_does_not_believe_it(apart: Halves) -> None:
    elsewhere = apart.home.engine("elsewhere")
    apart.decode.receive()
    apart.source.abandon("send", apart.address(apart.home))
    apart.harness.deliver_all()
    elsewhere.receive()
    assert (apart.decode.told, elsewhere.told) == ("", "")


@pytest.mark.parametrize("connected", [True, False])
def test_a_send_at_another_daemon_hears_that_no_receive_comes(apart: Halves, *, connected: bool) -> None:
    if connected:
        apart.greet()
    late = apart.source.engine("late")
    apart.send()
    apart.home.abandon("receive", apart.address(apart.source), reason="aborted")
    assert apart.prefill.told == ""
    apart.harness.deliver_all()
    assert (apart.prefill.told, apart.prefill.reason) == (CANCELLED, "aborted")
    late.send()
    assert late.told == CANCELLED


def test_a_daemon_that_cannot_be_reached_is_told_later_but_not_too_late(
    apart: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_transfers, "MAX_UNSENT", 1)
    second, address = apart.source.engine("second"), apart.address(apart.source)
    apart.send()
    second.send(request="f" * 32)
    for request in (REQUEST, "f" * 32):
        apart.home.abandon("receive", address, request=request)
    assert apart.home.peers.is_needed(address)
    apart.harness.deliver_all()
    assert apart.prefill.told == "", "the oldest of too many is not told"
    assert second.told == CANCELLED
    assert not apart.home.peers.is_needed(address)


def test_a_word_that_is_too_old_is_not_said(apart: Halves) -> None:
    address = apart.address(apart.source)
    apart.home.abandon("receive", address)
    apart.harness.pass_time(601)
    apart.send()
    assert not apart.home.peers.is_needed(address)
    apart.harness.deliver_all()
    assert apart.prefill.told == ""
