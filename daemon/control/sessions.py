"""Sessions: an engine's identity, its replies and its unacknowledged events. Without I/O."""

from __future__ import annotations

import hmac
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvferry.daemon.control.session_index import SessionRecord
from kvferry.daemon.process.shares import Shares
from kvferry.daemon.process.tenants import Tenants
from kvferry.daemon.quota import Quota
from kvferry.protocol.codec import Frames, PageIds
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import RETRY_LATER_MS, InvalidFieldError, OverloadedError, ReplyGoneError
from kvferry.protocol.events import SingleEvent
from kvferry.protocol.ids import new_secret
from kvferry.protocol.limits import Limits

SMALL_REPLY_BYTES: Final = 1024
"""Of up to so many bytes a reply is kept as long as its number is."""

MOST_ATTACHED: Final = 1024
"""Pools of a session of which is remembered which memory it has attached; then the oldest is forgotten."""

_GONE: Final[Frames] = []


class Peer(NamedTuple):
    """The process at the other end of a session socket, as reported by the kernel."""

    pid: int
    uid: int
    gid: int


class PendingEvent(NamedTuple):
    """An event that the session has not acknowledged."""

    cursor: int
    body: SingleEvent
    ids: tuple[PageIds, ...]
    queued_s: float


class Session:
    """One engine process's session. Its transfers, operations and events belong to it, and end with it.

    Attributes:
        tenant: whose pools it may use; it stays so if the configuration changes.
        owner_id: the number of its instance, which owns its pages, leases and snapshots.
        instance: that instance's name; empty where the session is an instance of its own.
        keep: whether it is kept for a while after its socket is lost.
        turn: how often it was resumed.
        ended: whether it has been removed from the registry.
        last_message: the highest number of its requests so far.
        sent_cursor: of the events that were sent so far, the highest cursor.
        attached: the number of the memory that its process has mapped, by the pool's name.
    """

    def __init__(
        self,
        session_id: int,
        name: str,
        peer: Peer,
        limits: Limits,
        *,
        tenant: int | None = None,
        owner_id: int | None = None,
        instance: str = "",
        secret: bytes = b"",
        replies: Quota | None = None,
    ) -> None:
        self.session_id = session_id
        self.tenant = peer.uid if tenant is None else tenant
        self.owner_id = session_id if owner_id is None else owner_id
        self.instance = instance
        self.keep = False
        self.ended = False
        self.last_message = 0
        self.sent_cursor = 0
        self.name = name
        self.peer = peer
        self.secret = secret or new_secret()
        self.turn = 0
        self.identity: bytes | None = None
        self.unsent: deque[PendingEvent] = deque()
        self.unacknowledged: deque[PendingEvent] = deque()
        self._limits = limits
        self._next_cursor = 1
        self._large = replies or _large_replies(limits)
        self._replies: OrderedDict[int, Frames | None] = OrderedDict()
        self._forgotten = 0
        self._parts: set[int] = set()
        self.attached: dict[str, int] = {}

    def __repr__(self) -> str:
        """Show number, name and process; never the secret."""
        return f"<Session {self.session_id} {self.name!r} pid={self.peer.pid} uid={self.peer.uid}>"

    @property
    def reply_bytes(self) -> int:
        """Return the bytes of the large replies that are kept."""
        return self._large.of(self.session_id)

    def attach(self, pool: str, region_id: int) -> None:
        """Record which memory of a pool its process has mapped."""
        self.attached.pop(pool, None)
        while len(self.attached) >= MOST_ATTACHED:
            del self.attached[next(iter(self.attached))]
        self.attached[pool] = region_id

    def begin(self, message_id: int) -> bool:
        """Record that a request is being handled; return False if it was seen before, as a retry is.

        Raises:
            OverloadedError: too many requests of the session have no reply yet.
            ReplyGoneError: it may have been seen before, and nothing is known of it any more.
        """
        if message_id in self._replies:
            return False
        if message_id <= self._forgotten:
            raise self._gone(message_id)
        if len(self._replies) >= self._limits.max_requests_per_session:
            answered = next((number for number, reply in self._replies.items() if reply is not None), None)
            if answered is None:
                raise OverloadedError(f"{len(self._replies)} requests of the session are in flight")
            del self._replies[answered]
            self._large.drop(self.session_id, answered)
            self._forgotten = max(self._forgotten, answered)
        self._replies[message_id] = None
        self.last_message = max(self.last_message, message_id)
        return True

    def check_parts(self) -> None:
        """Check that another BATCH may begin.

        Raises:
            OverloadedError: too many requests of earlier batches have no result yet.
        """
        if len(self._parts) >= self._limits.max_requests_per_session:
            raise OverloadedError(f"{len(self._parts)} requests of the session's batches are in flight")

    def begin_part(self, part_id: int) -> None:
        """Record that a request of a BATCH is being handled; its number is below 0, and its reply is not kept."""
        self._parts.add(part_id)

    def part_answered(self, part_id: int) -> None:
        """Record that a request of a BATCH has its result."""
        self._parts.discard(part_id)

    def answered(self, message_id: int, reply: Frames) -> bool:
        """Keep the reply for a retry; return False if the request was answered before."""
        if self.ended or self._replies.get(message_id, reply) is not None:
            return False
        self._replies[message_id] = reply
        size_bytes = sum(map(len, reply))
        if size_bytes > SMALL_REPLY_BYTES:
            self._large.keep(self.session_id, message_id, size_bytes)
            while self.reply_bytes > self._large.each:
                self.drop_oldest_reply()
        return True

    def drop_oldest_reply(self) -> None:
        """Drop the oldest of the large replies that are kept; a retry of its request is refused."""
        message_id: int = self._large.oldest(self.session_id)
        self._large.drop(self.session_id, message_id)
        self._replies[message_id] = _GONE

    def _gone(self, message_id: int) -> ReplyGoneError:
        return ReplyGoneError(
            f"message {message_id} was handled before, and its reply is not kept: at most "
            f"{self._limits.max_requests_per_session} replies of a session are, and of large ones "
            f"{self._limits.max_kept_session_reply_bytes} bytes",
            field="message_id",
        )

    def is_pending(self, message_id: int) -> bool:
        """Return whether the request is being handled and has no reply yet."""
        return message_id in self._parts or (message_id in self._replies and self._replies[message_id] is None)

    def reply_to(self, message_id: int) -> Frames | None:
        """Return the kept reply to a request, or None while it has none.

        Raises:
            ReplyGoneError: it had one.
        """
        reply = self._replies.get(message_id)
        if reply is _GONE:
            raise self._gone(message_id)
        return reply

    def add_event(self, body: SingleEvent, ids: tuple[PageIds, ...] = ()) -> None:
        """Queue an event with its page lists; it is kept until it is acknowledged."""
        event = PendingEvent(self._next_cursor, body, ids, time.monotonic())
        self._next_cursor += 1
        self.unsent.append(event)
        self.unacknowledged.append(event)

    def acknowledge(self, cursor: int) -> Iterator[PendingEvent]:
        """Drop and yield the events up to ``cursor``."""
        while self.unacknowledged and self.unacknowledged[0].cursor <= cursor:
            yield self.unacknowledged.popleft()
        while self.unsent and self.unsent[0].cursor <= cursor:
            self.unsent.popleft()

    def bind(self, identity: bytes) -> None:
        """Send replies and events to this ZeroMQ identity; a new one gets all unacknowledged events again."""
        if identity != self.identity:
            self.identity = identity
            self.unsent = deque(self.unacknowledged)

    def resumed_by(self, peer: Peer, *, keep: bool) -> None:
        """Hand the session to another peer, which gets all unacknowledged events again with its first request."""
        self.peer = peer
        self.keep = keep
        self.turn += 1
        self.identity = None


