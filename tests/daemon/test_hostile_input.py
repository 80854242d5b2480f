"""Hostile bytes and floods are ordinary: after each of these the daemon answers as before."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvferry.clients import Client, MhaSpec
from kvferry.clients.calls import session_open
from kvferry.daemon.control.zmtp import GREETING, READY, encoded, frame
from kvferry.protocol.base import ErrorReply
from kvferry.protocol.codec import decode_from_daemon, encode
from kvferry.protocol.envelope import Reply, Request
from kvferry.protocol.pool_messages import Free
from kvferry.protocol.session_messages import Ping, Pong
from kvferry.protocol.session_stream import pack
from kvferry.protocol.settings import CONTROL_SOCKET, SESSION_SOCKET, control_address
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user, soon
from tests.kit.devices import DEVICE
from tests.kit.faults import connected, reset, silent
from tests.kit.raw_engine import raw_engine

REPLY_MS = 10_000
MANY = 20
MOST_UNOPENED = 64
MUCH_MEMORY = 256 << 20
LIMIT: Final = 4096
PREFIX: Final = ("bash", "-c", f'ulimit -n {LIMIT} && exec "$0" "$@"')
SPEC: Final = MhaSpec(layers=1, tokens=16, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
OPENING: Final = GREETING + frame(4, b"\5READY\x0bSocket-Type\0\0\0\6DEALER")
FIRST_OF_LIBZMQ: Final = 0x6B8B4567
"""The routing id that libzmq makes up first, in every process."""
FLOOD: Final = """
import os, resource, socket, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (17_000, 17_000))
os.setuid(12345)
held = []
def connect():
    for _ in range(2000):
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].connect(sys.argv[1])
threads = [threading.Thread(target=connect) for _ in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
print()
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Run a daemon that may open ``LIMIT`` descriptors."""
    with kit.daemon(prefix=PREFIX) as one:
        yield one


@pytest.fixture
def dealer(daemon: Daemon) -> Iterator[zmq.Socket[bytes]]:
    """Return a bare socket to the daemon, without the client library's good manners."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as bare:
        bare.linger = 0
        bare.rcvtimeo = REPLY_MS
        bare.connect(control_address(daemon.runtime_dir))
        yield bare


@pytest.fixture(autouse=True)
def _still_well(daemon: Daemon) -> Iterator[None]:
    """Check after each test that the daemon answers a fresh client and has not grown."""
    process = psutil.Process(daemon.process.pid)
    before = process.memory_info().rss
    yield
    with Client.connect(daemon.runtime_dir, session=True) as client:
        client.ping()
    assert process.memory_info().rss - before < MUCH_MEMORY
    assert "Traceback" not in daemon.log.read_text()


def counters(daemon: Daemon) -> dict[str, int]:
    """Return the daemon's counters as they are now: those without a session may be told them a little late."""
    with Client.connect(daemon.runtime_dir) as client:
        return client.status().counters


def request(body: object, *, message_id: int = 7) -> bytes:
    return msgspec.msgpack.encode([message_id, "", b"", 0, 0, body])


def code_of(frames: list[bytes]) -> tuple[int, str]:
    reply = msgspec.msgpack.decode(frames[0], type=Reply)
    assert isinstance(reply.body, ErrorReply)
    return reply.message_id, reply.body.error.code


PING = {"type": "PING"}
REFUSED = {
    "deeply nested": ([b"\x91" * 100_000], 0, "MALFORMED"),
    "negative id": ([request(PING, message_id=-1)], 0, "MALFORMED"),
    "unknown type": ([request({"type": "LAUNCH"})], 7, "UNKNOWN_TYPE"),
    "no type": ([request({})], 7, "MALFORMED"),
    "short id frame": ([request({"type": "FREE", "pool": "p", "pages": 2}), b"123"], 7, "MALFORMED"),
    "5000 frames": ([request(PING), *[b"x"] * 5000], 7, "TOO_LARGE"),
    "no session": ([request({"type": "ALLOCATE", "pool": "p", "count": 1})], 7, "NO_SESSION"),
}


@pytest.mark.parametrize(("frames", "number", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_is_refused_by_number_where_that_can_be_read(
    dealer: zmq.Socket[bytes], frames: list[bytes], number: int, code: str
) -> None:
    dealer.send_multipart(frames)
    assert code_of(dealer.recv_multipart()) == (number, code)


@DEVICE.examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=300), min_size=1, max_size=6))
def test_any_bytes_get_one_answer(dealer: zmq.Socket[bytes], frames: list[bytes]) -> None:
    dealer.send_multipart(frames)
    assert code_of(dealer.recv_multipart())[1] in {"MALFORMED", "INVALID_FIELD", "UNKNOWN_TYPE"}


