"""The conversation of the operator's commands: the same bytes as the clients', whatever it loads."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvferry.protocol.base import Busy, ErrorReply, ReplyBody, RequestBody, pack_ids, unpack_ids
from kvferry.protocol.codec import IncomingRequest, decode_request, encode
from kvferry.protocol.conversation import EVENT, Arrived, Conversation
from kvferry.protocol.envelope import REQUEST_TYPES, Event, Reply, Request
from kvferry.protocol.errors import MalformedError
from kvferry.protocol.events import Settled
from kvferry.protocol.pool_messages import Allocate, Allocated, Free, Freed
from kvferry.protocol.requests import REQUESTS, request_type, tag_of
from kvferry.protocol.session_messages import Ping, Pong
from tests.protocol.samples import ERROR, EVENTS, GOLDEN, MESSAGES, REPLIES

BOOT_ID = "0123456789abcdef0123456789abcdef"
EVENT_NAMES = {tag_of(kind) for kind in EVENTS}
ALLOCATE = Allocate(pool="a", count=2)
GOLDEN_HEX: dict[str, list[str]] = json.loads(GOLDEN.read_text())


def wire(message: Reply | Event) -> list[bytes]:
    return [bytes(one) for one in encode(message)]


def test_requests_are_those_of_all_clients() -> None:
    assert [request_type(name) for name in REQUESTS] == list(REQUEST_TYPES.values())
    assert {name for name, kind in REQUEST_TYPES.items() if not kind.needs_session} == {"HELLO", "PING", "STATUS"}
    conversation, body = Conversation(BOOT_ID, b"secret"), Free(pool="a", pages=2)
    conversation.request(body, [pack_ids([1, 2])])
    number, frames = conversation.request(body, [pack_ids([7, -8])], deadline_ms=9)
    incoming = decode_request(frames)
    assert isinstance(incoming, IncomingRequest)
    assert (number, incoming.request) == (2, Request(2, BOOT_ID, b"secret", 9, 0, body))
    assert [one.tolist() for one in incoming.ids] == [[7, -8]]


def after(request: RequestBody, count: int = 1) -> Conversation:
    """Return a conversation that has sent so many of a request."""
    conversation = Conversation()
    for _ in range(count):
        conversation.request(request)
    return conversation


@pytest.mark.parametrize("name", [tag_of(kind) for kind in (*REPLIES, *EVENTS)])
def test_the_golden_messages_are_read(name: str) -> None:
    frames = [bytes.fromhex(one) for one in GOLDEN_HEX[name]]
    message, ids = MESSAGES[name]
    asked = next(kind for kind in REQUEST_TYPES.values() if name in {tag_of(kind.reply), "ERROR", "BUSY"} | EVENT_NAMES)
    request = MESSAGES[tag_of(asked)][0].body
    assert isinstance(request, RequestBody)
    conversation = after(request, 7)
    number = message.message_id if isinstance(message, Reply) else EVENT
    assert conversation.feed(frames) == Arrived(number, message.body, tuple(frames[1:]))
    assert [unpack_ids(one) for one in frames[1:]] == [one.tolist() for one in ids]
    assert conversation.feed(frames) is None, "twice is once"


def test_the_first_answer_says_which_incarnation_it_is_and_events_are_told_once_of_it_alone() -> None:
    conversation = after(Ping())
    body = Settled(request_id=BOOT_ID, pool="a", direction="send")
    for message, arrived in (
        (Reply(2, BOOT_ID, Pong()), None),  # nobody asked
        (Reply(1, BOOT_ID, Pong()), Arrived(1, Pong())),
        (Event(1, BOOT_ID, body), Arrived(EVENT, body)),
        (Event(1, BOOT_ID, body), None),
        (Event(2, "f" * 32, body), None),
        (Event(2, BOOT_ID, body), Arrived(EVENT, body)),
    ):
        assert conversation.feed(wire(message)) == arrived
    assert conversation.boot_id == BOOT_ID


@pytest.mark.parametrize(
    ("body", "code", "detail"),
    [
        (Busy(retry_after_ms=7, detail="full"), "BUSY", "full; try again after 7 ms"),
        (ErrorReply(error=ERROR), ERROR.code, ERROR.detail),
        (Pong(), "", ""),
    ],
)
def test_a_refusal_is_an_error(body: ReplyBody, code: str, detail: str) -> None:
    arrived = after(Ping()).feed(wire(Reply(1, BOOT_ID, body)))
    assert arrived is not None
    assert (arrived.error.code, arrived.error.detail) == (code, detail) if arrived.error else not code


(PONG,) = wire(Reply(1, BOOT_ID, Pong()))
ALLOCATED = bytes(encode(Reply(1, BOOT_ID, Allocated(pages=2)), [np.arange(2)])[0])


@pytest.mark.parametrize(
    ("asked", "frames"),
    [
        *((Ping(), frames) for frames in ([], [b""], [b"\xc1"], [bytes.fromhex(GOLDEN_HEX["PING"][0])])),
        *((Ping(), [PONG.replace(b"PONG", name)]) for name in (b"PING", b"PANG")),
        (Ping(), [PONG, b"12345678"]),
        (Ping(), wire(Reply(1, BOOT_ID, Freed(freed=1, deferred=0)))),
        (Ping(), wire(Event(1, BOOT_ID, Pong()))),  # type: ignore[arg-type]
        *((ALLOCATE, [ALLOCATED, *ids]) for ids in ([], [b"123"], [b"12345678"], [b"1" * 24], [b"1" * 16, b""])),
    ],
)
def test_what_is_no_message_of_a_daemon(asked: RequestBody, frames: list[bytes]) -> None:
    with pytest.raises(MalformedError):
        after(asked).feed(frames)
