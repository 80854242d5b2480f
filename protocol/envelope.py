"""The first frame of every message: who asks or answers what, for which incarnation, and for how long.

Envelopes are arrays (fixed order, new fields at the tail with defaults); bodies are maps, so that an error can name
the field at fault and a newer side may add one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.requests import EventBody, ReplyBody, RequestBody

MessageNumber = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A client's message.

    ``boot_id`` is the incarnation it expects ("" for any, before HELLO); ``secret`` the session's, or empty;
    ``deadline_ms`` the time left to the request, 0 for the daemon's default; ``acknowledged`` the highest event cursor
    that the client has handed to its user: the daemon forgets up to there.
    """

    message_id: MessageNumber
    boot_id: Annotated[str, Meta(max_length=32)]
    secret: Annotated[bytes, Meta(max_length=32)]
    deadline_ms: Annotated[int, Meta(ge=0)]
    acknowledged: Annotated[int, Meta(ge=0)]
    body: RequestBody


class RequestHead(msgspec.Struct, frozen=True, array_like=True):
    """As much of a request as can be read when its body cannot."""

    message_id: MessageNumber
    boot_id: str
    secret: bytes
    deadline_ms: int
    acknowledged: int
    body: msgspec.Raw


class BodyHead(msgspec.Struct, frozen=True):
    """As much of a body as can be read when its fields cannot."""

    type: str


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    """The daemon's answer to message ``message_id``; 0 where the message could not be read that far."""

    message_id: int
    boot_id: str
    body: ReplyBody


class Event(msgspec.Struct, frozen=True, array_like=True, tag="E"):
    """Something a session is told unasked. ``cursor`` counts the session's events from 1.

    ``lost`` counts events before this one that were dropped before the session acknowledged them; 0 in this version.
    """

    cursor: int
    boot_id: str
    body: EventBody
    lost: int = 0


FromDaemon = Reply | Event
