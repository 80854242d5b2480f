"""The conversation of the operator's commands: the same bytes as the clients', whatever it loads."""

from __future__ import annotations

import json

import pytest

from kvferry.protocol.codec import IncomingRequest, decode_request, encode
from kvferry.protocol.complaints import ENVELOPE
from kvferry.protocol.conversation import EVENT, Arrived, Conversation
from kvferry.protocol.envelope import Event, Reply, Request
from kvferry.protocol.errors import MalformedError
from kvferry.protocol.events import Settled
from kvferry.protocol.message_types import FROM_DAEMON, REQUESTS, WITHOUT_SESSION, request_type, type_from_daemon
from kvferry.protocol.page_frames import pack_ids, unpack_ids
from kvferry.protocol.pool_messages import Allocated, Free
from kvferry.protocol.requests import REQUEST_TYPES, Busy
from kvferry.protocol.schema import EVENTS
from kvferry.protocol.session_messages import Pong
from tests.protocol.bodies import REPLIES
from tests.protocol.samples import GOLDEN, MESSAGES

BOOT_ID = "0123456789abcdef0123456789abcdef"
GOLDEN_HEX: dict[str, list[str]] = json.loads(GOLDEN.read_text())


def wire(message: Reply | Event) -> list[bytes]:
    """Return what a daemon sends."""
    return [bytes(one) for one in encode(message)]


def test_every_type_is_found_where_it_is() -> None:
    assert list(REQUESTS) == list(REQUEST_TYPES)
    assert [request_type(name) for name in REQUESTS] == [row.request for row in REQUEST_TYPES.values()]
    assert {type_from_daemon(name) for name in FROM_DAEMON} == {*REPLIES, *EVENTS}
    assert {name for name, row in REQUEST_TYPES.items() if not row.needs_session} == WITHOUT_SESSION


def test_the_envelope_is_the_one_of_all_clients() -> None:
    assert (*ENVELOPE, "body") == Request.__struct_fields__
    body = Free(pool="a", pages=2)
    conversation = Conversation(BOOT_ID, b"secret")
    conversation.request(body, [pack_ids([1, 2])])
    number, frames = conversation.request(body, [pack_ids([7, 8])], deadline_ms=9)
    incoming = decode_request(frames)
    assert isinstance(incoming, IncomingRequest)
    assert incoming.request == Request(number, BOOT_ID, b"secret", 9, 0, body)
    assert number == 2
    assert [one.tolist() for one in incoming.ids] == [[7, 8]]


@pytest.mark.parametrize("name", FROM_DAEMON)
def test_the_golden_messages_are_read(name: str) -> None:
    frames = [bytes.fromhex(one) for one in GOLDEN_HEX[name]]
    message, ids = MESSAGES[name]
    arrived = Conversation().feed(frames)
    assert arrived is not None
    assert arrived.body == message.body
    assert arrived.message_id == (message.message_id if isinstance(message, Reply) else EVENT)
    assert [unpack_ids(one) for one in arrived.frames] == [one.tolist() for one in ids]


def test_the_first_answer_says_which_incarnation_it_is() -> None:
    conversation = Conversation()
    assert conversation.feed(wire(Reply(1, BOOT_ID, Pong()))) == Arrived(1, Pong())
    assert conversation.boot_id == BOOT_ID


def test_an_event_is_told_once_and_only_of_this_incarnation() -> None:
    conversation = Conversation(BOOT_ID)
    body = Settled(request_id=BOOT_ID, pool="a", direction="send")
    assert conversation.feed(wire(Event(1, BOOT_ID, body))) == Arrived(EVENT, body)
    assert conversation.feed(wire(Event(1, BOOT_ID, body))) is None
    assert conversation.feed(wire(Event(2, "f" * 32, body))) is None
    assert conversation.feed(wire(Event(2, BOOT_ID, body))) == Arrived(EVENT, body)


def test_a_refusal_is_an_error() -> None:
    arrived = Conversation().feed(wire(Reply(1, BOOT_ID, Busy(retry_after_ms=7, detail="full"))))
    assert arrived is not None
    assert arrived.error is not None
    assert (arrived.error.code, arrived.error.detail) == ("BUSY", "full; try again after 7 ms")
    arrived = Conversation().feed([bytes.fromhex(one) for one in GOLDEN_HEX["ERROR"]])
    assert arrived is not None
    assert arrived.error is not None
    assert arrived.error.info() == MESSAGES["ERROR"][0].body.error  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [bytes.fromhex(GOLDEN_HEX["PING"][0])],
        [bytes(encode(Reply(1, BOOT_ID, Pong()))[0]).replace(b"PONG", b"PING")],
        [bytes(encode(Reply(1, BOOT_ID, Pong()))[0]).replace(b"PONG", b"PANG")],
        [bytes(encode(Reply(1, BOOT_ID, Pong()))[0]), b"12345678"],
        [bytes.fromhex(GOLDEN_HEX["ALLOCATED"][0])],
        [bytes.fromhex(GOLDEN_HEX["ALLOCATED"][0]), b"123"],
    ],
)
def test_what_is_no_message_of_a_daemon(frames: list[bytes]) -> None:
    assert isinstance(MESSAGES["ALLOCATED"][0].body, Allocated)
    with pytest.raises(MalformedError):
        Conversation().feed(frames)


def test_ids_beyond_64_bits_are_refused() -> None:
    with pytest.raises(OverflowError, match="64 bits"):
        pack_ids([1 << 63])
    assert unpack_ids(pack_ids([-(1 << 63), (1 << 63) - 1])) == [-(1 << 63), (1 << 63) - 1]
