"""A dispatcher without sockets: requests come as bytes, and what it sends is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import Peer, SessionRegistry
from kvferry.daemon.control.zmtp import ReceivedMessage
from kvferry.protocol.base import ErrorReply, RequestBody
from kvferry.protocol.codec import Frames, PageIds, decode_from_daemon, encode
from kvferry.protocol.envelope import Event, Reply, Request
from kvferry.protocol.ids import BootId, new_boot_id
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import Allocate, Allocated, DeletePool, PoolDeleted
from kvferry.protocol.session_messages import Pong

BOOT = new_boot_id()
DEALER = b"dealer"
ALLOCATE = Allocate(pool="a", count=1)
DELETE = DeletePool(pool="a")


class Dispatching:
    """A dispatcher with one session: PING and ALLOCATE are answered at once, DELETE_POOL when the test says so."""

    def __init__(self, limits: Limits) -> None:
        self.counters = Counters()
        self.sessions = SessionRegistry(limits)
        self.session = self.sessions.open("engine", Peer(1, 2, 3))
        self.dispatcher = Dispatcher(BOOT, limits, self.sessions, self.counters, self.send)
        self.said = asyncio.Event()
        self.dispatcher.handle_open("PING", lambda _call: Pong())
        self.dispatcher.handle("ALLOCATE", self.allocate)
        self.dispatcher.handle("DELETE_POOL", self.deferred_call)
        self.sent: list[tuple[bytes, Reply | Event, tuple[PageIds, ...]]] = []
        self.calls: list[Call] = []
        self.deferred: list[Call] = []
        self.accepts = True
        self.more: list[bool] = []
        self.on_deferred: Callable[[], object] = lambda: None
        self.on_call: Callable[[Call], object] = lambda _call: None

    def send(self, identity: bytes, frames: Frames, *, more: bool = False) -> bool:
        """Take a message to a client, if its queue has room."""
        self.said.set()
        if self.accepts:
            self.more.append(more)
            self.sent.append((identity, *decode_from_daemon([bytes(one) for one in frames])))
        return self.accepts

    def allocate(self, call: Call) -> Answer:
        """Answer at once, with as many pages as are asked for."""
        self.calls.append(call)
        self.on_call(call)
        count = call.body.count  # type: ignore[attr-defined]
        return Answer(Allocated(pages=count), (np.arange(count),))

    def deferred_call(self, call: Call) -> None:
        """Answer later."""
        self.deferred.append(call)
        self.on_deferred()

    def answer(self, number: int, pool: str = "a") -> None:
        """Answer a request that was deferred."""
        self.dispatcher.answer(self.session, number, Answer(PoolDeleted(pool=pool)))

    def take(
        self,
        body: RequestBody,
        *ids: npt.ArrayLike,
        number: int = 1,
        boot: BootId = BOOT,
        secret: bytes | None = None,
        deadline_ms: int = 0,
        acknowledged: int = 0,
        identity: bytes = DEALER,
    ) -> list[Reply | Event]:
        """Let a request arrive; return what is sent because of it."""
        known = self.session.secret if secret is None else secret
        request = Request(number, boot, known, deadline_ms, acknowledged, body)
        frames = encode(request, [np.array(one, np.int64) for one in ids])
        return self.take_frames([bytes(one) for one in frames], identity=identity)

    def take_frames(
        self, frames: list[bytes], *, identity: bytes = DEALER, too_large: bool = False
    ) -> list[Reply | Event]:
        """Let bytes arrive; return what is sent because of them."""
        before = len(self.sent)
        self.dispatcher.on_message(ReceivedMessage(identity, frames, too_large=too_large))
        return self.messages[before:]

    @property
    def messages(self) -> list[Reply | Event]:
        """Return what was sent so far."""
        return [message for _, message, _ in self.sent]


def error_of(messages: list[Reply | Event]) -> tuple[int, str, str]:
    """Return the one refusal: to which message, its code and field."""
    (message,) = messages
    assert isinstance(message, Reply)
    assert isinstance(message.body, ErrorReply)
    return message.message_id, message.body.error.code, message.body.error.field
