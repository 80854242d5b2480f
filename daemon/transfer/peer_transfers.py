"""Transfers between daemons, without I/O: other daemons' send requests for receive requests here, and vice versa.

Messages of other daemons are applied to endpoints as events of the table in ``transitions``; who passes on one that
raises calls ``failed``. If the first chunk of a
send request does not fit, it is refused and the receive request goes on waiting, as it does when a source daemon is
lost that had not joined it. A half that comes after the other one has ended is told so; see ``kept``.
"""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Sequence
from typing import Protocol

from kvferry.daemon.quota import Quota
from kvferry.daemon.transfer.admission import CopyScheduler, check_chunk_count
from kvferry.daemon.transfer.completion import Completion
from kvferry.daemon.transfer.endpoints import (
    Announcement,
    Clocked,
    EndpointKey,
    Half,
    Incarnation,
    Origin,
    PlannedCopy,
    ReceiveRequest,
    RemoteEndpoint,
    RemotePool,
    SendChunk,
    SendRequest,
    SourcePool,
    TransferOp,
    shared_sources,
)
from kvferry.daemon.transfer.registry import Endpoints, SendToPeer
from kvferry.daemon.transfer.transitions import Event, State
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.planning.page_ranges import page_ranges, page_tokens_of, split
from kvferry.protocol.addresses import IPC, scheme
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    AccessDeniedError,
    InvalidFieldError,
    KvferryError,
    OverloadedError,
    PageGapError,
    PeerLostError,
    UnexpectedSourceError,
    UnknownTransferError,
    raised,
)
from kvferry.protocol.ids import new_key
from kvferry.protocol.manifests import Entry, Manifest
from kvferry.protocol.peer_messages import (
    Announce,
    HalfAbandoned,
    OpRequest,
    PeerBody,
    PeerSend,
    PoolGone,
    ReceiveClosed,
    ReceiveName,
    Segment,
    SendRefused,
    SendWithdrawn,
    StepReady,
)
from kvferry.protocol.session_stream import RegionRequest
from kvferry.protocol.transfer_messages import LayerStep

MAX_ANNOUNCEMENTS = 65_536
MAX_ANNOUNCEMENTS_OF_A_PEER = 16_384
MAX_REMOTE_POOLS = 4096
MAX_REMOTE_POOLS_OF_A_PEER = 1024
LONGEST_ANNOUNCEMENT_MS = 86_400_000
MAX_CUT_OFF = 4096
"""How many receive requests are remembered whose send requests here ended with the connection to their daemon."""
NO_SEND = 0
"""In SEND_REFUSED and SEND_WITHDRAWN: the message is about the announced receive request, not about a send request."""

NO_SESSION = 0
"""The session number of send requests from other daemons: no session here gets their events."""


class TransferActivity(Protocol):
    """What yields to transfers: told when a transfer op begins to move bytes, and when it no longer can."""

    def transfer_began(self) -> None:
        """Count a transfer op that begins."""

    def transfer_ended(self) -> None:
        """Stop counting a transfer op."""


