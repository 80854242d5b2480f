"""The daemon's ping of itself: against a scripted socket, and as a service manager hears of it from a real daemon."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvferry.clients import Client, MhaSpec
from kvferry.daemon.control import self_ping
from kvferry.daemon.control.self_ping import SelfPing
from kvferry.protocol.base import Busy, ErrorReply, ReplyBody
from kvferry.protocol.codec import encode
from kvferry.protocol.envelope import Reply
from kvferry.protocol.errors import DaemonLostError, StaleBootError
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.session_messages import Pong
from tests.kit.daemons import USERS_COMMAND
from tests.kit.started import Started, started

OURS = new_boot_id()
PATIENCE_S = 20.0
EVERY_S = 0.02


class ScriptedSocket:
    """What listens under the path of the control socket."""

    def __init__(self, router: zmq.asyncio.Socket, path: Path) -> None:
        self.path = path
        self._router = router
        self._asked: tuple[bytes, int] = (b"", 0)

    async def asked(self) -> None:
        """Wait for the next ping."""
        async with asyncio.timeout(PATIENCE_S):
            identity, frame = await self._router.recv_multipart()
        self._asked = identity, msgspec.msgpack.decode(frame)[0]

    async def answer(self, body: ReplyBody) -> None:
        """Answer it."""
        identity, number = self._asked
        await self._router.send_multipart([identity, *encode(Reply(number, OURS, body))])


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedSocket]:
    """Return a socket that answers as the test says."""
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder, zmq.asyncio.Context() as context:
        path = Path(folder) / "control.sock"
        with context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{path}")
            yield ScriptedSocket(router, path)


@pytest.mark.anyio
async def test_an_answer_is_reported_and_silence_is_not(scripted: ScriptedSocket) -> None:
    reports: asyncio.Queue[None] = asyncio.Queue()
    ping = SelfPing(scripted.path, OURS)
    ping.watch(EVERY_S, lambda: reports.put_nowait(None))
    for _ in range(3):
        await scripted.asked()  # asked again, since there was no answer in time
    assert reports.empty()
    await scripted.answer(ErrorReply(error=StaleBootError("another daemon's").info()))
    await scripted.asked()
    assert reports.empty(), "it is another daemon's word"
    for body in (Pong(), Busy(retry_after_ms=50, detail="much to do"), Pong()):
        await scripted.answer(body)
        async with asyncio.timeout(PATIENCE_S):
            await reports.get()
        await scripted.asked()
    await ping.close()


@pytest.mark.anyio
async def test_a_daemon_that_does_not_answer_itself_is_not_ready(
    scripted: ScriptedSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_ping, "ANSWER_S", EVERY_S)
    ping = SelfPing(scripted.path, OURS)
    with pytest.raises(DaemonLostError, match="does not answer at"):
        await ping.check()
    await ping.close()


class Watched(NamedTuple):
    """A daemon whose service manager is the test."""

    runtime_dir: Path
    process: Started


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Watched, socket.socket]]:
    """Return a daemon with a watchdog of 0.1 s, which nobody enforces, and what it says to its service manager."""
    log = tmp_path / "daemon.log"
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        log.open("wb") as output,
    ):
        manager.settimeout(PATIENCE_S)
        manager.bind(f"{folder}/notify")
        run = Path(folder) / "run"
        environment = {"NOTIFY_SOCKET": f"{folder}/notify", "WATCHDOG_USEC": "100000"}
        command = [*USERS_COMMAND, "--runtime-dir", os.fspath(run)]
        process = started(command, environment=environment, stderr=output.fileno(), pipes=False)
        while not manager.recv(4096).startswith(b"READY=1"):
            assert process.poll() is None
        try:
            yield Watched(run, process), manager
        finally:
            manager.setblocking(False)  # noqa: FBT003  socket's own signature
            heard(manager)  # its queue is short, and a full one would hold up the daemon's last words
            process.terminate()
        assert process.wait(PATIENCE_S) == 0, log.read_text()


def heard(manager: socket.socket) -> list[bytes]:
    """Return what has been said by now; the socket does not block."""
    said = []
    while True:
        try:
            said.append(manager.recv(4096))
        except BlockingIOError:
            return said


def test_the_loop_is_free_while_a_large_pool_is_made_and_deleted(
    watched: tuple[Watched, socket.socket],
) -> None:
    daemon, manager = watched
    assert manager.recv(4096) == b"WATCHDOG=1"
    spec = MhaSpec(layers=8, tokens=32768, page_size=128, kv_heads=8, head_dim=64, dtype="float16")
    with Client.connect(daemon.runtime_dir) as client:
        manager.setblocking(False)  # noqa: FBT003  socket's own signature
        heard(manager)
        pool = client.create_pool("large", spec)
        said = heard(manager)
        assert pool.manifest.region_bytes >= 1 << 29
        assert len(said) > 2, "a watchdog of the time that this takes would end the daemon"
