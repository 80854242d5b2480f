"""Sessions of other users in the test's own process: the kernel remembers who a process was when it connected."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvferry.clients.cli.json_form import request_from_fields
from kvferry.protocol.base import Body
from kvferry.protocol.codec import decode_from_daemon
from kvferry.protocol.envelope import Event, Reply
from tests.kit.daemons import Daemon
from tests.kit.raw_engine import REPLY_MS, RawEngine, raw_engine

SOMEBODY = 12345
"""A user without a name, who may go to the sockets by the test's own group."""


@contextmanager
def as_user(user: int, group: int = 0, groups: Sequence[int] = (0,)) -> Iterator[None]:
    """Be another user, for whoever is connected to meanwhile."""
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(group)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


class Witness:
    """A session of a user, which says anything and keeps all that the daemon says to it by itself.

    Attributes:
        events: what came, in its order.
    """

    def __init__(self, engine: RawEngine) -> None:
        self.events: list[Body] = []
        self._engine = engine

    @classmethod
    @contextmanager
    def of(
        cls, daemon: Daemon, user: int, name: str, group: int = 0, groups: Sequence[int] = (0,)
    ) -> Iterator[Witness]:
        """Open a session."""
        daemon.runtime_dir.parent.chmod(0o755)
        with ExitStack() as stack:
            with as_user(user, group, groups):
                engine = stack.enter_context(raw_engine(daemon.runtime_dir, name))
            yield cls(engine)

    def say(self, kind: str, deadline_ms: int = REPLY_MS, **fields: object) -> Body:
        """Send a message with its fields as JSON, page ids in place, and return what is answered, errors too."""
        body, frames = request_from_fields(kind, fields)
        outgoing = self._engine.core.request(body, tuple(frames), deadline_ms=deadline_ms)
        self._engine.control.send_multipart(self._engine.core.frames(outgoing))
        while True:
            message = self.hear()
            if not isinstance(message, Event) and message.message_id == outgoing.message_id:
                return message.body

    def until(self, kind: type[Body], count: int = 1) -> None:
        """Wait until so many of this kind of event have come."""
        while sum(isinstance(one, kind) for one in self.events) < count:
            self.hear()

    def hear(self) -> Reply | Event:
        """Return the next message; an event is kept, too."""
        assert self._engine.control.poll(REPLY_MS), "the daemon is silent"
        message = decode_from_daemon(self._engine.control.recv_multipart()).message
        if isinstance(message, Event):
            self.events.append(message.body)
        return message