def test_a_huge_message_closes_its_connection_only(dealer: zmq.Socket[bytes]) -> None:
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.send(bytes(100 << 20))
    assert monitor.poll(REPLY_MS), "the daemon reads 100 MiB"
    monitor.recv_multipart()
    dealer.disable_monitor()
    monitor.close()


def test_a_flood_without_reading_replies(daemon: Daemon, dealer: zmq.Socket[bytes]) -> None:
    frame = bytes(encode(Request(1, "", b"", 0, 0, Ping()))[0])
    dealer.setsockopt(zmq.SNDTIMEO, REPLY_MS)
    for _ in range(20_000):
        dealer.send(frame)
    with Client.connect(daemon.runtime_dir) as client:  # has its turn while the flood goes on
        client.ping()


@pytest.mark.parametrize("name", [CONTROL_SOCKET, SESSION_SOCKET])
def test_raw_bytes_at_a_socket(daemon: Daemon, name: str) -> None:
    for junk in (b"", b"\xff" * 9, os.urandom(5000), b"\x00" * 64, b"\xff\xff\xff\xff" + b"x" * 100):
        with connected(daemon.runtime_dir / name) as channel:
            channel.sendall(junk)
            channel.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while channel.recv(4096):  # until the daemon hangs up
                    pass


def test_an_engine_among_many_that_say_nothing_has_its_session(daemon: Daemon) -> None:
    log_lines = daemon.log.read_text().count("session refused")
    refused = counters(daemon).get("sessions.refused", 0)
    path = daemon.runtime_dir / SESSION_SOCKET
    with contextlib.ExitStack() as stack:
        with daemon.stopped():  # so that all of them wait when it goes on
            engine = stack.enter_context(connected(path))
            engine.sendall(pack(session_open("patient")))
            stack.enter_context(silent(path, 4 * MOST_UNOPENED))
        assert b"OPENED" in engine.recv(4096)
        assert soon(lambda: counters(daemon)["sessions.refused"] - refused >= 3 * MOST_UNOPENED)
    assert daemon.log.read_text().count("session refused") - log_lines < MOST_UNOPENED


