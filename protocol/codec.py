"""Encoding and decoding of messages; decode errors of any kind become typed errors.

A message is ``[envelope, ids…]``: one msgpack frame, then one raw little-endian int64 frame for each page list that
the body announces, or one for all of them. Decoding checks the number and the length of the frames; page ids are
read-only views of the received bytes, never copied but for those of a frame that has all lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.protocol.base import Body, list_frames
from kvferry.protocol.envelope import REQUEST_TYPES, BodyHead, Event, FromDaemon, Reply, Request, RequestHead
from kvferry.protocol.errors import CallerError, KvferryError, MalformedError, UnknownTypeError, invalid_field
from kvferry.protocol.limits import INT64_BYTES

PageIds: TypeAlias = npt.NDArray[np.int64]
"""Ids of pages, or of slots of states, ``(n,)`` int64."""

Frames: TypeAlias = list[bytes | memoryview]

WIRE_IDS: Final = np.dtype("<i8")
UNKNOWN_MESSAGE: Final = 0

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
    """A request that could not be decoded: the error to reply, and the message id (0 if unknown)."""

    message_id: int
    secret: bytes
    error: CallerError


def encoded_bytes(body: Body | Sequence[Body]) -> int:
    """Return the size of a body, or of several, as they travel, without their page lists."""
    return len(_encoder.encode(body))


def encode(message: Request | Reply | Event, ids: Sequence[PageIds | bytes] = ()) -> Frames:
    """Return the message's frames; see ``with_page_lists``.

    An array that has a frame of its own is seen there: do not modify it before sending.
    """
    return with_page_lists(_encoder.encode(message), message.body, ids)


def decode_request(frames: Sequence[bytes]) -> IncomingRequest | UnreadableRequest:
    """Return the request, or the error to reply if the bytes are not a request. Never raises, whatever the input."""
    try:
        request = _request_decoder.decode(frames[0])
        return IncomingRequest(request, page_lists(request.body, frames[1:]))
    except (msgspec.MsgspecError, ValueError, IndexError, RecursionError, MemoryError, KvferryError) as cause:
        return _explain(frames[0] if frames else b"", cause)


def decode_from_daemon(frames: Sequence[bytes]) -> IncomingReply:
    """Return the reply or event.

    Raises:
        MalformedError: the bytes are neither, or the page lists are not those announced.
    """
    try:
        message = _from_daemon_decoder.decode(frames[0])
        return IncomingReply(message, page_lists(message.body, frames[1:]))
    except (msgspec.MsgspecError, ValueError, IndexError, RecursionError, MemoryError) as cause:
        raise MalformedError(f"the daemon's message cannot be decoded: {cause}") from cause


def unpacked(frames: Sequence[bytes]) -> tuple[PageIds, ...]:
    """Return page lists as arrays that see the frames."""
    return tuple([np.frombuffer(frame, WIRE_IDS) for frame in frames])


def with_page_lists(head: bytes, body: Body, ids: Sequence[PageIds | bytes]) -> Frames:
    """Return a message's frames: the encoded envelope and the page lists that the body announces.

    Args:
        head: the encoded envelope.
        body: what announces them.
        ids: each an array, or bytes as they travel.

    Raises:
        ValueError: the lists are not those that the body announces, of a body whose lists have each a frame: a bug of
            the caller. A receiver that gets other lists in one frame refuses them.
    """
    if body.lists_joined:
        if not ids:
            return [head]
        return [head, b"".join([one if isinstance(one, bytes) else _packed(one) for one in ids])]
    frames = [one if isinstance(one, bytes) else np.ascontiguousarray(one, WIRE_IDS).data.cast("B") for one in ids]
    counts = body.page_counts()
    if tuple([len(one) for one in frames]) != tuple([count * INT64_BYTES for count in counts]):
        raise ValueError(f"{type(body).__name__} announces {counts} page ids")
    return [head, *frames]


def _packed(ids: PageIds) -> bytes:
    return (ids if ids.dtype is WIRE_IDS else ids.astype(WIRE_IDS)).tobytes()


def page_lists(body: Body, frames: Sequence[bytes]) -> tuple[PageIds, ...]:
    """Return the page lists that follow a body, as views of the received bytes.

    Raises:
        MalformedError: they are not those that the body announces.
    """
    return unpacked(list_frames(body, frames))


def split(bodies: Sequence[Body], ids: Sequence[PageIds]) -> list[tuple[PageIds, ...]]:
    """Return each body's page lists; ``ids``: those of all, one after another."""
    if not ids:
        return [()] * len(bodies)
    found, at = [], 0
    for one in bodies:
        count = len(one.page_counts()) if one.has_lists else 0
        found.append(tuple(ids[at : at + count]) if count else ())
        at += count
    return found


def _explain(envelope: bytes, cause: BaseException) -> UnreadableRequest:
    """Return the most specific error that the bytes of an undecodable request allow."""
    try:
        head = _request_head_decoder.decode(envelope)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        return UnreadableRequest(UNKNOWN_MESSAGE, b"", MalformedError(f"the envelope cannot be decoded: {cause}"))
    if isinstance(cause, CallerError):
        return UnreadableRequest(head.message_id, head.secret, cause)
    return UnreadableRequest(head.message_id, head.secret, _explain_body(head.body, cause))


def _explain_body(body: msgspec.Raw, cause: BaseException) -> CallerError:
    try:
        kind = _body_head_decoder.decode(body).type
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        return MalformedError("the body is not a map with a type", field="type")
    if kind not in REQUEST_TYPES:
        return UnknownTypeError(f"no request type {kind[:64]!r}", field="type")
    if isinstance(cause, msgspec.ValidationError):
        return invalid_field(cause)
    return MalformedError(f"the body of {kind} cannot be decoded: {cause}")
