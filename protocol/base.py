"""The base of all message bodies: a frozen struct, tagged by its ``type``, that may announce page lists.

Page ids never travel inside a body: a body holds the length of each list, and the ids follow as one raw little-endian
int64 frame per list, in the order in which the body names the lists.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, ClassVar, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Meta

from kvferry.protocol.errors import ErrorInfo, MalformedError
from kvferry.protocol.ids import MAIN, ComponentName
from kvferry.protocol.limits import EVENT_RING_SLOTS, INT64_BYTES

MAX_PAGE_LISTS = 64
"""Page lists per message: one for each component, several where its logical pages have gaps."""

PageCount = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""Number of page ids in the frame that follows for this list."""


class Body(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """The base of every request, reply and event body."""

    one_frame: ClassVar[bool] = False
    """Whether all numbers travel in one frame, whose parts the body counts; in JSON they are ``ids``."""
    has_lists: ClassVar[bool] = False
    """Whether page lists may follow."""
    lists_joined: ClassVar[bool] = False
    """Whether one frame has the ids of all lists, one list after another; else each list has its own."""
    frame_field: ClassVar[str] = "pages"
    """The field to name where a frame is wrong."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.has_lists = cls.page_counts is not Body.page_counts

    @property
    def request_id(self) -> str:
        """Return the request that it concerns; "" if it does not concern a single one."""
        return ""

    def page_counts(self) -> tuple[int, ...]:
        """Return the length of each page list that follows as a frame, in frame order; () if none follows."""
        return ()


class ReplyBody(Body, frozen=True, kw_only=True):
    """The base of all replies."""


ReplyT = TypeVar("ReplyT", bound=ReplyBody)


AfterRestart: TypeAlias = Literal["again", "absent", "done", "unknown"]
"""A request under way at a restart: ``again``: it is sent to the new daemon too, as a second time does no harm; else it
fails with STALE_BOOT, and this is its effect. ``done``: what it was to end has ended with the old daemon."""


class RequestBody(Body, frozen=True, kw_only=True):
    """The base of all requests."""

    reply: ClassVar[type[ReplyBody]]
    """What answers it, unless ERROR or BUSY does."""
    needs_session: ClassVar[bool] = True
    in_batch: ClassVar[bool] = True
    """Whether it may be in a BATCH. Not those that need no session, or pass descriptors over the session socket."""
    after_restart: ClassVar[AfterRestart] = "unknown"
    """What a client does with it if the daemon was restarted before it replied."""


class AnsweredBy(RequestBody, Generic[ReplyT], frozen=True, kw_only=True):
    """A request of which type checkers know the reply, too."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        (cls.reply,) = get_args(vars(cls)["__orig_bases__"][0])


def counts_of(bodies: Sequence[Body]) -> tuple[int, ...]:
    """Return the lengths of all page lists of several bodies, in their order."""
    return tuple([count for one in bodies if one.has_lists for count in one.page_counts()])


class ErrorReply(ReplyBody, frozen=True, kw_only=True, tag="ERROR"):
    """The request was refused, or failed."""

    error: ErrorInfo


class Busy(ReplyBody, frozen=True, kw_only=True, tag="BUSY"):
    """The request is valid but a bound on requests in flight is reached: retry it after ``retry_after_ms``."""

    retry_after_ms: int
    detail: str


class PageList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The pages of one component, in logical order; their ids follow in a frame.

    ``first_page`` is the logical number (position // page_size) of the first page. None means page 0 for a paged
    component; for a window or a state it means unknown, and both sides' lists are cut to the shorter length.
    ``tokens``, if given, is the number of tokens in the pages: all pages but the last must be full, and both sides must
    end at the same token. ``none`` states that this side wants nothing of a window or state; an empty list without it
    is an error if the other side's list is not empty.

    A paged component may have several lists in one message if its logical pages have gaps: each with its
    ``first_page``, in ascending order. Only the last one may end inside a page.
    """

    component: ComponentName = MAIN
    first_page: PageCount | None = None
    pages: PageCount
    tokens: Annotated[int, Meta(ge=1, lt=1 << 40)] | None = None
    none: bool = False


RingNumber = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""Of an event ring, from EVENTS_OPENED: no other session, and no other daemon, has one of this number."""


class DeviceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of the session's ring, by index, and the value that it must reach."""

    event: Annotated[int, Meta(ge=0, lt=EVENT_RING_SLOTS)]
    value: Annotated[int, Meta(ge=1, lt=1 << 62)]
    ring: RingNumber = 0
    """The ring that made it: one of another ring is refused. 0: it was made by hand, for the session's own."""


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


def list_frames(body: Body, frames: Sequence[bytes]) -> Sequence[bytes]:
    """Return the frames that follow a body as one for each page list, cutting one that has all lists into copies.

    Raises:
        MalformedError: they are not those that the body announces.
    """
    counts = body.page_counts() if body.has_lists else ()
    if not counts and not frames:
        return frames
    if not (counts and body.lists_joined):
        _check_frames(body, counts, frames)
        return frames
    _check_frames(body, (sum(counts),), frames)
    (whole,), found, at = frames, [], 0
    for count in counts:
        found.append(whole[at : at + count * INT64_BYTES])
        at += count * INT64_BYTES
    return found


def _check_frames(body: Body, counts: Sequence[int], frames: Sequence[bytes]) -> None:
    """Check that the frames have so many ids each.

    Raises:
        MalformedError: their number, or the length of one, is wrong.
    """
    if len(counts) != len(frames):
        field = body.frame_field
        raise MalformedError(f"{len(frames)} id frames for {len(counts)} page lists", field=field)
    for number, (count, frame) in enumerate(zip(counts, frames, strict=True)):
        if len(frame) != count * INT64_BYTES:
            raise MalformedError(
                f"id frame {number} has {len(frame)} bytes; {count} pages need {count * INT64_BYTES}",
                field=body.frame_field,
            )