class PeerTransfers:
    """Handles the messages of other daemons. Part of the transfer state machine.

    Attributes:
        remote_pools: pools that other daemons have described, by daemon, tenant and name.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        completion: Completion,
        scheduling: CopyScheduler,
        activity: TransferActivity,
        payloads: Quota,
    ) -> None:
        self._endpoints = endpoints
        self._completion = completion
        self._copy_scheduler = scheduling
        self._remote_numbers = itertools.count(1)
        self._activity = activity
        self._payloads = payloads
        self.remote_pools: dict[tuple[Incarnation, int, str], RemotePool] = {}
        self._cut_off: dict[tuple[Incarnation, ReceiveName], KvferryError] = {}

    # -- at the home: send requests of other daemons for receive requests here

    def _receive_for(self, origin: Origin) -> ReceiveRequest:
        """Return the open receive request of another daemon's send request.

        Raises:
            UnknownTransferError: it has ended, or a later RECEIVE has replaced it (another epoch).
            UnexpectedSourceError: it does not expect send requests of that daemon.
        """
        name = origin.receive_request
        receive_request = self._named(name)
        if receive_request is None or receive_request.state is not State.OPEN or receive_request.epoch != name.epoch:
            raise UnknownTransferError("the receive request is over", field="request_id")
        if origin.peer.address not in receive_request.source_daemons:
            raise UnexpectedSourceError("the RECEIVE does not name this daemon as a source", field="source_daemons")
        return receive_request

    def chunk_announced(self, peer: Incarnation, body: PeerSend, ids: Sequence[PageIds], now: float) -> None:
        """Accept a chunk of another daemon's send request, or refuse it by an effect if it does not fit.

        Chunks are numbered from 0 without gaps; an earlier one is ignored.
        """
        origin = Origin(peer, body.receive_request, body.send_request)
        send_request = self._endpoints.remote_sends.get(origin)
        number = body.chunk
        try:
            receive_request = self._receive_for(origin)
            if not shared_sources(receive_request.source_pools, (body.pool,)):
                raise UnexpectedSourceError(f"the RECEIVE does not name pool {body.pool!r}", field="source_pools")
            pool = self._remote_pool(origin.peer, body)
            chunk = chunk_of(body, ids, pool.manifest)
            if send_request is None:
                send_request = self._new_send(origin, number, pool, receive_request, now)
                send_request.region_key = body.region_key
            elif number < len(send_request.chunks):
                return  # repeated after a reconnection
            elif number > len(send_request.chunks):
                raise PageGapError(f"chunk {number} came after {len(send_request.chunks)} chunks", field="chunk")
            check_chunk_count(send_request)
            self._payloads.check(receive_request.session_id, len(chunk.payload))
            fits = self._copy_scheduler.fit(receive_request, send_request, number, [chunk])
        except KvferryError as error:
            self._refuse(origin, error, now)
            return
        self._endpoints.remote_sends[origin] = send_request
        send_request.add(chunk)
        send_request.ready[number] = body.ready
        for fit in fits:
            self._copy_scheduler.start(receive_request, send_request, fit, now)
        self._completion.check_done(receive_request, now)

    def step_ready(self, peer: Incarnation, body: StepReady, now: float) -> None:
        """Start the transfer ops of another daemon's chunk whose steps are ready.

        Raises:
            InvalidFieldError: more steps are ready than the chunk has.
        """
        send_request = self._endpoints.remote_sends.get(Origin(peer, body.receive_request, body.send_request))
        if send_request is None or body.chunk >= len(send_request.ready):
            return
        check_ready(body.ready, len(send_request.chunks[body.chunk].steps))
        send_request.ready[body.chunk] = max(send_request.ready[body.chunk], body.ready)
        for receive_request in list(send_request.receive_requests):
            if isinstance(receive_request, ReceiveRequest) and receive_request.state is State.OPEN:
                self._copy_scheduler.start_ready(receive_request, now)

    def withdrawn(self, peer: Incarnation, body: SendWithdrawn, now: float) -> None:
        """Fail another daemon's send request, which its daemon has withdrawn.

        Without a number, the SENDs of that daemon had ended before the announcement came. The receive request fails,
        unless others may still fill it: if it names more daemons than it has sources, it waits until all of them have
        sent this message.

        Raises:
            UnknownTransferError: the receive request has ended.
            UnexpectedSourceError: it does not expect send requests of that daemon.
        """
        origin, error = Origin(peer, body.receive_request, body.send_request), raised(body.error)
        if body.send_request != NO_SEND:
            send_request = self._endpoints.remote_sends.get(origin)
            if send_request is not None:
                self._completion.apply(send_request, Event.WITHDRAWN, now, cause=error)
            return
        receive_request = self._receive_for(origin)
        receive_request.given_up.add(peer.address)
        if not receive_request.unmet:
            return
        if len(receive_request.source_daemons) <= receive_request.sources or receive_request.given_up.issuperset(
            receive_request.source_daemons
        ):
            self._completion.apply(receive_request, Event.PEERS_ENDED_BEFORE, now, cause=error)

    def pool_gone(self, peer: Incarnation, body: PoolGone) -> None:
        """Unmap a pool that another daemon has removed."""
        key = (peer, body.tenant, body.pool)
        known = self.remote_pools.get(key)
        if known is not None and known.region_id == body.region:
            self.remote_pools.pop(key).unmap()

    # -- at the source: receive requests of other daemons for send requests here

    def announced(self, home: Incarnation, body: Announce, now: float) -> None:
        """Add another daemon's receive request, and send it the chunks that are here; repeating it is harmless."""
        name = body.receive_request
        known = self._endpoints.announcements.get((home, name))
        if known is not None:  # repeated after a reconnection: our chunks may be lost too
            for remote_endpoint in known.remote_endpoints:
                self._send_chunks(remote_endpoint)
            self._notify_of_ends(known, now)
            return
        for older in self._endpoints.announced(name.tenant, name.request_id):
            same_receive = _without_epoch(older.receive_request) == _without_epoch(name)
            if older.home.address == home.address and same_receive:  # the message of its end was lost, or is late
                self._completion.close(older, Event.BEGUN_ANEW, now, detail="the receiver has begun anew")
        endpoints = self._endpoints.of_request(name.tenant, name.request_id)
        try:
            self._check_announcement(home, body)
        except KvferryError as refusal:
            self._endpoints.refuse(Origin(home, name, NO_SEND), refusal)
            return
        announcement = Announcement(home, name, now + body.deadline_ms / 1000, body.destinations, body.source_pools)
        self._endpoints.announce(announcement)
        self._endpoints.tombstones.renewed(announcement.half)
        for endpoint in endpoints:
            if isinstance(endpoint, SendRequest) and endpoint.state is State.OPEN and _fills(endpoint, announcement):
                self._join(announcement, endpoint)
                self._endpoints.notify_matched(endpoint)
        self._notify_of_ends(announcement, now)
        self._notify_of_break(announcement)

    def _check_announcement(self, home: Incarnation, body: Announce) -> None:
        """Check a new announcement.

        Raises:
            InvalidFieldError: its daemon would wait for longer than any engine may, or other RECEIVEs of the request
                have said another number of destinations.
            OverloadedError: too many are announced, by this daemon or by all.
        """
        name, known = body.receive_request, self._endpoints.announcements
        if body.deadline_ms > LONGEST_ANNOUNCEMENT_MS:
            raise InvalidFieldError(
                f"{body.deadline_ms} ms: a day at most, {LONGEST_ANNOUNCEMENT_MS} ms", field="deadline_ms"
            )
        self._endpoints.check_destinations(name.tenant, name.request_id, body.destinations, body.source_pools)
        if self._endpoints.announced_by[home] >= (most := MAX_ANNOUNCEMENTS_OF_A_PEER):
            raise OverloadedError(f"{most} receive requests of the same daemon are announced here")
        if len(known) >= MAX_ANNOUNCEMENTS:
            raise OverloadedError(f"{MAX_ANNOUNCEMENTS} receive requests of other daemons are announced here")

    def send_chunk(self, send_request: SendRequest, number: int) -> None:
        """Send a chunk to other daemons' receive requests; the first chunk joins those that were announced here."""
        for one in send_request.receive_requests:
            if isinstance(one, RemoteEndpoint) and one.state is State.OPEN:
                self._endpoints.effects.append(peer_send_of(one, number))
        if number == 0:
            for announcement in self._endpoints.announced(send_request.pool.tenant, send_request.request_id):
                if _fills(send_request, announcement):
                    self._join(announcement, send_request)

    def _join(self, announcement: Announcement, send_request: SendRequest) -> None:
        """Send all chunks of a local send request to another daemon's receive request."""
        key = new_key() if scheme(announcement.home.address) == IPC else ""
        remote_endpoint = RemoteEndpoint(announcement, send_request, next(self._remote_numbers), State.OPEN, key)
        self._endpoints.remote_endpoints[remote_endpoint.number] = remote_endpoint
        announcement.remote_endpoints.append(remote_endpoint)
        send_request.receive_requests.append(remote_endpoint)
        self._send_chunks(remote_endpoint)

    def _send_chunks(self, remote_endpoint: RemoteEndpoint) -> None:
        chunks = range(len(remote_endpoint.send_request.chunks))
        self._endpoints.effects.extend(peer_send_of(remote_endpoint, number) for number in chunks)

    def closed(self, home: Incarnation, body: ReceiveClosed, now: float) -> None:
        """End another daemon's receive request with its outcome."""
        announcement = self._endpoints.announcements.get((home, body.receive_request))
        if announcement is None:
            return
        found = {number: (moved_bytes, trimmed_pages) for number, moved_bytes, trimmed_pages in body.moved}
        for remote_endpoint in announcement.remote_endpoints:
            moved_bytes, trimmed_pages = found.get(remote_endpoint.number, (0, 0))
            remote_endpoint.send_request.moved_bytes += moved_bytes
            remote_endpoint.send_request.trimmed_pages += trimmed_pages
        event, error = (Event.CLOSED_FAILED, raised(body.error)) if body.error else (Event.CLOSED, None)
        self._completion.close(announcement, event, now, unmet=bool(body.unmet), cause=error)

    def refused(self, peer: Incarnation, body: SendRefused, now: float) -> None:
        """Fail a remote endpoint whose home refused the send request.

        Without a number, a source has refused an announcement: the receive request here notes that and goes on waiting.

        Raises:
            UnknownTransferError: the receive request has ended.
            UnexpectedSourceError: it does not expect send requests of that daemon.
        """
        if body.send_request == NO_SEND:
            self._receive_for(Origin(peer, body.receive_request, NO_SEND)).last_refusal = raised(body.error)
            return
        remote_endpoint = self._endpoints.remote_endpoints.get(body.send_request)
        if remote_endpoint is not None and remote_endpoint.announcement.home == peer:
            self._completion.apply(remote_endpoint, Event.REFUSED, now, cause=raised(body.error))

    def unsendable(self, home: Incarnation, body: PeerSend, error: KvferryError, now: float) -> None:
        """Fail a remote endpoint one of whose chunks cannot be sent to its home, and tell the home why.

        As where the home refuses a chunk: the send request fails and, if it was the first one, the receive request goes
        on waiting.
        """
        remote_endpoint = self._endpoints.remote_endpoints.get(body.send_request)
        if remote_endpoint is None or remote_endpoint.announcement.home != home:
            return
        if body.chunk == 0:
            self._endpoints.refuse(Origin(home, body.receive_request, NO_SEND), error)
        self._completion.apply(remote_endpoint, Event.MATCHED_FAILED, now, cause=error)

    def open_remote(self, home: Incarnation, number: int, name: ReceiveName) -> RemoteEndpoint:
        """Return the open remote endpoint ``number``.

        Raises:
            UnknownTransferError: it has ended, is of another home, or of another receive request.
        """
        remote_endpoint = self._endpoints.remote_endpoints.get(number)
        if (
            remote_endpoint is None
            or remote_endpoint.state is not State.OPEN
            or remote_endpoint.announcement.home != home
        ):
            raise UnknownTransferError("the send request has ended", field="send_request")
        if remote_endpoint.announcement.receive_request != name:
            raise UnknownTransferError("the send request is for another receive request", field="receive_request")
        return remote_endpoint

    def redeem(self, asked: RegionRequest) -> None:
        """Accept the key that a home of this host was told with a send request, while that is open.

        Raises:
            AccessDeniedError: it is no such key, or not for this pool.
        """
        remote_endpoint = self._endpoints.remote_endpoints.get(asked.send_request)
        if remote_endpoint is not None and remote_endpoint.state is State.OPEN and remote_endpoint.region_key:
            pool = remote_endpoint.send_request.pool
            its = (pool.tenant, pool.name, pool.region.identity)
            is_right = hmac.compare_digest(remote_endpoint.region_key, asked.key)
            if is_right and its == (asked.tenant, asked.pool, asked.region):
                return
        raise AccessDeniedError(
            f"pool {asked.pool!r} is given to a daemon that shows the key of an open send request", field="key"
        )

    def begin_sending(self, remote_endpoint: RemoteEndpoint, op: int, now: float) -> None:
        """Note that this daemon begins to write a transfer op to the remote endpoint's home."""
        if op not in remote_endpoint.sending:
            self._activity.transfer_began()
            remote_endpoint.sending.add(op)
        send_request = remote_endpoint.send_request
        send_request.first_copy_at = now if send_request.first_copy_at is None else send_request.first_copy_at
        send_request.changed_at = now

    def sending_done(self, remote_endpoint: RemoteEndpoint, op: int, now: float) -> None:
        """Note that no byte of a transfer op can move any more; the remote endpoint may settle."""
        with self._completion.ending(remote_endpoint.send_request.request_id, now):
            remote_endpoint.send_request.changed_at = now
            was_sending = op in remote_endpoint.sending
            remote_endpoint.sending -= {op}
            self._completion.check_settled(remote_endpoint, now)
        if was_sending:
            self._activity.transfer_ended()

    # -- both roles

    def failed(self, body: PeerBody, cause: Exception, now: float) -> None:
        """End what a message is about, because handling it raised ``cause``: its sender will not repeat it."""
        if body.request_id:
            self._completion.break_off(body.request_id, cause, now)

    def abandoned(self, peer: Incarnation, body: HalfAbandoned, now: float) -> None:
        """Fail the endpoints here that wait for a half that another daemon abandons."""
        half = Half(body.tenant, body.request_id, body.direction)
        self.half_abandoned(half, raised(body.error), now, peer.address)

    def half_abandoned(self, half: Half, error: KvferryError, now: float, source: str | None = None) -> int:
        """Fail the open endpoints here that wait for a half that will not come; return how many.

        Args:
            half: the half that will not come.
            error: what they fail with.
            now: the time.
            source: the other daemon that abandons the half. If the half is SENDs, only receive requests that name this
                daemon as a source fail, and no tombstone is left: later ones are announced to it. None: an engine of
                this daemon.
        """
        waiting = [
            one
            for one in self._endpoints.of_request(half.tenant, half.request_id)
            if one.direction != half.direction
            and one.state is State.OPEN
            and one.unmet
            and (source is None or not isinstance(one, ReceiveRequest) or source in one.source_daemons)
        ]
        for endpoint in self._endpoints.while_live(waiting):
            with self._completion.ending(endpoint.request_id, now):
                self._completion.apply(endpoint, Event.PEER_ABANDONED, now, cause=error)
        if source is None or half.direction == "receive":
            notified = [one.pool.name for one in waiting]
            self._endpoints.tombstones.abandon(half, error, now, notified)
        return len(waiting)

    def peer_lost(self, peer: Incarnation, why: str, now: float) -> None:
        """Fail the endpoints of an incarnation that is gone."""
        lost = f"the daemon at {peer.address} is gone: {why}"
        of_peer = [one for one in self._endpoints.remote_sends.values() if one.origin and one.origin.peer == peer]
        for send_request in self._endpoints.while_live(of_peer):
            with self._completion.ending(send_request.request_id, now):
                self._completion.apply(send_request, Event.DAEMON_LOST, now, detail=lost)
        for announcement in [one for one in self._endpoints.announcements.values() if one.home == peer]:
            if announcement.remote_endpoints:  # it may not know of them, and announces itself again if it lives
                self._cut_off[peer, announcement.receive_request] = PeerLostError(lost)
            with self._completion.ending(announcement.request_id, now):
                self._completion.close(announcement, Event.DAEMON_LOST, now, detail=lost)
        while len(self._cut_off) > MAX_CUT_OFF:
            del self._cut_off[next(iter(self._cut_off))]
        for key in [one for one in self.remote_pools if one[0] == peer]:
            self.remote_pools.pop(key).unmap()

    def expired(self, announcement: Announcement, now: float) -> None:
        """End another daemon's receive request at its deadline: the message of its end was lost."""
        if self._endpoints.announcements.get((announcement.home, announcement.receive_request)) is announcement:
            late = f"the receive request at {announcement.home.address} passed its deadline, and no outcome came"
            nobody_came = not announcement.remote_endpoints
            self._completion.close(announcement, Event.DEADLINE, now, unmet=nobody_came, detail=late)

    def _new_send(
        self, origin: Origin, number: int, pool: SourcePool, receive_request: ReceiveRequest, now: float
    ) -> SendRequest:
        if number:
            raise PageGapError(f"chunk {number} came first, chunk 0 is missing", field="chunk")
        if len(receive_request.send_requests) >= receive_request.sources:
            raise UnexpectedSourceError(
                f"the receive request has its {receive_request.sources} sources", field="request_id"
            )
        times = Clocked(now, receive_request.deadline_at)
        return SendRequest(pool, receive_request.request_id, NO_SESSION, times, origin)

    def _remote_pool(self, peer: Incarnation, body: PeerSend) -> RemotePool:
        """Return another daemon's pool: as it was described before, or as this chunk describes it."""
        key = (peer, body.receive_request.tenant, body.pool)
        known = self.remote_pools.get(key)
        if known is not None and known.region_id == body.region:
            return known
        if body.manifest is None:
            raise InvalidFieldError(f"pool {body.pool!r} was not described", field="manifest")
        if known is None and len(self.remote_pools) >= MAX_REMOTE_POOLS:
            raise OverloadedError(f"{MAX_REMOTE_POOLS} pools of other daemons are known here")
        if known is None and sum(one == peer for one, _, _ in self.remote_pools) >= MAX_REMOTE_POOLS_OF_A_PEER:
            raise OverloadedError(f"{MAX_REMOTE_POOLS_OF_A_PEER} pools of the same daemon are known here")
        if known is not None:
            known.unmap()
        check_manifest(body.manifest)
        pool = RemotePool(body.receive_request.tenant, body.pool, body.manifest, peer, body.region, body.model)
        self.remote_pools[key] = pool
        return pool

    def _refuse(self, origin: Origin, error: KvferryError, now: float) -> None:
        """Refuse a chunk of another daemon's send request; a send request with earlier chunks fails as a whole."""
        send_request = self._endpoints.remote_sends.get(origin)
        if send_request is not None:
            self._completion.apply(send_request, Event.REFUSED, now, cause=error)
            return
        self._endpoints.refuse(origin, error)
        receive_request = self._named(origin.receive_request)
        if receive_request is not None and not isinstance(error, UnknownTransferError):
            receive_request.last_refusal = error

    def _named(self, name: ReceiveName) -> ReceiveRequest | None:
        """Return the live receive request of a name's pool, of any epoch."""
        return self._endpoints.receive_requests.get(EndpointKey(name.tenant, name.request_id, name.pool, "receive"))

    def _notify_of_ends(self, announcement: Announcement, now: float) -> None:
        """Tell a receive request's home if SENDs for it ended here before it was announced."""
        message = (announcement.home.boot_id, announcement.receive_request.epoch)
        ended = self._endpoints.tombstones.notices_for(announcement.half.other, announcement.listener, now, message)
        if ended:
            self._withdraw(announcement, ended[0])

    def _notify_of_break(self, announcement: Announcement) -> None:
        """Tell a receive request's home if its SENDs here ended when the connection broke, which it may not know."""
        lost = self._cut_off.pop((announcement.home, announcement.receive_request), None)
        if lost is not None and not announcement.remote_endpoints:
            self._withdraw(announcement, lost)

    def _withdraw(self, announcement: Announcement, error: KvferryError) -> None:
        """Tell a receive request's home that the SENDs here have ended, and how."""
        body = SendWithdrawn(receive_request=announcement.receive_request, send_request=NO_SEND, error=error.info())
        self._endpoints.effects.append(SendToPeer(announcement.home, body))


