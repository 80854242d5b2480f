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
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

import xxhash

from kvferry.daemon.landing import LandingSlots
from kvferry.daemon.metrics import Counters
from kvferry.daemon.rooms.peer_forms import piece_of
from kvferry.daemon.rooms.remote import Incarnation
from kvferry.daemon.rooms.sides import Piece
from kvferry.daemon.transports.base import OnPieceDone
from kvferry.daemon.transports.direct_pages import DirectPages
from kvferry.daemon.transports.fence_watch import Fence, FenceWatch, State
from kvferry.pools.copies import copy_by_size
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.gather import Parcel, cut_parcels, memory_runs
from kvferry.protocol.errors import CancelledError, KvferryError, PeerLostError, TransferFailedError, raised
from kvferry.protocol.ids import BootId
from kvferry.protocol.peer_messages import MAX_RUNS, Grant, Landed, PeerBody, PieceOver

GRANTS_PER_PIECE = 8
"""Slots that one piece may have at a time: so many that its source knows the next one when it has a buffer free."""

Say = Callable[[Incarnation, PeerBody], bool]


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
    ``wanting``: it is in the row of those that a slot is sought for.
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
        self.wanting = False
        self.failed_s = 0.0
        self.over = False

    @property
    def boot_id(self) -> BootId:
        """Return the peer's incarnation."""
        return BootId(self.peer.boot_id)

    @property
    def wants(self) -> bool:
        """Return whether another parcel should be granted."""
        return bool(self.parcels) and self.granted < GRANTS_PER_PIECE


