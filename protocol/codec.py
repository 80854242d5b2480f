"""Bytes to messages and back, one guard around every decode.

A message is ``[envelope, ids…]``: one msgpack frame, then one raw little-endian int64 frame for each page list that
the body announces. Decoding checks the number and the length of the frames; page ids are views of the received
bytes, read-only, never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.protocol.base import Body
from kvferry.protocol.envelope import BodyHead, Event, FromDaemon, Reply, Request, RequestHead
from kvferry.protocol.errors import CallerError, InvalidFieldError, KvferryError, MalformedError, UnknownTypeError
from kvferry.protocol.ids import PATTERNS
from kvferry.protocol.limits import INT64_BYTES
from kvferry.protocol.requests import REQUEST_TYPES

PageIds: TypeAlias = npt.NDArray[np.int64]
"""Page ids, ``(n,)`` int64."""

Frames: TypeAlias = list[bytes | memoryview]

WIRE_IDS: Final = np.dtype("<i8")
UNKNOWN_MESSAGE: Final = 0
_ENVELOPE_FIELDS: Final = {f"[{place}]": name for place, name in enumerate(Request.__struct_fields__) if name != "body"}

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_request_head_decoder = msgspec.msgpack.Decoder(RequestHead)
_body_head_decoder = msgspec.msgpack.Decoder(BodyHead)
_from_daemon_decoder = msgspec.msgpack.Decoder(FromDaemon)


class IncomingRequest(NamedTuple):
    """A decoded request and its page lists, in the order in which the body names them."""

    request: Request
    ids: tuple[PageIds, ...]


class IncomingReply(NamedTuple):
    """A decoded reply or event and its page lists."""

    message: Reply | Event
    ids: tuple[PageIds, ...]


class UnreadableRequest(NamedTuple):
    """A request that could not be decoded: what to answer, to which message (0 where that is unknown)."""

    message_id: int
    secret: bytes
    error: CallerError


def encode(message: Request | Reply | Event, ids: Sequence[PageIds] = ()) -> Frames:
    """Return the message's frames. The id frames are views of the arrays: do not write to those before the send.

    Raises:
        ValueError: the lists are not those that the body announces: a bug of the caller.
    """
    return with_page_lists(_encoder.encode(message), message.body, ids)


def decode_request(frames: Sequence[bytes]) -> IncomingRequest | UnreadableRequest:
    """Return the request, or what to answer where the bytes are none. Never raises for any input."""
    try:
        request = _request_decoder.decode(frames[0])
        return IncomingRequest(request, page_lists(request.body, frames[1:]))
    except (msgspec.MsgspecError, ValueError, IndexError, RecursionError, MemoryError, KvferryError) as cause:
        return _explain(frames[0] if frames else b"", cause)


def decode_from_daemon(frames: Sequence[bytes]) -> IncomingReply:
    """Return the reply or event.

    Raises:
        MalformedError: the bytes are neither, or their page lists are not those announced.
    """
    try:
        message = _from_daemon_decoder.decode(frames[0])
        return IncomingReply(message, page_lists(message.body, frames[1:]))
    except (msgspec.MsgspecError, ValueError, IndexError, RecursionError, MemoryError) as cause:
        raise MalformedError(f"the daemon's message cannot be read: {cause}") from cause


def with_page_lists(head: bytes, body: Body, ids: Sequence[PageIds]) -> Frames:
    """Return a message's frames: its head and the page lists that its body announces.

    Raises:
        ValueError: the lists are not those that the body announces: a bug of the caller.
    """
    frames: Frames = [head]
    counts = body.page_counts()
    if not ids and not counts:
        return frames
    if tuple(len(one) for one in ids) != counts:
        raise ValueError(f"{type(body).__name__} announces {counts} page ids")
    frames.extend(np.ascontiguousarray(one, WIRE_IDS).data.cast("B") for one in ids)
    return frames


def page_lists(body: Body, frames: Sequence[bytes]) -> tuple[PageIds, ...]:
    """Return the page lists that follow a body, as views of the received bytes.

    Raises:
        MalformedError: they are not those that the body announces.
    """
    counts = body.page_counts()
    if not counts and not frames:
        return ()
    if len(counts) != len(frames):
        raise MalformedError(f"{len(frames)} id frames for {len(counts)} page lists", field="pages")
    for number, (count, frame) in enumerate(zip(counts, frames, strict=True)):
        if len(frame) != count * INT64_BYTES:
            raise MalformedError(
                f"id frame {number} has {len(frame)} bytes; {count} pages need {count * INT64_BYTES}", field="pages"
            )
    return tuple(np.frombuffer(frame, WIRE_IDS) for frame in frames)


def _explain(envelope: bytes, cause: BaseException) -> UnreadableRequest:
    """Say as exactly as the bytes allow why a request cannot be read."""
    try:
        head = _request_head_decoder.decode(envelope)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        return UnreadableRequest(UNKNOWN_MESSAGE, b"", MalformedError(f"the envelope cannot be read: {cause}"))
    if isinstance(cause, CallerError):
        return UnreadableRequest(head.message_id, head.secret, cause)
    return UnreadableRequest(head.message_id, head.secret, _explain_body(head.body, cause))


def _explain_body(body: msgspec.Raw, cause: BaseException) -> CallerError:
    try:
        kind = _body_head_decoder.decode(body).type
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        return MalformedError("the body is no map with a type", field="type")
    if kind not in REQUEST_TYPES:
        return UnknownTypeError(f"no request type {kind[:64]!r}", field="type")
    if isinstance(cause, msgspec.ValidationError):
        return invalid_field(cause)
    return MalformedError(f"the body of {kind} cannot be read: {cause}")


def in_words(cause: msgspec.ValidationError) -> str:
    """Return msgspec's complaint, with what a pattern asks for in place of the pattern."""
    text = str(cause)
    for pattern, words in PATTERNS.items():
        text = text.replace(f"`str` matching regex {pattern!r}", words)
    return text


def invalid_field(cause: msgspec.ValidationError) -> InvalidFieldError:
    """Return msgspec's complaint as an error that names the field: ``Expected `int` - at `$[5].count```."""
    what, _, where = in_words(cause).partition(" - at `$")
    path = where.rstrip("`")
    field = _ENVELOPE_FIELDS.get(path, path.removeprefix("[5]").lstrip("."))
    if not field and "`" in what:
        field = what.rsplit("`", 2)[-2]
    return InvalidFieldError(what, field=field)
