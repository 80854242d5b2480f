"""All types of messages together: BATCH, which holds other requests, and the envelope, a message's first frame.

The envelope has message id, boot id, session secret, deadline and body. Envelopes are arrays (fixed order, new fields
are appended with defaults); bodies are maps, so that an error can name the field at fault and a newer side may add
fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias, Union

import msgspec
from msgspec import Meta

from kvferry.protocol.base import AnsweredBy, Busy, ErrorReply, ReplyBody, RequestBody, counts_of
from kvferry.protocol.events import EventBody
from kvferry.protocol.requests import BATCH, REQUESTS, request_type, tag_of

MAX_BATCH: Final = 256
"""Requests of one BATCH."""

_ALONE: Final[tuple[type[RequestBody], ...]] = tuple(request_type(name) for name in REQUESTS if name != BATCH)
_BATCHED: Final = tuple(kind for kind in _ALONE if kind.in_batch)


def replies_to(requests: Sequence[type[RequestBody]]) -> tuple[type[ReplyBody], ...]:
    """Return what may be answered to these requests: each type once."""
    return (*dict.fromkeys(one.reply for one in requests), ErrorReply, Busy)


# Which types there are, only the table knows; to a type checker every message is its base class.
if TYPE_CHECKING:
    BatchedRequest: TypeAlias = RequestBody
    BatchedResult: TypeAlias = ReplyBody
    AnyRequest: TypeAlias = RequestBody
    AnyReply: TypeAlias = ReplyBody
else:
    BatchedRequest = Union[_BATCHED]  # noqa: UP007  of a tuple
    BatchedResult = Union[replies_to(_BATCHED)]  # noqa: UP007

Times = Annotated[int, Meta(ge=1, le=MAX_BATCH)]
DeadlineMs = Annotated[int, Meta(ge=0)]


class Batched(ReplyBody, frozen=True, kw_only=True, tag="BATCHED"):
    """BATCH's reply: what each request would have been answered by itself, in their order, and the frames of those.

    A result that would make the message larger than ``limits.max_message_bytes`` is TOO_LARGE: ask for that alone.
    """

    lists_joined = True

    results: Annotated[tuple[BatchedResult, ...], Meta(max_length=MAX_BATCH)]
    """Of results in a row that are equal, and bring no page lists, the first one."""
    times: Annotated[tuple[Times, ...], Meta(max_length=MAX_BATCH)] = ()
    """How many results in a row each of ``results`` is; none: each is one."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the lengths of all results' lists."""
        return counts_of(self.results)


class Batch(AnsweredBy[Batched], frozen=True, kw_only=True, tag="BATCH"):
    """Requests that are begun in their order, as if each had come by itself; one that fails does not stop the others.

    The ids of all page lists travel in one frame, one list after another, and so do those of the reply: a frame costs
    more than the few ids of a list. A request that waits does not hold up those behind it. The reply comes once all
    have their result. Events of what they begin may come before it.
    """

    in_batch = False
    lists_joined = True
    frame_field = "requests"

    requests: Annotated[tuple[BatchedRequest, ...], Meta(min_length=1, max_length=MAX_BATCH)]
    deadlines_ms: Annotated[tuple[DeadlineMs, ...], Meta(max_length=MAX_BATCH)] = ()
    """Of each request, 0 for the message's own; empty: that of the message for all."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the lengths of all requests' lists."""
        return counts_of(self.requests)


_ALL: Final[tuple[type[RequestBody], ...]] = (*_ALONE, Batch)
REQUEST_TYPES: Final = {tag_of(kind): kind for kind in _ALL}
"""Every request, by its name on the wire."""

if not TYPE_CHECKING:
    AnyRequest = Union[_ALL]  # noqa: UP007
    AnyReply = Union[replies_to(_ALL)]  # noqa: UP007

MessageNumber = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A client's message.

    ``boot_id`` is the boot id it expects ("" for any, before HELLO); ``secret`` is the session's, or empty;
    ``deadline_ms`` is the time left for the request, 0 for the daemon's default; ``acknowledged`` is the highest event
    cursor that the client has delivered to its user: the daemon drops events up to there.
    """

    message_id: MessageNumber
    boot_id: Annotated[str, Meta(max_length=32)]
    secret: Annotated[bytes, Meta(max_length=32)]
    deadline_ms: Annotated[int, Meta(ge=0)]
    acknowledged: Annotated[int, Meta(ge=0)]
    body: AnyRequest


class RequestHead(msgspec.Struct, frozen=True, array_like=True):
    """The part of a request that can be decoded if its body cannot."""

    message_id: MessageNumber
    boot_id: str
    secret: bytes
    deadline_ms: int
    acknowledged: int
    body: msgspec.Raw


class BodyHead(msgspec.Struct, frozen=True):
    """The part of a body that can be decoded if its fields cannot."""

    type: str


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    """The daemon's reply to message ``message_id``; 0 if that could not be decoded."""

    message_id: int
    boot_id: str
    body: AnyReply


class Event(msgspec.Struct, frozen=True, array_like=True, tag="E"):
    """A message that the daemon sends without a request. ``cursor`` counts the session's events from 1.

    ``lost`` counts earlier events that were dropped before the session acknowledged them; 0 in this version.
    """

    cursor: int
    boot_id: str
    body: EventBody
    lost: int = 0


FromDaemon = Reply | Event
