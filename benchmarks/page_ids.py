"""Page ids on the wire: a SEND of 8192 pages to frames and back, against the ids as a msgpack list and SGLang's way."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np

from benchmarks.measure import MICROSECONDS, Effort, Row, Target, compare, microseconds
from benchmarks.peers import sglang
from benchmarks.peers.sglang import SGLang
from kvferry.clients.calls import page_lists, pages
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.protocol.codec import IncomingRequest, PageIds, decode_request, encode
from kvferry.protocol.envelope import Request
from kvferry.protocol.ids import new_boot_id, new_request_id, new_secret
from kvferry.protocol.transfer_messages import Send

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
    heads, _ = page_lists([listed])
    body = Send(request_id=new_request_id(), pool="prefill", lists=heads, first_token=7)
    request = Request(1, new_boot_id(), new_secret(), 1000, 0, body)
    received = [bytes(frame) for frame in encode(request, [ids])]
    assert isinstance(decode_request(received), IncomingRequest)

    message = ListMessage(body.request_id, body.pool, ids.tolist())
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ListMessage)
    packed = encoder.encode(message)
    peer_build = microseconds(lambda: encoder.encode(message), repeats)
    row = partial(compare, unit=MICROSECONDS, peer_is=LIST, rounds=rounds)
    rows = [
        row(
            "page_ids/build",
            ours=microseconds(lambda: encode(request, [ids]), repeats),
            peer=peer_build,
            target=Target(20, "ours"),
            note="a SEND of 8192 pages to frames; the bytes are copied once more, into libzmq, when they are sent",
        ),
        row(
            "page_ids/parse",
            ours=microseconds(lambda: decode_request(received), repeats),
            peer=microseconds(lambda: decoder.decode(packed), repeats),
            target=Target(20, "ours"),
            note="the same frames to a checked request with the ids as an array",
        ),
        row(
            "page_ids/build_from_list",
            ours=microseconds(lambda: encode(request, [pages(message.ids).ids]), repeats),
            peer=peer_build,
            note="for engines that keep page ids as a list of int: the list must become an array first",
        ),
    ]
    if (found := sglang.find()) is not None:
        rows += against_sglang(found, request, ids, effort)
    return rows


def against_sglang(peer: SGLang, request: Request, ids: PageIds, effort: Effort) -> list[Row]:
    """Compare with the functions that pack and unpack SGLang's lists of state indices; its main list goes as bytes."""
    rounds, repeats = effort.pick(15, 2), effort.pick(200, 2)
    indices, packed = [ids.astype(np.int32)], peer.pack([ids.tolist()], "i")
    received = [bytes(frame) for frame in encode(request, [ids])]
    decoded = decode_request(received)
    assert isinstance(decoded, IncomingRequest)
    assert [one.tolist() for one in decoded.ids] == peer.unpack(packed, "i") == [ids.tolist()]
    assert peer.pack(indices, "i") == packed
    row = partial(compare, unit=MICROSECONDS, rounds=rounds)
    where = "what SGLang sends state indices (sliding windows, indexers) with; its main list goes as int32 bytes"
    return [
        row(
            "page_ids/build_against_sglang",
            ours=microseconds(lambda: encode(request, [ids]), repeats),
            peer=microseconds(lambda: peer.pack(indices, "i"), effort.pick(20, 2)),
            peer_is=f"SGLang {peer.version}: pack_int_lists of one array",
            note=f"{len(ids)} ids, ours with the whole request around them; {where}",
        ),
        row(
            "page_ids/parse_against_sglang",
            ours=microseconds(lambda: decode_request(received), repeats),
            peer=microseconds(lambda: peer.unpack(packed, "i"), effort.pick(20, 2)),
            peer_is=f"SGLang {peer.version}: unpack_int_lists",
            note=f"{len(ids)} ids, ours to a checked request with an array, theirs to a list; {where}",
        ),
    ]
