"""Messages of engines, of the daemon, of other daemons and of the session socket, each read by itself."""

from __future__ import annotations

from typing import Final

from kvferry.clients.cli.json_form import object_from_json, request_from_fields
from kvferry.protocol.base import ErrorReply
from kvferry.protocol.codec import IncomingRequest, decode_from_daemon, decode_request, encode
from kvferry.protocol.envelope import REQUEST_TYPES, Reply
from kvferry.protocol.errors import KvferryError, MalformedError
from kvferry.protocol.peer_messages import decode_peer, encode_peer
from kvferry.protocol.session_stream import FrameSplitter, unpack_frame, unpack_open
from tests.fuzz.inputs import frames_of, joined
from tests.protocol.samples import as_hex, peers_as_hex

ROUNDS: Final = 10_000
KINDS: Final = tuple(REQUEST_TYPES)


def seeds() -> list[bytes]:
    """Return the golden messages."""
    samples = [*as_hex().values(), *peers_as_hex().values()]
    return [joined([bytes.fromhex(frame) for frame in frames]) for frames in samples]


def take_one_input(data: bytes) -> None:
    """Read the frames in every way there is; what was read is written again, and read as the same."""
    frames = frames_of(data)
    incoming = decode_request(frames)
    if isinstance(incoming, IncomingRequest):
        again = decode_request([bytes(one) for one in encode(incoming.request, incoming.ids)])
        assert isinstance(again, IncomingRequest)
        assert again.request == incoming.request
    else:
        encode(Reply(incoming.message_id, "", ErrorReply(error=incoming.error.info())))
    for read in (decode_from_daemon, _read_peer, _read_stream):
        try:
            read(frames)
        except MalformedError:
            continue
    try:
        request_from_fields(KINDS[len(data) % len(KINDS)], object_from_json(data))
    except KvferryError:
        return


def _read_peer(frames: list[bytes]) -> None:
    incoming = decode_peer(frames)
    again = decode_peer([bytes(one) for one in encode_peer(*incoming)])
    assert again.envelope == incoming.envelope


def _read_stream(parts: list[bytes]) -> None:
    splitter = FrameSplitter()
    for part in parts:
        for frame in splitter.feed(part):
            for unpack in (unpack_open, unpack_frame):
                try:
                    unpack(frame)
                except MalformedError:
                    continue
