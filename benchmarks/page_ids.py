"""Page ids on the wire: a SEND of 8192 pages built into frames, and parsed, against the ids as a msgpack list."""

from __future__ import annotations

import msgspec
import numpy as np

from benchmarks.measure import MICROSECONDS, Effort, Row, Target, compare, microseconds
from kvferry.clients.operations import pages, send_body
from kvferry.daemon.memory import keep_freed_memory
from kvferry.protocol.codec import IncomingRequest, decode_request, encode
from kvferry.protocol.envelope import Request
from kvferry.protocol.ids import new_boot_id, new_request_id, new_secret

PAGES = 8192
LIST = "msgspec msgpack of the same message with the ids as a list of int"


class ListMessage(msgspec.Struct, frozen=True):
    """The peer's message: the ids inside."""

    request_id: str
    pool: str
    ids: list[int]


def measure(effort: Effort) -> list[Row]:
    """Measure building and parsing one message."""
    keep_freed_memory()
    rounds, repeats = effort.pick(15, 2), effort.pick(200, 2)
    ids = np.random.default_rng(0).permutation(PAGES * 4)[:PAGES].astype(np.int64)
    listed = pages(ids)
    body = send_body("prefill", new_request_id(), [listed], last=True, destinations=1, first_token=7, payload=b"")
    request = Request(1, new_boot_id(), new_secret(), 1000, 0, body)
    received = [bytes(frame) for frame in encode(request, [ids])]
    assert isinstance(decode_request(received), IncomingRequest)

    message = ListMessage(body.request_id, body.pool, ids.tolist())
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ListMessage)
    packed = encoder.encode(message)
    peer_build = microseconds(lambda: encoder.encode(message), repeats)
    return [
        compare(
            "page_ids/build",
            MICROSECONDS,
            ours=microseconds(lambda: encode(request, [ids]), repeats),
            peer=peer_build,
            peer_is=LIST,
            rounds=rounds,
            target=Target(20, "ours"),
            note="a SEND of 8192 pages to frames; the bytes are copied once more, into libzmq, when they are sent",
        ),
        compare(
            "page_ids/parse",
            MICROSECONDS,
            ours=microseconds(lambda: decode_request(received), repeats),
            peer=microseconds(lambda: decoder.decode(packed), repeats),
            peer_is=LIST,
            rounds=rounds,
            target=Target(20, "ours"),
            note="the same frames to a checked request with the ids as an array",
        ),
        compare(
            "page_ids/build_from_list",
            MICROSECONDS,
            ours=microseconds(lambda: encode(request, [pages(message.ids).ids]), repeats),
            peer=peer_build,
            peer_is=LIST,
            rounds=rounds,
            note="for engines that keep page ids as a list of int: the list must become an array first",
        ),
    ]
