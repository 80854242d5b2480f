"""An engine without the client library's good manners: it says what a test wants it to say, by any message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from kvferry.clients.connection import open_control_socket
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.client_core import ClientCore, ReplyArrived
from kvferry.protocol.ids import BootId
from kvferry.protocol.requests import RequestBody
from kvferry.protocol.session_messages import ShareFollows

REPLY_MS: Final = 60_000


class RawEngine:
    """One session. ``channel`` is its session socket."""

    def __init__(self, runtime_dir: Path, name: str) -> None:
        """Use ``raw_engine``."""
        self.channel = SessionChannel.open(runtime_dir, name)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_control_socket(self._context, runtime_dir)
        self._core = ClientCore(BootId(self.channel.opened.boot_id), self.channel.opened.secret)

    def __repr__(self) -> str:
        """Show the session."""
        return f"<RawEngine session={self.channel.opened.session}>"

    def ask(
        self,
        body: RequestBody,
        *ids: npt.ArrayLike,
        lent: ShareFollows | None = None,
        deadline_ms: int = REPLY_MS,
    ) -> ReplyArrived:
        """Send a request, after what it lends, and return the reply.

        Raises:
            KvferryError: it was refused.
        """
        arrays = [np.asarray(one, np.int64) for one in ids]
        outgoing = self._core.request(body, arrays, deadline_ms=deadline_ms)
        if lent is not None:
            self.channel.say(_frames(lent, outgoing.message_id))
        self._socket.send_multipart(outgoing.frames)
        while True:
            assert self._socket.poll(deadline_ms + REPLY_MS), "no reply"
            news = self._core.feed(self._socket.recv_multipart())
            if isinstance(news, ReplyArrived) and news.message_id == outgoing.message_id:
                if news.error is not None:
                    raise news.error
                return news

    def close(self) -> None:
        """End the session."""
        self.channel.close()
        self._socket.close()
        self._context.term()


@contextmanager
def raw_engine(runtime_dir: Path, name: str = "raw") -> Iterator[RawEngine]:
    """Open a session for as long as the block."""
    engine = RawEngine(runtime_dir, name)
    try:
        yield engine
    finally:
        engine.close()


def _frames(lent: ShareFollows, message_id: int) -> Sequence[ShareFollows]:
    return [msgspec.structs.replace(lent, message_id=message_id)]
