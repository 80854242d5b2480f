"""Messages between daemons to bytes and back; whatever else comes is refused, and nothing else happens."""

from __future__ import annotations

import json
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.protocol.base import Body
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import MalformedError, raised
from kvferry.protocol.limits import PROTOCOL_MAX
from kvferry.protocol.peer_messages import (
    MAX_ENTRIES,
    MAX_RUNS,
    MAX_SEGMENTS,
    IncomingPeerMessage,
    PeerBody,
    PeerEnvelope,
    Segment,
    Written,
    decode_peer,
    encode_peer,
)
from kvferry.protocol.transfer_messages import MAX_POOLS, MAX_STEPS
from tests.protocol.bodies import ids_for, structs_of
from tests.protocol.peer_samples import GOLDEN, MESSAGES, as_hex
from tests.protocol.samples import ERROR
from tests.protocol.samples import MESSAGES as CLIENT_MESSAGES
from tests.protocol.samples import as_hex as client_messages_as_hex

GOLDEN_HEX: dict[str, list[str]] = json.loads(GOLDEN.read_text())
BODIES: tuple[type[Body], ...] = get_args(PeerBody)
ADDRESS_AT, BOOT_AT, TO_BOOT_AT, BODY_AT = range(4)


@st.composite
def messages(draw: st.DrawFn) -> tuple[PeerEnvelope, tuple[PageIds, ...]]:
    """Draw a message of any type, with its page lists."""
    kind = draw(st.sampled_from(BODIES))
    envelope = draw(structs_of(PeerEnvelope))
    envelope = msgspec.structs.replace(envelope, body=draw(structs_of(kind)))
    return envelope, draw(ids_for(envelope.body))


def golden(name: str) -> list[bytes]:
    """Return the frames of a sample as they are kept."""
    return [bytes.fromhex(frame) for frame in GOLDEN_HEX[name]]


@given(messages())
def test_round_trip(drawn: tuple[PeerEnvelope, tuple[PageIds, ...]]) -> None:
    envelope, ids = drawn
    got = decode_peer([bytes(frame) for frame in encode_peer(envelope, ids)])
    assert got.envelope == envelope
    assert [one.tolist() for one in got.ids] == [one.tolist() for one in ids]


def test_page_lists_are_read_only() -> None:
    for one in decode_peer(golden("SEND_REQUEST")).ids:
        assert one.dtype == np.int64
        assert not one.flags.writeable


def test_lists_that_a_send_does_not_announce_are_a_bug() -> None:
    envelope, ids = MESSAGES["SEND_REQUEST"]
    for wrong in ((), ids[:1], ids[::-1]):
        with pytest.raises(ValueError, match="PeerSend announces"):
            encode_peer(envelope, wrong)


# -- golden bytes


def test_every_type_has_golden_bytes() -> None:
    assert set(MESSAGES) == set(GOLDEN_HEX) == {str(kind.__struct_config__.tag) for kind in BODIES}
    assert PROTOCOL_MAX == 2, "begin golden_peer_v3.json, and keep speaking the old version"


@pytest.mark.parametrize("name", MESSAGES)
def test_the_bytes_on_the_wire_do_not_change(name: str) -> None:
    assert GOLDEN_HEX[name] == as_hex()[name], "see peer_samples.py"


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_bytes_are_read(name: str) -> None:
    envelope, ids = MESSAGES[name]
    got = decode_peer(golden(name))
    assert got.envelope == envelope
    assert [one.tolist() for one in got.ids] == [one.tolist() for one in ids]


@pytest.mark.parametrize("name", MESSAGES)
def test_samples_say_all_that_can_be_said(name: str) -> None:
    body = MESSAGES[name][0].body
    fields = msgspec.structs.fields(type(body))
    assert all(getattr(body, one.name) != one.default for one in fields)


def test_a_newer_daemon_may_add_fields_at_the_tail() -> None:
    raw = msgspec.msgpack.decode(golden("RECEIVE_CLOSED")[0])
    raw[BODY_AT]["new_field"] = [1, 2]
    raw[BODY_AT]["receive_request"] = [*raw[BODY_AT]["receive_request"], "new"]
    got = decode_peer([msgspec.msgpack.encode([*raw, "new"])])
    assert got.envelope == MESSAGES["RECEIVE_CLOSED"][0]


