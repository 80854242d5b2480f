"""What a message costs beyond pyzmq: one round trip, and many in flight, against the bare echo server."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from benchmarks.measure import MICROSECONDS, THOUSANDS_A_SECOND, Contender, Effort, Row, Target, compare
from benchmarks.processes import running_daemon, running_echo_server
from kvferry.clients import Client, MhaSpec, calls
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.base import Busy, ErrorReply, RequestBody
from kvferry.protocol.codec import Frames, decode_from_daemon, encode
from kvferry.protocol.envelope import Request
from kvferry.protocol.ids import BootId
from kvferry.protocol.pool_messages import Allocate, Free
from kvferry.protocol.session_messages import Pong
from kvferry.protocol.settings import control_address

MESSAGE_BYTES = 200
IN_FLIGHT = 64
POOL = "bench"
ECHO = "bare pyzmq echo: ROUTER on uvloop, FD drain, nothing decoded"
DealerSocket = zmq.Socket[bytes]
SEND_MORE = int(zmq.SNDMORE)  # a plain integer: pyzmq's enums cost more than the call
MakeRequests = Callable[[int], Sequence[Frames]]
"""Returns so many requests, each as its frames."""
IsRight = Callable[[list[bytes]], bool]
"""Judges the frames of a reply."""


def round_trip(effort: Effort) -> list[Row]:
    """Measure the median of single round trips."""
    rounds, pings = effort.pick(15, 2), effort.pick(2000, 20)
    with (
        running_daemon() as runtime_dir,
        running_echo_server() as echo,
        Client.connect(runtime_dir, name="bench") as client,
        contextlib.closing(SessionChannel.open(runtime_dir, calls.session_open("bench-raw"))) as channel,
        dealer(control_address(runtime_dir)) as raw,
        dealer(echo) as bare,
    ):
        peer = median_round_trip(bare, [bytes(MESSAGE_BYTES)], pings)
        requests = [ping_frame(channel, number) for number in range(1, 65)]
        check_reply(raw, requests[0])
        row = partial(compare, unit=MICROSECONDS, peer=peer, peer_is=ECHO, rounds=rounds, target=Target(1.3))
        return [
            row(
                "round_trip",
                ours=lambda: statistics.median(client.ping() for _ in range(pings)) * 1e6,
                note="Client.ping with a session: our client and our daemon; the peer's client is a bare DEALER",
            ),
            row(
                "round_trip/daemon",
                ours=median_round_trip(raw, requests, pings),
                note="the bare DEALER on both sides, with PINGs of a session encoded before: the daemon alone",
            ),
        ]


def pipelined(effort: Effort) -> list[Row]:
    """Measure requests a second with many in flight."""
    rounds, messages = effort.pick(15, 2), effort.pick(20_000, 200)
    with (
        running_daemon() as runtime_dir,
        running_echo_server() as echo,
        Client.connect(runtime_dir, name="bench") as client,
        contextlib.closing(SessionChannel.open(runtime_dir, calls.session_open("bench-raw"))) as channel,
        dealer(control_address(runtime_dir)) as raw,
        dealer(echo) as bare,
    ):
        client.create_pool(
            POOL, MhaSpec(layers=1, tokens=128, page_size=1, kv_heads=1, head_dim=1, dtype="int8")
        ).close()
        pings = [ping_frame(channel, number) for number in range(1, 1025)]
        check_reply(raw, pings[0])
        peer = throughput(bare, endlessly([bytes(MESSAGE_BYTES)]), is_echo, messages)
        row = partial(compare, unit=THOUSANDS_A_SECOND, peer=peer, peer_is=ECHO, rounds=rounds)
        return [
            row(
                "pipelined",
                ours=throughput(raw, endlessly(pings), is_success, messages),
                target=Target(0.6),
                note=f"{IN_FLIGHT} PINGs of a session in flight, every check on; the same bare DEALER on both sides",
            ),
            row(
                "pipelined/allocate_and_free",
                ours=throughput(raw, allocations(channel), is_success, messages),
                note="the same with work: ALLOCATE and FREE of a page in turns, each with its reply kept for a retry",
            ),
        ]


@contextlib.contextmanager
def dealer(address: str) -> Iterator[DealerSocket]:
    """Connect a bare DEALER that blocks."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        yield socket


def ping_frame(channel: SessionChannel, number: int) -> bytes:
    """Return a PING of a session, filled up to the size of the peer's message by a field of a newer protocol."""
    body = {"type": "PING", "filler": ""}
    request = (number, channel.opened.boot_id, channel.opened.secret, 0, 0, body)
    short = len(msgspec.msgpack.encode(request))
    body["filler"] = "." * (MESSAGE_BYTES - short - 1)  # a string of 32 to 255 bytes has one more byte of length
    return msgspec.msgpack.encode(request)


def check_reply(socket: DealerSocket, request: bytes) -> None:
    """Check that the daemon takes the request for a PING."""
    socket.send(request)
    reply = decode_from_daemon(socket.recv_multipart()).message
    assert isinstance(reply.body, Pong), reply


def endlessly(requests: Sequence[bytes]) -> MakeRequests:
    """Return a source that repeats these requests of one frame."""
    return lambda count: [[request] for request in itertools.islice(itertools.cycle(requests), count)]


def allocations(channel: SessionChannel) -> MakeRequests:
    """Return a source of new requests that take page 1 and give it back, in turns."""
    numbers = itertools.count(2000)  # not those of the PINGs
    boot_id, secret = BootId(channel.opened.boot_id), channel.opened.secret
    page = np.ones(1, np.int64)

    def make(count: int) -> Sequence[Frames]:
        turns: list[tuple[RequestBody, list[npt.NDArray[np.int64]]]] = [
            (Allocate(pool=POOL, count=1), []),
            (Free(pool=POOL, pages=1), [page]),
        ]
        return [
            encode(Request(next(numbers), boot_id, secret, 0, 0, body), ids)
            for body, ids in itertools.islice(itertools.cycle(turns), count)
        ]

    return make


def median_round_trip(socket: DealerSocket, requests: Sequence[bytes], count: int) -> Contender:
    """Return a contender that asks and waits ``count`` times, and reports the median in microseconds."""

    def measure() -> float:
        times = []
        for request in itertools.islice(itertools.cycle(requests), count):
            started = time.perf_counter()
            socket.send(request)
            socket.recv()
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6

    return measure


def throughput(socket: DealerSocket, make_requests: MakeRequests, is_right: IsRight, count: int) -> Contender:
    """Return a contender that keeps ``IN_FLIGHT`` requests under way, and reports thousands a second."""

    def send(frames: Frames) -> None:
        for frame in frames[:-1]:
            socket.send(frame, SEND_MORE)
        socket.send(frames[-1])

    def receive() -> None:
        while socket.recv(copy=False).more:
            pass

    def measure() -> float:
        waiting = iter(make_requests(count))
        started = time.perf_counter()
        for frames in itertools.islice(waiting, IN_FLIGHT):
            send(frames)
        for frames in waiting:
            receive()
            send(frames)
        for _ in range(IN_FLIGHT - 1):
            receive()
        last = socket.recv_multipart()
        elapsed_s = time.perf_counter() - started
        assert is_right(last), last
        return count / elapsed_s / 1e3

    return measure


def is_echo(frames: list[bytes]) -> bool:
    """Return whether these frames are the peer's reply."""
    return [len(frame) for frame in frames] == [MESSAGE_BYTES]


def is_success(frames: list[bytes]) -> bool:
    """Return whether these frames are a reply of ours that refuses nothing."""
    return not isinstance(decode_from_daemon(frames).message.body, ErrorReply | Busy)
