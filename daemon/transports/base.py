"""The contract of every transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.daemon.rooms.effects import StartPiece
from kvferry.protocol.errors import KvferryError

OnPieceDone = Callable[[int, KvferryError | None], None]
"""Called with a piece's id and what went wrong, once for each piece, on the control loop."""


class Transport(Protocol):
    """Moves pieces in the background. Methods are called on the control loop and return at once."""

    def start(self, piece: StartPiece) -> None:
        """Begin to copy; ``on_piece_done`` follows exactly once, when no byte of the piece can move any more."""

    def stop(self, piece_id: int) -> None:
        """Stop at the next boundary, if the piece is still under way; ``on_piece_done`` follows all the same."""

    def close(self) -> None:
        """Stop everything and wait until no byte moves; nothing is reported after it."""
