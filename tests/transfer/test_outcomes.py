"""What both sides of a transfer are told, and when their pages are free: within a daemon and between daemons.

The outcome is known at once, but nobody is told ``settled``, and no page is free, while a byte of it may move. Within a
daemon both sides wait for the copy. Between daemons of one host (``ipc``) the home copies: its pages may be written
until the copy has ended. Between hosts (``tcp``) the source writes to a slot, which is no page: only the source waits.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Final

import msgspec
import pytest

from kvferry.daemon.transfer import admission, peer_transfers
from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.base import PageList
from kvferry.protocol.errors import (
    CancelledError,
    InvalidFieldError,
    NotOwnerError,
    PageBusyError,
    TransferExistsError,
    TransferFailedError,
    UnexpectedSourceError,
    UnknownTransferError,
)
from kvferry.protocol.manifests import Component
from kvferry.protocol.peer_messages import (
    Announce,
    Confirm,
    Confirmed,
    PeerSend,
    PoolGone,
    ReceiveClosed,
    ReceiveName,
    SendRefused,
    SendWithdrawn,
    StepReady,
    WriteCredit,
    Written,
    decode_peer,
)
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.peers import BYTES, PAGES, Transfer
from tests.kit.transfers import FIRST, ORDERS, Engine, TransferHarness, layers

pytestmark = pytest.mark.any_device

OTHER: Final = "f" * 32
FAILED: Final = TransferFailedError("scripted")
STEPS = (LayerStep(first_layer=0, layers=1, event=0, value=1), LayerStep(first_layer=1, layers=1, event=1, value=1))


@FIRST
def test_a_transfer(both: Transfer, first: str) -> None:
    both.begin(first, first_token=5, payload=b"more")
    assert both.told == ("", ""), "nothing has moved"
    assert both.held == (PAGES, PAGES)
    both.succeeds()
    sent, received = both.prefill.finished, both.decode.finished
    assert (sent.moved_bytes, received.moved_bytes) == (BYTES, BYTES)
    assert (sent.pages, received.pages) == (PAGES, PAGES)
    assert (received.first_token, received.payload) == (5, b"more")
    assert (sent.first_token, sent.payload) == (None, b"")


def test_the_events_count_the_time(here: Transfer) -> None:
    here.send()
    here.harness.pass_time(2.0)
    here.receive()
    here.harness.pass_time(0.5)
    here.succeeds()
    sent, received = here.prefill.finished, here.decode.finished
    assert (sent.waited_us, received.waited_us) == (2_000_000, 0)
    assert (sent.moved_us, received.moved_us) == (500_000, 500_000)


def test_nothing_moves_without_an_announcement(apart: Transfer) -> None:
    apart.send()
    apart.receive(apart.third)
    apart.harness.run()
    assert apart.told == ("", "")
    assert not apart.source.state_machine.endpoints.remote_endpoints


def test_a_source_says_what_it_has_in_order(apart: Transfer) -> None:
    apart.announce()
    apart.send(0, 1, last=False)
    apart.send(1)
    said = [apart.harness.deliver(apart.source, apart.home) for _ in range(2)]
    assert [one.chunk for one in said if isinstance(one, PeerSend)] == [0, 1]
    assert [one.manifest is None for one in said if isinstance(one, PeerSend)] == [False, True]
    apart.succeeds()


def test_layers_move_when_their_events_have_come(apart: Transfer) -> None:
    apart.begin(steps=STEPS)
    assert not list(apart.harness.steps())
    apart.source.events(apart.prefill.session, 1, 0)
    apart.harness.deliver_until(apart.source, apart.home, StepReady)
    apart.harness.run()
    assert apart.told == ("", "")
    pairs = list(zip(apart.prefill.content, apart.decode.content, strict=True))
    assert {name for ours, theirs in pairs for name in ours if ours[name] != theirs[name]} == {"main/k/1", "main/v/1"}
    apart.source.events(apart.prefill.session, 1, 1)
    apart.succeeds()


def test_an_announcement_that_is_said_again_changes_nothing(apart: Transfer) -> None:
    apart.greet()
    apart.receive()
    apart.send()
    apart.harness.deliver_until(apart.home, apart.source, Announce)
    peer = apart.home.links.connect(apart.address(apart.source))
    assert peer is not None
    apart.home.links.told.on_up(peer)
    apart.succeeds()


def test_one_send_fills_receives_of_two_daemons(apart: Transfer) -> None:
    second = apart.third.engine("decode")
    apart.send(destinations=2)
    apart.receive()
    apart.harness.run()
    assert apart.told == ("", "OK settled")
    assert apart.held == (PAGES, 0), "the source waits for its second receive request"
    apart.receive(into=second)
    apart.succeeds()
    assert second.told == "OK settled"
    assert second.content == apart.prefill.content
    assert apart.prefill.finished.moved_bytes == 2 * BYTES


def test_a_send_goes_to_as_many_receives_as_it_says(apart: Transfer) -> None:
    second = apart.third.engine("decode")
    apart.receive()
    apart.announce(into=second)
    apart.send()
    apart.harness.run()
    assert (apart.told, second.told) == (("OK settled", "OK settled"), "")


def test_a_receive_takes_stages_of_two_daemons(apart: Transfer) -> None:
    apart.announce(apart.source, apart.third, sources=2)
    stages = [node.engine("stage", layers(1, first=n)) for n, node in enumerate((apart.source, apart.third))]
    for stage in stages:
        assert apart.decode.told == ""
        stage.send()
        apart.harness.run()
    apart.check_over("", "OK")
    for stage in stages:
        assert stage.told == "OK settled"
        assert all(
            ours.items() <= theirs.items() for ours, theirs in zip(stage.content, apart.decode.content, strict=True)
        )


@pytest.mark.parametrize(
    ("said", "of_first"),
    [([(0, 0, 3), (1, 0, 3)], PAGES), ([(0, 0, 1), (1, 0, 3), (0, 1, 3)], 1)],
    ids=["the first to come is taken", "chunks that are cut apart come once each"],
)
def test_replicas_at_two_daemons(apart: Transfer, said: list[tuple[int, int, int]], of_first: int) -> None:
    apart.announce(apart.source, apart.third, sources=2)
    entries = [msgspec.structs.replace(one, replicas=2) for one in layers(2)]
    replicas = [node.engine("replica", entries) for node in (apart.third, apart.source)]
    for which, first, stop in said:
        replicas[which].send(first, stop, last=stop == PAGES)
        apart.harness.deliver_all()
    apart.harness.run()
    apart.check_over("", "OK")
    one, other = replicas
    assert apart.decode.content == [*one.content[:of_first], *other.content[of_first:]]
    assert [one.told, other.told] == ["OK settled"] * 2
    moved = [one.finished.moved_bytes, other.finished.moved_bytes]
    assert moved == [BYTES // PAGES * of_first, BYTES // PAGES * (PAGES - of_first)]


def test_both_sides_are_told_how_many_pages_were_trimmed(apart: Transfer) -> None:
    apart.greet()
    window = [Component(name="swa", space="swa", pages=9, kind="window")]
    engines = []
    for node, count in ((apart.source, 3), (apart.home, 2)):
        one = node.engine("windows", layers(1, component="swa"), pages=9, components=window, count=0)
        ids = one.pool.allocator_of("swa").allocate(one.session, count)
        engines.append((one, [(PageList(component="swa", first_page=None, pages=count), ids)]))
    (prefill, sent), (decode, wanted) = engines
    prefill.send(ids=sent)
    apart.receive(into=decode, ids=wanted)
    apart.harness.run()
    assert (prefill.told, decode.told) == ("OK settled", "OK settled")
    assert (prefill.finished.trimmed_pages, decode.finished.trimmed_pages) == (1, 1)


Ending = Callable[[Transfer], None]
ENDINGS: Final[dict[str, tuple[Ending, str, str]]] = {
    "the sender cancels": (lambda both: both.prefill.cancel("send"), "CANCELLED", "PEER_CANCELLED"),
    "the receiver cancels": (lambda both: both.decode.cancel("receive"), "PEER_CANCELLED", "CANCELLED"),
    "time runs out": (lambda both: both.harness.pass_time(30.0), "DEADLINE", "DEADLINE"),
    "the receiver dies": (lambda both: both.decode.lose(), "PEER_LOST", ""),
    "the sender dies": (lambda both: both.prefill.lose(), "", "PEER_LOST"),
}


def check_under_way(both: Transfer, sender: str, receiver: str, sent: int = PAGES) -> None:
    """Check who is told, and whose pages are held, while a copy of a transfer that has failed is under way."""
    if both.way == "here":
        assert (both.told, both.held) == ((sender, receiver), (sent, PAGES))
    elif both.way == "ipc":  # nothing is read at the source that matters
        assert (both.told, both.held) == ((f"{sender} settled" if sender else "", receiver), (0, PAGES))
    else:  # the source's bytes are being read
        assert (both.told, both.held) == ((sender, f"{receiver} settled" if receiver else ""), (sent, 0))


@FIRST
@pytest.mark.parametrize("error", [None, CancelledError("stopped")], ids=["done", "stopped"])
@pytest.mark.parametrize(
    ("end", "last"), [(end, last) for end in ENDINGS for last in (True, False) if end != "the sender dies" or not last]
)
def test_an_end_while_a_copy_is_under_way(
    both: Transfer, first: str, end: str, error: CancelledError | None, *, last: bool
) -> None:
    ending, sender, receiver = ENDINGS[end]
    both.meet(first, last=last)
    step = both.under_way()
    ending(both)
    both.harness.deliver_all()
    check_under_way(both, sender, receiver, PAGES if last else 1)
    if both.way == "here":
        assert both.home.transport.stopped == {step[2]}
    before = both.decode.content
    both.harness.step(*step, error)
    both.ends(sender, receiver)
    assert both.way != "tcp" or both.decode.content == before, "what lands in a slot after the end touches no page"
    assert both.prefill.pool.allocator.idle == (end == "the sender dies")


@FIRST
def test_a_copy_fails(both: Transfer, first: str) -> None:
    both.meet(first)
    both.end_copy(FAILED)
    both.ends("TRANSFER_FAILED", "TRANSFER_FAILED")
    assert both.decode.finished.moved_bytes == 0


def test_one_of_two_copies_fails(here: Transfer) -> None:
    here.receive()
    here.send(0, 1, last=False)
    here.send(1)
    first, second = here.home.transport.under_way
    here.home.transport.end(first, FAILED)
    assert here.told == ("TRANSFER_FAILED", "TRANSFER_FAILED")
    assert here.home.transport.stopped == {second}
    here.home.transport.end(second, FAILED)
    here.check_over("TRANSFER_FAILED", "TRANSFER_FAILED")


def test_what_was_read_after_its_send_had_ended_does_not_count(mapped: Transfer) -> None:
    mapped.meet()
    mapped.prefill.cancel("send")  # the home does not know it yet
    mapped.source.fill(mapped.prefill.pool, mapped.prefill.pages)  # the pages are used anew
    mapped.end_copy()
    mapped.harness.deliver_until(mapped.home, mapped.source, Confirm)
    mapped.harness.deliver_until(mapped.source, mapped.home, Confirmed)
    mapped.ends("CANCELLED", "PEER_CANCELLED")


def test_a_send_that_ends_while_its_credit_is_on_its_way(by_slots: Transfer) -> None:
    by_slots.greet()
    by_slots.send()
    by_slots.receive()
    by_slots.harness.deliver_until(by_slots.home, by_slots.source, Announce)
    by_slots.harness.deliver_until(by_slots.source, by_slots.home, PeerSend)
    by_slots.prefill.cancel("send")
    assert by_slots.prefill.told == "CANCELLED settled", "nothing has been asked for"
    by_slots.harness.deliver_until(by_slots.home, by_slots.source, WriteCredit)
    assert not by_slots.source.remote.sending
    by_slots.harness.deliver_until(by_slots.source, by_slots.home, Written)
    by_slots.ends("CANCELLED", "PEER_CANCELLED")


@pytest.mark.parametrize("end", ["the sender cancels", "time runs out"])
def test_a_send_that_no_one_waits_for(here: Transfer, end: str) -> None:
    here.send()
    assert here.held == (PAGES, 0)
    ending, outcome, _ = ENDINGS[end]
    ending(here)
    here.check_over(outcome, "")


@pytest.mark.parametrize("end", ["the receiver cancels", "time runs out"])
def test_a_receive_that_no_one_sends_to(both: Transfer, end: str) -> None:
    both.announce()
    assert both.held == (0, PAGES)
    ending, _, outcome = ENDINGS[end]
    ending(both)
    both.ends("", outcome)


@pytest.mark.parametrize("steps", [(), STEPS], ids=["last", "steps are not ready"])
@pytest.mark.parametrize("last", [False, True])
def test_a_sender_dies_before_decode_asks(both: Transfer, steps: tuple[LayerStep, ...], *, last: bool) -> None:
    """A send request that has said all, and of which all is there, goes on; another one is forgotten with its pages."""
    both.send(last=last, steps=steps)
    both.prefill.lose()
    if not last or steps:
        assert both.prefill.pool.allocator.idle
        return
    assert both.held == (PAGES, 0)
    both.receive()
    both.ends("", "OK")
    assert both.prefill.pool.allocator.idle
    both.harness.check_nothing_left()


def test_a_sender_dies_before_its_steps_are_ready(both: Transfer) -> None:
    both.begin(steps=STEPS)
    both.prefill.lose()
    both.ends("", "PEER_LOST")


@FIRST
def test_a_sender_may_die_after_its_last_send(here: Transfer, first: str) -> None:
    here.meet(first)
    sent = here.prefill.content
    here.prefill.lose()
    assert here.told == ("", "")
    here.ends("", "OK")
    assert here.decode.content == sent
    assert here.prefill.pool.allocator.idle


def test_a_send_of_the_dead_still_has_its_deadline(here: Transfer) -> None:
    here.send()
    here.prefill.lose()
    here.harness.pass_time(29.9)
    assert here.held == (PAGES, 0)
    here.harness.pass_time(0.1)
    assert here.prefill.pool.allocator.idle


@pytest.mark.parametrize(("send_s", "receive_s"), [(5.0, 50.0), (50.0, 5.0)])
@FIRST
def test_the_earlier_deadline_ends_both(here: Transfer, first: str, send_s: float, receive_s: float) -> None:
    for side, engine in zip(ORDERS[first], (here.prefill, here.decode)[:: 1 if first == "send" else -1], strict=True):
        engine.come(side, deadline_s=send_s if side == "send" else receive_s)
    assert here.home.state_machine.next_deadline() == here.harness.now + 5
    here.harness.pass_time(4.9)
    assert here.told == ("", "")
    here.harness.pass_time(0.1)
    assert here.told == ("DEADLINE", "DEADLINE")
    side = "send" if send_s < receive_s else "receive"
    assert f"the {side} side's deadline passed; missing: copies" in here.decode.reason


@pytest.mark.parametrize("side", ["send", "receive"])
def test_the_deadline_of_one_side_reaches_the_other_daemon(apart: Transfer, side: str) -> None:
    """The clock of one daemon is the first to see it."""
    mine, other = (apart.source, apart.home) if side == "send" else (apart.home, apart.source)
    apart.send(deadline_s=5.0 if side == "send" else 60.0)
    apart.announce(deadline_s=60.0 if side == "send" else 5.0)
    step = apart.under_way()
    mine.pass_time(5.0)
    apart.harness.deliver_until(mine, other, SendWithdrawn if side == "send" else ReceiveClosed)
    assert [one.split()[0] for one in apart.told] == ["DEADLINE", "DEADLINE"]
    apart.harness.step(*step)
    apart.ends("DEADLINE", "DEADLINE")


def test_the_deadline_of_a_receive_that_nobody_joined(apart: Transfer) -> None:
    apart.announce(deadline_s=5.0)
    apart.harness.cut(apart.source, apart.home)  # the receive request's end is lost on the way
    apart.harness.pass_time(5.0)
    assert not apart.source.state_machine.endpoints.announcements, "the source has its own clock"
    apart.check_over("", "DEADLINE")


def test_a_receive_that_is_over_is_forgotten(apart: Transfer) -> None:
    apart.meet()
    receives = [weakref.ref(one) for one in apart.home.state_machine.endpoints.receive_requests.values()]
    apart.succeeds()
    gc.collect()
    assert [one() for one in receives] == [None]


@pytest.mark.parametrize(
    ("begin", "missing"),
    [
        (lambda here: here.send(), "1 of 1 destinations: no RECEIVE yet"),
        (lambda here: here.receive(), "1 of 1 sources: no SEND yet"),
        (lambda here: here.begin("receive", stop=1, last=False, deadline_s=60.0), "a source's last SEND"),
    ],
)
def test_a_deadline_says_what_was_missing(here: Transfer, begin: Ending, missing: str) -> None:
    begin(here)
    here.harness.run()
    here.harness.pass_time(30.0)
    assert missing in (here.decode if here.decode.told else here.prefill).reason


@pytest.mark.parametrize(("first_s", "then_s", "end_s"), [(10, 10, 19), (60, 1, 60)])
def test_a_chunk_may_extend_the_deadline_but_not_shorten_it(
    here: Transfer, first_s: float, then_s: float, end_s: float
) -> None:
    here.send(0, 1, last=False, deadline_s=first_s)
    here.harness.pass_time(9)
    here.send(1, deadline_s=then_s)
    here.harness.pass_time(end_s - 9.1)
    assert here.told == ("", "")
    here.harness.pass_time(0.1)
    here.check_over("DEADLINE", "")


def test_sides_that_are_over_do_not_wait_for_their_deadlines() -> None:
    """One that is due before them and is not over would keep all of them, an hour's worth of pages and cells."""
    harness = TransferHarness()
    prefill, decode, early = harness.engine("prefill"), harness.engine("decode"), harness.engine("early")
    early.receive(request=OTHER, deadline_s=1.0)
    receive_requests = []
    for number in range(50):
        decode.receive(request=f"{number:032x}", deadline_s=3600.0)
        receive_requests.append(weakref.ref(list(harness.state_machine.endpoints.receive_requests.values())[-1]))
        prefill.send(request=f"{number:032x}", deadline_s=3600.0)
        harness.transport.finish_all()
    gc.collect()
    assert sum(receive_request() is not None for receive_request in receive_requests) < 25