def test_an_older_daemon_leaves_out_what_has_a_default() -> None:
    raw = msgspec.msgpack.decode(golden("WRITTEN")[0])
    raw[BODY_AT] = {"type": "WRITTEN", "grant": 11}
    body = decode_peer([msgspec.msgpack.encode(raw)]).envelope.body
    assert body == Written(grant=11)


# -- what cannot be read


def changed(name: str, at: int, value: object) -> list[bytes]:
    """Return a sample with one element of its envelope replaced."""
    head, *frames = golden(name)
    raw = msgspec.msgpack.decode(head)
    raw[at] = value
    return [msgspec.msgpack.encode(raw), *frames]


def with_field(name: str, field: str, value: object) -> list[bytes]:
    """Return a sample with one field of its body replaced."""
    return changed(name, BODY_AT, {**msgspec.msgpack.decode(golden(name)[0])[BODY_AT], field: value})


def nested(depth: int) -> object:
    """Return lists in lists."""
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


RECEIVE_REQUEST = ["f" * 32, "decode", 7, 2]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\x90"],
        [b"\xff" * 9],
        [b"\x91" * 100_000],
        [b"\x81\xa1a" * 100_000],
        [b"\xdf\xff\xff\xff\xff"],
        changed("GRANT", ADDRESS_AT, "udp://192.0.2.7:1"),
        changed("GRANT", ADDRESS_AT, "tcp://192.0.2.7:7801\n"),
        changed("GRANT", ADDRESS_AT, "tcp://192.0.2.7:7801 x"),
        changed("GRANT", ADDRESS_AT, "ipc://relative"),
        changed("GRANT", ADDRESS_AT, "tcp://" + "x" * 300 + ":1"),
        changed("GRANT", ADDRESS_AT, b"tcp://192.0.2.7:7801"),
        changed("GRANT", BOOT_AT, "x" * 32),
        changed("GRANT", BOOT_AT, ""),
        changed("GRANT", TO_BOOT_AT, 7),
        changed("GRANT", BODY_AT, None),
        changed("GRANT", BODY_AT, {}),
        changed("GRANT", BODY_AT, {"type": "SEND"}),
        with_field("GRANT", "type", "GRANTT"),
        with_field("GRANT", "grant", -1),
        with_field("GRANT", "grant", 1 << 63),
        with_field("GRANT", "grant", 1.0),
        with_field("GRANT", "segment", -1),
        with_field("GRANT", "address", -1),
        with_field("GRANT", "size_bytes", -1),
        with_field("GRANT", "session", "x" * 257),
        with_field("OP_REQUEST", "segments", []),
        with_field("OP_REQUEST", "segments", [["main", 0, 1, [0], [[0, 0]]]] * (MAX_SEGMENTS + 1)),
        with_field("OP_REQUEST", "segments", [["Main", 0, 1, [0], [[0, 0]]]]),
        with_field("OP_REQUEST", "segments", [["main", -1, 1, [0], [[0, 0]]]]),
        with_field("OP_REQUEST", "segments", [["main", 0, 1, [-1], [[0, 0]]]]),
        with_field("OP_REQUEST", "segments", [["main", 0, 1, [0], [[0]]]]),
        with_field("OP_REQUEST", "segments", nested(900)),
        with_field("OP_REQUEST", "receive_request", RECEIVE_REQUEST[:3]),
        with_field("OP_REQUEST", "receive_request", ["F" * 32, *RECEIVE_REQUEST[1:]]),
        with_field("OP_REQUEST", "receive_request", [RECEIVE_REQUEST[0], "../etc", *RECEIVE_REQUEST[2:]]),
        with_field("OP_REQUEST", "receive_request", [*RECEIVE_REQUEST[:2], -7, 2]),
        with_field("ANNOUNCE", "deadline_ms", -1),
        with_field("PEER_HELLO", "dialled", "nowhere"),
        with_field("RECEIVE_CLOSED", "moved", [[1]]),
        with_field("RECEIVE_CLOSED", "error", "PEER_LOST"),
        with_field("WRITTEN", "checksum", -1),
        with_field("SEND_REQUEST", "lists", [{"pages": 2}] * 65),
        with_field("SEND_REQUEST", "payload", b"x" * ((8 << 20) + 1)),
        with_field("SEND_REQUEST", "manifest", {"pages": 1}),
        with_field("SEND_REQUEST", "steps", [[1]]),
        golden("SEND_REQUEST")[:2],
        golden("SEND_REQUEST")[:1],
        [*golden("SEND_REQUEST"), b""],
        [golden("SEND_REQUEST")[0], golden("SEND_REQUEST")[2], golden("SEND_REQUEST")[1]],
        [*golden("SEND_REQUEST")[:2], b"\0" * 7],
        [*golden("GRANT"), b""],
    ],
)
def test_what_is_wrong_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedError):
        decode_peer(frames)


