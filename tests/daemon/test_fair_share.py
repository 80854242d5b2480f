"""An engine waits for little of unauthenticated connections, and of others' long lists, however much there is to do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvferry.daemon.control.control_socket import TURN_S, ControlSocket
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.zmtp import GREETING, ReceivedMessage, encoded, frame
from kvferry.daemon.process.access import Listener
from kvferry.protocol.limits import Limits

COMMAND = 4
OPENING = GREETING + frame(COMMAND, b"\5READY\x0bSocket-Type\0\0\0\6DEALER")
UNAUTHENTICATED = 6
MANY = 40
MOST = 20
WAIT_S = 20.0

pytestmark = pytest.mark.anyio


class Served:
    """A control socket whose messages take time by the word: ``long`` ones twice a turn, on a clock of its own."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handled: list[bytes] = []
        """What was done, in order: the words of the messages, connections that were let in, and turns of the loop."""
        self.engine = b""
        self._now_s = 0.0
        self._news = asyncio.Event()
        self._path = path
        self._clients: list[socket.socket] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self._now_s)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen()
        listening.setblocking(False)  # noqa: FBT003  socket's own signature
        self.loop = asyncio.get_running_loop()
        self.control = ControlSocket(
            Listener(path, listening), Limits(), Counters(), also="tcp://127.0.0.1:0", max_connections=MOST
        )
        self.control.start(self.loop, self._handle, self._spared)

    def connect(self, *, from_a_host: bool = False) -> socket.socket:
        """Return the socket of a client that has shaken hands, and has come by TCP or not."""
        if from_a_host:
            one = socket.create_connection(("127.0.0.1", int(self.control.endpoint.rpartition(":")[2])))
        else:
            one = socket.socket(socket.AF_UNIX)
            one.connect(str(self._path))
        self._clients.append(one)
        one.sendall(OPENING)
        return one

    def close(self) -> None:
        for one in self._clients:
            one.close()
        self.control.close()

    async def until(self, word: bytes, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.handled.count(word) < count:
                self._news.clear()
                await self._news.wait()

    def count_turns(self) -> None:
        self.handled.append(b"turn")
        self.loop.call_soon(self.count_turns)

    def most_a_turn(self, word: bytes) -> int:
        """Return how often a word occurs at most between two turns."""
        return max(part.split().count(word) for part in b" ".join(self.handled).split(b"turn"))

    def _spared(self) -> set[bytes]:
        """Take twice a turn, when somebody has to make room."""
        if len(self.control) >= MOST:
            self._now_s += 2 * TURN_S
            self.handled.append(b"let_in")
            self._news.set()
        return {self.engine}

    def _handle(self, message: ReceivedMessage) -> None:
        (word,) = message.frames
        if word == b"fails":
            raise MemoryError
        if word == b"engine":
            self.engine = message.identity
        self._now_s += 2 * TURN_S if word.endswith(b"long") else 0.0
        self.handled.append(word)
        self._news.set()


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    with contextlib.closing(Served(tmp_path / "control.sock", monkeypatch)) as one:
        yield one


async def test_an_engine_waits_for_at_most_a_turn_of_unauthenticated_connections(site: Served) -> None:
    engine, unauthenticated = site.connect(), [site.connect() for _ in range(UNAUTHENTICATED)]
    engine.sendall(encoded([b"engine"]))
    await site.until(b"engine", 1)
    for one in unauthenticated:
        one.sendall(encoded([b"long"]) * MANY)
    await site.until(b"long", 1)  # they are at it
    before = site.handled.count(b"long")
    engine.sendall(encoded([b"request"]))
    await site.until(b"request", 1)
    between = site.handled[: site.handled.index(b"request")].count(b"long") - before
    assert between <= 2, "one message a turn, of all unauthenticated connections together"
    await site.until(b"long", UNAUTHENTICATED * MANY)


async def test_heartbeats_give_unauthenticated_connections_no_turns_of_their_own(site: Served) -> None:
    unauthenticated = [site.connect() for _ in range(UNAUTHENTICATED)]
    site.count_turns()
    for ttl in range(100, 100 + MANY):
        for one in unauthenticated:
            one.sendall(frame(COMMAND, b"\4PING" + ttl.to_bytes(2)) + encoded([b"long"]) * 2)
        await site.until(b"long", 2 * UNAUTHENTICATED * (ttl - 99))
    assert site.most_a_turn(b"long") == 1


async def test_who_connects_again_and_again_takes_a_turn_as_well(site: Served) -> None:
    site.count_turns()
    for _ in range(2 * MOST):
        site.connect()
    await site.until(b"let_in", MOST)
    assert site.most_a_turn(b"let_in") == 1


async def test_a_failure_closes_its_connection_and_the_others_have_their_turns(site: Served) -> None:
    failed: list[object] = []
    site.loop.set_exception_handler(lambda _, context: failed.append(context.get("exception")))
    unauthenticated = [site.connect() for _ in range(UNAUTHENTICATED)]
    for one in unauthenticated:
        one.sendall(encoded([b"fails" if one is unauthenticated[0] else b"long"]) * 2)
    await site.until(b"long", 2 * (UNAUTHENTICATED - 1))
    assert [type(one) for one in failed] == [MemoryError]
    assert len(site.control) == UNAUTHENTICATED - 1


async def test_who_holds_little_pays_for_no_other_host(site: Served) -> None:
    site.control.kept.most = 10_000
    engine = site.connect()
    unauthenticated = [site.connect(from_a_host=True) for _ in range(UNAUTHENTICATED)]
    engine.sendall(encoded([b"engine"]) + encoded([bytes(5000)])[:4000])
    await site.until(b"engine", 1)
    for one in unauthenticated:
        one.sendall(encoded([b"unauthenticated"]) + encoded([bytes(5000)])[:2000])
    await site.until(b"unauthenticated", UNAUTHENTICATED)
    engine.sendall(encoded([bytes(5000)])[4000:] + encoded([b"lives"]))
    await site.until(b"lives", 1)
    assert len(site.control) < 1 + UNAUTHENTICATED


async def test_what_waits_for_its_turn_is_counted(site: Served) -> None:
    site.control.kept.most = 10_000
    unauthenticated = site.connect()
    unauthenticated.sendall(encoded([b"long"]) + encoded([b"long", bytes(20_000)]))
    with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012  once it is closed
        await site.until(b"long", 1)
        while True:
            unauthenticated.sendall(encoded([b"late"]))
            await asyncio.sleep(0)
    assert b"late" not in site.handled


async def test_what_was_to_leave_together_leaves_where_the_rest_finds_no_room(site: Served) -> None:
    engine = site.connect()
    engine.sendall(encoded([b"engine"]))
    await site.until(b"engine", 1)
    engine.setblocking(False)  # noqa: FBT003  socket's own signature
    site.control.max_queued = 1
    assert site.control.send(site.engine, [b"first"], more=True)
    assert not site.control.send(site.engine, [b"second"])
    assert encoded([b"first"]) in engine.recv(4096), "at once, behind the handshake"
    assert site.control.send(site.engine, [b"third"]), "there is room again"
