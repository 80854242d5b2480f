"""The wire protocol as an AsyncAPI 3 document, generated from the structs: ``python -m kvferry.protocol.schema``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final, get_args

import msgspec

from kvferry.protocol.base import Body, Busy, ErrorReply
from kvferry.protocol.envelope import REQUEST_TYPES, Event, Reply, Request
from kvferry.protocol.events import EventBody
from kvferry.protocol.limits import PROTOCOL_MAX
from kvferry.protocol.requests import tag_of
from kvferry.protocol.session_stream import RegionFollows, SessionEnd, SessionOpen, SessionOpened, SessionRefused

EVENTS: Final = get_args(EventBody)
REFUSALS: Final = (ErrorReply, Busy)
SESSION_FRAMES: Final = (SessionOpen, SessionEnd, SessionOpened, SessionRefused, RegionFollows)


def asyncapi() -> dict[str, Any]:
    """Return the document: both sockets, every message, every operation."""
    requests = REQUEST_TYPES.values()
    bodies = dict.fromkeys([*requests, *(kind.reply for kind in requests), *REFUSALS, *EVENTS])
    messages = (*bodies, *SESSION_FRAMES)
    _, schemas = msgspec.json.schema_components(
        [*messages, Request, Reply, Event], ref_template="#/components/schemas/{name}"
    )
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "kvferry",
            "version": str(PROTOCOL_MAX),
            "description": "msgpack; [envelope, one little-endian int64 frame for each page list]. "
            "Envelopes are arrays, bodies maps.",
        },
        "defaultContentType": "application/msgpack",
        "channels": {
            "control": _channel("control.sock", "ZeroMQ ROUTER over ipc", bodies),
            "session": _channel("session.sock", "Unix stream; uint32 length before each frame", SESSION_FRAMES),
        },
        "operations": {tag_of(kind): _operation(kind, kind.reply) for kind in requests}
        | {tag_of(kind): _push(kind) for kind in EVENTS},
        "components": {
            "messages": {
                kind.__name__: {"payload": {"$ref": f"#/components/schemas/{kind.__name__}"}} for kind in messages
            },
            "schemas": schemas,
        },
    }


def document() -> bytes:
    """Return the document in the form of docs/asyncapi.json."""
    return msgspec.json.format(msgspec.json.encode(asyncapi(), order="sorted"), indent=1) + b"\n"


def _channel(address: str, description: str, kinds: Iterable[type[msgspec.Struct]]) -> dict[str, Any]:
    messages = {kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"} for kind in kinds}
    return {"address": address, "description": description, "messages": messages}


def _operation(request: type[Body], reply: type[Body]) -> dict[str, Any]:
    answers = [_message(kind) for kind in (reply, *REFUSALS)]
    return {
        "action": "receive",
        "channel": {"$ref": "#/channels/control"},
        "messages": [_message(request)],
        "reply": {"channel": {"$ref": "#/channels/control"}, "messages": answers},
    }


def _push(kind: type[Body]) -> dict[str, Any]:
    return {"action": "send", "channel": {"$ref": "#/channels/control"}, "messages": [_message(kind)]}


def _message(kind: type[Body]) -> dict[str, str]:
    return {"$ref": f"#/channels/control/messages/{kind.__name__}"}


if __name__ == "__main__":
    sys.stdout.buffer.write(document())
