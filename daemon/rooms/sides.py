"""The two sides of hand-offs as the book keeps them: offers (accepted SENDs) and rooms (accepted RECEIVEs).

Both go through the same states, and only forwards: OPEN until the outcome is known, FINISHED until no byte can move
any more, SETTLED. A FINISHED side still holds its pages.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Literal, NamedTuple

import msgspec

from kvferry.daemon.rooms.page_ranges import PageRange, entries_of
from kvferry.pools.coverage import Cells, Coverage
from kvferry.pools.plan import Plan
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.events import Finished


class State(enum.Enum):
    """How far a side has come."""

    OPEN = "open"
    FINISHED = "finished"
    SETTLED = "settled"


class SideKey(NamedTuple):
    """One side of a hand-off, as its session names it."""

    tenant: int
    request_id: str
    pool: str
    side: Literal["send", "receive"]


class Clocked(NamedTuple):
    """When a side came and when it must be done, in seconds of one monotonic clock."""

    created_at: float
    deadline_at: float


class Chunk(NamedTuple):
    """One accepted SEND."""

    ranges: tuple[PageRange, ...]
    last: bool
    first_token: int | None
    payload: bytes

    @property
    def carries_token(self) -> bool:
        """Return whether it has what only one SEND of a request may have."""
        return self.first_token is not None or bool(self.payload)


class Promise(NamedTuple):
    """Cells of one component that a chunk fills, and the plan that fills them."""

    component: str
    cells: Cells
    plan: Plan


class Piece(NamedTuple):
    """One chunk on its way into one room."""

    piece_id: int
    offer: Offer
    room: Room
    promises: tuple[Promise, ...]


class Side:
    """What offers and rooms have in common."""

    side: ClassVar[Literal["send", "receive"]]

    def __init__(self, pool: Pool, request_id: str, session_id: int, times: Clocked) -> None:
        self.pool = pool
        self.request_id = request_id
        self.session_id = session_id
        self.created_at = times.created_at
        self.deadline_at = times.deadline_at
        self.state = State.OPEN
        self.generation = 0
        self.first_copy_at: float | None = None
        self.moved_bytes = 0
        self.skipped_source_entries = 0
        self.skipped_source_pages = 0

    @property
    def key(self) -> SideKey:
        """Return what names this side."""
        return SideKey(self.pool.tenant, self.request_id, self.pool.name, self.side)

    @property
    def pages(self) -> int:
        """Return how many pages this side has named."""
        raise NotImplementedError

    def waits_for(self) -> str:
        """Say what is missing, for STATUS and for a DEADLINE error."""
        raise NotImplementedError

    def finished_event(self, error: KvferryError | None, now: float) -> Finished:
        """Return the FINISHED event of this side."""
        started = now if self.first_copy_at is None else self.first_copy_at
        return Finished(
            request_id=self.request_id,
            pool=self.pool.name,
            side=self.side,
            generation=self.generation,
            error=error.info() if error else None,
            pages=self.pages,
            moved_bytes=self.moved_bytes,
            skipped_source_entries=self.skipped_source_entries,
            skipped_source_pages=self.skipped_source_pages,
            waited_us=round((started - self.created_at) * 1e6),
            moved_us=round((now - started) * 1e6),
        )


class Offer(Side):
    """The SENDs of one request from one pool. Its pages are held for reading until every room has settled."""

    side = "send"

    def __init__(self, pool: Pool, request_id: str, session_id: int, times: Clocked, destinations: int) -> None:
        super().__init__(pool, request_id, session_id, times)
        self.destinations = destinations
        self.chunks: list[Chunk] = []
        self.rooms: list[Room] = []
        self.outcomes: list[KvferryError | None] = []

    @property
    def complete(self) -> bool:
        """Return whether the last SEND is accepted: from then on the sender may die."""
        return bool(self.chunks) and self.chunks[-1].last

    @property
    def fully_matched(self) -> bool:
        """Return whether no SEND and no RECEIVE is missing any more."""
        return self.complete and len(self.rooms) == self.destinations

    @property
    def carries_token(self) -> bool:
        """Return whether a SEND with a first token or payload was accepted."""
        return any(chunk.carries_token for chunk in self.chunks)

    @property
    def pages(self) -> int:
        """Return how many pages all SENDs named."""
        return sum(len(one.ids) for chunk in self.chunks for one in chunk.ranges)

    def waits_for(self) -> str:
        """Say what is missing, for STATUS and for a DEADLINE error."""
        if len(self.rooms) < self.destinations:
            return f"{self.destinations - len(self.rooms)} of {self.destinations} rooms: no RECEIVE yet"
        return "copies" if self.complete else "its own last SEND"

    def end_page(self, component: str) -> int | None:
        """Return where the next chunk of the component has to start; None before the first."""
        for chunk in reversed(self.chunks):
            for one in chunk.ranges:
                if one.component == component:
                    return one.end_page
        return None


class Room(Side):
    """A RECEIVE: pages to fill, and what has come. Its pages are held for writing until it has settled."""

    side = "receive"

    def __init__(
        self,
        pool: Pool,
        request_id: str,
        session_id: int,
        times: Clocked,
        ranges: tuple[PageRange, ...],
        sources: int,
    ) -> None:
        super().__init__(pool, request_id, session_id, times)
        self.sources = sources
        self.ranges = {one.component: one for one in ranges}
        self.coverage = {
            one.component: Coverage(entries_of(pool, one.component), len(one.ids), pool.manifest.optional_components)
            for one in ranges
        }
        self.offers: list[Offer] = []
        self.pieces: dict[int, Piece] = {}

    @property
    def pages(self) -> int:
        """Return how many pages the RECEIVE named."""
        return sum(len(one.ids) for one in self.ranges.values())

    @property
    def arrived_pages(self) -> int:
        """Return how many of its pages are there in every required entry."""
        return sum(one.arrived_pages for one in self.coverage.values())

    @property
    def all_promised(self) -> bool:
        """Return whether every source has sent its last SEND."""
        return len(self.offers) == self.sources and all(offer.complete for offer in self.offers)

    @property
    def token_chunk(self) -> Chunk | None:
        """Return the chunk with the first token and payload, if it came."""
        return next((c for offer in self.offers for c in offer.chunks if c.carries_token), None)

    def check_promised(self) -> None:
        """Check that nothing required is without a sender; see ``Coverage.check_promised``."""
        for coverage in self.coverage.values():
            coverage.check_promised()

    def waits_for(self) -> str:
        """Say what is missing, for STATUS and for a DEADLINE error."""
        if len(self.offers) < self.sources:
            return f"{self.sources - len(self.offers)} of {self.sources} sources: no SEND yet"
        if not self.all_promised:
            return "a source's last SEND"
        return f"copies: {self.arrived_pages} of {self.pages} pages there"

    def finished_event(self, error: KvferryError | None, now: float) -> Finished:
        """Return the FINISHED event, with first token and payload where it succeeded."""
        event = super().finished_event(error, now)
        chunk = self.token_chunk
        if error or chunk is None:
            return event
        return msgspec.structs.replace(event, first_token=chunk.first_token, payload=chunk.payload)
