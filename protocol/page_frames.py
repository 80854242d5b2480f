"""The frames of page ids that follow a body: raw little-endian int64, one frame per list. Needs no numpy."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvferry.protocol.base import Body
from kvferry.protocol.errors import MalformedError
from kvferry.protocol.limits import INT64_BYTES


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return the ids as a frame.

    Raises:
        OverflowError: an id does not fit in 64 bits.
    """
    try:
        return struct.pack(f"<{len(ids)}q", *ids)
    except struct.error as cause:
        raise OverflowError(f"a page id does not fit in 64 bits: {cause}") from cause


def unpack_ids(frame: bytes) -> list[int]:
    """Return the ids of a frame."""
    return list(struct.unpack(f"<{len(frame) // INT64_BYTES}q", frame))


def check_frames(body: Body, frames: Sequence[bytes]) -> None:
    """Check that the frames are the page lists that the body announces.

    Raises:
        MalformedError: the number of frames, or the length of one, is wrong.
    """
    counts = body.page_counts()
    if len(counts) != len(frames):
        field = body.frame_field(min(len(counts), len(frames)))
        raise MalformedError(f"{len(frames)} id frames for {len(counts)} page lists", field=field)
    for number, (count, frame) in enumerate(zip(counts, frames, strict=True)):
        if len(frame) != count * INT64_BYTES:
            raise MalformedError(
                f"id frame {number} has {len(frame)} bytes; {count} pages need {count * INT64_BYTES}",
                field=body.frame_field(number),
            )
