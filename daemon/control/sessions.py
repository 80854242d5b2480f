"""Sessions: who an engine is, what it was answered, and the events it has yet to acknowledge. Sans I/O."""

from __future__ import annotations

import hmac
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import NamedTuple

from kvferry.protocol.codec import Frames, PageIds
from kvferry.protocol.errors import OverloadedError
from kvferry.protocol.ids import new_secret
from kvferry.protocol.limits import Limits
from kvferry.protocol.requests import EventBody


class Peer(NamedTuple):
    """Who is at the other end of a session socket, by the kernel's word."""

    pid: int
    uid: int
    gid: int


class PendingEvent(NamedTuple):
    """An event that the session has not acknowledged."""

    cursor: int
    body: EventBody
    ids: tuple[PageIds, ...] = ()


class Session:
    """One engine process's session. Its transfers, operations and events are its own; they go when it dies.

    Attributes:
        owner_id: the number of its instance, which owns its pages, leases and snapshots.
        instance: that instance's name; empty where the session is an instance of its own.
        keep: whether it is to be kept where its socket is lost.
        ended: whether it is in the registry no longer.
        last_message: the highest number of its requests so far.
    """

    def __init__(
        self, session_id: int, name: str, peer: Peer, limits: Limits, *, owner_id: int | None = None, instance: str = ""
    ) -> None:
        self.session_id = session_id
        self.owner_id = session_id if owner_id is None else owner_id
        self.instance = instance
        self.keep = False
        self.ended = False
        self.last_message = 0
        self.name = name
        self.peer = peer
        self.secret = new_secret()
        self.identity: bytes | None = None
        self.unsent: deque[PendingEvent] = deque()
        self.unacknowledged: deque[PendingEvent] = deque()
        self._limits = limits
        self._next_cursor = 1
        self._replies: OrderedDict[int, Frames | None] = OrderedDict()
        self._parts: set[int] = set()

    def __repr__(self) -> str:
        """Show who it is; never the secret."""
        return f"<Session {self.session_id} {self.name!r} pid={self.peer.pid} uid={self.peer.uid}>"

    @property
    def tenant(self) -> int:
        """Return whose pools it may use: its user's."""
        return self.peer.uid

    def begin(self, message_id: int) -> bool:
        """Note that a request is being handled; return False where it was seen before: it is a retry.

        Raises:
            OverloadedError: too many requests of the session have no reply yet.
        """
        if message_id in self._replies:
            return False
        if len(self._replies) >= self._limits.max_requests_per_session:
            answered = next((number for number, reply in self._replies.items() if reply is not None), None)
            if answered is None:
                raise OverloadedError(f"{len(self._replies)} requests of the session are in flight")
            del self._replies[answered]
        self._replies[message_id] = None
        self.last_message = max(self.last_message, message_id)
        return True

    def check_parts(self) -> None:
        """Check that another BATCH may begin.

        Raises:
            OverloadedError: too many requests of those before have no result yet.
        """
        if len(self._parts) >= self._limits.max_requests_per_session:
            raise OverloadedError(f"{len(self._parts)} requests of the session's batches are in flight")

    def begin_part(self, part_id: int) -> None:
        """Note that a request of a BATCH is being handled; it has a number below 0, and its reply is not kept."""
        self._parts.add(part_id)

    def part_answered(self, part_id: int) -> None:
        """Note that a request of a BATCH has its result."""
        self._parts.discard(part_id)

    def answered(self, message_id: int, reply: Frames) -> bool:
        """Keep the reply for a retry; return False where the request was answered before."""
        if self._replies.get(message_id, reply) is not None:
            return False
        self._replies[message_id] = reply
        return True

    def is_pending(self, message_id: int) -> bool:
        """Return whether the request is being handled and has no reply yet."""
        return message_id in self._parts or (message_id in self._replies and self._replies[message_id] is None)

    def reply_to(self, message_id: int) -> Frames | None:
        """Return the reply that was given to a request, or None."""
        return self._replies.get(message_id)

    def add_event(self, body: EventBody, ids: tuple[PageIds, ...] = ()) -> None:
        """Queue an event with its page lists; it stays until ``acknowledge``."""
        event = PendingEvent(self._next_cursor, body, ids)
        self._next_cursor += 1
        self.unsent.append(event)
        self.unacknowledged.append(event)

    def acknowledge(self, cursor: int) -> Iterator[PendingEvent]:
        """Forget the events up to ``cursor``, yielding them."""
        while self.unacknowledged and self.unacknowledged[0].cursor <= cursor:
            yield self.unacknowledged.popleft()
        while self.unsent and self.unsent[0].cursor <= cursor:
            self.unsent.popleft()

    def bind(self, identity: bytes) -> None:
        """Answer and push to this peer from now on; a new one is sent all unacknowledged events again."""
        if identity != self.identity:
            self.identity = identity
            self.unsent = deque(self.unacknowledged)

    def resumed_by(self, peer: Peer, *, keep: bool) -> None:
        """Be another peer's from now on, which is sent all unacknowledged events again with its first request."""
        self.peer = peer
        self.keep = keep
        self.identity = None


class SessionRegistry:
    """The live sessions, by number and by secret, and the instances that they make up.

    An instance has the number of its first session, so that numbers of owners never mean two things.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ids = itertools.count(1)
        self._by_id: dict[int, Session] = {}
        self._by_secret: dict[bytes, Session] = {}
        self._by_owner: dict[int, list[Session]] = {}
        self._owners: dict[tuple[int, str], int] = {}

    def __len__(self) -> int:
        """Return how many sessions live."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        """Yield the live sessions, oldest first."""
        return iter(self._by_id.values())

    def open(self, name: str, peer: Peer, instance: str = "") -> Session:
        """Return a new session, of the live instance of that user and name if there is one.

        Raises:
            OverloadedError: as many live as the limits allow.
        """
        if len(self._by_id) >= self._limits.max_sessions:
            raise OverloadedError(f"{len(self._by_id)} sessions live")
        session_id = next(self._ids)
        owner_id = self._owners.setdefault((peer.uid, instance), session_id) if instance else session_id
        session = Session(session_id, name, peer, self._limits, owner_id=owner_id, instance=instance)
        self._by_owner.setdefault(owner_id, []).append(session)
        self._by_id[session.session_id] = session
        self._by_secret[session.secret] = session
        return session

    def close(self, session: Session) -> None:
        """Forget a session, and its instance with the last one."""
        session.ended = True
        del self._by_id[session.session_id]
        del self._by_secret[session.secret]
        its = self._by_owner[session.owner_id]
        its.remove(session)
        if not its:
            del self._by_owner[session.owner_id]
            self._owners.pop((session.tenant, session.instance), None)

    def get(self, session_id: int) -> Session | None:
        """Return the live session of that number, or None."""
        return self._by_id.get(session_id)

    def of_instance(self, owner_id: int) -> tuple[Session, ...]:
        """Return the live sessions of an instance, oldest first; () where it has ended."""
        return tuple(self._by_owner.get(owner_id, ()))

    def by_secret(self, secret: bytes) -> Session | None:
        """Return the live session of that secret, or None."""
        session = self._by_secret.get(secret)
        return session if session and hmac.compare_digest(session.secret, secret) else None
