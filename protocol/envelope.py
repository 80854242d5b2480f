"""The first frame of every message: message id, boot id, session secret, deadline and body.

Envelopes are arrays (fixed order, new fields are appended with defaults); bodies are maps, so that an error can name
the field at fault and a newer side may add fields.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.requests import EventBody, ReplyBody, RequestBody

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
    body: RequestBody


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
    body: ReplyBody


class Event(msgspec.Struct, frozen=True, array_like=True, tag="E"):
    """A message that the daemon sends without a request. ``cursor`` counts the session's events from 1.

    ``lost`` counts earlier events that were dropped before the session acknowledged them; 0 in this version.
    """

    cursor: int
    boot_id: str
    body: EventBody
    lost: int = 0


FromDaemon = Reply | Event
