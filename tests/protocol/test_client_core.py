"""The client's half of the protocol, driven by hand-made replies and events."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest

from kvferry.protocol.base import Body, Busy, ErrorReply, PageList
from kvferry.protocol.client_core import (
    BatchAnswered,
    ClientCore,
    News,
    OperationChanged,
    Outgoing,
    ReplyArrived,
    TierOperation,
    Transfer,
    TransferChanged,
)
from kvferry.protocol.codec import IncomingRequest, decode_request, encode
from kvferry.protocol.envelope import Batch, Batched, Event, Reply, Request
from kvferry.protocol.errors import (
    ErrorInfo,
    MalformedError,
    MisuseError,
    OverloadedError,
    PageBusyError,
    PageGapError,
    PeerLostError,
)
from kvferry.protocol.events import Finished, Settled, TierDone
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.pool_messages import Allocate, Allocated
from kvferry.protocol.session_messages import Ping, Pong
from kvferry.protocol.tier_messages import OperationStarted, Store
from kvferry.protocol.transfer_messages import Accepted, Receive, Send

BOOT = BootId("00112233445566778899aabbccddeeff")
OTHER_BOOT = "ff" * 16
SECRET = b"0123456789abcdef"
REQUEST = "ab" * 16
IDS = (np.array([3, 4], np.int64),)
SEND = Send(request_id=REQUEST, pool="prefill", lists=(PageList(pages=2),))
CHUNK = Send(request_id=REQUEST, pool="prefill", lists=(PageList(pages=2),), last=False)
RECEIVE = Receive(request_id=REQUEST, pool="decode", lists=(PageList(pages=2),))


@pytest.fixture
def core() -> ClientCore:
    """Return a core with a session."""
    return ClientCore(BOOT, SECRET)


def request_in(outgoing: Outgoing) -> Request:
    """Return what the daemon reads."""
    incoming = decode_request([bytes(frame) for frame in outgoing.frames])
    assert isinstance(incoming, IncomingRequest)
    assert incoming.request.message_id == outgoing.message_id
    return incoming.request


Heard: TypeAlias = News | BatchAnswered | None


def reply(core: ClientCore, outgoing: Outgoing, body: Any, *ids: Any) -> Heard:  # noqa: ANN401
    """Let the daemon answer."""
    return core.feed([bytes(frame) for frame in encode(Reply(outgoing.message_id, BOOT, body), ids)])


def event(core: ClientCore, cursor: int, body: Finished | Settled, boot: str = BOOT) -> TransferChanged | None:
    """Let the daemon tell something."""
    changed = core.feed([bytes(frame) for frame in encode(Event(cursor, boot, body))])
    assert changed is None or isinstance(changed, TransferChanged)
    return changed


def refusal(error: Exception) -> ErrorReply:
    assert isinstance(error, PageBusyError | PageGapError | PeerLostError)
    return ErrorReply(error=error.info())


def finished(direction: str, error: ErrorInfo | None = None, **fields: Any) -> Finished:  # noqa: ANN401  any field
    pool = "prefill" if direction == "send" else "decode"
    return Finished(
        request_id=REQUEST, pool=pool, direction="send" if direction == "send" else "receive", error=error, **fields
    )


def settled(direction: str) -> Settled:
    pool = "prefill" if direction == "send" else "decode"
    return Settled(request_id=REQUEST, pool=pool, direction="send" if direction == "send" else "receive")


def acknowledged(core: ClientCore) -> int:
    """Return the cursor that the next request acknowledges."""
    return request_in(core.request(Ping())).acknowledged


# -- requests and replies


def test_a_request_says_who_when_and_what_was_seen(core: ClientCore) -> None:
    request = request_in(core.request(Allocate(pool="a", count=3), deadline_ms=250))
    assert request == Request(1, BOOT, SECRET, 250, 0, Allocate(pool="a", count=3))
    assert request_in(core.request(Ping())).message_id == 2
    assert core.pending == 2


def test_a_reply_finds_its_request(core: ClientCore) -> None:
    first, second = core.request(Allocate(pool="a", count=2)), core.request(Ping())
    assert reply(core, second, Pong()) == ReplyArrived(2, Pong(), (), None)
    got = reply(core, first, Allocated(pages=2), IDS[0])
    assert isinstance(got, ReplyArrived)
    assert got.ids[0].tolist() == [3, 4]
    assert core.pending == 0


@pytest.mark.parametrize("answer", ["again", "after giving up", "never asked"])
def test_a_reply_nobody_waits_for_means_nothing(core: ClientCore, answer: str) -> None:
    outgoing = core.request(Ping())
    if answer == "again":
        reply(core, outgoing, Pong())
    elif answer == "after giving up":
        core.forget(outgoing.message_id)
    else:
        outgoing = Outgoing(Request(99, BOOT, b"", 0, 0, Ping()))
    assert reply(core, outgoing, Pong()) is None


def test_a_refusal_is_an_error_of_its_class(core: ClientCore) -> None:
    got = reply(core, core.request(Ping()), refusal(PageBusyError("page 3 is being read", field="pages")))
    assert isinstance(got, ReplyArrived)
    assert isinstance(got.error, PageBusyError)
    assert got.error.field == "pages"


def test_busy_is_an_error_that_says_when(core: ClientCore) -> None:
    got = reply(core, core.request(Ping()), Busy(retry_after_ms=50, detail="256 requests"))
    assert isinstance(got, ReplyArrived)
    assert isinstance(got.error, OverloadedError)
    assert "50 ms" in got.error.detail


def test_without_a_session_the_first_reply_says_which_daemon_it_is() -> None:
    core = ClientCore()
    outgoing = core.request(Ping())
    assert request_in(outgoing).boot_id == NO_BOOT
    reply(core, outgoing, Pong())
    assert request_in(core.request(Ping())).boot_id == BOOT


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"x" * 100], [b"\x93\xa1R\x01\xa0"]])
def test_junk_is_malformed(core: ClientCore, frames: list[bytes]) -> None:
    core.request(Ping())
    with pytest.raises(MalformedError):
        core.feed(frames)
    assert core.pending == 1


# -- transfers


def begin(core: ClientCore, body: Send | Receive = RECEIVE) -> tuple[Transfer, Outgoing]:
    return core.transfer(body, IDS)


def changed(news: object) -> Transfer:
    assert isinstance(news, TransferChanged)
    return news.transfer


def states(transfer: Transfer) -> tuple[str, bool, bool]:
    return transfer.state, transfer.is_finished, transfer.is_settled


def test_the_life_of_a_transfer(core: ClientCore) -> None:
    transfer, outgoing = begin(core)
    assert states(transfer) == ("sent", False, False)
    with pytest.raises(MisuseError, match="is not finished: call wait_finished"):
        transfer.outcome()
    assert changed(reply(core, outgoing, Accepted(generation=1))) is transfer
    assert states(transfer) == ("open", False, False)
    success = finished("receive", first_token=5)
    assert changed(event(core, 1, success)) is transfer
    assert states(transfer) == ("finished", True, False)
    assert transfer.outcome() == success
    assert changed(event(core, 2, settled("receive"))) is transfer
    assert states(transfer) == ("settled", True, True)
    assert "settled" in repr(transfer)


def test_both_sides_of_one_request_are_two_transfers(core: ClientCore) -> None:
    sending, out_send = begin(core, SEND)
    receiving, out_receive = begin(core, RECEIVE)
    reply(core, out_send, Accepted())
    reply(core, out_receive, Accepted())
    assert changed(event(core, 1, finished("send"))) is sending
    assert changed(event(core, 2, finished("receive"))) is receiving


def test_a_failure(core: ClientCore) -> None:
    transfer, outgoing = begin(core)
    reply(core, outgoing, Accepted())
    event(core, 1, finished("receive", PeerLostError("the engine died").info()))
    assert states(transfer) == ("finished", True, False)
    with pytest.raises(PeerLostError, match="the engine died"):
        transfer.outcome()


def test_a_refused_transfer_is_over(core: ClientCore) -> None:
    transfer, outgoing = begin(core)
    assert changed(reply(core, outgoing, refusal(PageBusyError("busy")))) is transfer
    assert states(transfer) == ("refused", True, True)
    with pytest.raises(PageBusyError):
        transfer.outcome()
    again, outgoing = begin(core)
    assert again is not transfer
    reply(core, outgoing, Accepted())
    assert states(again) == ("open", False, False)
    assert states(transfer) == ("refused", True, True)


def test_a_refused_chunk_leaves_the_transfer_open(core: ClientCore) -> None:
    transfer, outgoing = begin(core, CHUNK)
    reply(core, outgoing, Accepted())
    same, outgoing = begin(core, SEND)
    assert same is transfer
    reply(core, outgoing, refusal(PageGapError("a hole")))
    assert states(transfer) == ("refused", True, False), "its pages are held"
    same, outgoing = begin(core, SEND)
    assert same is transfer
    assert states(transfer) == ("open", False, False)
    reply(core, outgoing, Accepted())
    assert changed(event(core, 1, finished("send"))) is transfer
    transfer.outcome()


def test_chunks_may_be_sent_without_waiting(core: ClientCore) -> None:
    transfer, first = begin(core, CHUNK)
    same, second = begin(core, SEND)
    assert same is transfer
    assert changed(reply(core, first, refusal(PageBusyError("busy")))) is transfer
    assert states(transfer) == ("refused", True, True)
    assert changed(reply(core, second, Accepted())) is transfer
    assert transfer.is_settled is False
    assert changed(event(core, 1, finished("send", PeerLostError("").info()))) is transfer


def test_a_request_id_used_again_is_another_transfer(core: ClientCore) -> None:
    first, outgoing = begin(core)
    reply(core, outgoing, Accepted(generation=1))
    event(core, 1, finished("receive", PeerLostError("died").info()))
    early, outgoing = begin(core)
    assert early is not first, "its outcome is known: this is another one"
    assert changed(reply(core, outgoing, refusal(PageBusyError("not settled yet")))) is early
    assert changed(event(core, 2, settled("receive"))) is first
    second, outgoing = begin(core)
    reply(core, outgoing, Accepted(generation=2))
    assert changed(event(core, 3, finished("receive"))) is second
    assert (first.state, second.state) == ("settled", "finished")


# -- events


def test_what_was_seen_is_acknowledged(core: ClientCore) -> None:
    _, outgoing = begin(core)
    reply(core, outgoing, Accepted())
    assert acknowledged(core) == 0
    event(core, 1, finished("receive"))
    assert acknowledged(core) == 1
    event(core, 2, settled("receive"))
    assert acknowledged(core) == 2


def test_an_event_that_comes_again_means_nothing(core: ClientCore) -> None:
    transfer, outgoing = begin(core)
    reply(core, outgoing, Accepted())
    event(core, 1, finished("receive", first_token=1))
    assert event(core, 1, finished("receive", first_token=2)) is None
    assert transfer.outcome().first_token == 1
    event(core, 2, settled("receive"))
    for cursor in (1, 2):
        assert event(core, cursor, settled("receive")) is None
    assert acknowledged(core) == 2


def test_an_event_out_of_order_does_not_take_the_cursor_back(core: ClientCore) -> None:
    _, outgoing = begin(core)
    reply(core, outgoing, Accepted())
    event(core, 5, finished("receive"))
    assert event(core, 4, settled("receive")) is None
    assert acknowledged(core) == 5


def test_an_event_of_something_forgotten_is_seen_all_the_same(core: ClientCore) -> None:
    assert event(core, 1, finished("receive")) is None
    assert acknowledged(core) == 1


def test_an_event_of_another_daemon_means_nothing(core: ClientCore) -> None:
    transfer, outgoing = begin(core)
    reply(core, outgoing, Accepted())
    assert event(core, 1, finished("receive"), boot=OTHER_BOOT) is None
    assert states(transfer) == ("open", False, False)
    assert acknowledged(core) == 0


def test_an_event_may_come_before_the_reply(core: ClientCore) -> None:
    transfer, outgoing = begin(core)
    assert changed(event(core, 1, finished("receive"))) is transfer
    assert changed(reply(core, outgoing, Accepted())) is transfer
    assert states(transfer) == ("finished", True, False)
    assert changed(event(core, 2, settled("receive"))) is transfer


def test_a_body_that_is_no_reply_to_a_transfer_changes_nothing(core: ClientCore) -> None:
    transfer, outgoing = begin(core)
    odd: Body = Pong()
    assert changed(reply(core, outgoing, odd)) is transfer
    assert states(transfer) == ("sent", False, False)


# -- batches


def step_of(core: ClientCore) -> tuple[Transfer, TierOperation, Outgoing, Outgoing]:
    """Return a transfer, an operation, a plain request and the batch that holds all three."""
    transfer, sending = core.transfer(SEND, IDS)
    operation, storing = core.operation(Store(pool="prefill", hashes=bytes(32), pages=2), IDS)
    asking = core.request(Allocate(pool="prefill", count=2))
    return transfer, operation, asking, core.batch([sending, storing, asking])


def test_a_batch_is_answered_part_by_part(core: ClientCore) -> None:
    transfer, operation, asking, batch = step_of(core)
    body = request_in(batch).body
    assert isinstance(body, Batch)
    assert [type(one) for one in body.requests] == [Send, Store, Allocate]
    done = TierDone(operation=7, kind="store", stored=2)
    assert core.feed([bytes(one) for one in encode(Event(1, BOOT, done))]) is None, "nobody knows the number yet"
    results = (Accepted(), OperationStarted(operation=7), Allocated(pages=2))
    heard = reply(core, batch, Batched(results=results), *IDS)
    assert isinstance(heard, BatchAnswered)
    assert heard.news[:2] == (TransferChanged(transfer), OperationChanged(operation))
    assert (transfer.state, operation.state, operation.done) == ("open", "done", done)
    assert isinstance(heard.news[2], ReplyArrived)
    assert heard.news[2].message_id == asking.message_id
    assert heard.news[2].ids[0].tolist() == [3, 4]
    assert core.pending == 0


def test_a_batch_that_is_refused_as_a_whole(core: ClientCore) -> None:
    transfer, operation, asking, batch = step_of(core)
    core.forget(asking.message_id)
    heard = reply(core, batch, refusal(PageBusyError("page 3", field="requests[0].pages")))
    assert heard == BatchAnswered((TransferChanged(transfer), OperationChanged(operation)))
    assert isinstance(transfer.error, PageBusyError)
    assert isinstance(operation.error, PageBusyError)


@pytest.mark.parametrize("body", [Pong(), Batched(results=(Accepted(),))], ids=["no batch", "too few"])
def test_an_answer_that_is_none_of_a_batch(core: ClientCore, body: Body) -> None:
    *_, batch = step_of(core)
    with pytest.raises(MalformedError, match="a batch of 3"):
        reply(core, batch, body)


def test_deadlines_of_a_batch(core: ClientCore) -> None:
    first = core.request(Allocate(pool="a", count=1), deadline_ms=70)
    body = request_in(core.batch([core.request(Allocate(pool="a", count=1)), first])).body
    assert isinstance(body, Batch)
    assert body.deadlines_ms == (0, 70)


def test_who_resumes_numbers_on() -> None:
    assert ClientCore(BOOT, SECRET, last_message=41).request(Ping()).message_id == 42
