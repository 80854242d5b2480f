"""Transports between daemons that do nothing by themselves: a test decides when bytes move and how each piece ends.

By mapping, where the peer's address is of this host: the home copies, ends the copy, and has the source confirm. By
landing slots else: the source gathers what was granted, and its write ends; only then does the home touch a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from kvferry.daemon.rooms.endings import name_of
from kvferry.daemon.rooms.peer_book import PeerBook
from kvferry.daemon.rooms.remote import Incarnation, RemotePool, Target
from kvferry.daemon.rooms.sides import Piece, State
from kvferry.daemon.transports.landing_receiver import Say
from kvferry.pools.copies import copy_one_by_one
from kvferry.pools.devices.base import Region
from kvferry.pools.gather import total_segments
from kvferry.protocol.errors import (
    CancelledError,
    InvalidFieldError,
    KvferryError,
    PeerLostError,
    TransferFailedError,
    UnknownRoomError,
    raised,
)
from kvferry.protocol.peer_messages import Confirm, Confirmed, Grant, Landed, Part, PieceOver
from kvferry.protocol.peer_messages import Piece as PieceMessage
from tests.region_bytes import read_region, write_region

ON_THIS_HOST = "ipc://"
PART = Part(component="main", start=0, pages=1, entries=(0,), heads=((0, 0),))
"""What the pieces of a test say of themselves: the test moves them by their plans."""

RegionOf = Callable[[RemotePool], Region]
SendingKey: TypeAlias = tuple[Incarnation, int]


class Sending:
    """A piece that a source daemon sends.

    Attributes:
        writing: whether a grant of it is being written.
        over: whether no grant follows.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.writing = False
        self.over = False


class Arriving:
    """A piece at its home.

    Attributes:
        stopped: whether the home wants it no more.
        confirming: whether the source was asked to confirm the copy.
    """

    def __init__(self, piece: Piece, peer: Incarnation, region_of: RegionOf) -> None:
        self.piece = piece
        self.peer = peer
        self._region_of = region_of
        self.error: KvferryError | None = None
        self.confirming = False

    @property
    def stopped(self) -> bool:
        """Return whether the copy is to end."""
        return self.error is not None

    @property
    def region(self) -> Region:
        """Return the source's memory.

        Raises:
            PeerLostError: nobody has it.
        """
        pool = self.piece.offer.pool
        assert isinstance(pool, RemotePool)
        return self._region_of(pool)

    def gathered(self) -> list[bytes]:
        """Return what the source's memory holds now, a block each."""
        memory = read_region(self.region)
        return [
            memory[int(start) : int(start) + int(size)].tobytes()
            for promise in self.piece.promises
            for start, _, size in promise.plan.blocks().tolist()
        ]

    def copy(self) -> None:
        """Copy from the source's memory as it is now."""
        for promise in self.piece.promises:
            plan = promise.plan
            staging = np.empty(plan.total_bytes, np.uint8)
            stop, at = total_segments(plan.source), staging.ctypes.data
            self.region.gather(plan.source, 0, stop, at, copy_one_by_one)
            self.piece.room.pool.region.scatter(plan.destination, 0, stop, at, copy_one_by_one)

    def scatter(self, landed: list[bytes]) -> None:
        """Put what landed into the pages."""
        content = iter(landed)
        for promise in self.piece.promises:
            for _, start, _ in promise.plan.blocks().tolist():
                write_region(self.piece.room.pool.region, np.frombuffer(next(content), np.uint8), int(start))