def _fills(send_request: SendRequest, announcement: Announcement) -> bool:
    """Return whether a local send request may join another daemon's receive request."""
    return bool(send_request.unmet) and shared_sources(announcement.source_pools, (send_request.pool.name,))


def _without_epoch(name: ReceiveName) -> tuple[str, str, int]:
    """Return the key of a receive request that all its epochs have in common."""
    return (name.request_id, name.pool, name.tenant)


# -- chunks and transfer ops as messages


ANY_EVENT, ANY_VALUE = 0, 1
"""In steps of another daemon's chunk: only the source sees their events; it sends how many steps are ready."""


def peer_send_of(remote_endpoint: RemoteEndpoint, number: int) -> SendToPeer:
    """Return the message with chunk ``number`` of a local send request for a receive request's home."""
    send_request = remote_endpoint.send_request
    chunk, pool = send_request.chunks[number], send_request.holder
    assert pool is not None, remote_endpoint
    lists = [
        named
        for one in chunk.ranges
        if not one.implied
        for named in split(one, page_tokens_of(pool.manifest, one.component))
    ]
    body = PeerSend(
        receive_request=remote_endpoint.announcement.receive_request,
        send_request=remote_endpoint.number,
        chunk=number,
        pool=pool.name,
        manifest=pool.manifest if number == 0 else None,
        region=pool.region.identity,
        lists=tuple(one for one, _ in lists),
        last=chunk.last,
        first_token=chunk.first_token,
        payload=chunk.payload,
        steps=tuple((step.first_layer, step.layers) for step in chunk.steps),
        ready=send_request.ready[number],
        model=pool.model.public if pool.model and number == 0 else None,
        checksums=chunk.checksums,
        region_key=remote_endpoint.region_key if number == 0 else "",
    )
    return SendToPeer(remote_endpoint.announcement.home, body, [ids for _, ids in lists])


