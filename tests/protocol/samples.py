"""One fixed message of every type: its body is a line of ``samples.txt``, its bytes are in ``golden_v4.json``.

Messages between daemons have theirs in ``golden_peer_v4.json``. The golden bytes change only with the protocol: when a
type or a field is added (at the tail, with a default), write them anew with ``python -m tests.protocol.samples`` and
look at the difference; old lines must not change, unless PROTOCOL_MAX is raised and new files begun.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias, Union, get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from kvferry.protocol.base import Body, ErrorReply, ReplyBody, RequestBody
from kvferry.protocol.codec import PageIds, decode_from_daemon, decode_request, encode
from kvferry.protocol.envelope import REQUEST_TYPES, Event, Reply, Request, replies_to
from kvferry.protocol.events import EventBody
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.peer_messages import PeerBody, PeerEnvelope, decode_peer, encode_peer
from kvferry.protocol.session_stream import MemoryFollows, SessionFrame, SessionOpen, pack

BOOT: Final = "00112233445566778899aabbccddeeff"
TO_BOOT: Final = "ffeeddccbbaa99887766554433221100"
IDS: Final = (np.array([5, 1 << 40], np.int64), np.array([-1], np.int64))
OF_TABLES: Final = np.array([129, 257, 0, 1, 9, 1, 2, 5, 6, 7, 4, 8], np.int64)
GOLDEN: Final = Path(__file__).with_name("golden_v4.json")
PEER_GOLDEN: Final = Path(__file__).with_name("golden_peer_v4.json")

Message: TypeAlias = tuple[Request | Reply | Event | PeerEnvelope, tuple[PageIds, ...]]
REQUESTS: Final = tuple(REQUEST_TYPES.values())
REPLIES: Final = replies_to(REQUESTS)
EVENTS: Final[tuple[type[Body], ...]] = get_args(EventBody)
PEERS: Final[tuple[type[Body], ...]] = get_args(PeerBody)


def samples(kind: str, types: Iterable[Any]) -> dict[str, Any]:
    """Return the values of a kind of lines, by their tags."""
    lines = Path(__file__).with_name("samples.txt").read_text().splitlines()
    decoder = msgspec.json.Decoder(Union[tuple(types)])  # noqa: UP007  of a tuple
    values = [decoder.decode(line.removeprefix(kind)) for line in lines if line.startswith(f"{kind} ")]
    return {str(one.__struct_config__.tag): one for one in values}


def enveloped(body: Any) -> Message:  # noqa: ANN401  any body
    """Return a whole message: the body in its envelope, and its page lists."""
    ids = tuple({2: IDS[0], 1: IDS[1], 12: OF_TABLES}[count] for count in body.page_counts())
    if isinstance(body, RequestBody):
        return Request(7, BOOT, b"0123456789abcdef", 30_000, 12, body), ids
    if isinstance(body, ReplyBody):
        return Reply(7, BOOT, body), ids
    if type(body) in EVENTS:
        return Event(2 + EVENTS.index(type(body)), BOOT, body), ids
    return PeerEnvelope("tcp://192.0.2.7:7801", BOOT, TO_BOOT, body), ids


BODIES: Final = samples("message", (*REQUESTS, *REPLIES, *EVENTS))
MESSAGES: Final = {name: enveloped(body) for name, body in BODIES.items()}
NEWER: Final = {
    "FINISHED for SETTLED, too": enveloped(replace(BODIES["FINISHED"], settled=True)),
    "FINISHED for MATCHED, too": enveloped(replace(BODIES["FINISHED"], matched=2)),
    "BATCHED of equal results": enveloped(replace(BODIES["BATCHED"], times=(2, 1))),
}
"""With fields that were added at the tail, and which the samples above leave out as an older side does."""

PEER_MESSAGES: Final = {name: enveloped(body) for name, body in samples("peer", PEERS).items()}
SESSION_FRAMES: Final = samples("session", (SessionOpen, MemoryFollows, *get_args(SessionFrame)))
SPECS: Final[dict[str, PoolSpec]] = samples("spec", get_args(PoolSpec))
"""A spec of every kind with every field. What they say is nonsense: it is their bytes that count."""

_error: ErrorReply = BODIES["ERROR"]
ERROR: Final = _error.error


def to_frames(message: Any, ids: tuple[PageIds, ...]) -> list[bytes]:  # noqa: ANN401  of clients or of daemons
    frames = encode_peer(message, ids) if isinstance(message, PeerEnvelope) else encode(message, ids)
    return [bytes(one) for one in frames]


def reader_of(message: object) -> Callable[[list[bytes]], Any]:
    readers: dict[type, Callable[[list[bytes]], Any]] = {Request: decode_request, PeerEnvelope: decode_peer}
    return readers.get(type(message), decode_from_daemon)


def as_hex() -> dict[str, list[str]]:
    """Return the frames of every sample of clients, in hexadecimal digits."""
    messages = {name: [one.hex() for one in to_frames(*message)] for name, message in (MESSAGES | NEWER).items()}
    frames = {f"session {name}": [pack(frame).hex()] for name, frame in SESSION_FRAMES.items()}
    return messages | frames | {f"spec {kind}": [msgspec.msgpack.encode(spec).hex()] for kind, spec in SPECS.items()}


def peers_as_hex() -> dict[str, list[str]]:
    return {name: [one.hex() for one in to_frames(*message)] for name, message in PEER_MESSAGES.items()}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(as_hex(), indent=1) + "\n")
    PEER_GOLDEN.write_text(json.dumps(peers_as_hex(), indent=1) + "\n")