def test_draining_fails_what_waits_for_a_message(here: Transfer) -> None:
    here.meet(last=False)
    other = here.source.engine("other")
    other.send(request=OTHER)
    here.source.drain()
    assert (here.told, other.told) == (("SHUTTING_DOWN", "SHUTTING_DOWN"), "SHUTTING_DOWN settled")
    here.ends("SHUTTING_DOWN", "SHUTTING_DOWN")


def test_draining_lets_running_transfers_finish(both: Transfer) -> None:
    both.meet()
    both.home.drain()
    assert both.told == ("", "")
    both.succeeds()


def test_only_the_owner_cancels(here: Transfer) -> None:
    here.send()
    prefill, decode = here.prefill, here.decode
    for session, pool in ((decode.session, prefill.pool), (prefill.session, decode.pool)):
        with pytest.raises(UnknownTransferError):
            here.source.cancel(session, pool, "send")
    with pytest.raises(UnknownTransferError):
        prefill.cancel("receive")
    assert here.told == ("", "")


def test_pages_in_use_may_not_be_used_otherwise_until_settled(here: Transfer) -> None:
    here.meet()
    for misuse, what in (
        (here.prefill.receive, "is being read"),
        (here.decode.send, "is being written"),
        (here.decode.receive, "is being written"),
    ):
        with pytest.raises(PageBusyError, match=what):
            misuse(request=OTHER)
    here.decode.cancel("receive")
    with pytest.raises(PageBusyError):
        here.decode.receive(request=OTHER)
    here.end_copy()
    here.decode.receive(request=OTHER)


