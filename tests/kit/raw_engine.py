"""An engine that speaks the protocol by itself: it says what no client would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy.typing as npt
import zmq

from kvferry.clients import calls
from kvferry.clients.arguments import packed_ids
from kvferry.clients.calls import Call
from kvferry.clients.cli.json_form import request_from_fields
from kvferry.clients.core.client_core import ClientCore, ReplyArrived
from kvferry.clients.daemon_socket import open_control_socket
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.base import Body, RequestBody
from kvferry.protocol.ids import BootId
from kvferry.protocol.session_stream import MemoryFollows, SessionOpen, SessionOpened, ShareFollows

REPLY_MS = 60_000
T = TypeVar("T")
Said: TypeAlias = Callable[[int], Sequence[ShareFollows | MemoryFollows]]
"""What goes over the session socket before a request, by the request's number."""


class RawEngine(NamedTuple):
    """A session; ``channel`` is its end of the session socket."""

    channel: SessionChannel
    control: zmq.Socket[bytes]
    core: ClientCore

    def call(
        self,
        call: Call[T],
        said: Said | None = None,
        deadline_ms: int = REPLY_MS,
        fds: Sequence[int] = (),
    ) -> T:
        """Send a request and return its reply; ``said`` goes over the session socket before, with ``fds``."""
        return self.numbered(call, said, deadline_ms, fds)[1]

    def numbered(
        self,
        call: Call[T],
        said: Said | None = None,
        deadline_ms: int = REPLY_MS,
        fds: Sequence[int] = (),
    ) -> tuple[int, T]:
        """As ``call``; return the request's number, too."""
        outgoing = self.core.request(call.body, call.ids, deadline_ms=deadline_ms)
        if said is not None:
            self.channel.send(said(outgoing.message_id), fds)
        self.control.send_multipart(self.core.frames(outgoing))
        while self.control.poll(deadline_ms):
            news = self.core.feed(self.control.recv_multipart())
            if isinstance(news, ReplyArrived) and news.message_id == outgoing.message_id:
                if news.error is not None:
                    raise news.error
                return outgoing.message_id, call.read(news)
        raise TimeoutError(call)

    def ask(
        self,
        body: RequestBody,
        *ids: npt.ArrayLike,
        registered: ShareFollows | None = None,
        deadline_ms: int = REPLY_MS,
    ) -> ReplyArrived:
        """Send a body with its id arrays, after what it registers, and return the reply as it is."""
        packed = tuple(one if isinstance(one, bytes) else packed_ids(one, "ids") for one in ids)
        call = Call(body, packed, lambda reply: reply)
        if registered is None:
            return self.call(call, deadline_ms=deadline_ms)
        return self.call(call, lambda number: [msgspec.structs.replace(registered, message_id=number)], deadline_ms)

    def say(self, kind: str, registered: ShareFollows | None = None, **fields: Any) -> Body:  # noqa: ANN401  any JSON
        """Send a message with its fields as JSON, page ids in place, and return the reply's body."""
        body, frames = request_from_fields(kind, fields)
        return self.ask(body, *frames, registered=registered).body


@contextmanager
def raw_engine(runtime_dir: Path, name: str = "raw", opening: SessionOpen | None = None) -> Iterator[RawEngine]:
    """Open a session, with this frame if it is given."""
    with zmq.Context() as context, open_control_socket(context, runtime_dir) as control:
        channel = SessionChannel.open(runtime_dir, opening or calls.session_open(name))
        with contextlib.closing(channel):
            engine = RawEngine(channel, control, ClientCore(BootId(channel.opened.boot_id), channel.opened.secret))
            engine.call(calls.hello(name))
            yield engine


@contextmanager
def resumed(runtime_dir: Path, before: SessionOpened, *, keep: bool = False) -> Iterator[RawEngine]:
    """Take a raw engine's session over, by a new control socket too; ``before``: what its last opening said."""
    opening = calls.session_open("", keep=keep, resume=before.secret)
    with (
        zmq.Context() as context,
        open_control_socket(context, runtime_dir) as control,
        contextlib.closing(SessionChannel.open(runtime_dir, opening)) as channel,
    ):
        opened = channel.opened
        core = ClientCore(BootId(opened.boot_id), opened.secret, last_message=opened.last_message)
        yield RawEngine(channel, control, core)