def test_connections_that_are_reset_leave_nothing_open(daemon: Daemon) -> None:
    process = psutil.Process(daemon.process.pid)
    counters(daemon)
    before = process.num_fds()
    with silent(daemon.runtime_dir / CONTROL_SOCKET, MANY) as channels:
        for channel in channels:
            channel.sendall(OPENING)
            assert channel.recv(1), "an answer, the rest of which stays unread"
        reset(daemon.process.pid, channels)  # after half a frame's head: nothing to answer
        assert soon(lambda: process.num_fds() < before + MANY // 2)


def test_a_session_whose_socket_is_reset_ends(daemon: Daemon, client: Client) -> None:
    with connected(daemon.runtime_dir / SESSION_SOCKET) as channel:
        channel.sendall(pack(session_open("reset")))
        assert channel.recv(1), "an answer, the rest of which stays unread"
        assert any(one.name == "reset" for one in client.status().sessions)
        reset(daemon.process.pid, [channel])
        assert soon(lambda: all(one.name != "reset" for one in client.status().sessions))


def test_who_has_most_connections_without_a_session_makes_room(daemon: Daemon) -> None:
    code = (
        "import socket\n"
        "def one():\n    it = socket.socket(socket.AF_UNIX)\n"
        "    it.connect(sys.argv[1] + '/session.sock')\n    return it\n"
        f"held = [one() for _ in range({4 * MOST_UNOPENED})]\n"
        "print(Client.connect(sys.argv[1]).ping() > 0)"
    )
    with connected(daemon.runtime_dir / SESSION_SOCKET) as slow:
        assert said_by_another_user(daemon, code) == "True"
        slow.sendall(pack(session_open("slow")))
        assert b"OPENED" in slow.recv(4096)


def test_bytes_after_the_opening_end_the_session(daemon: Daemon) -> None:
    with raw_engine(daemon.runtime_dir) as engine:
        channel = engine.channel.socket
        channel.sendall(b"more")
        channel.setblocking(True)  # noqa: FBT003  socket's own signature
        channel.settimeout(REPLY_MS / 1000)
        assert channel.recv(10) == b""


def test_another_users_flood_of_connections_keeps_no_engine_out(
    daemon: Daemon, client: Client, require: Callable[[object, str], None]
) -> None:
    require(os.geteuid() == 0, "root, to be another user")

    def connects_s() -> float:
        started = time.perf_counter()
        with Client.connect(daemon.runtime_dir) as newcomer:
            newcomer.ping()
        return time.perf_counter() - started

    daemon.runtime_dir.parent.chmod(0o755)
    command = [sys.executable, "-c", FLOOD, str(daemon.runtime_dir / CONTROL_SOCKET)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"\n"
            assert min(connects_s() for _ in range(5)) < 1
            assert psutil.Process(daemon.process.pid).num_fds() < LIMIT // 4
            assert client.ping() > 0
        finally:
            process.kill()
    assert client.status().counters["connections.closed.for_others"] > 0


def test_routing_ids_that_somebody_else_took_first(daemon: Daemon) -> None:
    with zmq.Context() as context, contextlib.ExitStack() as stack:

        def dealer(routing_id: bytes = b"") -> zmq.Socket[bytes]:
            one = stack.enter_context(context.socket(zmq.DEALER))
            one.linger, one.rcvtimeo = 0, REPLY_MS
            if routing_id:
                one.setsockopt(zmq.ROUTING_ID, routing_id)
            one.connect(control_address(daemon.runtime_dir))
            return one

        taken = [dealer(b"\0" + (FIRST_OF_LIBZMQ + number).to_bytes(4)) for number in range(64)]
        twice = [dealer(b"a name") for _ in range(2)]
        others = [*taken, *twice, *[dealer(number.to_bytes(8)) for number in range(1, 64)], *[dealer() for _ in taken]]
        for number, one in enumerate(others, 1):
            one.send_multipart(encode(Request(number, "", b"", 0, 0, Ping())))
        for number, one in enumerate(others, 1):
            reply = decode_from_daemon(one.recv_multipart()).message
            assert isinstance(reply, Reply)
            assert (reply.message_id, type(reply.body)) == (number, Pong)


def test_what_an_engine_said_last_is_done_before_its_end(daemon: Daemon) -> None:
    instance = "an instance"
    with Client.connect(daemon.runtime_dir, name="rest", instance=instance) as rest:
        rest.create_pool("mine", SPEC).close()
        for _ in range(5):
            ids = rest.allocate("mine", 4)
            opening = session_open("last", instance)
            with (
                raw_engine(daemon.runtime_dir, opening=opening) as engine,
                connected(daemon.runtime_dir / CONTROL_SOCKET) as channel,
            ):
                channel.sendall(OPENING)
                said = b""
                while READY not in said:
                    said += channel.recv(4096)
                opened = engine.channel.opened
                ping = Request(100, opened.boot_id, opened.secret, 0, 0, Ping())
                free = Request(101, opened.boot_id, opened.secret, 0, 0, Free(pool="mine", pages=len(ids)))
                channel.sendall(encoded(encode(ping)))
                assert b"PONG" in channel.recv(4096), "it is the session's connection from now on"
                with daemon.stopped():  # so that it sees what is said and the end together
                    channel.sendall(encoded(encode(free, (np.asarray(ids),))))
                    engine.channel.close()
            assert soon(lambda: [one.name for one in rest.status().sessions if one.name == "last"] == [])
            assert rest.status().pools[0].free == SPEC.tokens // SPEC.page_size
        rest.delete_pool("mine")
