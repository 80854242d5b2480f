"""The wire protocol as an AsyncAPI 3 document, generated from the structs: ``python -m kvferry.protocol.schema``."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from kvferry.protocol.base import Body
from kvferry.protocol.envelope import Event, Reply, Request
from kvferry.protocol.events import Finished, Matched, Settled
from kvferry.protocol.requests import REQUEST_TYPES, Busy, ErrorReply
from kvferry.protocol.session_messages import RegionFollows, SessionEnd, SessionOpen, SessionOpened, SessionRefused
from kvferry.protocol.tier_messages import TierDone
from kvferry.protocol.versions import PROTOCOL_MAX

EVENTS: tuple[type[Body], ...] = (Matched, Finished, Settled, TierDone)
REFUSALS: tuple[type[Body], ...] = (ErrorReply, Busy)
SESSION_FRAMES = (SessionOpen, SessionEnd, SessionOpened, SessionRefused, RegionFollows)


def asyncapi() -> dict[str, Any]:
    """Return the document: both sockets, every message, every operation."""
    bodies = [kind for row in REQUEST_TYPES.values() for kind in (row.request, row.reply)]
    messages: list[type[msgspec.Struct]] = list(dict.fromkeys([*bodies, *REFUSALS, *EVENTS, *SESSION_FRAMES]))
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
            "control": _channel("control.sock", "ZeroMQ ROUTER over ipc", [*bodies, *REFUSALS, *EVENTS]),
            "session": _channel("session.sock", "Unix stream; uint32 length before each frame", SESSION_FRAMES),
        },
        "operations": {name: _operation(row.request, row.reply) for name, row in REQUEST_TYPES.items()}
        | {_tag(kind): _push(kind) for kind in EVENTS},
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


def _channel(address: str, description: str, kinds: Any) -> dict[str, Any]:  # noqa: ANN401  any struct types
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


def _tag(kind: type[Body]) -> str:
    return str(kind.__struct_config__.tag)


if __name__ == "__main__":
    sys.stdout.buffer.write(document())
