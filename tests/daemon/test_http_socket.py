"""The socket for metrics: what it answers, and that no client can hold it up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from kvferry.daemon.control import http_socket
from kvferry.daemon.control.http_socket import MOST_CONNECTIONS, MOST_HEAD_BYTES, Asker, HttpAnswer, HttpSocket, plain
from kvferry.daemon.process.access import SOCKET_MODE, listen_on

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]
GET = b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = bytes(32 << 20)


class Served:
    """A socket that serves two pages, and remembers its clients."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[Asker] = []

    async def page(self, asker: Asker) -> HttpAnswer:
        self.asked.append(asker)
        return plain(HTTPStatus.OK, "here")

    async def large(self, _asker: Asker) -> HttpAnswer:
        return HttpAnswer(HTTPStatus.OK, LARGE)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.path)

    async def answer(self, request: bytes) -> bytes:
        reader, writer = await self.connect()
        writer.write(request)
        async with asyncio.timeout(20):
            said = await reader.read()
        writer.close()
        return said


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    one = Served(folder / "http.sock")
    http = HttpSocket([listen_on(one.path, SOCKET_MODE)], {"/page": one.page, "/large": one.large})
    http.start()
    try:
        yield one
    finally:
        await http.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (GET, 200),
        (b"GET /page?x=1 HTTP/1.0\r\n\r\n", 200),
        (b"GET /other HTTP/1.1\r\n\r\n", 404),
        (b"POST /page HTTP/1.1\r\n\r\n", 405),
        (b"GET /page\r\n\r\n", 400),
        (b"\xff\x00 GET\r\n\r\n", 400),
        (b"GET /page HTTP/1.1\r\nX: " + b"x" * 2 * MOST_HEAD_BYTES, 431),
    ],
)
async def test_a_request_has_one_answer(tmp_path: Path, request_: bytes, status: int) -> None:
    async with serving(tmp_path) as one:
        head, _, body = (await one.answer(request_)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"Content-Length: %d" % len(body) in head
        assert (body == b"here\n") == (status == 200)


async def test_who_may_see_all_is_told_by_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as one:
        await one.answer(GET)
        monkeypatch.setattr(http_socket, "may_see_all", lambda _user: False)
        await one.answer(GET)
    assert one.asked == ["operator", "user"]


async def test_one_who_says_nothing_is_closed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_socket, "PATIENCE_S", 0.05)
    async with serving(tmp_path) as one:
        assert await one.answer(GET[:-2]) == b""


async def test_one_who_does_not_read_is_closed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_socket, "PATIENCE_S", 0.05)
    async with serving(tmp_path) as one:
        with socket.socket(socket.AF_UNIX) as slow:
            slow.setblocking(False)  # noqa: FBT003  socket's own signature
            slow.connect(str(one.path))
            slow.sendall(b"GET /large HTTP/1.1\r\n\r\n")
            hung_up = asyncio.get_running_loop().create_future()
            # Sending to a closed connection fails: only so a client that reads nothing sees it.
            while not hung_up.done():
                await asyncio.sleep(0)
                try:
                    slow.send(b"x")
                except BrokenPipeError:
                    hung_up.set_result(None)
                except BlockingIOError:
                    continue
        assert (await one.answer(GET)).endswith(b"here\n")


async def test_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as one:
        idle = [await one.connect() for _ in range(5 * MOST_CONNECTIONS)]
        assert (await one.answer(GET)).endswith(b"here\n")
        oldest, _ = idle[0]
        async with asyncio.timeout(20):
            assert await oldest.read() == b"", "its place was taken"
        for _, writer in idle:
            writer.close()


async def test_a_client_that_leaves_breaks_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as one:
        for said in (b"", GET[:5], b"GET /large HTTP/1.1\r\n\r\n"):
            _, writer = await one.connect()
            writer.write(said)
            writer.transport.abort()
        assert (await one.answer(GET)).endswith(b"here\n")
