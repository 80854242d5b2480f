"""A fuzz target for everything that reads bytes from outside: ``python -m tests.fuzz.codec_target [ROUNDS [SEED]]``.

``take_one_input`` has the form that coverage-guided fuzzers call; without one, golden messages are damaged at random.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Final

from kvferry.clients.cli.json_form import object_from_json, request_from_fields
from kvferry.protocol.base import ErrorReply
from kvferry.protocol.codec import IncomingRequest, decode_from_daemon, decode_request, encode
from kvferry.protocol.envelope import REQUEST_TYPES, Reply
from kvferry.protocol.errors import KvferryError, MalformedError
from kvferry.protocol.peer_messages import decode_peer, encode_peer
from kvferry.protocol.session_stream import FrameSplitter, unpack_frame, unpack_open
from tests.protocol.samples import as_hex, peers_as_hex

SEPARATOR: Final = b"\x00--\x00"
INTERESTING: Final = (b"\x00", b"\x7f", b"\x80", b"\x90", b"\xc0", b"\xc1", b"\xdc", b"\xdf", b"\xff", b"\xff" * 8)
KINDS: Final = tuple(REQUEST_TYPES)


def take_one_input(data: bytes) -> None:
    """Read the bytes in every way there is; raises only where kvferry has a bug."""
    frames = data.split(SEPARATOR)
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


def _read_stream(ops: list[bytes]) -> None:
    splitter = FrameSplitter()
    for op in ops:
        for frame in splitter.feed(op):
            for unpack in (unpack_open, unpack_frame):
                try:
                    unpack(frame)
                except MalformedError:
                    continue


def inputs(rounds: int, seed: int) -> Iterator[bytes]:
    """Yield damaged golden messages, the same for the same seed."""
    source = random.Random(seed)  # noqa: S311  nothing secret
    samples = [*as_hex().values(), *peers_as_hex().values()]
    golden = [SEPARATOR.join(bytes.fromhex(frame) for frame in frames) for frames in samples]
    for _ in range(rounds):
        data = bytearray(source.choice(golden))
        for _ in range(source.randint(1, 6)):
            at = source.randint(0, len(data))
            cut = source.choice((0, 0, 1, 1, 4, 32))
            data[at : at + cut] = source.choice((source.choice(INTERESTING), source.randbytes(source.randint(0, 9))))
        yield bytes(data)


def main(arguments: list[str]) -> int:
    """Run; print what to keep as a regression test where something breaks."""
    rounds, seed = (*[int(one) for one in arguments], *(100_000, 0)[len(arguments) :])
    for data in inputs(rounds, seed):
        try:
            take_one_input(data)
        except Exception:
            sys.stderr.write(f"breaks: bytes.fromhex({data.hex()!r})\n")
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
