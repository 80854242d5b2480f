"""Messages to bytes and back; one guard around every decode; which version both sides speak."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.protocol.codec import IncomingRequest, UnreadableRequest, decode_from_daemon, decode_request
from kvferry.protocol.envelope import REQUEST_TYPES, Batch, Request
from kvferry.protocol.errors import CallerError, MalformedError, VersionMismatchError
from kvferry.protocol.ids import NO_BOOT
from kvferry.protocol.limits import PROTOCOL_MAX, PROTOCOL_MIN, agree
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.pool_messages import Free
from kvferry.protocol.requests import tag_of
from kvferry.protocol.schema import document
from kvferry.protocol.session_stream import FrameSplitter, unpack_attachment, unpack_frame, unpack_open
from tests.protocol import samples
from tests.protocol.bodies import ALL_BODIES, damaged, messages
from tests.protocol.samples import MESSAGES, PEER_MESSAGES, to_frames

ALL: Final = MESSAGES | PEER_MESSAGES
_GOLDEN = (json.loads(file.read_text()) for file in (samples.GOLDEN, samples.PEER_GOLDEN))
GOLDEN_HEX: Final[dict[str, list[str]]] = next(_GOLDEN) | next(_GOLDEN)


def golden(name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in GOLDEN_HEX[name]]


def assert_read(message: samples.Message, frames: list[bytes]) -> None:
    expected, ids = message
    got, got_ids = samples.reader_of(expected)(frames)
    assert got == expected
    assert [one.tolist() for one in got_ids] == [one.tolist() for one in ids]
    assert all(one.dtype == np.int64 and not one.flags.writeable for one in got_ids)


@given(messages())
def test_round_trip(message: samples.Message) -> None:
    assert_read(message, to_frames(*message))


def test_ids_are_raw_little_endian_and_of_64_bits_whatever_they_were() -> None:
    assert to_frames(*MESSAGES["FREE"])[1] == struct.pack("<2q", 5, 1 << 40)
    requests = (Free(pool="a", pages=3), Free(pool="a", pages=1))
    given_: Any = (np.arange(6, dtype=np.int32)[::2], np.array([8], np.uint16))  # not contiguous, and of other widths
    for body, count in ((Batch(requests=requests), 2), (requests[0], 1)):
        message = Request(1, NO_BOOT, b"", 0, 0, body)
        assert_read((message, (np.array([0, 2, 4]), np.array([8]))[:count]), to_frames(message, given_[:count]))


@pytest.mark.parametrize("name", ["FREE", "SEND_REQUEST"])
@pytest.mark.parametrize("ids", [(), (np.arange(3),), (np.arange(2), np.arange(2)), samples.IDS[::-1]])
def test_lists_that_the_body_does_not_announce_are_a_bug(name: str, ids: tuple[Any, ...]) -> None:
    message, _ = ALL[name]
    with pytest.raises(ValueError, match=f"{type(message.body).__name__} announces"):
        to_frames(message, ids)


def test_every_type_has_golden_bytes() -> None:
    assert set(ALL) == {tag_of(kind) for kind in ALL_BODIES}
    assert {type(one) for one in samples.SPECS.values()} == set(get_args(PoolSpec))
    assert set(GOLDEN_HEX) == {*samples.as_hex(), *samples.peers_as_hex()}
    assert PROTOCOL_MAX == 4, "begin new golden files, and keep speaking the old version"


@pytest.mark.parametrize("name", GOLDEN_HEX)
def test_the_bytes_on_the_wire_do_not_change_and_are_read(name: str) -> None:
    assert GOLDEN_HEX[name] == (samples.as_hex() | samples.peers_as_hex())[name], "see samples.py"
    kind, _, rest = name.partition(" ")
    if name in ALL | samples.NEWER:
        assert_read((ALL | samples.NEWER)[name], golden(name))
    elif kind == "spec":
        assert msgspec.msgpack.decode(*golden(name), type=PoolSpec) == samples.SPECS[rest]
    else:
        (frame,) = FrameSplitter().feed(*golden(name))
        read = {"OPEN": unpack_open, "MEMORY": unpack_attachment}.get(rest, unpack_frame)
        assert read(frame) == samples.SESSION_FRAMES[rest]


def test_one_frame_has_all_lists_of_a_batch() -> None:
    message, lists = ALL["BATCH"]
    assert [len(one) for one in golden("BATCH")[1:]] == [16]
    two = msgspec.structs.replace(message.body, requests=(Free(pool="a", pages=2), Free(pool="b", pages=1)))
    both = msgspec.structs.replace(message, body=two)
    assert to_frames(both, (*lists, samples.IDS[1]))[1:] == [struct.pack("<3q", 5, 1 << 40, -1)]
    read = decode_request(to_frames(both, (*lists, samples.IDS[1])))
    assert isinstance(read, IncomingRequest)
    assert read.ids[0].base is not read.ids[1].base, "who keeps one list does not keep the others"
    for wrong in ([], [b"x" * 23], [b"x" * 16, b"x" * 8]):
        refused = refusal([to_frames(both, (*lists, samples.IDS[1]))[0], *wrong])
        assert (refused.error.code, refused.error.field) == ("MALFORMED", "requests")


def test_samples_say_all_that_can_be_said() -> None:
    messages = [MESSAGES["SEND"], *PEER_MESSAGES.values()]
    for value in (*samples.SPECS.values(), *(message.body for message, _ in messages)):
        assert all(getattr(value, one.name) != one.default for one in msgspec.structs.fields(value)), value


@pytest.mark.parametrize(("name", "at"), [("SEND", 5), ("FINISHED", 3)])
def test_a_newer_side_may_add_fields_at_the_tail(name: str, at: int) -> None:
    head, *frames = golden(name)
    raw = msgspec.msgpack.decode(head)
    raw[at]["new_field"] = [1, 2]
    assert_read(ALL[name], [msgspec.msgpack.encode([*raw, 1]), *frames])


def refusal(frames: list[bytes]) -> UnreadableRequest:
    incoming = decode_request(frames)
    assert isinstance(incoming, UnreadableRequest), incoming
    return incoming


def changed(name: str, at: int, value: object) -> list[bytes]:
    head, *frames = golden(name)
    raw = msgspec.msgpack.decode(head)
    raw[at] = value
    return [msgspec.msgpack.encode(raw), *frames]


def with_field(name: str, field: str, value: object) -> list[bytes]:
    at = 5 if name in REQUEST_TYPES else 3
    return changed(name, at, {**msgspec.msgpack.decode(golden(name)[0])[at], field: value})


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"\x00"], [b"\x90"], [b"\x93\x01\xa0\xa0"], [b"\xff" * 9]])
def test_what_is_no_envelope(frames: list[bytes]) -> None:
    refused = refusal(frames)
    assert (refused.message_id, refused.secret, refused.error.code) == (0, b"", "MALFORMED")


@pytest.mark.parametrize(
    ("code", "field", "frames"),
    [
        ("UNKNOWN_TYPE", "type", with_field("PING", "type", "PINGG")),
        ("UNKNOWN_TYPE", "type", with_field("PING", "type", "ERROR")),  # a reply is no request
        ("MALFORMED", "type", with_field("PING", "type", 7)),
        ("MALFORMED", "type", changed("PING", 5, [])),
        ("INVALID_FIELD", "deadline_ms", changed("PING", 3, -1)),
        ("INVALID_FIELD", "secret", changed("PING", 2, b"x" * 33)),
        ("INVALID_FIELD", "boot_id", changed("PING", 1, "x" * 33)),
        ("INVALID_FIELD", "acknowledged", changed("PING", 4, -1)),
        ("INVALID_FIELD", "count", changed("ALLOCATE", 5, {"type": "ALLOCATE", "pool": "a"})),
        ("INVALID_FIELD", "count", with_field("ALLOCATE", "count", 0)),
        ("INVALID_FIELD", "pool", with_field("ALLOCATE", "pool", "../etc")),
        ("INVALID_FIELD", "pool", with_field("ALLOCATE", "pool", "a\n")),
        ("INVALID_FIELD", "request_id", with_field("SEND", "request_id", "F" * 32)),
        ("INVALID_FIELD", "request_id", with_field("SEND", "request_id", "f" * 31 + "\n")),
        ("INVALID_FIELD", "payload", with_field("SEND", "payload", b"x" * ((8 << 20) + 1))),
        ("INVALID_FIELD", "first_token", with_field("SEND", "first_token", -1)),
        ("INVALID_FIELD", "lists", with_field("SEND", "lists", [{"pages": 2}] * 65)),
        ("INVALID_FIELD", "lists[0].pages", with_field("SEND", "lists", [{"component": "main", "pages": -1}])),
        ("INVALID_FIELD", "lists[0].component", with_field("SEND", "lists", [{"component": "Main", "pages": 2}])),
        ("INVALID_FIELD", "direction", with_field("CANCEL", "direction", "both")),
        ("INVALID_FIELD", "spec.layers", with_field("CREATE_POOL", "spec", {"kind": "mha", "layers": 0})),
        ("INVALID_FIELD", "spec.kind", with_field("CREATE_POOL", "spec", {"kind": "rwkv"})),
        ("MALFORMED", "pages", [*with_field("FREE", "pages", 2)[:1], b"x" * 15]),
        ("MALFORMED", "pages", with_field("FREE", "pages", 3)),
        ("MALFORMED", "pages", [*with_field("PING", "client", "")[:1], b""]),
        ("MALFORMED", "pages", with_field("SEND", "last", True)[:2]),  # noqa: FBT003  a field's value
    ],
)
def test_what_is_wrong_is_named(code: str, field: str, frames: list[bytes]) -> None:
    refused = refusal(frames)
    assert (refused.error.code, refused.error.field) == (code, field)
    assert refused.message_id == 7
    if field != "secret":
        assert refused.secret == b"0123456789abcdef"


def test_deep_nesting_is_an_error_like_any_other() -> None:
    for junk in (b"\x91" * 100_000, b"\x81\xa1a" * 100_000, golden("PING")[0] + b"\x91" * 100_000):
        assert refusal([junk]).error.code == "MALFORMED"
    assert refusal(with_field("SEND", "lists", nested(900))).error.code == "INVALID_FIELD"


@given(st.lists(st.binary(max_size=200), max_size=4) | damaged(samples.REQUESTS))
@example([b"\xdf\xff\xff\xff\xff"])  # a map of four thousand million
@example([b"\xc6\xff\xff\xff\xff"])  # four gigabytes of bytes
@example([b"\x96\x01\xa0\xc4\x00\x00\x00\x81\xa4type\xa1\xff"])  # no UTF-8
def test_arbitrary_and_damaged_bytes_never_raise(frames: list[bytes]) -> None:
    incoming = decode_request(frames)
    if isinstance(incoming, UnreadableRequest):
        assert isinstance(incoming.error, CallerError)
        assert incoming.error.code in {"MALFORMED", "UNKNOWN_TYPE", "INVALID_FIELD"}
    else:
        assert tuple(len(one) for one in incoming.ids) == incoming.request.body.page_counts()


@given(st.lists(st.binary(max_size=200), max_size=3) | st.sampled_from(sorted(REQUEST_TYPES)).map(golden))
def test_what_is_no_message_of_a_daemon(frames: list[bytes]) -> None:
    with pytest.raises(MalformedError):
        decode_from_daemon(frames)


@given(st.integers(-3, 6), st.integers(-3, 6))
def test_the_highest_version_of_both(lowest: int, highest: int) -> None:
    common = set(range(lowest, highest + 1)) & set(range(PROTOCOL_MIN, PROTOCOL_MAX + 1))
    if common:
        assert agree(lowest, highest) == max(common)
        return
    with pytest.raises(VersionMismatchError, match=f"speaks {lowest}..{highest}, this side") as refused:
        agree(lowest, highest)
    assert refused.value.field == "protocol_min"


def test_the_committed_asyncapi_document_is_current() -> None:
    committed = Path(__file__).parents[2] / "docs" / "asyncapi.json"
    assert committed.read_bytes() == document(), "python -m kvferry.protocol.schema > docs/asyncapi.json"