class ScriptedRemote:
    """What ``RemoteTransports`` is to a daemon.

    Attributes:
        mapped: pieces that this daemon copies from a peer's memory, by id.
        landing: pieces that a peer is to write to this daemon's slots, by id.
        sending: pieces that homes have asked this daemon for, by home and number.
        slots: what peers have written to this daemon's slots, by the peer's boot id and grant.
        done: pieces that have ended and are not reported yet.
    """

    def __init__(
        self,
        say: Say,
        book: PeerBook,
        on_piece_done: Callable[[int, KvferryError | None], None],
        on_settled: Callable[[], None],
        region_of: RegionOf,
    ) -> None:
        self.mapped: dict[int, Arriving] = {}
        self.landing: dict[int, Arriving] = {}
        self.sending: dict[SendingKey, Sending] = {}
        self.slots: dict[tuple[str, int], list[bytes]] = {}
        self.done: list[tuple[int, KvferryError | None]] = []
        self._say = say
        self._book = book
        self._on_piece_done = on_piece_done
        self._on_settled = on_settled
        self._region_of = region_of

    def report(self) -> None:
        """Report the pieces that have ended: never from within ``start`` or ``stop``."""
        while self.done:
            self._on_piece_done(*self.done.pop(0))

    # -- at the home

    def can_reach(self, _address: str) -> bool:
        """See ``RemoteTransports.can_reach``."""
        return True

    def start(self, piece: Piece) -> None:
        """See ``RemoteTransports.start``."""
        assert piece.offer.origin is not None
        peer = piece.offer.origin.peer
        arriving = Arriving(piece, peer, self._region_of)
        if peer.address.startswith(ON_THIS_HOST):
            self._map(arriving)
            return
        self.landing[piece.piece_id] = arriving
        origin, number = piece.offer.origin, piece.piece_id
        asked = PieceMessage(
            room=name_of(piece.room), offer=origin.offer, piece=number, chunk=piece.chunk, parts=(PART,)
        )
        grant = Grant(piece=number, grant=number, part=0, first=0, stop=1, session="", address=0, size_bytes=1)
        if not (self._say(peer, asked) and self._say(peer, grant)):
            self._end_landing(number, PeerLostError("gone"))

    def _map(self, arriving: Arriving) -> None:
        number = arriving.piece.piece_id
        try:
            assert arriving.region.size_bytes
        except PeerLostError as error:
            self.done.append((number, error))
            return
        self.mapped[number] = arriving

    def stop(self, piece_id: int) -> None:
        """See ``RemoteTransports.stop``."""
        self._fail(piece_id, CancelledError("stopped"))

    def peer_lost(self, peer: Incarnation, why: str) -> None:
        """See ``RemoteTransports.peer_lost``."""
        for piece_id in [n for n, one in (self.mapped | self.landing).items() if one.peer == peer]:
            self._fail(piece_id, PeerLostError(why))
        for key in [key for key in self.sending if key[0] == peer]:
            self._over(key)

    def end_copy(self, piece_id: int, error: KvferryError | None = None) -> None:
        """End the copy of a mapped piece; ask the source to confirm it, if all is well."""
        arriving = self.mapped[piece_id]
        arriving.error = arriving.error or error
        if arriving.error is not None:
            self._end_mapped(piece_id)
            return
        arriving.confirming = True
        origin = arriving.piece.offer.origin
        assert origin is not None
        asked = Confirm(room=name_of(arriving.piece.room), offer=origin.offer, piece=piece_id)
        if not self._say(arriving.peer, asked):
            arriving.error = PeerLostError("gone")
            self._end_mapped(piece_id)

    def confirmed(self, peer: Incarnation, message: Confirmed) -> None:
        """See ``RemoteTransports.confirmed``."""
        arriving = self.mapped.get(message.piece)
        if arriving is not None and arriving.peer == peer and arriving.confirming:
            arriving.error = raised(message.error) if message.error else None
            self._end_mapped(message.piece)

    def landed(self, peer: Incarnation, message: Landed) -> None:
        """See ``RemoteTransports.landed``."""
        arriving = self.landing.get(message.grant)
        slot = self.slots.pop((peer.boot_id, message.grant), None)
        if arriving is None or arriving.peer != peer:
            return
        error = raised(message.error) if message.error else None
        if error is None and slot is None:
            error = TransferFailedError("the checksum is wrong: nothing came")
        if error is None and slot is not None:
            arriving.scatter(slot)
        self._end_landing(message.grant, error)

    def _fail(self, piece_id: int, error: KvferryError) -> None:
        if piece_id in self.landing:
            self._end_landing(piece_id, error)
            return
        arriving = self.mapped.get(piece_id)
        if arriving is not None:
            arriving.error = arriving.error or error
            if arriving.confirming:
                self._end_mapped(piece_id)

    def _end_landing(self, piece_id: int, error: KvferryError | None) -> None:
        arriving = self.landing.pop(piece_id)
        self._say(arriving.peer, PieceOver(piece=piece_id))
        self.done.append((piece_id, error))

    def _end_mapped(self, piece_id: int) -> None:
        self.done.append((piece_id, self.mapped.pop(piece_id).error))

    # -- at the source

    def piece_asked(self, peer: Incarnation, message: PieceMessage) -> None:
        """See ``RemoteTransports.piece_asked``."""
        target = self._book.open_target(peer, message.offer, message.room)
        if (peer, message.piece) in self.sending:
            raise InvalidFieldError("known already", field="piece")
        self.sending[peer, message.piece] = Sending(target)
        self._book.begin_sending(target, message.piece, target.offer.created_at)

    def granted(self, peer: Incarnation, message: Grant) -> None:
        """See ``RemoteTransports.granted``."""
        sending = self.sending.get((peer, message.piece))
        if sending is None or sending.over:
            self._say(peer, Landed(grant=message.grant, error=UnknownRoomError("over", field="piece").info()))
        else:
            sending.writing = True

    def piece_over(self, peer: Incarnation, number: int) -> None:
        """See ``RemoteTransports.piece_over``."""
        self._over((peer, number))

    def stop_sending(self, target: Target) -> None:
        """See ``RemoteTransports.stop_sending``."""
        for key in [key for key, one in self.sending.items() if one.target is target]:
            self._over(key)

    def end_write(self, key: SendingKey, error: KvferryError | None = None) -> None:
        """End the write of a grant: its pages are not read any more."""
        peer, number = key
        sending = self.sending[key]
        assert sending.writing, "nothing was granted"
        assert sending.target.offer.state is not State.SETTLED, "pages are read that nobody holds"
        sending.writing = False
        self._say(peer, Landed(grant=number, error=error.info() if error else None))
        self._check_settled(key)

    def writing(self) -> list[SendingKey]:
        """Return the writes that are under way."""
        return [key for key, one in self.sending.items() if one.writing]

    def _over(self, key: SendingKey) -> None:
        if key in self.sending:
            self.sending[key].over = True
            self._check_settled(key)

    def _check_settled(self, key: SendingKey) -> None:
        sending = self.sending.get(key)
        if sending is not None and sending.over and not sending.writing:
            del self.sending[key]
            self._book.sending_done(sending.target, key[1])
            self._on_settled()
