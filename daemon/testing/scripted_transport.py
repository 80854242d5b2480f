"""A transport that does nothing by itself: a test decides when and how each piece ends."""

from __future__ import annotations

import numpy as np

from kvferry.daemon.rooms.effects import StartPiece
from kvferry.daemon.transports.base import OnPieceDone
from kvferry.pools.copies import copy_one_by_one
from kvferry.pools.gather import total_segments
from kvferry.protocol.errors import KvferryError


class ScriptedTransport:
    """See ``Transport``. Between ``start`` and ``end`` a piece is under way: its bytes move when ``copy`` is called.

    Attributes:
        under_way: the pieces started and not ended, by id, oldest first.
        stopped: the ids of those that are to stop.
    """

    def __init__(self, on_piece_done: OnPieceDone) -> None:
        self.under_way: dict[int, StartPiece] = {}
        self.stopped: set[int] = set()
        self._on_piece_done = on_piece_done

    def __repr__(self) -> str:
        """Show what is under way."""
        return f"<ScriptedTransport under_way={list(self.under_way)} stopped={sorted(self.stopped)}>"

    def start(self, piece: StartPiece) -> None:
        """See ``Transport.start``."""
        assert piece.piece_id not in self.under_way, "a piece that is under way"
        self.under_way[piece.piece_id] = piece

    def stop(self, piece_id: int) -> None:
        """See ``Transport.stop``."""
        if piece_id in self.under_way:
            self.stopped.add(piece_id)

    def close(self) -> None:
        """See ``Transport.close``."""
        self.under_way.clear()
        self.stopped.clear()

    def copy(self, piece_id: int) -> None:
        """Move the piece's bytes, without a word: it stays under way."""
        piece = self.under_way[piece_id]
        for plan in piece.plans:
            staging = np.empty(plan.total_bytes, np.uint8)
            stop, at = total_segments(plan.source), staging.ctypes.data
            piece.source.region.gather(plan.source, 0, stop, at, copy_one_by_one)
            piece.destination.region.scatter(plan.destination, 0, stop, at, copy_one_by_one)

    def end(self, piece_id: int, error: KvferryError | None = None) -> None:
        """Report the piece's end: no byte of it moves any more."""
        del self.under_way[piece_id]
        self.stopped.discard(piece_id)
        self._on_piece_done(piece_id, error)

    def finish(self, piece_id: int) -> None:
        """Move the piece's bytes and report that all is well."""
        self.copy(piece_id)
        self.end(piece_id)

    def finish_all(self) -> None:
        """Finish every piece, also those that start meanwhile."""
        while self.under_way:
            self.finish(next(iter(self.under_way)))
