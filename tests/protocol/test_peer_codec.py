"""What other daemons say: what is no message is refused, and nothing else happens. ``test_codec`` has the rest."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.protocol.errors import MalformedError
from kvferry.protocol.peer_messages import (
    MAX_ENTRIES,
    MAX_RUNS,
    MAX_SEGMENTS,
    IncomingPeerMessage,
    Segment,
    Written,
    decode_peer,
)
from kvferry.protocol.transfer_messages import MAX_POOLS, MAX_STEPS
from tests.protocol.bodies import damaged
from tests.protocol.samples import MESSAGES, PEER_MESSAGES, PEERS, to_frames
from tests.protocol.test_codec import changed, golden, nested

ADDRESS_AT, KEY_AT, TO_KEY_AT = range(3)


def test_an_older_daemon_leaves_out_what_has_a_default_and_a_newer_one_adds_at_the_tail() -> None:
    frames = [golden("WRITTEN")[0], msgspec.msgpack.encode({"type": "WRITTEN", "credit": 11})]
    assert decode_peer(frames).envelope.body == Written(credit=11)
    frames = with_field("RECEIVE_CLOSED", "new_field", [1, 2])
    frames[0] = msgspec.msgpack.encode([*msgspec.msgpack.decode(frames[0]), "new"])
    assert decode_peer(frames) == decode_peer(golden("RECEIVE_CLOSED"))


def with_field(name: str, field: str, value: object) -> list[bytes]:
    head, body, *ids = golden(name)
    return [head, msgspec.msgpack.encode({**msgspec.msgpack.decode(body), field: value}), *ids]


RECEIVE_REQUEST = ["f" * 32, "decode", 7, 2]


@pytest.mark.parametrize(
    "frames",
    [
        [], [b""], [b"\xc1"], [b"\x90"], [b"\xff" * 9], [b"\x91" * 100_000], [b"\x81\xa1a" * 100_000],
        changed("WRITE_CREDIT", ADDRESS_AT, "udp://192.0.2.7:1"),
        changed("WRITE_CREDIT", ADDRESS_AT, "tcp://192.0.2.7:7801\n"),
        changed("WRITE_CREDIT", ADDRESS_AT, "ipc://relative"),
        changed("WRITE_CREDIT", ADDRESS_AT, "tcp://" + "x" * 300 + ":1"),
        changed("WRITE_CREDIT", KEY_AT, "x" * 32),
        changed("WRITE_CREDIT", KEY_AT, ""),
        changed("WRITE_CREDIT", TO_KEY_AT, "f" * 31),
        changed("WRITE_CREDIT", TO_KEY_AT, "f" * 32 + "\n"),
        [golden("WRITE_CREDIT")[0] + b"\xc0", *golden("WRITE_CREDIT")[1:]],
        [msgspec.msgpack.encode(["tcp://192.0.2.7:7801", "f" * 32, "", "x" * 600]), golden("WRITE_CREDIT")[1]],
        [golden("WRITE_CREDIT")[0], b"\xc0"],
        [golden("WRITE_CREDIT")[0], msgspec.msgpack.encode({"type": "SEND"})],
        with_field("PEER_HELLO", "boot_id", ""),
        with_field("PEER_HELLO", "bounce_buffer_bytes", -1),
        with_field("PEER_HEARTBEAT", "number", -1),
        with_field("WRITE_CREDIT", "credit", -1),
        with_field("WRITE_CREDIT", "credit", 1 << 63),
        with_field("WRITE_CREDIT", "segment", -1),
        with_field("WRITE_CREDIT", "address", -1),
        with_field("WRITE_CREDIT", "size_bytes", -1),
        with_field("WRITE_CREDIT", "session", "x" * 257),
        with_field("OP_REQUEST", "segments", []),
        with_field("OP_REQUEST", "segments", [["main", 0, 1, [0], [[0, 0]]]] * (MAX_SEGMENTS + 1)),
        with_field("OP_REQUEST", "segments", [["Main", 0, 1, [0], [[0, 0]]]]),
        with_field("OP_REQUEST", "segments", [["main", -1, 1, [0], [[0, 0]]]]),
        with_field("OP_REQUEST", "segments", [["main", 0, 1, [-1], [[0, 0]]]]),
        with_field("OP_REQUEST", "segments", nested(900)),
        with_field("OP_REQUEST", "receive_request", RECEIVE_REQUEST[:3]),
        with_field("OP_REQUEST", "receive_request", ["F" * 32, *RECEIVE_REQUEST[1:]]),
        with_field("OP_REQUEST", "receive_request", [RECEIVE_REQUEST[0], "../etc", *RECEIVE_REQUEST[2:]]),
        with_field("OP_REQUEST", "receive_request", [*RECEIVE_REQUEST[:2], -7, 2]),
        with_field("ANNOUNCE", "deadline_ms", -1),
        with_field("PEER_HELLO", "dialled", "nowhere"),
        with_field("RECEIVE_CLOSED", "moved", [[1, (1 << 50) + 1, 0]]),
        with_field("RECEIVE_CLOSED", "moved", [[1, 0, 1 << 62]]),
        with_field("RECEIVE_CLOSED", "error", "PEER_LOST"),
        with_field("WRITTEN", "checksum", -1),
        with_field("SEND_REQUEST", "lists", [{"pages": 2}] * 65),
        with_field("SEND_REQUEST", "payload", b"x" * ((8 << 20) + 1)),
        with_field("SEND_REQUEST", "manifest", {"pages": 1}),
        with_field("SEND_REQUEST", "steps", [[1]]),
        golden("SEND_REQUEST")[:3],
        golden("SEND_REQUEST")[:1],
        [*golden("SEND_REQUEST")[:2], golden("SEND_REQUEST")[3], golden("SEND_REQUEST")[2]],
        [*golden("SEND_REQUEST")[:3], b"\0" * 7],
        [*golden("WRITE_CREDIT"), b""],
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedError):
        decode_peer(frames)


@given(st.lists(st.binary(max_size=200), max_size=4) | st.sampled_from([*map(golden, MESSAGES)]) | damaged(PEERS))
@example([b"\xc6\xff\xff\xff\xff"])  # four gigabytes of bytes
@example([b"\x94\xa0\xa0\xa0\x81\xa4type\xa1\xff"])  # no UTF-8
def test_any_bytes_are_read_or_refused(frames: list[bytes]) -> None:
    try:
        got = decode_peer(frames)
    except MalformedError:
        return
    assert isinstance(got, IncomingPeerMessage)
    assert tuple(len(one) for one in got.ids) == got.envelope.body.page_counts()
    assert decode_peer(to_frames(*got)).envelope == got.envelope


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("SEND_REQUEST", {"steps": ((0, 1),) * (MAX_STEPS + 1)}),
        ("SEND_REQUEST", {"steps": ((0, 1 << 40),)}),
        ("RECEIVE_CLOSED", {"moved": ((1, 2, 3),) * (MAX_POOLS + 1)}),
        ("OP_REQUEST", {"segments": (Segment("main", 0, 1, (0,) * (MAX_ENTRIES + 1), ()),)}),
        ("OP_REQUEST", {"segments": (Segment("main", 0, 1, (), ((0, 1),) * (MAX_ENTRIES + 1)),)}),
        ("WRITE_CREDIT", {"runs": ((0, 1),) * (MAX_RUNS + 1)}),
    ],
)
def test_what_a_peer_may_say_at_once_is_bounded(name: str, change: dict[str, object]) -> None:
    envelope, ids = PEER_MESSAGES[name]
    envelope = msgspec.structs.replace(envelope, body=msgspec.structs.replace(envelope.body, **change))
    with pytest.raises(MalformedError, match="Expected"):
        decode_peer(to_frames(envelope, ids))
