"""From accepted chunks to pieces: what fits is promised, cut into steps, and started when a step is ready."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.daemon.rooms.acceptance import withdraw, would_complete
from kvferry.daemon.rooms.effects import StartPiece, WarnTrimmed
from kvferry.daemon.rooms.matching import Match, match
from kvferry.daemon.rooms.registry import Sides
from kvferry.daemon.rooms.sides import Chunk, Offer, Piece, Room
from kvferry.protocol.errors import KvferryError


class Fit(NamedTuple):
    """A chunk of an offer, by its number, and what it fills."""

    chunk: int
    match: Match


class Moves:
    """Makes and starts the pieces of rooms. A hand-off of less than ``whole_below_bytes`` is not cut into steps."""

    def __init__(self, sides: Sides, whole_below_bytes: int) -> None:
        self._sides = sides
        self._whole_below_bytes = whole_below_bytes
        self._piece_ids = itertools.count(1)

    def fit(self, room: Room, offer: Offer, first: int, chunks: Sequence[Chunk]) -> list[Fit]:
        """Match an offer's chunks from number ``first`` on, and promise their cells; or leave no trace.

        Raises:
            KvferryError: a chunk does not fit, or all sources are done and cells are missing.
        """
        fits: list[Fit] = []
        try:
            for number, chunk in enumerate(chunks, first):
                found = match(chunk, offer.pool, room, self._whole_below_bytes)
                for promise in found.promises:
                    room.coverage[promise.component].promise(promise.cells)
                fits.append(Fit(number, found))
            if would_complete(room, offer, chunks):
                room.check_promised([one for fit in fits for one in fit.match.excused])
        except KvferryError:
            self.withdraw(room, fits)
            raise
        return fits

    def withdraw(self, room: Room, fits: Sequence[Fit]) -> None:
        """Take back what ``fit`` promised."""
        withdraw([(room, [fit.match for fit in fits])])

    def join(self, room: Room, offer: Offer) -> None:
        """Let the offer be one of the room's: from now on they end together."""
        room.offers.append(offer)
        offer.rooms.append(room)

    def start(self, room: Room, offer: Offer, fit: Fit, now: float) -> None:
        """Let the offer join the room, and start those pieces of the chunk whose step is ready."""
        if offer not in room.offers:
            self.join(room, offer)
        found = fit.match
        for side in (room, offer):
            side.skipped_source_entries = max(side.skipped_source_entries, found.skipped_source_entries)
            side.covered_source_entries = max(side.covered_source_entries, found.covered_source_entries)
            side.skipped_source_pages += found.skipped_source_pages
            side.trimmed_pages += found.trimmed_pages
        self._sides.effects.extend(WarnTrimmed(offer, room, trim) for trim in found.trims)
        for excused in found.excused:
            room.coverage[excused.component].excuse(excused.cells)
        steps = sorted({promise.step for promise in found.promises})
        for step in steps:
            promises = tuple(one for one in found.promises if one.step == step)
            piece = Piece(next(self._piece_ids), offer, room, promises, fit.chunk, step)
            self._sides.pieces[piece.piece_id] = room.pieces[piece.piece_id] = piece
            room.waiting.append(piece)
        self.start_ready(room, now)

    def start_ready(self, room: Room, now: float) -> None:
        """Start the room's pieces whose step is ready by now."""
        ready = [piece for piece in room.waiting if piece.ready]
        for piece in ready:
            room.waiting.remove(piece)
            for side in (room, piece.offer):
                side.first_copy_at = now if side.first_copy_at is None else side.first_copy_at
            plans = tuple(promise.plan for promise in piece.promises)
            self._sides.effects.append(StartPiece(piece.piece_id, piece.offer.pool, room.pool, plans, room.request_id))
