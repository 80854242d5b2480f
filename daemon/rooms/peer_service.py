"""The shell between the room book and other daemons: their messages in, the book's effects towards them out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import structlog

from kvferry.daemon.metrics import Counters
from kvferry.daemon.peers import PeerLinks
from kvferry.daemon.pool_service import PoolService
from kvferry.daemon.rooms.effects import (
    AnnounceRoom,
    CloseRoom,
    Effect,
    OfferChunk,
    RefuseOffer,
    StopSending,
    TellEnded,
    TellReady,
    Withdraw,
)
from kvferry.daemon.rooms.endings import name_of
from kvferry.daemon.rooms.peer_book import NO_OFFER, PeerBook
from kvferry.daemon.rooms.peer_forms import chunk_of, offer_of
from kvferry.daemon.rooms.remote import Incarnation, Origin, RemotePool
from kvferry.daemon.rooms.sides import Room
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.pools.devices.base import Region
from kvferry.pools.entry_checks import check_entry
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    InvalidFieldError,
    KvferryError,
    OverloadedError,
    UnknownPoolError,
    UnknownRoomError,
    raised,
)
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.peer_messages import (
    Announce,
    Confirm,
    Confirmed,
    Grant,
    Landed,
    OfferRefused,
    OfferWithdrawn,
    PeerBody,
    PeerOffer,
    Piece,
    PieceOver,
    PoolGone,
    RoomClosed,
    StepReady,
)
from kvferry.protocol.session_messages import PeerStatus, RegionRequest

MAX_REMOTE_POOLS = 4096
LONGEST_ANNOUNCEMENT_S = 86_400.0
log = structlog.get_logger(__name__)


class PeerService:
    """Lets rooms here take offers of other daemons, and offers here fill rooms of other daemons.

    Attributes:
        remote_pools: what other daemons have described, by who, tenant and name.
    """

    def __init__(
        self,
        links: PeerLinks,
        book: PeerBook,
        pools: PoolService,
        transports: RemoteTransports,
        carry_out: Callable[[], None],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``carry_out`` does what the book asks; it is called after each message. ``clock`` is the book's."""
        self._links = links
        self._book = book
        self._pools = pools
        self._transports = transports
        self._carry_out = carry_out
        self._counters = counters
        self._clock = clock
        self.remote_pools: dict[tuple[Incarnation, int, str], RemotePool] = {}
        links.on_message = self._on_message
        links.on_up = self._on_up
        links.on_lost = self._on_lost
        links.is_needed = lambda address: bool(book.rooms_expecting(address))

    def source_daemons(self, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Return the other daemons among those that a RECEIVE names, and have the links to them.

        Raises:
            InvalidFieldError: one cannot be reached from here.
        """
        others = tuple(dict.fromkeys(one for one in addresses if not self._links.is_own(one)))
        for address in others:
            field = f"source_daemons[{addresses.index(address)}]"
            if not self._transports.can_reach(address):
                raise InvalidFieldError(
                    f"{address}: this daemon has no landing slots; set landing.transport in its configuration",
                    field=field,
                )
            self._links.check_reachable(address, field)
            self._links.connect(address, field)  # now: once the room is made, nobody can be refused any more
        return others

    def carry_out(self, effect: Effect) -> None:
        """Do what the book asks towards another daemon; other effects are not ours."""
        if isinstance(effect, AnnounceRoom):
            peer = self._links.connect(effect.address)
            if peer is None:
                effect.room.unreachable.add(effect.address)
            else:
                self._announce(peer, effect.room)
        elif isinstance(effect, CloseRoom):
            peer = self._links.connect(effect.address)
            if peer is not None:
                info = effect.error.info() if effect.error else None
                closed = RoomClosed(room=effect.room, error=info, moved=effect.moved, unmet=effect.unmet)
                self._links.send(peer, closed)
        elif isinstance(effect, RefuseOffer):
            refused = OfferRefused(room=effect.room, offer=effect.offer, error=effect.error.info())
            self._links.send(effect.peer, refused)
        elif isinstance(effect, TellEnded):
            ended = OfferWithdrawn(room=effect.room, offer=NO_OFFER, error=effect.error.info())
            self._links.send(effect.peer, ended)
        elif isinstance(effect, StopSending):
            self._transports.stop_sending(effect.target)
        else:
            self._tell_home(effect)

    def status(self) -> tuple[PeerStatus, ...]:
        """Return the other daemons as STATUS shows them."""
        waiting = Counter(home.address for home in self._book.waiting_homes())
        return tuple(
            PeerStatus(
                address=address,
                state=state,
                announced=len(self._book.rooms_expecting(address)),
                waiting=waiting[address],
            )
            for address, state in self._links.status()
        )

    def region_of(self, asked: RegionRequest) -> Region:
        """Return the memory that another daemon of this host asks for.

        Raises:
            UnknownPoolError: there is no such pool, or it has been made anew since.
        """
        region = self._pools.get(asked.tenant, asked.pool).region
        if region.identity != asked.region:
            raise UnknownPoolError(f"pool {asked.pool!r} has been made anew", field="region")
        return region

    def pool_deleted(self, pool: Pool) -> None:
        """Let other daemons give up their mappings of a pool's memory."""
        gone = PoolGone(tenant=pool.tenant, pool=pool.name, region=pool.region.identity)
        for peer in self._links.up():
            self._links.send(peer, gone)

    def _tell_home(self, effect: Effect) -> None:
        if isinstance(effect, OfferChunk):
            body, ids = offer_of(effect.target, effect.chunk)
            self._links.send(effect.target.announcement.home, body, ids)
        elif isinstance(effect, TellReady):
            target = effect.target
            ready = StepReady(
                room=target.announcement.room, offer=target.number, chunk=effect.chunk, ready=effect.ready
            )
            self._links.send(target.announcement.home, ready)
        elif isinstance(effect, Withdraw):
            target = effect.target
            withdrawn = OfferWithdrawn(room=target.announcement.room, offer=target.number, error=effect.error.info())
            self._links.send(target.announcement.home, withdrawn)

    def _announce(self, peer: Incarnation, room: Room) -> None:
        left_ms = max(1, round((room.deadline_at - self._clock()) * 1000))
        self._links.send(peer, Announce(room=name_of(room), deadline_ms=left_ms))

    def _on_up(self, peer: Incarnation) -> None:
        for room in self._book.rooms_expecting(peer.address):
            room.unreachable.discard(peer.address)
            self._announce(peer, room)

    def _on_lost(self, peer: Incarnation, why: str) -> None:
        self._transports.peer_lost(peer, why)
        self._book.peer_lost(peer, why, self._clock())
        for room in self._book.rooms_expecting(peer.address):
            room.unreachable.add(peer.address)
        for key in [one for one in self.remote_pools if one[0] == peer]:
            self.remote_pools.pop(key).unmap()
        self._carry_out()

    def _on_message(self, peer: Incarnation, body: PeerBody, ids: tuple[PageIds, ...]) -> None:
        try:
            self._at_home(peer, body, ids)
            self._at_source(peer, body)
        except UnknownRoomError:
            self._counters.add("peers.too_late")
        finally:
            self._carry_out()

    def _at_home(self, peer: Incarnation, body: PeerBody, ids: tuple[PageIds, ...]) -> None:
        now = self._clock()
        if isinstance(body, PeerOffer):
            self._offered(peer, body, ids, now)
        elif isinstance(body, StepReady):
            self._book.step_ready(Origin(peer, body.room, body.offer), body.chunk, body.ready, now)
        elif isinstance(body, OfferWithdrawn) and body.offer == NO_OFFER:
            self._book.sources_ended(peer, body.room, raised(body.error), now)
        elif isinstance(body, OfferWithdrawn):
            self._book.withdrawn(Origin(peer, body.room, body.offer), raised(body.error), now)
        elif isinstance(body, Landed):
            self._transports.landed(peer, body)
        elif isinstance(body, Confirmed):
            self._transports.confirmed(peer, body)
        elif isinstance(body, PoolGone):
            self._pool_gone(peer, body)

    def _at_source(self, peer: Incarnation, body: PeerBody) -> None:
        now = self._clock()
        if isinstance(body, Announce):
            left_s = min(body.deadline_ms / 1000, LONGEST_ANNOUNCEMENT_S)
            self._book.announced(peer, body.room, now + left_s, now)
        elif isinstance(body, RoomClosed):
            error = raised(body.error) if body.error else None
            self._book.closed(peer, body.room, error, body.moved, now, body.unmet)
        elif isinstance(body, OfferRefused) and body.offer == NO_OFFER:
            self._book.announcement_refused(body.room, raised(body.error))
        elif isinstance(body, OfferRefused):
            self._book.refused(peer, body.offer, raised(body.error), now)
        elif isinstance(body, Piece):
            self._transports.piece_asked(peer, body)
        elif isinstance(body, Grant):
            self._transports.granted(peer, body)
        elif isinstance(body, PieceOver):
            self._transports.piece_over(peer, body.piece)
        elif isinstance(body, Confirm):
            self._confirm(peer, body)

    def _confirm(self, peer: Incarnation, body: Confirm) -> None:
        error = None
        try:
            self._book.open_target(peer, body.offer, body.room)
        except KvferryError as wrong:
            error = wrong.info()
        self._links.send(peer, Confirmed(piece=body.piece, error=error))

    def _offered(self, peer: Incarnation, body: PeerOffer, ids: tuple[PageIds, ...], now: float) -> None:
        origin = Origin(peer, body.room, body.offer)
        try:
            self._book.room_for(origin)
            pool = self._remote_pool(peer, body)
            chunk = chunk_of(body, ids, pool.manifest)
        except KvferryError as error:
            self._book.refuse(origin, error, now)
            return
        self._book.offered(origin, body.chunk, pool, chunk, body.ready, now)

    def _pool_gone(self, peer: Incarnation, body: PoolGone) -> None:
        key = (peer, body.tenant, body.pool)
        known = self.remote_pools.get(key)
        if known is not None and known.region_id == body.region:
            self.remote_pools.pop(key).unmap()

    def _remote_pool(self, peer: Incarnation, body: PeerOffer) -> RemotePool:
        key = (peer, body.room.tenant, body.pool)
        known = self.remote_pools.get(key)
        if known is not None and known.region_id == body.region:
            return known
        if body.manifest is None:
            raise InvalidFieldError(f"pool {body.pool!r} was not described", field="manifest")
        if known is None and len(self.remote_pools) >= MAX_REMOTE_POOLS:
            raise OverloadedError(f"{MAX_REMOTE_POOLS} pools of other daemons are known here")
        if known is not None:
            known.unmap()
        check_manifest(body.manifest)
        pool = RemotePool(body.room.tenant, body.pool, body.manifest, peer, body.region)
        self.remote_pools[key] = pool
        return pool


def check_manifest(manifest: Manifest) -> None:
    """Check that what another daemon says of its pool can be reckoned with.

    Raises:
        InvalidFieldError: no entry, or one that lies beyond the region or whose component is not described.
        GeometryMismatchError: an entry that contradicts itself.
    """
    names = {one.name for one in manifest.components}
    for index, entry in enumerate(manifest.entries):
        beyond = entry.base + entry.pages * entry.page_bytes > manifest.region_bytes
        if beyond or entry.component not in names:
            raise InvalidFieldError(f"{entry.name} does not fit its manifest", field=f"manifest.entries[{index}]")
        check_entry(entry, f"manifest.entries[{index}]")
    if not manifest.entries:
        raise InvalidFieldError("a pool without entries", field="manifest.entries")
