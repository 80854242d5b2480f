"""What both sides of a transfer are told, and when their pages are free: within a daemon and between daemons.

The outcome is known at once, but nobody is told ``settled``, and no page is free, while a byte of it may move. Within a
daemon both sides wait for the copy. Between daemons of one host (``ipc``) the home copies: its pages may be written
until the copy has ended. Between hosts (``tcp``) the source writes to a slot, which is no page: only the source waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

from kvferry.daemon.transfer import admission, peer_transfers
from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol import errors
from kvferry.protocol import peer_messages as messages
from kvferry.protocol.base import PageList
from kvferry.protocol.manifests import Component
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.peers import BYTES, PAGES, WAYS, Node, PeerHarness, Transfer, Way
from tests.kit.transfers import FIRST, ORDERS, Engine, layers

OTHER: Final = "f" * 32
FAILED: Final = errors.TransferFailedError("scripted")
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


def test_each_message_and_each_end_of_a_copy_is_something_that_has_happened(here: Transfer) -> None:
    """A transfer that still gets pages is not stuck."""
    here.receive()
    here.send(0, 1, last=False)
    begun = here.harness.now
    here.harness.pass_time(5.0)
    sides = list(here.source.state_machine.endpoints)
    assert [one.changed_at for one in sides] == [begun, begun]
    here.end_copy()
    assert [one.changed_at for one in sides] == [begun + 5, begun + 5]
    here.harness.pass_time(2.0)
    here.send(1, 2, last=False)
    assert [one.changed_at for one in sides] == [begun + 7, begun + 7]


def test_layers_move_when_their_events_have_come(apart: Transfer) -> None:
    apart.begin(steps=STEPS)
    assert not list(apart.harness.steps())
    apart.source.events(apart.prefill.session, 1, 0)
    apart.harness.deliver_until(apart.source, apart.home, messages.StepReady)
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
    apart.harness.deliver_until(apart.home, apart.source, messages.Announce)
    peer = apart.home.links.connect(apart.address(apart.source))
    assert peer is not None
    apart.home.links.told.on_up(peer)
    apart.succeeds()


@pytest.mark.parametrize("destinations", [1, 2])
def test_a_send_fills_as_many_receives_as_they_say_also_of_two_daemons(apart: Transfer, destinations: int) -> None:
    second = apart.third.engine("decode")
    apart.send()
    apart.announce(destinations=destinations)
    apart.harness.run()
    assert apart.told == ("OK settled" if destinations == 1 else "", "OK settled")
    assert apart.held == (PAGES if destinations == 2 else 0, 0), "the source waits for its second receive request"
    apart.announce(into=second, destinations=destinations)
    apart.harness.run()
    assert second.told == ("OK settled" if destinations == 2 else "")
    assert apart.prefill.told == "OK settled"
    assert apart.prefill.finished.moved_bytes == destinations * BYTES
    assert destinations == 1 or second.content == apart.decode.content == apart.prefill.content


def test_receives_of_two_daemons_say_the_same_number_of_them(apart: Transfer) -> None:
    second = apart.third.engine("decode")
    apart.send()
    apart.announce(destinations=2)
    apart.announce(into=second, destinations=3)
    apart.harness.run()
    assert (apart.decode.told, second.told) == ("OK settled", "")
    (waiting,) = apart.third.state_machine.endpoints.receive_requests.values()
    assert "refused: INVALID_FIELD [destinations]: this RECEIVE says 3" in waiting.waits_for()
    second.cancel("receive")
    apart.announce(into=second, destinations=2)
    apart.harness.run()
    assert second.told == "CANCELLED settled OK settled"
    assert apart.prefill.told == "OK settled"


@FIRST
@pytest.mark.parametrize("way", WAYS)
def test_a_receive_takes_the_sources_that_it_names(way: Way, first: str) -> None:
    """Each of two sources has all of the request, with a token of its own; each receiver names another one first."""
    both = Transfer(way)
    sources = [both.prefill, both.source.engine("other")]
    receivers = [both.decode, both.home.engine("second")]
    for direction in ORDERS[first]:
        for number in range(2):
            if direction == "send":
                sources[number].send(first_token=number)
            else:
                both.announce(into=receivers[number], sources=(sources[number].pool.name,))
        both.harness.deliver_all()
    both.harness.run()
    for source, receiver in zip(sources, receivers, strict=True):
        assert (source.told, receiver.told) == ("OK settled", "OK settled")
        assert receiver.content == source.content
        assert source.finished.moved_bytes == BYTES
        assert receiver.finished.first_token == sources.index(source)
    assert receivers[0].content != receivers[1].content
    both.harness.check_nothing_left()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("named", [("stage1", "stage0"), ("stage0", "stage1")])
def test_the_first_token_is_that_of_the_source_named_first(way: Way, named: tuple[str, ...]) -> None:
    both = Transfer(way)
    stages = [both.source.engine(f"stage{layer}", layers(1, first=layer)) for layer in (0, 1)]
    stages[0].send(first_token=0, payload=b"of stage0")
    both.announce(sources=named)
    assert "1 of 2 sources: no SEND yet of stage1" in both.waits_for
    stages[1].send(first_token=1, payload=b"of stage1")
    both.harness.run()
    assert both.decode.told == "OK settled"
    token = int(named[0][-1])
    assert (both.decode.finished.first_token, both.decode.finished.payload) == (token, f"of {named[0]}".encode())
    both.harness.check_nothing_left()


def test_a_send_of_a_pool_that_the_receive_does_not_name_is_refused(apart: Transfer) -> None:
    apart.announce(sources=("another",))
    (known,) = apart.source.state_machine.endpoints.announcements.values()
    known.source_pools = ()  # a daemon that does not look
    apart.send()
    apart.harness.run()
    assert apart.prefill.told == "UNEXPECTED_SOURCE settled"
    assert "does not name pool 'prefill'" in apart.prefill.reason
    assert apart.decode.told == ""


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
    if both.way == "here":
        assert (both.told, both.held) == ((sender, receiver), (sent, PAGES))
    elif both.way == "ipc":  # nothing is read at the source that matters
        assert (both.told, both.held) == ((f"{sender} settled" if sender else "", receiver), (0, PAGES))
    else:  # the source's bytes are being read
        assert (both.told, both.held) == ((sender, f"{receiver} settled" if receiver else ""), (sent, 0))


@pytest.mark.parametrize(
    ("first", "error"), [("send", None), ("receive", errors.CancelledError("stopped"))], ids=["done", "stopped"]
)
@pytest.mark.parametrize(
    ("end", "last"), [(end, last) for end in ENDINGS for last in (True, False) if end != "the sender dies" or not last]
)
def test_an_end_while_a_copy_is_under_way(
    both: Transfer, first: str, end: str, error: errors.CancelledError | None, *, last: bool
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
    mapped.harness.deliver_until(mapped.home, mapped.source, messages.Confirm)
    mapped.harness.deliver_until(mapped.source, mapped.home, messages.Confirmed)
    mapped.ends("CANCELLED", "PEER_CANCELLED")


@pytest.mark.parametrize("steps", [(), STEPS], ids=["last", "steps are not ready"])
@pytest.mark.parametrize("last", [False, True])
def test_a_sender_dies_before_decode_asks(both: Transfer, steps: tuple[LayerStep, ...], *, last: bool) -> None:
    both.send(last=last, steps=steps)
    sent = both.prefill.content
    both.prefill.lose()
    if not last or steps:
        assert both.prefill.pool.allocator.idle
        return
    assert both.held == (PAGES, 0)
    both.receive()
    both.ends("", "OK")
    assert both.decode.content == sent
    assert both.prefill.pool.allocator.idle


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
    assert "1 of 1 destinations: no RECEIVE yet" in here.prefill.reason


def test_draining_fails_what_waits_for_a_message_and_nothing_else(here: Transfer) -> None:
    here.meet()
    early, late = here.source.engine("early"), here.source.engine("late")
    early.send(request=OTHER)
    late.receive(request="e" * 32)
    here.source.drain()
    assert (early.told, late.told) == ("SHUTTING_DOWN settled",) * 2
    assert here.told == ("", "")
    here.succeeds()


def test_only_the_owner_cancels(here: Transfer) -> None:
    here.send()
    prefill, decode = here.prefill, here.decode
    for session, pool in ((decode.session, prefill.pool), (prefill.session, decode.pool)):
        with pytest.raises(errors.UnknownTransferError):
            here.source.cancel(session, pool, "send")
    with pytest.raises(errors.UnknownTransferError):
        prefill.cancel("receive")
    assert here.told == ("", "")


def test_pages_in_use_may_not_be_used_otherwise_until_settled(here: Transfer) -> None:
    here.meet()
    for misuse, what in (
        (here.prefill.receive, "is being read"),
        (here.decode.send, "is being written"),
        (here.decode.receive, "is being written"),
    ):
        with pytest.raises(errors.PageBusyError, match=what):
            misuse(request=OTHER)
    here.decode.cancel("receive")
    with pytest.raises(errors.PageBusyError):
        here.decode.receive(request=OTHER)
    here.end_copy()
    here.decode.receive(request=OTHER)


def test_freeing_busy_pages_is_deferred(here: Transfer) -> None:
    here.meet()
    prefill, decode = here.prefill, here.decode
    free = prefill.pool.allocator.free_count
    for engine in (prefill, decode):
        assert engine.pool.allocator.free(engine.session, engine.pages) == (0, PAGES)
    with pytest.raises(errors.NotOwnerError):
        prefill.send(request=OTHER)
    here.succeeds()
    assert prefill.pool.allocator.free_count == free + PAGES
    assert decode.pool.allocator.idle


@pytest.mark.parametrize(("max_ids", "code"), [(1, "TOO_LARGE"), (PAGES + 1, "LENGTH_MISMATCH")])
def test_a_first_chunk_that_the_link_or_the_home_does_not_take_fails_alone(
    apart: Transfer, max_ids: int, code: str
) -> None:
    apart.announce(apart.source, apart.third)
    apart.source.links.max_ids = max_ids
    apart.send(ids=apart.source.filled(apart.prefill.pool, apart.prefill.session, PAGES + 1))
    apart.harness.deliver_all()
    assert apart.told == (f"{code} settled", "")
    assert f"refused: {code}" in apart.waits_for, "the receive request goes on waiting, and says for what"
    another = apart.third.engine("prefill")
    another.send()
    apart.ends(code, "OK")
    assert another.content == apart.decode.content


def send_beyond_the_link(apart: Transfer) -> None:
    apart.source.links.max_ids = 1
    apart.send(1)


def lose_a_chunk(apart: Transfer) -> None:
    """No message is lost on a connection that stands: only a peer with a fault leaves one out."""
    apart.send(1, 2, last=False)
    apart.harness.connection(apart.source, apart.home).on_its_way.popleft()
    apart.send(2)


def send_a_chunk_too_many(apart: Transfer) -> None:
    """A home counts them by itself, as its peer may be of another version."""
    apart.send(1, last=False)
    with pytest.MonkeyPatch.context() as patch:
        apart.send(ids={}, last=False)
        patch.setattr(admission, "MAX_CHUNKS", 2)
        apart.harness.deliver_all()


@pytest.mark.parametrize(
    ("say", "code"),
    [
        (
            lambda one: one.send(1, ids=one.source.filled(one.prefill.pool, one.prefill.session, PAGES)),
            "LENGTH_MISMATCH",
        ),
        (send_beyond_the_link, "TOO_LARGE"),
        (lose_a_chunk, "PAGE_GAP"),
        (send_a_chunk_too_many, "TOO_LARGE"),
    ],
    ids=["past the end of the receive", "beyond the link", "one is lost", "one too many"],
)
def test_a_later_chunk_that_is_refused_ends_both(apart: Transfer, say: Ending, code: str) -> None:
    apart.meet("receive", last=False)
    say(apart)
    apart.ends(code, code)


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
    refusal = messages.SendRefused(receive_request=name, send_request=0, error=FAILED.info())
    with pytest.raises(errors.UnexpectedSourceError):
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


def test_a_receive_of_another_tenant_waits_as_if_nobody_sent(apart: Transfer) -> None:
    apart.send()
    foreign = apart.third.engine("foreign", tenant=8)
    apart.receive(into=foreign)
    apart.harness.run()
    (receive_request,) = apart.third.state_machine.endpoints.receive_requests.values()
    assert receive_request.waits_for() == "1 of 1 sources: no SEND yet"
    apart.receive()
    apart.harness.run()
    assert apart.told == ("OK settled", "OK settled")
    assert foreign.told == ""


def test_another_tenant_may_have_a_request_of_the_same_number(apart: Transfer) -> None:
    apart.announce()
    foreign = apart.source.engine("foreign", tenant=8)
    assert foreign.send().matched == 0
    apart.send()
    apart.harness.run()
    assert apart.told == ("OK settled", "OK settled")
    assert foreign.told == ""


@pytest.mark.parametrize(
    ("bound", "told", "said"),
    [
        ("MAX_ANNOUNCEMENTS", "", "0 receive requests of other daemons are announced here"),
        ("MAX_REMOTE_POOLS", "BUSY settled", "0 pools of other daemons are known here"),
    ],
)
def test_what_other_daemons_have_here_is_bounded(
    apart: Transfer, monkeypatch: pytest.MonkeyPatch, bound: str, told: str, said: str
) -> None:
    monkeypatch.setattr(peer_transfers, bound, 0)
    apart.begin()
    assert apart.told == (told, "")
    assert said in apart.waits_for


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


def last_said(harness: PeerHarness, sender: Node, receiver: Node) -> messages.IncomingPeerMessage:
    """Take what was said last off its way."""
    return messages.decode_peer(harness.connection(sender, receiver).on_its_way.pop())


def refusal(harness: PeerHarness, sender: Node, receiver: Node) -> tuple[str, str | None]:
    """Take a refusal off its way: its code and field."""
    body = last_said(harness, sender, receiver).envelope.body
    assert isinstance(body, messages.SendRefused)
    return body.error.code, body.error.field


def test_a_receive_that_would_wait_for_ever_is_not_announced(apart: Transfer) -> None:
    apart.greet()
    name = messages.ReceiveName("0" * 32, "decode", 7, 1)
    (connection,) = apart.source.links.connections.values()
    assert connection.peer is not None
    for deadline_ms in (peer_transfers.LONGEST_ANNOUNCEMENT_MS + 1, (1 << 63) - 1):
        announce = messages.Announce(receive_request=name, deadline_ms=deadline_ms)
        apart.source.links.told.on_message(connection.peer, announce, ())
        assert not apart.source.state_machine.endpoints.announcements
        assert refusal(apart.harness, apart.source, apart.home) == ("INVALID_FIELD", "deadline_ms")


@pytest.mark.parametrize(
    ("changes", "refused", "said"),
    [
        ({"epoch": 2}, ("UNKNOWN_TRANSFER", "request_id"), "no SEND yet"),
        ({"ready": 3}, ("INVALID_FIELD", "ready"), "INVALID_FIELD [ready]"),
        ({"ready": (1 << 63) - 1}, ("INVALID_FIELD", "ready"), "INVALID_FIELD [ready]"),
        ({"chunk": 1}, ("PAGE_GAP", "chunk"), "chunk 0 is missing"),
    ],
)
def test_a_chunk_that_cannot_be_is_refused_and_the_right_one_is_taken(
    apart: Transfer, changes: dict[str, Any], refused: tuple[str, str], said: str
) -> None:
    apart.announce()
    apart.send()
    chunk = last_said(apart.harness, apart.source, apart.home)
    source, body = Incarnation(chunk.envelope.address, chunk.envelope.key), chunk.envelope.body
    assert isinstance(body, messages.PeerSend)
    if "epoch" in changes:
        changes = {"receive_request": msgspec.structs.replace(body.receive_request, **changes)}
    apart.home.links.told.on_message(source, msgspec.structs.replace(body, **changes), chunk.ids)
    assert said in apart.waits_for
    assert refusal(apart.harness, apart.home, apart.source) == refused
    apart.home.links.told.on_message(source, body, chunk.ids)
    more = messages.StepReady(receive_request=body.receive_request, send_request=body.send_request, chunk=0, ready=3)
    with pytest.raises(errors.InvalidFieldError, match="steps are ready"):
        apart.home.links.told.on_message(source, more, ())
    apart.harness.run()
    assert apart.decode.told == "OK settled"


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
    own_count = 2 if how == "generation" else 1
    assert apart.receive(apart.third, apart.source, into=newer) == own_count, "each session counts for itself"
    apart.harness.run()
    assert newer.told == ("CANCELLED settled" if how == "generation" else "")
    assert apart.prefill.told == ("PEER_CANCELLED settled" if how == "generation" else "PEER_LOST settled")
    assert not apart.home.state_machine.peers.remote_pools, "nothing is remembered for what does not exist"


@pytest.mark.parametrize("how", ["deleted", "its daemon is lost"])
def test_the_memory_of_a_pool_that_is_gone_is_given_up(mapped: Transfer, how: str) -> None:
    mapped.meet()
    pools = mapped.home.state_machine.peers.remote_pools
    ((key, pool),) = pools.items()
    mapped.harness.run()
    pool.mapping = region = HostRegion.create("mapped", 4096)
    another = messages.PoolGone(tenant=pool.tenant, pool=pool.name, region=pool.region_id + 1)
    mapped.home.state_machine.peers.pool_gone(key[0], another)
    assert key in pools, "it was of a pool before this one"
    if how == "deleted":
        mapped.source.messenger.pool_removed(mapped.prefill.pool)
        mapped.harness.run()
    else:
        mapped.lose_daemon(mapped.source, mapped.home)
    assert region.fd == -1, "it is closed"
    assert key not in pools


def test_the_source_daemon_restarts_and_hears_of_receives_that_still_wait(apart: Transfer) -> None:
    apart.announce()
    again = apart.harness.restart(apart.source)
    apart.harness.notice(apart.home, apart.source)
    assert "no connection to" in apart.waits_for
    apart.harness.heal()
    assert "no connection to" not in apart.waits_for
    prefill = again.engine("prefill")
    prefill.send()
    apart.ends("", "OK")
    assert prefill.content == apart.decode.content


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


def test_a_daemon_that_is_not_there_is_named_as_long_as_it_is_waited_for(apart: Transfer) -> None:
    apart.announce()
    address = apart.address(apart.source)
    assert [(one.address, one.state, one.announced) for one in apart.home.peers.status()] == [(address, "up", 1)]
    assert [one.waiting for one in apart.source.peers.status()] == [1]
    apart.lose_daemon(apart.source, apart.home)
    assert f"no connection to {address}" in apart.waits_for
    assert [(one.address, one.state, one.announced) for one in apart.home.peers.status()] == [(address, "greeting", 1)]
    apart.harness.pass_time(31.0)
    apart.check_over("", "DEADLINE")
    assert f"no connection to {address}" in apart.decode.reason
    assert [one.announced for one in apart.home.peers.status()] == [0]


def test_a_daemon_is_not_its_own_source(apart: Transfer) -> None:
    own, other = apart.address(apart.home), apart.address(apart.source)
    assert apart.home.messenger.source_daemons((other, own, other), 0) == (other,)


def test_only_the_home_of_a_receive_may_refuse_its_send(apart: Transfer) -> None:
    apart.announce()
    apart.send()
    ((number, remote_endpoint),) = apart.source.state_machine.endpoints.remote_endpoints.items()
    announcement = remote_endpoint.announcement
    another = announcement.home._replace(boot_id="f" * 32)
    refusal = messages.SendRefused(
        receive_request=announcement.receive_request, send_request=number, error=FAILED.info()
    )
    for home, told in ((another, ""), (announcement.home, "TRANSFER_FAILED")):
        apart.source.state_machine.peers.refused(home, refusal, 0.0)
        apart.source.pass_time(0.0)
        assert told in apart.told[0], home
        assert bool(apart.told[0]) == bool(told)
