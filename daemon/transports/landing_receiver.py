"""The receiving half of a transfer between hosts: pieces are granted landing slots, and scattered from them.

The source writes into a slot and says so; nothing of a page is touched before generation, length and checksum are
right. So a late write can only ever land in a slot, and a room that failed settles at once: only its slots wait, for
the source's word that its writes have ended, or in quarantine for a fence.

Where pages are written directly, which is an option, no slot stands between: what arrived is checked in its pages, and
a piece that failed is over only when nothing can land in them any more.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

import structlog
import xxhash

from kvferry.daemon.landing import LandingSlots
from kvferry.daemon.metrics import Counters
from kvferry.daemon.rooms.endings import name_of
from kvferry.daemon.rooms.remote import Incarnation, RemotePool
from kvferry.daemon.rooms.sides import Piece, Promise
from kvferry.daemon.transports.base import OnPieceDone
from kvferry.daemon.transports.direct_pages import DirectPages
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.gather import Parcel, cut_parcels, memory_runs, scatter
from kvferry.protocol.errors import CancelledError, KvferryError, PeerLostError, TransferFailedError, raised
from kvferry.protocol.ids import BootId
from kvferry.protocol.manifests import Entry
from kvferry.protocol.peer_messages import Grant, Landed, Part, PeerBody, PieceOver
from kvferry.protocol.peer_messages import Piece as PieceMessage

GRANTS_PER_PIECE = 4
"""Slots that one piece may have at a time: enough to keep gathering, the wire and scattering busy at once."""

FENCE_LOOK_S = 0.5
log = structlog.get_logger(__name__)

Say = Callable[[Incarnation, PeerBody], bool]


class Fence(Protocol):
    """What can make sure that nothing old lands."""

    session_name: str

    async def rebuild(self) -> str:
        """Destroy and rebuild the engine; nothing old lands afterwards."""


class _Place(NamedTuple):
    """What a grant lets a peer write: the slot of that number, or pages (``runs``) that go by it."""

    number: int
    address: int
    runs: tuple[tuple[int, int], ...] = ()


class _Grant(NamedTuple):
    landing: _Landing
    place: _Place
    part: int
    parcel: Parcel


class _Landing:
    """One piece: parcels not granted yet, grants under way, and the first error.

    ``direct`` are the parts whose pages are written directly, ``in_pages`` the grants of them that may still land.
    """

    def __init__(self, piece: Piece, peer: Incarnation) -> None:
        self.piece = piece
        self.peer = peer
        self.parcels: deque[tuple[int, Parcel]] = deque()
        self.direct: set[int] = set()
        self.in_pages = 0
        self.granted = 0
        self.scattering = 0
        self.error: KvferryError | None = None
        self.told_over = False
        self.over = False

    @property
    def boot_id(self) -> BootId:
        """Return the peer's incarnation."""
        return BootId(self.peer.boot_id)