class LandingReceiver:
    """See ``Transport``, for pieces of offers that came from other hosts. All methods belong on the loop."""

    def __init__(
        self,
        say: Say,
        fence: Fence,
        slots: LandingSlots,
        executor: Executor,
        on_piece_done: OnPieceDone,
        counters: Counters,
        pages: DirectPages | None = None,
    ) -> None:
        """Verify and scatter on ``executor``, which is shut down before the slots' memory goes.

        With ``pages``, whole pages are written directly.
        """
        self._say = say
        self._fence = fence
        self._slots = slots
        self._executor = executor
        self._on_piece_done = on_piece_done
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._landings: dict[int, _Landing] = {}
        self._grants: dict[int, _Grant] = {}
        self._taking: set[int] = set()  # grants that have landed and are being scattered
        self._grant_ids = itertools.count(1)
        self._wanting: deque[_Landing] = deque()
        self._watch = FenceWatch(fence, slots, self, counters)
        self._silence_s = slots.bounds.quarantined_s
        self._pages = pages
        self._resting: dict[int, _Landing] = {}  # by the number of the pages in which something may still land
        self._closed = False
        if pages is not None:
            pages.on_change = self._pages_changed

    def __repr__(self) -> str:
        """Show what is under way."""
        return f"<LandingReceiver pieces={len(self._landings)} grants={len(self._grants)} {self._slots!r}>"

    def start(self, piece: Piece) -> None:
        """See ``Transport.start``."""
        assert piece.offer.origin is not None, piece
        landing = _Landing(piece, piece.offer.origin.peer)
        self._landings[piece.piece_id] = landing
        if self._watch.state == "broken":
            self._fail(landing, TransferFailedError("nothing can land here until this daemon is restarted"))
            return
        try:
            for number, promise in enumerate(piece.promises):
                cut = cut_parcels(promise.plan.source, self._slots.slot_bytes)
                landing.parcels.extend((number, parcel) for parcel in cut)
                pool = piece.room.pool
                # The host tier is nobody's to write: what lands there goes by slots.
                in_pages = self._pages is not None and isinstance(pool.region, HostRegion) and not pool.lands_as
                if in_pages and not promise.plan.destination.sliced.any():
                    landing.direct.add(number)
        except KvferryError as error:
            self._fail(landing, error)
            return
        if not self._say(landing.peer, piece_of(piece)):
            self._fail(landing, PeerLostError(f"the daemon at {landing.peer.address} is gone"))
            return
        self._want(landing)
        self.pump()

    def stop(self, piece_id: int) -> None:
        """See ``Transport.stop``."""
        landing = self._landings.get(piece_id)
        if landing is not None:
            self._fail(landing, CancelledError("the hand-off ended before all had landed"))

    def landed(self, peer: Incarnation, message: Landed) -> None:
        """Take a peer's word that a grant is used up."""
        grant = self._grants.get(message.grant)
        if grant is None or grant.landing.peer != peer or message.grant in self._taking:
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
        else:  # it had failed already, and may have waited for this
            self._check_done(landing)
        self._want(landing)
        self.pump()

    def peer_lost(self, peer: Incarnation, why: str) -> None:
        """Fail the pieces of a peer, whose slots rest from now on."""
        error = PeerLostError(f"the daemon at {peer.address} is gone: {why}")
        self.cut_off(set(self._slots.quarantine_peer(BootId(peer.boot_id), time.monotonic())), error)
        for landing in [one for one in self._landings.values() if one.peer == peer]:
            self._fail(landing, error)
        self._watch.look()

    def close(self) -> None:
        """See ``Transport.close``. The executor is shut down after it, the engine before."""
        self._closed = True
        self._landings.clear()
        self._wanting.clear()
        self._watch.close()

    @property
    def state(self) -> State:
        """Return how the slots are; see ``FenceWatch``."""
        return self._watch.state

    def held_by(self) -> dict[str, int]:
        """Return how many grants each peer has not answered, by its address."""
        return dict(Counter(grant.landing.peer.address for grant in self._grants.values()))

    @property
    def unanswered(self) -> bool:
        """See ``Grants``."""
        return any(grant.landing.error is not None for grant in self._grants.values())

    def rest_unanswered(self, now_s: float) -> None:
        """See ``Grants``. A peer that lives and says nothing must not hold memory for ever."""
        silent = {
            number: grant
            for number, grant in self._grants.items()
            if grant.landing.error is not None
            and number not in self._taking
            and now_s - grant.landing.failed_s > self._silence_s
        }
        for number, grant in silent.items():
            landing = grant.landing
            self._slots.quarantine(grant.place.number, landing.boot_id, number, landing.failed_s)
        if silent:
            self._counters.add("landing.unanswered_grants", len(silent))
            self._forget(silent)

    def cut_off(self, numbers: set[int], error: KvferryError) -> None:
        """See ``Grants``. What has landed is taken all the same."""
        ended = {number: grant for number, grant in self._grants.items() if grant.place.number in numbers}
        self._forget({number: grant for number, grant in ended.items() if number not in self._taking})
        for grant in ended.values():
            self._fail(grant.landing, error)

    def nothing_lands(self) -> None:
        """See ``Grants``."""
        rested, self._resting = self._resting, {}
        for landing in rested.values():
            landing.in_pages -= 1
            self._check_done(landing)

    def pump(self) -> None:
        """Grant what slots there are, a parcel of each piece in turn."""
        while self._wanting:
            landing = self._wanting[0]
            if not landing.wants or self._awaits_pages(landing):
                self._wanting.popleft().wanting = False
                continue
            number = next(self._grant_ids)
            place = self._place(landing, number)
            if place is None:
                return
            self._wanting.popleft().wanting = False
            self._grant(landing, number, place)
            self._want(landing)

    def _want(self, landing: _Landing) -> None:
        """Put a piece at the end of the row."""
        if landing.wants and not landing.wanting:
            landing.wanting = True
            self._wanting.append(landing)

    def _pages_changed(self) -> None:
        for landing in self._landings.values():
            self._want(landing)
        self.pump()

    def _grant(self, landing: _Landing, number: int, place: _Place) -> None:
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
            return
        self._grants[number] = _Grant(landing, place, part, parcel)
        landing.granted += 1
        landing.in_pages += bool(place.runs)

    def _awaits_pages(self, landing: _Landing) -> bool:
        """Return whether the piece's pool is being registered; then it comes back into the row by itself."""
        if self._pages is None or landing.parcels[0][0] not in landing.direct:
            return False
        return self._pages.state(landing.piece.room.pool) == "pending"

    def _place(self, landing: _Landing, number: int) -> _Place | None:
        """Return where the piece's next parcel may be written; None where it has to wait."""
        part, parcel = landing.parcels[0]
        pool = landing.piece.room.pool
        if part in landing.direct and self._pages is not None and self._pages.state(pool) == "ready":
            side = landing.piece.promises[part].plan.destination
            assert isinstance(pool.region, HostRegion), pool
            runs = memory_runs(side, pool.region.address, parcel.first, parcel.stop)
            if len(runs) <= MAX_RUNS:
                taken = self._slots.take_pages(landing.boot_id, number, parcel.size_bytes)
                return None if taken is None else _Place(taken, runs[0][0], tuple(runs))
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
        memory = grant.landing.piece.room.pool.region
        memory.scatter(plan.destination, grant.parcel.first, grant.parcel.stop, grant.place.address, copy_by_size)

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
        self._want(landing)
        self.pump()

    def _release(self, number: int, grant: _Grant, *, may_still_land: bool = False) -> None:
        self._grants.pop(number, None)
        place, landing = grant.place, grant.landing
        if may_still_land:
            self._slots.quarantine(place.number, landing.boot_id, number, time.monotonic())
            if place.runs:
                self._resting[place.number] = landing
            self._watch.look()
        else:
            self._slots.give_back(place.number, landing.boot_id, number)
            landing.in_pages -= bool(place.runs)

    def _forget(self, grants: dict[int, _Grant]) -> None:
        """Forget grants whose slots or pages rest."""
        for number, grant in grants.items():
            del self._grants[number]
            if grant.place.runs:
                self._resting[grant.place.number] = grant.landing

    def _fail(self, landing: _Landing, error: KvferryError) -> None:
        if landing.error is None:
            landing.error = error
            landing.failed_s = time.monotonic()
            landing.parcels.clear()
            self._say(landing.peer, PieceOver(piece=landing.piece.piece_id))
            self._watch.look()
        self._check_done(landing)

    def _check_done(self, landing: _Landing) -> None:
        """Report the piece once no byte of it can move: slots that are still granted are no pages."""
        if landing.over or landing.scattering or landing.in_pages:
            return
        if landing.error is None and (landing.parcels or landing.granted):
            return
        landing.over = True
        self._landings.pop(landing.piece.piece_id, None)
        if landing.error is None:
            self._say(landing.peer, PieceOver(piece=landing.piece.piece_id))
        if not self._closed:
            self._loop.call_soon(self._on_piece_done, landing.piece.piece_id, landing.error)