def chunk_of(message: PeerSend, ids: Sequence[PageIds], manifest: Manifest) -> SendChunk:
    """Return the chunk of another daemon's message, checked against the manifest of its pool.

    Raises:
        KvferryError: a page list does not fit the manifest, see ``page_ranges``.
    """
    check_ready(message.ready, len(message.steps))
    steps = tuple(
        LayerStep(first_layer=first, layers=layers, event=ANY_EVENT, value=ANY_VALUE) for first, layers in message.steps
    )
    ranges = page_ranges(message.lists, ids, manifest, may_end_inside=message.last, may_lack=True)
    return SendChunk(ranges, message.last, message.first_token, message.payload, steps, message.checksums)


def check_ready(ready: int, steps: int) -> None:
    """Check how many of a chunk's steps are said to be ready; one is of a chunk without steps.

    Raises:
        InvalidFieldError: it has fewer.
    """
    if ready > max(1, steps):
        raise InvalidFieldError(f"{ready} steps are ready of {steps}", field="ready")


def op_of(op: TransferOp) -> OpRequest:
    """Return the message that asks the source daemon for a transfer op."""
    assert op.send_request.origin is not None, op
    assert isinstance(op.send_request.pool, RemotePool), op
    places = {id(entry): number for number, entry in enumerate(op.send_request.pool.manifest.entries)}
    return OpRequest(
        receive_request=op.receive_request.name,
        send_request=op.send_request.origin.send_request,
        op=op.op_id,
        chunk=op.chunk,
        segments=tuple(_segment_of(planned_copy, places) for planned_copy in op.planned_copies),
    )


