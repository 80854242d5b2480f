"""Frames on the session socket, however the bytes arrive."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.protocol.errors import MalformedError
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
    assert max(len(frame) for frame in FRAMES) < MAX_SESSION_FRAME_BYTES // 4


@given(st.binary(max_size=64))
def test_junk_is_malformed(junk: bytes) -> None:
    for unpack in (unpack_open, unpack_frame):
        with pytest.raises(MalformedError):
            unpack(junk)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_stream_is_split_or_refused(pieces: list[bytes]) -> None:
    splitter, got = FrameSplitter(), b""
    try:
        for piece in pieces:
            got += b"".join(struct.pack("<I", len(frame)) + frame for frame in splitter.feed(piece))
    except MalformedError:
        return
    assert b"".join(pieces).startswith(got)


def test_each_side_reads_the_other_sides_frames_only() -> None:
    opening, *answers = FRAMES
    for frame in answers:
        with pytest.raises(MalformedError):
            unpack_open(frame)
    with pytest.raises(MalformedError):
        unpack_frame(opening)
