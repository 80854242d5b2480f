"""Answers GET over HTTP/1.1 on a Unix socket and on TCP: one request a connection. Does not know what it answers.

A client may be slow or hostile. There are few connections at a time, and a new one takes the place of the oldest. Each
has a bound on the bytes of its request, and a time limit for the request and the answer together.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, Literal, NamedTuple

import structlog

from kvferry.daemon.process.access import may_see_all
from kvferry.daemon.process.tenants import CREDENTIALS

MOST_CONNECTIONS: Final = 4
"""Their descriptors are of the daemon's reserve."""

MOST_HEAD_BYTES: Final = 8192
PATIENCE_S: Final = 5.0
ACCEPT_PAUSE_S: Final = 0.5
"""After there was no descriptor for a connection."""

TEXT: Final = "text/plain; charset=utf-8"
_END_OF_HEAD: Final = b"\r\n\r\n"
_WORDS_OF_A_REQUEST: Final = 3

log = structlog.get_logger(__name__)


class HttpAnswer(NamedTuple):
    """What a page answers."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


Asker = Literal["operator", "user"]
"""Who asks: one that may see what is of any user, or not."""

Page = Callable[[Asker], Awaitable[HttpAnswer]]
"""Returns the answer."""


def plain(status: HTTPStatus, text: str = "") -> HttpAnswer:
    """Return an answer of one line."""
    return HttpAnswer(status, f"{text or status.phrase.lower()}\n".encode())


class HttpSocket:
    """Serves pages between ``start`` and ``close``. A client over TCP counts as an operator."""

    def __init__(self, listeners: Sequence[socket.socket], pages: Mapping[str, Page]) -> None:
        """Take over listening sockets that do not block; ``pages`` are by their path."""
        self._listeners = listeners
        self._pages = pages
        self._accepting: list[asyncio.Task[None]] = []
        self._serving: dict[asyncio.Task[None], None] = {}

    def __repr__(self) -> str:
        """Show how many connections there are."""
        return f"<HttpSocket {len(self._serving)} of {MOST_CONNECTIONS} connections>"

    def start(self) -> None:
        """Serve on the running loop."""
        self._accepting = [asyncio.create_task(self._accept(one)) for one in self._listeners]

    async def close(self) -> None:
        """Close all connections and stop listening."""
        tasks = [*self._accepting, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self._listeners:
            one.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                channel, _ = await loop.sock_accept(listener)
            except OSError as cause:
                log.warning("a connection for metrics was not accepted", cause=cause.strerror)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._serving) >= MOST_CONNECTIONS:
                oldest = next(iter(self._serving))
                del self._serving[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._serve(channel))
            self._serving[task] = None
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task, None)
        if not task.cancelled() and (cause := task.exception()) is not None:
            log.error("a request for metrics failed", exc_info=cause)

    async def _serve(self, channel: socket.socket) -> None:
        with channel:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    answer = await self._answer(channel)
                    if answer is not None:
                        await _say(channel, answer)
            except (TimeoutError, OSError):
                return  # it was too slow, or is gone

    async def _answer(self, channel: socket.socket) -> HttpAnswer | None:
        """Read a request and return the answer to it; None where the client is gone."""
        loop = asyncio.get_running_loop()
        received = b""
        while _END_OF_HEAD not in received:
            if len(received) > MOST_HEAD_BYTES:
                return plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            more = await loop.sock_recv(channel, MOST_HEAD_BYTES)
            if not more:
                return None
            received += more
        words = received.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != _WORDS_OF_A_REQUEST or not words[2].startswith("HTTP/1."):
            return plain(HTTPStatus.BAD_REQUEST)
        page = self._pages.get(words[1].partition("?")[0])
        if page is None:
            return plain(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._pages)}")
        if words[0] != "GET":
            return plain(HTTPStatus.METHOD_NOT_ALLOWED, "GET alone")
        return await page(_asker(channel))


def _asker(channel: socket.socket) -> Asker:
    if channel.family != socket.AF_UNIX:
        return "operator"  # who may reach the port is the operator's choice
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return "operator" if may_see_all(CREDENTIALS.unpack(credentials)[1]) else "user"


async def _say(channel: socket.socket, answer: HttpAnswer) -> None:
    """Send an answer, and wait until the client is gone: it would lose the end if something unread were closed."""
    loop = asyncio.get_running_loop()
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        *(["Allow: GET"] if answer.status is HTTPStatus.METHOD_NOT_ALLOWED else []),
        "Connection: close",
    )
    await loop.sock_sendall(channel, "\r\n".join(head).encode() + _END_OF_HEAD + answer.body)
    channel.shutdown(socket.SHUT_WR)
    while await loop.sock_recv(channel, MOST_HEAD_BYTES):
        pass