def _segment_of(planned_copy: PlannedCopy, places: dict[int, int]) -> Segment:
    entries: list[Entry] = [pair.source for pair in planned_copy.pairs]
    heads = tuple((pair.heads.source, pair.heads.count) if pair.heads else (0, 0) for pair in planned_copy.pairs)
    return Segment(
        component=planned_copy.component,
        start=planned_copy.cut.source_start,
        pages=len(planned_copy.plan.source.ids),
        entries=tuple(places[id(entry)] for entry in entries),
        heads=heads,
        step=planned_copy.cut.source_step,
        tokens=planned_copy.cut.source or (0, 0),
    )


def check_manifest(manifest: Manifest) -> None:
    """Check that another daemon's manifest is consistent, before addresses are computed from it.

    Raises:
        InvalidFieldError: no entry, or one that lies beyond the region or whose component is not described.
        GeometryMismatchError: an entry's fields contradict each other.
    """
    names = {one.name for one in manifest.components}
    for index, entry in enumerate(manifest.entries):
        beyond = entry.base + entry.pages * entry.page_bytes > manifest.region_bytes
        if beyond or entry.component not in names:
            raise InvalidFieldError(
                f"{entry.name} lies beyond the region, or its component is not described",
                field=f"manifest.entries[{index}]",
            )
        check_entry(entry, f"manifest.entries[{index}]")
    if not manifest.entries:
        raise InvalidFieldError("the pool has no entries", field="manifest.entries")