def test_freeing_busy_pages_is_deferred(here: Transfer) -> None:
    here.meet()
    prefill, decode = here.prefill, here.decode
    free = prefill.pool.allocator.free_count
    for engine in (prefill, decode):
        assert engine.pool.allocator.free(engine.session, engine.pages) == (0, PAGES)
    with pytest.raises(NotOwnerError):
        prefill.send(request=OTHER)
    here.succeeds()
    assert prefill.pool.allocator.free_count == free + PAGES
    assert decode.pool.allocator.idle


def test_a_first_chunk_that_does_not_fit_fails_alone(apart: Transfer) -> None:
    apart.receive(apart.source, apart.third)
    wrong = apart.source.filled(apart.prefill.pool, apart.prefill.session, PAGES + 1)
    apart.send(ids=wrong)
    apart.harness.deliver_all()
    assert apart.told == ("LENGTH_MISMATCH settled", "")
    assert "refused: " in apart.waits_for
    another = apart.third.engine("prefill")
    another.send()
    apart.ends("LENGTH_MISMATCH", "OK")
    assert another.content == apart.decode.content


def test_a_later_chunk_that_does_not_fit_fails_both(apart: Transfer) -> None:
    apart.meet(last=False)
    apart.send(1, ids=apart.source.filled(apart.prefill.pool, apart.prefill.session, PAGES))
    apart.ends("LENGTH_MISMATCH", "LENGTH_MISMATCH")


