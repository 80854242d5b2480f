"""What the room book asks its shell to do, in order."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.pools.plan import Plan
from kvferry.pools.pool import Pool
from kvferry.protocol.events import Finished, Settled


class StartPiece(NamedTuple):
    """Copy these plans, then report ``piece_done``; the pages are held until then."""

    piece_id: int
    source: Pool
    destination: Pool
    plans: tuple[Plan, ...]


class StopPiece(NamedTuple):
    """The copy is not wanted any more: stop at the next boundary, then report ``piece_done`` all the same."""

    piece_id: int


class Tell(NamedTuple):
    """Tell a session, if it still lives."""

    session_id: int
    event: Finished | Settled


Effect = StartPiece | StopPiece | Tell
