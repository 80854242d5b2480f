"""The daemon's ping of itself: against a scripted socket, and as a service manager hears of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvferry.clients import AsyncClient, MhaSpec
from kvferry.daemon.control import self_ping
from kvferry.daemon.control.self_ping import SelfPing
from kvferry.daemon.daemon import Tuning
from kvferry.protocol.base import Busy, ErrorReply, ReplyBody
from kvferry.protocol.codec import encode
from kvferry.protocol.envelope import Reply
from kvferry.protocol.errors import DaemonLostError, StaleBootError
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.session_messages import Pong
from tests.kit.in_process import serving

OURS = new_boot_id()
PATIENCE_S = 20.0
EVERY_S = 0.2


class ScriptedSocket:
    """What listens under the path of the control socket."""

    def __init__(self, router: zmq.asyncio.Socket, path: Path) -> None:
        self.path = path
        self._router = router
        self._asked: tuple[bytes, int] = (b"", 0)

    async def asked(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            identity, frame = await self._router.recv_multipart()
        self._asked = identity, msgspec.msgpack.decode(frame)[0]

    async def answer(self, body: ReplyBody) -> None:
        identity, number = self._asked
        await self._router.send_multipart([identity, *encode(Reply(number, OURS, body))])


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedSocket]:
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder, zmq.asyncio.Context() as context:
        path = Path(folder) / "control.sock"
        with context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{path}")
            yield ScriptedSocket(router, path)


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let a whole daemon block where it starts and ends."""


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


@pytest.mark.anyio
async def test_the_loop_is_free_while_a_large_pool_is_made_and_deleted() -> None:
    spec = MhaSpec(layers=8, tokens=32768, page_size=128, kv_heads=8, head_dim=64, dtype="float16")
    async with serving(tuning=Tuning(), watchdog_s=0.1) as one, await AsyncClient.connect(one.path) as client:
        before = one.manager.pings
        pool = await client.create_pool("large", spec)
        assert pool.manifest.region_bytes >= 1 << 29
        await client.delete_pool("large")
        assert one.manager.pings > before + 2, "a watchdog of the time that this takes would end the daemon"
        pool.close()