class SessionRegistry:
    """The live sessions, by number and by secret, and the instances that they make up.

    An instance has the number of its first session, so that owner numbers are unique.

    Attributes:
        tenants: whose sessions they are.
    """

    def __init__(self, limits: Limits, tenants: Tenants | None = None) -> None:
        self.tenants = tenants or Tenants()
        self._limits = limits
        self._last_id = 0
        self._by_id: dict[int, Session] = {}
        self._by_secret: dict[bytes, Session] = {}
        self._by_owner: dict[int, list[Session]] = {}
        self._owners: dict[tuple[int, str], int] = {}
        self._replies = _large_replies(limits, self.tenant_of, self.tenants.shares)

    def __len__(self) -> int:
        """Return how many sessions live."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        """Yield the live sessions, oldest first."""
        return iter(self._by_id.values())

    def open(self, name: str, peer: Peer, instance: str = "", tenant: int | None = None) -> Session:
        """Return a new session, in the tenant's live instance of this name if there is one; by default its user's.

        Raises:
            OverloadedError: ``max_sessions`` sessions are live, or the tenant has its share of them.
        """
        tenant = peer.uid if tenant is None else tenant
        live, most = self.by_tenant(), self._limits.max_sessions
        if live[tenant] >= self.tenants.shares.most(tenant, most, live):
            raise OverloadedError(
                f"{live.total()} sessions live, {live[tenant]} of them of {whose(tenant)}, of at most {most} of all"
            ).after(RETRY_LATER_MS)
        self._last_id += 1
        session_id = self._last_id
        owner_id = self._owners.get((tenant, instance), session_id) if instance else session_id
        session = Session(
            session_id,
            name,
            peer,
            self._limits,
            tenant=tenant,
            owner_id=owner_id,
            instance=instance,
            replies=self._replies,
        )
        return self._add(session)

    def continue_after(self, last_id: int) -> None:
        """Give no session a number up to this one: an earlier daemon gave it to another."""
        self._last_id = max(self._last_id, last_id)

    def adopt(self, record: SessionRecord) -> Session:
        """Return an earlier daemon's session, as it was but for what was under way in it.

        Raises:
            InvalidFieldError: it cannot be beside those that live: its number, secret or instance is another's.
        """
        tenant = record.uid if record.tenant is None else record.tenant
        key = (tenant, record.instance)
        its = self._by_owner.get(record.owner, ())
        if record.session in self._by_id or record.secret in self._by_secret:
            raise InvalidFieldError("its number or its secret is another session's", field="session")
        if record.instance and self._owners.get(key, record.owner) != record.owner:
            raise InvalidFieldError("its instance has another number", field="owner")
        if any((one.tenant, one.instance) != key for one in its):
            raise InvalidFieldError("its instance is another one's", field="owner")
        if record.owner > record.session or not (record.instance or record.owner == record.session):
            raise InvalidFieldError("no such instance was given that number", field="owner")
        peer = Peer(record.pid, record.uid, record.gid)
        session = Session(
            record.session,
            record.name,
            peer,
            self._limits,
            tenant=tenant,
            owner_id=record.owner,
            instance=record.instance,
            secret=record.secret,
            replies=self._replies,
        )
        session.turn = record.turn
        session.keep = True
        return self._add(session)

    def _add(self, session: Session) -> Session:
        if session.instance:
            self._owners[session.tenant, session.instance] = session.owner_id
        self._by_owner.setdefault(session.owner_id, []).append(session)
        self._by_id[session.session_id] = session
        self._by_secret[session.secret] = session
        return session

    def close(self, session: Session) -> None:
        """Remove a session, and with the last one its instance."""
        session.ended = True
        self._replies.drop_all(session.session_id)
        del self._by_id[session.session_id]
        del self._by_secret[session.secret]
        its = self._by_owner[session.owner_id]
        its.remove(session)
        if not its:
            del self._by_owner[session.owner_id]
            self._owners.pop((session.tenant, session.instance), None)

    @property
    def reply_bytes(self) -> int:
        """Return the bytes of the large replies that are kept."""
        return self._replies.total

    def replies_by_tenant(self) -> Counter[int]:
        """Return the same for each tenant."""
        return self._replies.by_tenant()

    def bound_replies(self) -> None:
        """Drop large replies until those of all are within their bound.

        Those of the tenant who keeps most of them go, of the session with most.
        """
        while self._replies.total > self._replies.most:
            self._by_id[self._replies.worst()].drop_oldest_reply()

    def identities(self) -> set[bytes]:
        """Return the identities to which live sessions are answered."""
        return {one.identity for one in self if one.identity is not None}

    def by_tenant(self) -> Counter[int]:
        """Return how many sessions each tenant has."""
        return Counter(one.tenant for one in self)

    def tenant_of(self, session_id: int) -> int:
        """Return the tenant of a live session; -1 where it has ended."""
        session = self._by_id.get(session_id)
        return -1 if session is None else session.tenant

    def get(self, session_id: int) -> Session | None:
        """Return the live session with this number, or None."""
        return self._by_id.get(session_id)

    def of_instance(self, owner_id: int) -> tuple[Session, ...]:
        """Return the live sessions of an instance, oldest first; () where it has ended."""
        return tuple(self._by_owner.get(owner_id, ()))

    def by_secret(self, secret: bytes) -> Session | None:
        """Return the live session with this secret, or None."""
        session = self._by_secret.get(secret)
        return session if session and hmac.compare_digest(session.secret, secret) else None


def _large_replies(
    limits: Limits, tenant_of: Callable[[int], int] = lambda _session_id: 0, shares: Shares | None = None
) -> Quota:
    """Return what counts the large replies that sessions keep, by message."""
    most = limits.max_kept_reply_bytes
    return Quota("reply", limits.max_kept_session_reply_bytes, most, tenant_of, shares=shares)
