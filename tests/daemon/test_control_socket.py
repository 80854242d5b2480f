"""The control socket in a flood, with clients that choose their names, and at an engine's end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import psutil
import pytest
import zmq

from kvferry.clients import Client, MhaSpec
from kvferry.clients.calls import session_open
from kvferry.daemon.control.zmtp import GREETING, READY, encoded, frame
from kvferry.protocol.base import Body
from kvferry.protocol.codec import decode_from_daemon, encode
from kvferry.protocol.envelope import Reply, Request
from kvferry.protocol.pool_messages import Free
from kvferry.protocol.session_messages import Ping, Pong
from kvferry.protocol.settings import CONTROL_SOCKET, control_address
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.raw_engine import raw_engine

LIMIT: Final = 4096
PREFIX: Final = ("bash", "-c", f'ulimit -n {LIMIT} && exec "$0" "$@"')
SPEC: Final = MhaSpec(layers=1, tokens=16, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
REPLY_MS: Final = 20_000
CONNECTS_S: Final = 1.0
TRIES: Final = 5
COMMAND: Final = 4
FIRST_OF_LIBZMQ: Final = 0x6B8B4567
"""The routing id that libzmq makes up first, in every process."""

IDLE: Final = """
context = zmq.Context(io_threads=1)
context.set(zmq.MAX_SOCKETS, 4000)
held = [context.socket(zmq.DEALER) for _ in range(3000)]
for one in held:
    one.connect("ipc://" + sys.argv[1])
"""
FLOOD: Final = """
held = []
def connect():
    for _ in range(2000):
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].connect(sys.argv[1])
threads = [threading.Thread(target=connect) for _ in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Run a daemon that may open ``LIMIT`` descriptors."""
    with kit.daemon(prefix=PREFIX) as one:
        yield one


@contextlib.contextmanager
def another_user(daemon: Daemon, code: str) -> Iterator[None]:
    """Have another user connect to the control socket as this program does, and stay."""
    daemon.runtime_dir.parent.chmod(0o755)
    begin = "import os, resource, socket, sys, threading, zmq\n"
    begin += "resource.setrlimit(resource.RLIMIT_NOFILE, (17_000, 17_000))\nos.setuid(12345)\n"
    path = str(daemon.runtime_dir / CONTROL_SOCKET)
    command = [sys.executable, "-c", f"{begin}{code}\nprint()\nsys.stdin.read()", path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("code", [IDLE, FLOOD], ids=["3000 idle clients", "16000 connections at once"])
def test_another_user_keeps_no_engine_out(
    daemon: Daemon, client: Client, code: str, require: Callable[[object, str], None]
) -> None:
    require(os.geteuid() == 0, "root, to be another user")

    def connects_s() -> float:
        started = time.perf_counter()
        with Client.connect(daemon.runtime_dir) as newcomer:
            newcomer.ping()
        return time.perf_counter() - started

    with another_user(daemon, code):
        assert min(connects_s() for _ in range(TRIES)) < CONNECTS_S
        assert psutil.Process(daemon.process.pid).num_fds() < LIMIT // 4
        assert client.ping() > 0
    assert client.status().counters["connections.closed.for_others"] > 0


def ask(client: zmq.Socket[bytes], number: int) -> None:
    client.send_multipart(encode(Request(number, "", b"", 0, 0, Ping())))


def answer(client: zmq.Socket[bytes]) -> tuple[int, type[Body]]:
    assert client.poll(REPLY_MS)
    reply = decode_from_daemon(client.recv_multipart()).message
    assert isinstance(reply, Reply)
    return reply.message_id, type(reply.body)


def test_routing_ids_that_somebody_else_took_first(daemon: Daemon) -> None:
    with zmq.Context() as context, contextlib.ExitStack() as stack:

        def dealer(routing_id: bytes = b"") -> zmq.Socket[bytes]:
            one = stack.enter_context(context.socket(zmq.DEALER))
            one.linger = 0
            if routing_id:
                one.setsockopt(zmq.ROUTING_ID, routing_id)
            one.connect(control_address(daemon.runtime_dir))
            return one

        taken = [dealer(b"\0" + (FIRST_OF_LIBZMQ + number).to_bytes(4)) for number in range(64)]
        twice = [dealer(b"a name") for _ in range(2)]
        others = [*taken, *twice, *[dealer(number.to_bytes(8)) for number in range(1, 64)], *[dealer() for _ in taken]]
        for number, one in enumerate(others, 1):
            ask(one, number)
        assert [answer(one) for one in others] == [(number, Pong) for number in range(1, len(others) + 1)]


def test_what_an_engine_said_last_is_done_before_its_end(daemon: Daemon) -> None:
    instance = "an instance"
    with Client.connect(daemon.runtime_dir, name="rest", instance=instance) as rest:
        rest.create_pool("mine", SPEC).close()
        for _ in range(TRIES):
            ids = rest.allocate("mine", 4)
            opening = session_open("last", instance)
            with raw_engine(daemon.runtime_dir, opening=opening) as engine, control(daemon) as channel:
                opened = engine.channel.opened
                ping = Request(100, opened.boot_id, opened.secret, 0, 0, Ping())
                free = Request(101, opened.boot_id, opened.secret, 0, 0, Free(pool="mine", pages=len(ids)))
                channel.sendall(encoded(encode(ping)))
                assert b"PONG" in channel.recv(4096), "it is the session's connection from now on"
                daemon.process.send_signal(signal.SIGSTOP)  # so that it sees what is said and the end together
                try:
                    channel.sendall(encoded(encode(free, (np.asarray(ids),))))
                    engine.channel.close()
                finally:
                    daemon.process.send_signal(signal.SIGCONT)
            assert soon(lambda: [one.name for one in rest.status().sessions if one.name == "last"] == [])
            assert rest.status().pools[0].free == SPEC.tokens // SPEC.page_size
        rest.delete_pool("mine")


@contextlib.contextmanager
def control(daemon: Daemon) -> Iterator[socket.socket]:
    """Return a connection to the control socket that has shaken hands."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(os.fspath(daemon.runtime_dir / CONTROL_SOCKET))
        channel.sendall(GREETING + frame(COMMAND, b"\5READY\x0bSocket-Type\0\0\0\6DEALER"))
        said = b""
        while READY not in said:
            said += channel.recv(4096)
        yield channel