def test_the_chunks_of_another_daemon_are_bounded(apart: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home counts them by itself, as its peer may be of another version."""
    apart.announce()
    for _ in range(3):
        apart.send(ids={}, last=False)
    apart.harness.deliver_all()
    apart.send(ids={}, last=False)
    monkeypatch.setattr(admission, "MAX_CHUNKS", 3)
    apart.ends("TOO_LARGE", "TOO_LARGE")


def test_a_send_beyond_the_sources_is_refused(apart: Transfer) -> None:
    another = apart.third.engine("prefill")
    apart.announce(apart.source, apart.third)
    apart.send()
    another.send()
    apart.succeeds()
    assert another.told == "UNEXPECTED_SOURCE settled"


def test_a_refusal_counts_from_a_daemon_that_the_receive_names(apart: Transfer) -> None:
    apart.announce()
    (receive_request,) = apart.home.state_machine.endpoints.receive_requests.values()
    name, source = receive_request.name, apart.harness.connection(apart.home, apart.source).peer
    assert source is not None
    stranger = source._replace(address=apart.address(apart.third))
    refusal = SendRefused(receive_request=name, send_request=0, error=FAILED.info())
    with pytest.raises(UnexpectedSourceError):
        apart.home.state_machine.peers.refused(stranger, refusal, apart.harness.now)
    assert "refused" not in apart.waits_for, "it has no say in what the receive request waits for"
    apart.home.state_machine.peers.refused(source, refusal, apart.harness.now)
    assert "refused" in apart.waits_for
    apart.send()
    apart.succeeds()


def test_a_chunk_of_a_daemon_that_the_receive_does_not_name_is_refused(apart: Transfer) -> None:
    apart.announce()
    (receive_request,) = apart.home.state_machine.endpoints.receive_requests.values()
    receive_request.source_daemons = ()
    apart.send()
    apart.harness.deliver_all()
    assert apart.told == ("UNEXPECTED_SOURCE settled", "")
    assert not receive_request.send_requests
    assert not apart.home.state_machine.peers.remote_pools, "it has no say in what is remembered here"


def test_a_receive_of_another_tenant_is_refused_where_the_request_lives(apart: Transfer) -> None:
    apart.send()
    foreign = apart.third.engine("foreign", tenant=8)
    apart.receive(into=foreign)
    apart.harness.run()
    assert not apart.source.state_machine.endpoints.announcements
    (receive_request,) = apart.third.state_machine.endpoints.receive_requests.values()
    assert "another tenant" in receive_request.waits_for()
    apart.receive()
    apart.harness.run()
    assert apart.told == ("OK settled", "OK settled")


def test_a_side_of_another_tenant_is_refused_where_a_receive_is_announced(apart: Transfer) -> None:
    apart.announce()
    foreign = apart.source.engine("foreign", tenant=8)
    for speak in (foreign.send, foreign.receive):
        with pytest.raises(TransferExistsError, match="another tenant"):
            speak()
    apart.send()
    apart.succeeds()


def test_too_many_announcements_are_refused(apart: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transfers, "MAX_ANNOUNCEMENTS", 0)
    apart.announce()
    assert not apart.source.state_machine.endpoints.announcements
    assert "0 receive requests of other daemons are announced here" in apart.waits_for


def test_what_one_peer_announces_is_bounded_for_itself(apart: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transfers, "MAX_ANNOUNCEMENTS_OF_A_PEER", 1)
    apart.announce()
    late = apart.home.engine("late")
    apart.receive(into=late)
    apart.harness.deliver_all()
    of_home = [one.receive_request.pool for one in apart.source.state_machine.endpoints.announcements.values()]
    assert of_home == ["decode"]
    other = apart.third.engine("other")
    apart.receive(into=other)
    apart.harness.deliver_all()
    assert len(apart.source.state_machine.endpoints.announcements) == 2, "another daemon has its own share"
    apart.harness.pass_time(1e12)
    assert (late.told, other.told) == ("DEADLINE settled",) * 2
    assert "1 receive requests of the same daemon are announced here" in late.reason
    assert not apart.source.state_machine.endpoints.announced_by


def test_a_receive_that_would_wait_for_ever_is_not_announced(apart: Transfer) -> None:
    apart.greet()
    name = ReceiveName("0" * 32, "decode", 7, 1)
    (connection,) = apart.source.links.connections.values()
    assert connection.peer is not None
    for deadline_ms in (peer_transfers.LONGEST_ANNOUNCEMENT_MS + 1, (1 << 63) - 1):
        announce = Announce(receive_request=name, deadline_ms=deadline_ms)
        apart.source.links.told.on_message(connection.peer, announce, ())
        assert not apart.source.state_machine.endpoints.announcements
        refused = decode_peer(apart.harness.connection(apart.source, apart.home).on_its_way.pop()).envelope.body
        assert isinstance(refused, SendRefused)
        assert (refused.error.code, refused.error.field) == ("INVALID_FIELD", "deadline_ms")


def test_epochs_of_the_future_are_unknown(apart: Transfer) -> None:
    apart.announce()
    apart.send()
    said = decode_peer(apart.harness.connection(apart.source, apart.home).on_its_way.pop())
    assert isinstance(said.envelope.body, PeerSend)
    name = said.envelope.body.receive_request
    later = msgspec.structs.replace(
        said.envelope.body, receive_request=msgspec.structs.replace(name, epoch=name.epoch + 1)
    )
    source = Incarnation(said.envelope.address, said.envelope.key)
    apart.home.links.told.on_message(source, later, said.ids)
    refused = decode_peer(apart.harness.connection(apart.home, apart.source).on_its_way.pop()).envelope.body
    assert isinstance(refused, SendRefused)
    assert refused.error.code == "UNKNOWN_TRANSFER"
    assert "no SEND yet" in apart.waits_for


@pytest.mark.parametrize("ready", [3, (1 << 63) - 1])
def test_no_more_steps_are_ready_than_there_are(apart: Transfer, ready: int) -> None:
    apart.announce()
    apart.send()
    said = decode_peer(apart.harness.connection(apart.source, apart.home).on_its_way.pop())
    assert isinstance(said.envelope.body, PeerSend)
    source = Incarnation(said.envelope.address, said.envelope.key)
    wrong = msgspec.structs.replace(said.envelope.body, ready=ready)
    apart.home.links.told.on_message(source, wrong, said.ids)
    assert "INVALID_FIELD [ready]" in apart.waits_for
    apart.harness.connection(apart.home, apart.source).on_its_way.clear()  # the source has not said it
    apart.home.links.told.on_message(source, said.envelope.body, said.ids)
    body = StepReady(receive_request=wrong.receive_request, send_request=wrong.send_request, chunk=0, ready=ready)
    with pytest.raises(InvalidFieldError, match="steps are ready"):
        apart.home.links.told.on_message(source, body, ())
    apart.harness.run()
    assert apart.decode.told == "OK settled"


def test_a_receive_is_begun_anew_on_another_source(apart: Transfer) -> None:
    apart.meet(last=False)
    step = apart.under_way()
    apart.prefill.lose()
    apart.harness.deliver_all()
    another = apart.third.engine("prefill")
    if apart.way == "ipc":
        with pytest.raises(TransferExistsError):
            apart.receive(apart.third)  # its pages may still be written
        apart.harness.step(*step)
        apart.harness.run()
    assert apart.receive(apart.third) == 2
    another.send()
    if apart.way == "tcp":  # the write goes on, into its slot
        apart.harness.deliver_all()
        apart.harness.step(*step)
    apart.ends("", "PEER_LOST settled OK")
    assert apart.decode.finished.generation == 2
    assert another.content == apart.decode.content


@pytest.mark.parametrize("how", ["generation", "session"])
def test_what_was_said_to_an_older_receive_is_void(apart: Transfer, how: str) -> None:
    apart.announce()
    apart.send()  # is on its way to the first one
    newer = apart.decode
    if how == "generation":
        newer.cancel("receive")
    else:
        newer.lose()
        session = apart.home.session()
        newer = Engine(apart.home, session, newer.pool, apart.home.filled(newer.pool, session, PAGES))
    assert apart.receive(apart.third, apart.source, into=newer) == (2 if how == "generation" else 1), (
        "each session counts for itself"
    )
    apart.harness.deliver(apart.source, apart.home)
    (receive_request,) = apart.home.state_machine.endpoints.receive_requests.values()
    assert not receive_request.send_requests
    apart.harness.run()
    assert newer.told == ("CANCELLED settled" if how == "generation" else "")
    assert apart.prefill.told == ("PEER_CANCELLED settled" if how == "generation" else "PEER_LOST settled")


def test_a_deleted_pools_memory_is_given_up(mapped: Transfer) -> None:
    mapped.meet()
    pools = mapped.home.state_machine.peers.remote_pools
    ((key, pool),) = pools.items()
    mapped.harness.run()
    pool.mapping = region = HostRegion.create("mapped", 4096)
    another = PoolGone(tenant=pool.tenant, pool=pool.name, region=pool.region_id + 1)
    mapped.home.state_machine.peers.pool_gone(key[0], another)
    assert key in pools, "it was of a pool before this one"
    mapped.source.messenger.pool_removed(mapped.prefill.pool)
    mapped.harness.run()
    assert region.fd == -1, "it is closed"
    assert key not in pools


def test_pools_are_not_remembered_for_receives_that_do_not_exist(apart: Transfer) -> None:
    apart.announce()
    apart.send()
    apart.decode.cancel("receive")
    apart.harness.run()
    assert not apart.home.state_machine.peers.remote_pools


def test_pools_of_peers_are_bounded(apart: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transfers, "MAX_REMOTE_POOLS", 0)
    apart.begin()
    assert apart.told == ("BUSY settled", "")
    assert "0 pools of other daemons are known here" in apart.waits_for


def test_chunks_of_a_peer_have_no_gap(apart: Transfer) -> None:
    """No message is lost on a connection that stands: only a peer with a fault leaves one out."""
    apart.announce()
    apart.send(0, 1, last=False)
    apart.harness.deliver_all()
    apart.send(1, 2, last=False)
    apart.harness.connection(apart.source, apart.home).on_its_way.popleft()
    apart.send(2)
    apart.ends("PAGE_GAP", "PAGE_GAP")


def test_the_first_chunk_of_a_peer_is_not_missing(apart: Transfer) -> None:
    apart.announce()
    apart.send(0, 1, last=False)
    (first,) = apart.harness.connection(apart.source, apart.home).on_its_way
    said = decode_peer(first)
    assert isinstance(said.envelope.body, PeerSend)
    source = Incarnation(said.envelope.address, said.envelope.key)
    later = msgspec.structs.replace(said.envelope.body, chunk=1)
    apart.home.links.told.on_message(source, later, said.ids)
    assert "chunk 0 is missing" in apart.waits_for


def test_a_first_chunk_that_the_link_cannot_carry_is_refused_by_name(apart: Transfer) -> None:
    apart.announce()
    apart.source.links.max_ids = 1
    apart.send()
    apart.harness.run()
    assert apart.prefill.told == "TOO_LARGE settled"
    assert "refused: TOO_LARGE" in apart.waits_for, "the receive request goes on waiting, and says for what"
    apart.harness.pass_time(1e12)
    apart.ends("TOO_LARGE", "DEADLINE")


def test_a_later_chunk_that_the_link_cannot_carry_ends_both(apart: Transfer) -> None:
    apart.announce()
    apart.send(0, 1, last=False)
    apart.harness.deliver_all()
    apart.source.links.max_ids = 1
    apart.send(1)
    apart.ends("TOO_LARGE", "TOO_LARGE")


def test_the_source_daemon_dies(apart: Transfer) -> None:
    apart.meet()
    apart.harness.end(apart.source)
    assert apart.decode.told == "", "nobody has noticed"
    apart.harness.notice(apart.home, apart.source)
    assert (apart.decode.told, apart.decode.held) == (
        ("PEER_LOST", PAGES) if apart.way == "ipc" else ("PEER_LOST settled", 0)
    )
    apart.harness.run()
    assert apart.decode.told == "PEER_LOST settled"
    apart.harness.check_nothing_left()


def test_the_source_daemon_dies_before_it_has_confirmed(mapped: Transfer) -> None:
    mapped.meet()
    mapped.end_copy()
    mapped.lose_daemon(mapped.source, mapped.home)
    assert mapped.decode.told == "PEER_LOST settled"
    mapped.harness.check_nothing_left()


def test_the_source_daemon_dies_before_anything_of_it_joined(apart: Transfer) -> None:
    apart.announce(apart.source, apart.third)
    apart.lose_daemon(apart.source, apart.home)
    assert f"no connection to {apart.address(apart.source)}" in apart.waits_for
    assert apart.address(apart.third) not in apart.waits_for
    apart.third.engine("prefill").send()
    apart.harness.run()
    assert apart.decode.told == "OK settled"


def test_the_source_daemon_restarts_and_hears_of_receives_that_still_wait(apart: Transfer) -> None:
    apart.announce()
    again = apart.harness.restart(apart.source)
    apart.harness.notice(apart.home, apart.source)
    apart.harness.heal()
    prefill = again.engine("prefill")
    prefill.send()
    apart.ends("", "OK")
    assert prefill.content == apart.decode.content


def test_the_credits_of_a_source_daemon_that_restarts_are_void(apart: Transfer) -> None:
    apart.meet()
    again = apart.harness.restart(apart.source)
    for connection in apart.harness.network.connections():  # reopened, and the break not noticed before that
        if connection.broken:
            connection.reopen()
    apart.harness.deliver_all()
    assert apart.decode.told.startswith("PEER_LOST")
    assert not again.remote.sending
    apart.harness.run()
    assert apart.decode.told == "PEER_LOST settled"
    apart.harness.check_nothing_left()


def test_the_destination_daemon_dies(apart: Transfer) -> None:
    apart.meet()
    apart.lose_daemon(apart.home, apart.source)
    if apart.way == "tcp":
        assert (apart.prefill.told, apart.prefill.held) == ("PEER_LOST", PAGES), "its bytes are being read"
        apart.end_copy(TransferFailedError("nobody is there"))
    assert (apart.prefill.told, apart.prefill.held) == ("PEER_LOST settled", 0)
    apart.harness.check_nothing_left()


def test_the_destination_daemon_restarts_and_the_old_credit_is_void(by_slots: Transfer) -> None:
    by_slots.meet()
    by_slots.harness.restart(by_slots.home)
    by_slots.harness.notice(by_slots.source, by_slots.home)
    by_slots.harness.heal()
    assert by_slots.prefill.told == "PEER_LOST"
    by_slots.end_copy()
    by_slots.harness.run()
    assert by_slots.prefill.told == "PEER_LOST settled"
    by_slots.harness.check_nothing_left()


def test_a_partition_ends_with_the_deadline_on_both_sides(apart: Transfer) -> None:
    apart.meet()
    apart.harness.cut(apart.source, apart.home)  # neither notices
    step = apart.under_way()
    apart.harness.pass_time(31.0)
    assert [one.split()[0] for one in apart.told] == ["DEADLINE", "DEADLINE"]
    apart.harness.step(*step)
    apart.check_over("DEADLINE", "DEADLINE")


@pytest.mark.parametrize("who", ["source", "home", "both"])
def test_a_break_that_a_side_notices_ends_it_on_both(apart: Transfer, who: str) -> None:
    apart.meet()
    noticing, other = (apart.source, apart.home) if who == "source" else (apart.home, apart.source)
    if who == "both":
        apart.harness.cut(noticing, other)
        apart.harness.notice(noticing, other)
        apart.harness.notice(other, noticing)
    else:
        connection = apart.harness.connection(noticing, other)
        connection.break_off()
        connection.reopen()
    apart.ends("PEER_LOST", "PEER_LOST")


def test_receives_are_announced_again_when_a_link_is_up_again(apart: Transfer) -> None:
    apart.announce()
    apart.harness.cut(apart.source, apart.home)
    apart.send()
    apart.harness.run()
    assert apart.told == ("", ""), "the send request is lost on the way"
    apart.harness.notice(apart.home, apart.source)
    assert "no connection to" in apart.waits_for
    apart.harness.heal()
    assert apart.told == ("PEER_LOST settled",) * 2, "the receive request, too, would wait for nobody"
    apart.prefill.acknowledge("send")
    apart.decode.acknowledge("receive")
    apart.receive()
    apart.send()
    apart.ends("PEER_LOST settled OK", "PEER_LOST settled OK")


def test_a_send_that_came_meanwhile_fills_what_is_announced_again(apart: Transfer) -> None:
    apart.announce()
    apart.harness.cut(apart.source, apart.home)
    apart.send()
    apart.harness.run()
    for one, other in ((apart.home, apart.source), (apart.source, apart.home)):
        apart.harness.notice(one, other)
    apart.prefill.acknowledge("send")
    apart.send()
    apart.harness.heal()
    apart.ends("PEER_LOST settled OK", "OK")


def test_an_unreachable_daemon_is_named_at_the_deadline(apart: Transfer) -> None:
    address = apart.address(apart.source)
    apart.harness.end(apart.source)
    apart.receive()
    apart.harness.run()
    assert f"no connection to {address}" in apart.waits_for
    assert [(one.address, one.state, one.announced) for one in apart.home.peers.status()] == [(address, "greeting", 1)]
    apart.harness.pass_time(31.0)
    apart.check_over("", "DEADLINE")
    assert f"no connection to {address}" in apart.decode.reason
    assert [one.announced for one in apart.home.peers.status()] == [0]


def test_status_shows_who_waits_where(apart: Transfer) -> None:
    apart.announce()
    shown = [(one.address, one.state, one.announced, one.waiting) for one in apart.home.peers.status()]
    assert shown == [(apart.address(apart.source), "up", 1, 0)]
    shown = [(one.address, one.state, one.announced, one.waiting) for one in apart.source.peers.status()]
    assert shown == [(apart.address(apart.home), "up", 0, 1)]


def test_a_daemon_is_not_its_own_source(apart: Transfer) -> None:
    own, other = apart.address(apart.home), apart.address(apart.source)
    assert apart.home.messenger.source_daemons((other, own, other)) == (other,)


def test_a_second_end_changes_nothing(apart: Transfer) -> None:
    apart.meet()
    ((home, name),) = apart.source.state_machine.endpoints.announcements
    apart.harness.run()
    again = ReceiveClosed(receive_request=name, error=FAILED.info(), moved=((1, BYTES, 0),))
    apart.source.state_machine.peers.closed(home, again, apart.harness.now)
    apart.check_over("OK", "OK")
    assert apart.prefill.finished.moved_bytes == BYTES


def test_only_the_home_of_a_receive_may_ask_for_its_send(apart: Transfer) -> None:
    apart.announce()
    apart.send()
    ((number, remote_endpoint),) = apart.source.state_machine.endpoints.remote_endpoints.items()
    home, name = remote_endpoint.announcement.home, remote_endpoint.announcement.receive_request
    another = home._replace(boot_id="f" * 32)
    peers = apart.source.state_machine.peers
    assert peers.open_remote(home, number, name) is remote_endpoint
    for wrong in (
        (another, number, name),
        (home, number + 1, name),
        (home, number, msgspec.structs.replace(name, epoch=2)),
    ):
        with pytest.raises(UnknownTransferError):
            peers.open_remote(*wrong)
    peers.refused(another, SendRefused(receive_request=name, send_request=number, error=FAILED.info()), 0.0)
    assert apart.told == ("", "")