@pytest.mark.parametrize("name", CLIENT_MESSAGES)
def test_what_clients_and_daemons_say_to_each_other_is_none(name: str) -> None:
    with pytest.raises(MalformedError):
        decode_peer([bytes.fromhex(frame) for frame in client_messages_as_hex()[name]])


@given(st.lists(st.binary(max_size=200), max_size=4))
@example([b"\xc6\xff\xff\xff\xff"])  # four gigabytes of bytes
@example([b"\x94\xa0\xa0\xa0\x81\xa4type\xa1\xff"])  # no UTF-8
def test_arbitrary_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedError):
        decode_peer(frames)


@st.composite
def damaged(draw: st.DrawFn) -> list[bytes]:
    """Draw a valid message and damage it: bytes changed, cut, repeated; frames lost, doubled, swapped."""
    frames = [bytes(frame) for frame in encode_peer(*draw(messages()))]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(frames) - 1))
        start = draw(st.integers(0, len(frames[at])))
        stop = draw(st.integers(start, min(len(frames[at]), start + 8)))
        frames[at] = frames[at][:start] + draw(st.binary(max_size=8)) + frames[at][stop:]
    return draw(st.sampled_from([frames, frames[:-1], [*frames, frames[-1]], frames[::-1]]))


@given(damaged())
def test_damaged_messages_are_read_or_refused(frames: list[bytes]) -> None:
    try:
        got = decode_peer(frames)
    except MalformedError:
        return
    assert isinstance(got, IncomingPeerMessage)
    assert tuple(len(one) for one in got.ids) == got.envelope.body.page_counts()
    assert decode_peer([bytes(one) for one in encode_peer(*got)]).envelope == got.envelope


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("SEND_REQUEST", {"steps": ((0, 1),) * (MAX_STEPS + 1)}),
        ("SEND_REQUEST", {"steps": ((0, 1 << 40),)}),
        ("RECEIVE_CLOSED", {"moved": ((1, 2, 3),) * (MAX_POOLS + 1)}),
        ("OP_REQUEST", {"segments": (Segment("main", 0, 1, (0,) * (MAX_ENTRIES + 1), ()),)}),
        ("OP_REQUEST", {"segments": (Segment("main", 0, 1, (), ((0, 1),) * (MAX_ENTRIES + 1)),)}),
        ("GRANT", {"runs": ((0, 1),) * (MAX_RUNS + 1)}),
    ],
)
def test_what_a_peer_may_say_at_once_is_bounded(name: str, change: dict[str, object]) -> None:
    envelope, ids = MESSAGES[name]
    envelope = msgspec.structs.replace(envelope, body=msgspec.structs.replace(envelope.body, **change))
    with pytest.raises(MalformedError, match="Expected"):
        decode_peer([bytes(frame) for frame in encode_peer(envelope, ids)])


# -- errors that travel


def test_an_error_keeps_its_class_and_words() -> None:
    error = raised(ERROR)
    assert type(error).__name__ == "PeerLostError"
    assert error.info() == ERROR


def test_an_error_of_a_newer_daemon_keeps_its_code() -> None:
    newer = msgspec.structs.replace(ERROR, code="NOT_YET_INVENTED")
    assert raised(newer).info() == newer
