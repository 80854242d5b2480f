"""A ping of the daemon by itself, through its control socket, as an engine would: the proof that it serves.

The whole way counts: libzmq's thread, the kernel's socket under the path that engines use, and the control loop in
between. So nothing here may run on a thread of its own, and an answer that was refused as too much is an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import zmq
import zmq.asyncio

from kvferry.protocol.base import ErrorReply
from kvferry.protocol.conversation import Conversation
from kvferry.protocol.errors import DaemonLostError, MalformedError
from kvferry.protocol.ids import BootId
from kvferry.protocol.session_messages import Ping

ANSWER_S: Final = 10.0
"""How long the first answer may take: the loop has nothing else to do yet."""


class SelfPing:
    """Pings on the running loop, from ``__init__`` to ``close``; one ping at a time."""

    def __init__(self, path: Path, boot_id: BootId) -> None:
        """Connect to the control socket; ``boot_id`` is this daemon's, so that no other one answers for it."""
        self._path = path
        self._conversation = Conversation(boot_id)
        self._watching: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{path}")

    async def check(self) -> None:
        """Return once the daemon has answered.

        Raises:
            DaemonLostError: it has not, in ``ANSWER_S``.
        """
        if not await self._ping(ANSWER_S):
            raise DaemonLostError(
                f"this daemon does not answer at {self._path} within {ANSWER_S:g} s",
                remedy="see whether another process has taken the socket's place",
            )

    def watch(self, every_s: float, report: Callable[[], None]) -> None:
        """Ping from now on, and ``report`` each answer, about every ``every_s``."""
        self._watching = asyncio.create_task(self._watch(every_s, report), name="self-ping")

    async def close(self) -> None:
        """Stop, and disconnect."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _watch(self, every_s: float, report: Callable[[], None]) -> None:
        while True:
            if await self._ping(every_s):  # else once more: the connection may have been closed for others
                report()
                await asyncio.sleep(every_s)

    async def _ping(self, timeout_s: float) -> bool:
        """Return whether an answer comes in time, be it a late one to a ping before."""
        while await self._socket.poll(0):  # what came while nobody asked says nothing about now
            await self._socket.recv_multipart()
        _, frames = self._conversation.request(Ping(), deadline_ms=round(timeout_s * 1000) or 1)
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart(frames)
                while not self._is_answer(await self._socket.recv_multipart()):
                    pass
        except TimeoutError:
            return False
        return True

    def _is_answer(self, frames: list[bytes]) -> bool:
        try:
            arrived = self._conversation.feed(frames)
        except MalformedError:
            return False
        return arrived is not None and not isinstance(arrived.body, ErrorReply)  # STALE_BOOT: another daemon's
