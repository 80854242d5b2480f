"""ZMTP as the listening side speaks it: the same messages however the bytes are cut, and no bytes do harm."""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.control.zmtp import (
    CHUNK_BYTES,
    FRAMES_AT_ONCE,
    GREETING,
    MAX_ANSWERS_BYTES,
    IncomingStream,
    ReceivedMessage,
    encoded,
    frame,
)
from kvferry.protocol.errors import KvferryError, MalformedError, TooLargeError
from kvferry.protocol.limits import Limits
from tests.kit.devices import DEVICE

COMMAND = 4
IDENTITY = b"who"
LIMITS = Limits(max_frame_bytes=1000, max_frames=4, max_message_bytes=2000)
DEALER = frame(COMMAND, b"\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0")
OPENING = GREETING + DEALER


def opened() -> IncomingStream:
    """Return a stream whose handshake is over."""
    stream = IncomingStream(IDENTITY, LIMITS)
    stream.feed(OPENING)
    assert stream.take(1) == []
    stream.answers.clear()
    return stream


def taken(stream: IncomingStream, bound: int = 100) -> list[list[bytes]]:
    return [one.frames for one in stream.take(bound)]


@DEVICE.examples(200)
@given(
    messages=st.lists(st.lists(st.binary(max_size=400), min_size=1, max_size=4), max_size=6),
    cuts=st.lists(st.integers(0, 4000), max_size=12),
)
def test_the_same_messages_however_the_bytes_are_cut(messages: list[list[bytes]], cuts: list[int]) -> None:
    stream, found = IncomingStream(IDENTITY, LIMITS), []
    data = OPENING + b"".join(encoded(one) for one in messages)
    places = [0, *sorted(min(one, len(data)) for one in cuts), len(data)]
    for start, stop in itertools.pairwise(places):
        if start < stop:
            stream.feed(data[start:stop])
        found += taken(stream)
    assert found == messages
    assert stream.held_bytes == 0


@pytest.mark.parametrize("unit", [frame(COMMAND, b""), frame(COMMAND, b"\4PING\0\0ab"), b"\1\0", b"\0\0"])
def test_a_take_is_short_whatever_the_frames_are(unit: bytes) -> None:
    stream, takes = opened(), 0
    stream.feed(unit * 10 * FRAMES_AT_ONCE + b"\0\0" + encoded([b"last"]))
    found: list[list[bytes]] = []
    while [b"last"] not in found:
        assert takes == 0 or stream.has_more
        found += taken(stream, 20 * FRAMES_AT_ONCE)
        takes += 1
    assert takes > 10


def test_who_pings_and_does_not_read_is_answered_only_so_much() -> None:
    stream = opened()
    for _ in range(100):
        stream.feed(frame(COMMAND, b"\4PING\0\0" + bytes(16)) * 100)
        stream.take(1)
    assert 0 < len(stream.answers) < 2 * MAX_ANSWERS_BYTES
    stream.answers.clear()
    stream.feed(frame(COMMAND, b"\4PING\0\0again"))
    stream.take(1)
    assert bytes(stream.answers) == frame(COMMAND, b"\4PONGagain")


@pytest.mark.parametrize("rest", [b"", b"\0"])
def test_a_message_that_was_taken_is_not_kept(rest: bytes) -> None:
    stream = IncomingStream(IDENTITY, Limits())
    stream.feed(OPENING)
    stream.take(1)
    tracemalloc.start()
    try:
        stream.feed(encoded([bytes(1 << 20)]) + rest)
        assert len(stream.take(2)) == 1
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stream.held_bytes == len(rest)
    assert kept < 1 << 16


def test_what_comes_byte_by_byte_counts_for_what_it_takes() -> None:
    stream, byte = opened(), memoryview(bytes(1))
    stream.feed(b"\2" + (1000).to_bytes(8))
    stream.take(1)
    tracemalloc.start()
    try:
        for _ in range(900):
            stream.feed(bytes(byte))
            stream.take(1)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stream.held_bytes >= kept * 0.8


def test_frames_and_bytes_of_a_message_are_bounded_and_the_next_one_is_whole() -> None:
    stream = opened()
    for frames, kept in (([b"x"] * 5, 4), ([bytes(900)] * 3, 2)):
        stream.feed(encoded(frames) + encoded([b"next"]))
        [first, second] = stream.take(2)
        assert first == ReceivedMessage(IDENTITY, frames[:kept], too_large=True)
        assert second == ReceivedMessage(IDENTITY, [b"next"], too_large=False)


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n",
        GREETING[:10] + b"\2",
        GREETING[:12] + b"PLAIN".ljust(52, b"\0"),
        GREETING + frame(0, b"a message before READY"),
        GREETING + frame(COMMAND, b"\5READY\x0bSocket-Type\0\0\0\3PUB"),
        GREETING + frame(COMMAND, b"\5READY" + bytes(600)),
        OPENING + b"\x09\1x",
        OPENING + b"\xfd\1x",
    ],
)
def test_what_is_no_client_of_ours_is_refused(junk: bytes) -> None:
    stream = IncomingStream(IDENTITY, LIMITS)
    stream.feed(junk.ljust(64, b"\0"))
    with pytest.raises(MalformedError):
        stream.take(100)


def test_a_frame_over_the_limit_is_refused_before_it_comes() -> None:
    stream = opened()
    stream.feed(b"\2" + (1001).to_bytes(8))
    with pytest.raises(TooLargeError, match="1001"):
        stream.take(1)


@DEVICE.examples(300)
@given(data=st.binary(max_size=300), begins=st.sampled_from([b"", GREETING, OPENING]))
def test_any_bytes_are_messages_or_refused(data: bytes, begins: bytes) -> None:
    stream = IncomingStream(IDENTITY, LIMITS)
    with contextlib.suppress(KvferryError):
        for at in range(0, len(begins + data), 7):
            stream.feed((begins + data)[at : at + 7])
            for message in stream.take(100):
                assert sum(map(len, message.frames)) <= LIMITS.max_message_bytes
    assert stream.held_bytes <= (1 + CHUNK_BYTES) * len(begins + data)
