"""Frames on the session socket, however the bytes arrive; what others said, as it may be printed."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.protocol.errors import MalformedError
from kvferry.protocol.printable import json_line, printable
from kvferry.protocol.session_stream import MAX_SESSION_FRAME_BYTES, FrameSplitter, pack, unpack_frame, unpack_open
from tests.protocol.samples import SESSION_FRAMES

STREAM = b"".join(pack(frame) for frame in SESSION_FRAMES.values())
FRAMES = [pack(frame)[4:] for frame in SESSION_FRAMES.values()]


@given(st.lists(st.integers(0, len(STREAM)), max_size=9))
@example(list(range(len(STREAM))))
def test_a_stream_may_be_cut_anywhere(cuts: list[int]) -> None:
    splitter, at, got = FrameSplitter(), 0, []
    for cut in [*sorted(cuts), len(STREAM)]:
        got += list(splitter.feed(STREAM[at:cut]))
        at = cut
    assert got == FRAMES


def test_a_frame_has_a_bound() -> None:
    largest = struct.pack("<I", MAX_SESSION_FRAME_BYTES) + b"x" * MAX_SESSION_FRAME_BYTES
    assert [len(one) for one in FrameSplitter().feed(largest)] == [MAX_SESSION_FRAME_BYTES]
    with pytest.raises(MalformedError, match=f"a session frame of {MAX_SESSION_FRAME_BYTES + 1} bytes"):
        list(FrameSplitter().feed(struct.pack("<I", MAX_SESSION_FRAME_BYTES + 1)))


@given(st.binary(max_size=64))
@example(FRAMES[0])
@example(FRAMES[-1])
def test_junk_is_malformed_and_so_are_ones_own_frames(junk: bytes) -> None:
    for unpack in (unpack_frame, unpack_open):
        if junk not in FRAMES or (junk == FRAMES[0]) == (unpack is unpack_frame):
            with pytest.raises(MalformedError):
                unpack(junk)


def test_what_a_terminal_obeys_is_escaped() -> None:
    hostile = "a\x1b[2J\n\r\u202e\u2028\x9b\u200b\U000e0041\x00é字 b"
    assert printable(hostile) == r"a\x1b[2J\n\r\u202e\u2028\x9b\u200b\U000e0041\x00é字 b"


@given(st.text())
def test_what_is_printed_is_printable_and_a_json_line_says_the_same(text: str) -> None:
    line = json_line({text: [text]})
    assert line.isprintable()
    assert printable(text).isprintable()
    assert json.loads(line) == {text: [text]}
