"""The registry of live endpoints, with their deadlines and the effects gathered so far."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kvferry.daemon.transfer.endpoints import (
    Announcement,
    EndpointKey,
    Incarnation,
    Origin,
    ReceiveRequest,
    RemoteEndpoint,
    SendRequest,
    SourcePool,
    TransferOp,
    shared_sources,
)
from kvferry.daemon.transfer.kept import Tombstones
from kvferry.daemon.transfer.matching import Trim
from kvferry.daemon.transfer.transitions import State
from kvferry.pools.allocator import HeldPages
from kvferry.pools.integrity import WALKED, Problem, Walk
from kvferry.pools.planning.page_ranges import lists_with_pages
from kvferry.pools.planning.plan import Plan
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.events import Finished, Matched, Settled
from kvferry.protocol.peer_messages import HalfAbandoned, PeerBody, ReceiveClosed, ReceiveName, SendRefused

# -- effects: what the transfer state machine asks its shell to do, in order


class StartOp(NamedTuple):
    """Execute these plans, then call ``op_done``; the pages are held until then.

    With ``checksums``, compare what is in the destination's pages then with the source's bytes.
    """

    op_id: int
    source: SourcePool
    destination: Pool
    plans: tuple[Plan, ...]
    request_id: str = ""
    checksums: bool = False


class StopOp(NamedTuple):
    """Stop a copy at the next boundary, then call ``op_done`` as usual."""

    op_id: int


class Notify(NamedTuple):
    """Queue an event for a session, if it is still live."""

    session_id: int
    event: Matched | Finished | Settled


class WarnTrimmed(NamedTuple):
    """Warn that page lists of unequal length were cut to the shorter one: the kept pages may not belong together."""

    send_request: SendRequest
    receive_request: ReceiveRequest
    trim: Trim


class ReportBug(NamedTuple):
    """Log why endpoints have failed with INTERNAL: the table has no row for an event, or ``cause`` was raised."""

    request_id: str
    detail: str
    cause: Exception | None = None


class AnnounceReceive(NamedTuple):
    """Announce a receive request to a daemon that may have send requests for it."""

    address: str
    receive_request: ReceiveRequest


class SendToPeer(NamedTuple):
    """Send a message to one incarnation of another daemon, if it is still there."""

    peer: Incarnation
    body: PeerBody
    ids: Sequence[PageIds] = ()


class SendToDaemon(NamedTuple):
    """Send a message to the daemon at an address; HALF_ABANDONED is kept for it until it is connected."""

    address: str
    body: ReceiveClosed | HalfAbandoned


class StopSending(NamedTuple):
    """Stop writing transfer ops of this remote endpoint, then call ``sending_done`` for each one in progress."""

    remote_endpoint: RemoteEndpoint


Effect = StartOp | StopOp | Notify | WarnTrimmed | ReportBug | AnnounceReceive | SendToPeer | SendToDaemon | StopSending


def request_id_of(effect: Effect) -> str:
    """Return the request that an effect concerns, for log lines; "" for a StopOp."""
    match effect:
        case Notify(event=about) | SendToPeer(body=about) | SendToDaemon(body=about):
            return about.request_id
        case WarnTrimmed(receive_request=about) | AnnounceReceive(receive_request=about):
            return about.request_id
        case StopSending(remote_endpoint=about):
            return about.request_id
        case StopOp():
            return ""
    return effect.request_id


# -- deadlines


FEW = 16

K = TypeVar("K")
T = TypeVar("T")


class Deadlines(Generic[T]):
    """One deadline for each of a set of hashable things, in seconds of one monotonic clock.

    Keeps no reference to a thing that was dropped.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # may have dropped numbers; ``set`` bounds how many
        self._things: dict[int, T] = {}
        self._numbers: dict[T, int] = {}
        self._next_numbers = itertools.count()

    def __repr__(self) -> str:
        """Show how many deadlines are set."""
        return f"<Deadlines {len(self._things)}>"

    def set(self, thing: T, deadline_at: float) -> None:
        """Set a thing's deadline, replacing the one it had."""
        self.drop(thing)
        number = self._numbers[thing] = next(self._next_numbers)
        self._things[number] = thing
        heapq.heappush(self._heap, (deadline_at, number))
        if len(self._heap) > FEW + 2 * len(self._things):
            self._heap = [one for one in self._heap if one[1] in self._things]
            heapq.heapify(self._heap)

    def drop(self, thing: T) -> None:
        """Remove a thing's deadline, if it has one."""
        number = self._numbers.pop(thing, None)
        if number is not None:
            del self._things[number]

    def __contains__(self, thing: T) -> bool:
        """Return whether a thing has a deadline."""
        return thing in self._numbers

    def due(self, now: float) -> Iterator[T]:
        """Yield and drop the things that are due, earliest first. Deadlines may be set and dropped meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            thing = self._things.get(heapq.heappop(self._heap)[1])
            if thing is not None:
                self.drop(thing)
                yield thing

    def next(self) -> float | None:
        """Return the earliest deadline, or None."""
        while self._heap and self._heap[0][1] not in self._things:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


# -- live endpoints


OVERDUE_S: Final = 5.0
"""A deadline that passed longer ago was forgotten; a loaded daemon is late by less."""


def _named(endpoint: SendRequest | ReceiveRequest) -> str:
    return f"{endpoint.direction.upper()} {endpoint.request_id} of session {endpoint.session_id}"


def _request_of(one: SendRequest | ReceiveRequest | Announcement) -> tuple[int, str]:
    """Return the request by its tenant: others may have one of the same number."""
    return one.half.tenant, one.half.request_id


class Groups(Generic[K, T]):
    """Things by a key that several may have, in the order in which they came."""

    def __init__(self) -> None:
        self._groups: dict[K, dict[T, None]] = {}

    def add(self, key: K, thing: T) -> None:
        """Add a thing to the group of a key."""
        self._groups.setdefault(key, {})[thing] = None

    def drop(self, key: K, thing: T) -> None:
        """Remove a thing from the group of a key, if it is there, and the group with its last one."""
        group = self._groups.get(key, {})
        group.pop(thing, None)
        if not group:
            self._groups.pop(key, None)

    def of(self, key: K) -> list[T]:
        """Return the things of a key."""
        return list(self._groups.get(key, ()))


class Endpoints:
    """The endpoints, transfer ops and effects that the parts of the transfer state machine share.

    Attributes:
        send_requests: the send requests of this daemon's sessions.
        receive_requests: the receive requests of this daemon's sessions.
        remote_sends: other daemons' send requests that joined receive requests here.
        announcements: other daemons' receive requests that wait for send requests from here.
        announced_by: how many of them each daemon has.
        remote_endpoints: other daemons' receive requests that send requests here have joined, by number, until they
            have settled.
        ops: the transfer ops into receive requests here that are waiting or in progress.
        effects: what the shell has to do.
        deadlines: of the open endpoints and the announcements.
        tombstones: of endpoints that ended before their peer came.
        quarantined: endpoints that hold pages for ever, as their end raised.
    """

    def __init__(self, tombstones: Tombstones) -> None:
        self.tombstones = tombstones
        self.send_requests: dict[EndpointKey, SendRequest] = {}
        self.receive_requests: dict[EndpointKey, ReceiveRequest] = {}
        self.remote_sends: dict[Origin, SendRequest] = {}
        self.announcements: dict[tuple[Incarnation, ReceiveName], Announcement] = {}
        self.announced_by: Counter[Incarnation] = Counter()
        self.remote_endpoints: dict[int, RemoteEndpoint] = {}
        self.ops: dict[int, TransferOp] = {}
        self.effects: list[Effect] = []
        self.quarantined: list[SendRequest | ReceiveRequest] = []
        self._by_request: Groups[tuple[int, str], SendRequest | ReceiveRequest] = Groups()
        self._announced: Groups[tuple[int, str], Announcement] = Groups()
        self._expecting: Groups[str, ReceiveRequest] = Groups()
        self.deadlines: Deadlines[SendRequest | ReceiveRequest | Announcement] = Deadlines()

    def __iter__(self) -> Iterator[SendRequest | ReceiveRequest]:
        """Yield the endpoints of this daemon's sessions."""
        yield from self.send_requests.values()
        yield from self.receive_requests.values()

    @staticmethod
    def while_live(endpoints: Iterable[SendRequest | ReceiveRequest]) -> Iterator[SendRequest | ReceiveRequest]:
        """Yield each endpoint that has not settled when its turn comes: ending one may end others."""
        yield from (one for one in list(endpoints) if one.state is not State.SETTLED)

    def of_request(self, tenant: int, request_id: str) -> list[SendRequest | ReceiveRequest]:
        """Return the endpoints of a tenant's request that belong to this daemon's sessions."""
        return self._by_request.of((tenant, request_id))

    def all_of_request(self, request_id: str) -> list[SendRequest | ReceiveRequest | RemoteEndpoint]:
        """Return everything of a request, whoever's it is, and also what has entered in part only. Slow."""
        every = (self.remote_endpoints, self.remote_sends, self.receive_requests, self.send_requests)
        return [one for of_kind in every for one in of_kind.values() if one.request_id == request_id]

    def announced(self, tenant: int, request_id: str) -> list[Announcement]:
        """Return other daemons' receive requests for a tenant's request, oldest first."""
        return self._announced.of((tenant, request_id))

    def check_destinations(self, tenant: int, request_id: str, destinations: int, source_pools: Sequence[str]) -> None:
        """Check how many RECEIVEs a source fills, as one of them says, by what the others have said.

        Raises:
            InvalidFieldError: another number.
        """
        of_sessions = [
            one
            for one in self.of_request(tenant, request_id)
            if one.state is State.OPEN and (isinstance(one, ReceiveRequest) or one.receive_requests)
        ]
        for one in (*of_sessions, *self.announced(tenant, request_id)):
            theirs = (one.pool.name,) if isinstance(one, SendRequest) else one.source_pools
            if one.destinations != destinations and shared_sources(theirs, source_pools):
                raise InvalidFieldError(
                    f"this RECEIVE says {destinations}, another one of the request {one.destinations}: all of them say "
                    "how many pools receive",
                    field="destinations",
                )

    def receives_expecting(self, address: str) -> list[ReceiveRequest]:
        """Return the open receive requests that were announced to a daemon."""
        return [one for one in self._expecting.of(address) if one.state is State.OPEN]

    def refuse(self, origin: Origin, error: KvferryError) -> None:
        """Tell another daemon that its send request does not fit the receive request."""
        refused = SendRefused(
            receive_request=origin.receive_request, send_request=origin.send_request, error=error.info()
        )
        self.effects.append(SendToPeer(origin.peer, refused))

    def notify_matched(self, send_request: SendRequest) -> None:
        """Send MATCHED to an open send request's session: another receive request has joined it."""
        matched = Matched(
            request_id=send_request.request_id,
            pool=send_request.pool.name,
            direction="send",
            generation=send_request.generation,
            matched=send_request.matched,
            destinations=send_request.destinations,
        )
        self.effects.append(Notify(send_request.session_id, matched))

    def announce(self, announcement: Announcement) -> None:
        """Add another daemon's receive request."""
        self.announcements[announcement.home, announcement.receive_request] = announcement
        self._announced.add(_request_of(announcement), announcement)
        self.announced_by[announcement.home] += 1
        self.deadlines.set(announcement, announcement.deadline_at)

    def withdraw(self, announcement: Announcement) -> None:
        """Remove another daemon's receive request, if it is there."""
        self.deadlines.drop(announcement)
        self._announced.drop(_request_of(announcement), announcement)
        if self.announcements.pop((announcement.home, announcement.receive_request), None) is not None:
            self.announced_by[announcement.home] -= 1
            if not self.announced_by[announcement.home]:
                del self.announced_by[announcement.home]

    def enter(self, endpoint: SendRequest | ReceiveRequest) -> None:
        """Add an endpoint of a session here."""
        if isinstance(endpoint, ReceiveRequest):
            self.receive_requests[endpoint.key] = endpoint
            for address in endpoint.source_daemons:
                self._expecting.add(address, endpoint)
        else:
            self.send_requests[endpoint.key] = endpoint
        self._by_request.add(_request_of(endpoint), endpoint)
        self.deadlines.set(endpoint, endpoint.deadline_at)

    def leave(self, endpoint: SendRequest | ReceiveRequest) -> None:
        """Remove an endpoint that has settled; idempotent."""
        if isinstance(endpoint, SendRequest) and endpoint.origin is not None:
            self.remote_sends.pop(endpoint.origin, None)
            return
        if isinstance(endpoint, ReceiveRequest):
            for address in endpoint.source_daemons:
                self._expecting.drop(address, endpoint)
        self._by_request.drop(_request_of(endpoint), endpoint)
        of_kind: dict[EndpointKey, Any] = (
            self.receive_requests if isinstance(endpoint, ReceiveRequest) else self.send_requests
        )
        of_kind.pop(endpoint.key, None)

    def quarantine(self, endpoint: SendRequest | ReceiveRequest | RemoteEndpoint) -> None:
        """Move an endpoint to those that hold their pages for ever."""
        if isinstance(endpoint, RemoteEndpoint):
            self.remote_endpoints.pop(endpoint.number, None)
            return
        self.deadlines.drop(endpoint)
        self.leave(endpoint)
        if endpoint.held:
            self.quarantined.append(endpoint)

    def held_pages(self) -> Iterator[HeldPages]:
        """Yield the pages that each endpoint holds; endpoints may settle meanwhile, and those of others may come."""
        for receive_request in list(self.receive_requests.values()):
            if receive_request.state is not State.SETTLED:
                for one in lists_with_pages(receive_request.ranges.values()):
                    allocator = receive_request.pool.allocator_of(one.component)
                    yield HeldPages(allocator, one.ids, writing=True, holder=_named(receive_request))
        for send_request in list(self.send_requests.values()):
            pool = send_request.holder
            if pool is not None and send_request.state is not State.SETTLED:
                for one in lists_with_pages(one for chunk in send_request.chunks for one in chunk.ranges):
                    yield HeldPages(
                        pool.allocator_of(one.component), one.ids, writing=False, holder=_named(send_request)
                    )
        for endpoint in list(self.quarantined):
            for held in endpoint.held:
                yield HeldPages(held.allocator, held.ids, writing=held.written, holder=_named(endpoint))

    def problems(self, now: float) -> Walk:
        """Yield the endpoints that would never end, or whose transfer ops are not those that are known."""
        for number, endpoint in enumerate(list(self)):
            if endpoint.state is State.OPEN:
                if endpoint not in self.deadlines:
                    yield Problem("an open request has no deadline", holder=_named(endpoint))
                elif now - endpoint.deadline_at > OVERDUE_S:
                    late = f"an open request's deadline passed {now - endpoint.deadline_at:.1f} s ago"
                    yield Problem(late, holder=_named(endpoint))
            if endpoint.state is not State.SETTLED and isinstance(endpoint, ReceiveRequest):
                if any(self.ops.get(op_id) is not op for op_id, op in endpoint.ops.items()):
                    yield Problem("a copy that its RECEIVE waits for is not known", holder=_named(endpoint))
                if endpoint.state is State.FINISHED and not endpoint.ops:
                    yield Problem("a finished request with nothing under way has not settled", holder=_named(endpoint))
            if number % WALKED == 0:
                yield None
        yield from self._strays()

    def _strays(self) -> Iterator[Problem]:
        orphans = [op.receive_request for op in self.ops.values() if op.op_id not in op.receive_request.ops]
        for what, holders in (
            ("a copy that no RECEIVE waits for", orphans),
            ("a quarantined request, whose end raised, holds its pages", self.quarantined),
        ):
            if holders:
                yield Problem(what, total=len(holders), holder=_named(holders[0]))

    def postpone(self, endpoint: SendRequest | ReceiveRequest, deadline_at: float) -> None:
        """Set an endpoint's deadline to this time, unless it is later already."""
        if deadline_at > endpoint.deadline_at:
            endpoint.deadline_at = deadline_at
            self.deadlines.set(endpoint, deadline_at)