class LandingReceiver:
    """See ``Transport``, for pieces of offers that came from other hosts. All methods belong on the loop."""

    def __init__(
        self,
        say: Say,
        fence: Fence,
        region: HostRegion,
        slots: LandingSlots,
        executor: Executor,
        on_piece_done: OnPieceDone,
        counters: Counters,
        pages: DirectPages | None = None,
    ) -> None:
        """Take slots from ``region``, which they tile, and verify and scatter on ``executor``.

        With ``pages``, whole pages are written directly.
        """
        self._say = say
        self._fence = fence
        self._region = region
        self._slots = slots
        self._executor = executor
        self._on_piece_done = on_piece_done
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._landings: dict[int, _Landing] = {}
        self._grants: dict[int, _Grant] = {}
        self._taking: set[int] = set()  # grants that have landed and are being scattered
        self._grant_ids = itertools.count(1)
        self._fencing: asyncio.Task[None] | None = None
        self._pages = pages
        self._resting: dict[int, _Landing] = {}  # by the number of the pages in which something may still land
        self._closed = False
        if pages is not None:
            pages.on_change = self._pump

    def __repr__(self) -> str:
        """Show what is under way."""
        return f"<LandingReceiver pieces={len(self._landings)} grants={len(self._grants)} {self._slots!r}>"

    def start(self, piece: Piece) -> None:
        """See ``Transport.start``."""
        assert piece.offer.origin is not None, piece
        landing = _Landing(piece, piece.offer.origin.peer)
        self._landings[piece.piece_id] = landing
        try:
            for number, promise in enumerate(piece.promises):
                cut = cut_parcels(promise.plan.source, self._slots.slot_bytes)
                landing.parcels.extend((number, parcel) for parcel in cut)
                if self._pages is not None and not promise.plan.destination.sliced.any():
                    landing.direct.add(number)
        except KvferryError as error:
            self._fail(landing, error)
            return
        if not self._say(landing.peer, _message_of(piece)):
            self._fail(landing, PeerLostError(f"the daemon at {landing.peer.address} is gone"))
            return
        self._pump()

    def stop(self, piece_id: int) -> None:
        """See ``Transport.stop``."""
        landing = self._landings.get(piece_id)
        if landing is not None:
            self._fail(landing, CancelledError("the hand-off ended before all had landed"))

    def landed(self, peer: Incarnation, message: Landed) -> None:
        """Take a peer's word that a grant is used up."""
        grant = self._grants.get(message.grant)
        if grant is None or grant.landing.peer != peer:
            self._counters.add("landing.unknown_grants")
            return
        landing = grant.landing
        landing.granted -= 1
        if message.error is None and landing.error is None:
            landing.scattering += 1
            self._taking.add(message.grant)
            work = self._loop.run_in_executor(self._executor, self._take, grant, message.checksum)
            work.add_done_callback(lambda done: self._taken(message.grant, grant, done))
            return
        self._release(message.grant, grant, may_still_land=message.may_still_land)
        if message.error is not None:
            self._fail(landing, raised(message.error))
        self._pump()

    def peer_lost(self, peer: Incarnation, why: str) -> None:
        """Fail the pieces of a peer, whose slots rest from now on."""
        self._cut_off(set(self._slots.quarantine_peer(BootId(peer.boot_id), time.monotonic())))
        for landing in [one for one in self._landings.values() if one.peer == peer]:
            self._fail(landing, PeerLostError(f"the daemon at {peer.address} is gone: {why}"))
        self._look_at_fence()

    def close(self) -> None:
        """See ``Transport.close``. The executor is shut down after it, the engine before."""
        self._closed = True
        self._landings.clear()
        if self._fencing is not None:
            self._fencing.cancel()

    def _pump(self) -> None:
        """Grant what slots there are, a parcel of each piece in turn."""
        waiting = deque(one for one in self._landings.values() if one.parcels and one.granted < GRANTS_PER_PIECE)
        while waiting:
            landing = waiting.popleft()
            number = next(self._grant_ids)
            place = self._place(landing, number)
            if place is None:
                continue
            part, parcel = landing.parcels.popleft()
            grant = Grant(
                piece=landing.piece.piece_id,
                grant=number,
                part=part,
                first=parcel.first,
                stop=parcel.stop,
                session=self._fence.session_name,
                address=place.address,
                size_bytes=parcel.size_bytes,
                runs=place.runs,
            )
            if not self._say(landing.peer, grant):
                self._slots.give_back(place.number, landing.boot_id, number)
                self._fail(landing, PeerLostError(f"the daemon at {landing.peer.address} is gone"))
                continue
            self._grants[number] = _Grant(landing, place, part, parcel)
            landing.granted += 1
            landing.in_pages += bool(place.runs)
            if landing.parcels and landing.granted < GRANTS_PER_PIECE:
                waiting.append(landing)

    def _place(self, landing: _Landing, number: int) -> _Place | None:
        """Return where the piece's next parcel may be written; None where it has to wait."""
        part, parcel = landing.parcels[0]
        pool = landing.piece.room.pool
        if part in landing.direct and self._pages is not None:
            state = self._pages.state(pool)
            if state == "ready":
                taken = self._slots.take_pages(landing.boot_id, number, parcel.size_bytes)
                side = landing.piece.promises[part].plan.destination
                runs = memory_runs(side, pool.region.address, parcel.first, parcel.stop)
                return None if taken is None else _Place(taken, runs[0][0], tuple(runs))
            if state == "pending":
                return None
        slot = self._slots.take(landing.boot_id, number)
        return None if slot is None else _Place(slot.number, slot.address)

    def _take(self, grant: _Grant, checksum: int) -> None:
        """On a thread: check what landed and put it where it belongs."""
        digest = xxhash.xxh3_64()
        for address, size_bytes in grant.place.runs or ((grant.place.address, grant.parcel.size_bytes),):
            digest.update((ctypes.c_char * size_bytes).from_address(address))
        found = digest.intdigest()
        if found != checksum:
            raise TransferFailedError(f"what landed has checksum {found:016x}, the source sent {checksum:016x}")
        if grant.place.runs:
            return
        plan = grant.landing.piece.promises[grant.part].plan
        pool = grant.landing.piece.room.pool
        scatter(plan.destination, pool.region.address, grant.parcel.first, grant.parcel.stop, grant.place.address)

    def _taken(self, number: int, grant: _Grant, done: asyncio.Future[None]) -> None:
        landing = grant.landing
        landing.scattering -= 1
        self._taking.discard(number)
        self._release(number, grant)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._counters.add("landing.refused")
            known = isinstance(error, KvferryError)
            self._fail(landing, error if known else TransferFailedError(f"landing failed: {error}"))  # type: ignore[arg-type]
        elif grant.place.runs:
            self._counters.add("landing.direct_bytes", grant.parcel.size_bytes)
        self._check_done(landing)
        self._pump()

    def _release(self, number: int, grant: _Grant, *, may_still_land: bool = False) -> None:
        self._grants.pop(number, None)
        place, landing = grant.place, grant.landing
        if may_still_land:
            self._slots.quarantine(place.number, landing.boot_id, number, time.monotonic())
            if place.runs:
                self._resting[place.number] = landing
            self._look_at_fence()
        else:
            self._slots.give_back(place.number, landing.boot_id, number)
            landing.in_pages -= bool(place.runs)

    def _cut_off(self, numbers: set[int]) -> list[_Landing]:
        """Forget the grants of what rests from now on, unless it has landed; return whose they were."""
        ended = [(n, grant) for n, grant in self._grants.items() if grant.place.number in numbers]
        for number, grant in ended:
            if number not in self._taking:
                del self._grants[number]
                if grant.place.runs:
                    self._resting[grant.place.number] = grant.landing
        return [grant.landing for _, grant in ended]

    def _fail(self, landing: _Landing, error: KvferryError) -> None:
        if landing.error is None:
            landing.error = error
            landing.parcels.clear()
            self._tell_over(landing)
        self._check_done(landing)

    def _check_done(self, landing: _Landing) -> None:
        """Report the piece once no byte of it can move: slots that are still granted are no pages."""
        if landing.over or landing.scattering or landing.in_pages:
            return
        if landing.error is None and (landing.parcels or landing.granted):
            return
        landing.over = True
        self._landings.pop(landing.piece.piece_id, None)
        self._tell_over(landing)
        if not self._closed:
            self._loop.call_soon(self._on_piece_done, landing.piece.piece_id, landing.error)

    def _tell_over(self, landing: _Landing) -> None:
        if not landing.told_over:
            landing.told_over = True
            self._say(landing.peer, PieceOver(piece=landing.piece.piece_id))

    # -- fences

    def _look_at_fence(self) -> None:
        """Watch over what rests, as long as anything does."""
        if self._fencing is None and not self._closed and self._slots.quarantined_bytes:
            self._fencing = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        try:
            while self._slots.quarantined_bytes:
                if self._slots.fence_due(time.monotonic()):
                    await self._do_fence()
                self._pump()
                await asyncio.sleep(FENCE_LOOK_S)
        finally:
            self._fencing = None

    async def _do_fence(self) -> None:
        for landing in self._cut_off(set(self._slots.fence_begins(time.monotonic()))):
            self._fail(landing, TransferFailedError("its landing slot was fenced while it was under way"))
        try:
            await self._fence.rebuild()
        except KvferryError as error:
            log.exception("the fence failed: no slot is freed", cause=str(error))
            return
        freed = self._slots.fenced()
        rested, self._resting = self._resting, {}
        for landing in rested.values():
            landing.in_pages -= 1
            self._check_done(landing)
        self._counters.add("landing.fences")
        log.warning("landing slots fenced", freed=freed)


def _message_of(piece: Piece) -> PieceMessage:
    assert piece.offer.origin is not None, piece
    assert isinstance(piece.offer.pool, RemotePool), piece
    places = {id(entry): number for number, entry in enumerate(piece.offer.pool.manifest.entries)}
    return PieceMessage(
        room=name_of(piece.room),
        offer=piece.offer.origin.offer,
        piece=piece.piece_id,
        chunk=piece.chunk,
        parts=tuple(_part_of(promise, places) for promise in piece.promises),
    )


def _part_of(promise: Promise, places: dict[int, int]) -> Part:
    entries: list[Entry] = [pair.source for pair in promise.pairs]
    heads = tuple((pair.heads.source, pair.heads.count) if pair.heads else (0, 0) for pair in promise.pairs)
    return Part(
        component=promise.component,
        start=promise.source_start,
        pages=len(promise.plan.source.ids),
        entries=tuple(places[id(entry)] for entry in entries),
        heads=heads,
    )
