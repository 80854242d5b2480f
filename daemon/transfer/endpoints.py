"""The endpoints of transfers: send requests (accepted SENDs) and receive requests (accepted RECEIVEs).

Both go through the same states, in order: OPEN until the outcome is known, FINISHED until no byte can move any more,
SETTLED. A FINISHED endpoint still holds its pages, and one whose end raised, which is QUARANTINED, does so for ever. A
send request may come from another daemon (``origin``); at that daemon it is a local send request, with a
``RemoteEndpoint`` in place of the receive request.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from kvferry.daemon.transfer.transitions import Kind, State
from kvferry.pools.allocator import PageAllocator
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.coverage import Cells, Coverage
from kvferry.pools.planning.page_ranges import PageRange, entries_of
from kvferry.pools.planning.pairing import Pair
from kvferry.pools.planning.plan import Cut, Plan
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.events import Finished
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.peer_messages import ReceiveName
from kvferry.protocol.transfer_messages import LayerStep

# -- other daemons


class Incarnation(NamedTuple):
    """One life of another daemon: a restart makes a new one."""

    address: str
    boot_id: str


class Origin(NamedTuple):
    """The key of a send request that came from another daemon."""

    peer: Incarnation
    receive_request: ReceiveName
    send_request: int


class RemotePool:
    """A pool of another daemon.

    Attributes:
        mapping: its memory, mapped read-only by the transport; None before that, and for daemons on other hosts.
    """

    def __init__(
        self,
        tenant: int,
        name: str,
        manifest: Manifest,
        peer: Incarnation,
        region_id: int,
        model: ModelIdentity | None = None,
    ) -> None:
        self.region_id = region_id
        self.tenant = tenant
        self.name = name
        self.manifest = manifest
        self.peer = peer
        self.model = model
        self.mapping: HostRegion | None = None

    def __repr__(self) -> str:
        """Show its tenant, name and daemon."""
        return f"<RemotePool {self.tenant}/{self.name} of {self.peer.address}>"

    def unmap(self) -> None:
        """Close the mapping; copies in progress keep the memory until they end."""
        if self.mapping is not None:
            self.mapping.close()
            self.mapping = None

    @property
    def region(self) -> HostRegion:
        """Return the mapped memory; call it only after the transport has mapped it."""
        assert self.mapping is not None, self
        return self.mapping


# -- endpoints


class Held(NamedTuple):
    """Pages that an endpoint reads or, ``written``, writes."""

    allocator: PageAllocator
    ids: PageIds
    written: bool

    def begin(self, owner_id: int, field: str) -> None:
        """Begin the use of pages of this owner.

        Raises:
            KvferryError: it may not: see ``PageAllocator``.
        """
        if self.written:
            self.allocator.begin_write(owner_id, self.ids, field)
        else:
            self.allocator.begin_read(owner_id, self.ids, field)

    def release(self) -> None:
        """End the use of the pages."""
        if self.written:
            self.allocator.end_write(self.ids)
        else:
            self.allocator.end_read(self.ids)


class EndpointKey(NamedTuple):
    """The key of an endpoint of a session here."""

    tenant: int
    request_id: str
    pool: str
    direction: Literal["send", "receive"]


class Half(NamedTuple):
    """One half of a request: all its SENDs, or all its RECEIVEs."""

    tenant: int
    request_id: str
    direction: Literal["send", "receive"]

    @property
    def other(self) -> Half:
        """Return the request's other half."""
        return self._replace(direction="receive" if self.direction == "send" else "send")


class Clocked(NamedTuple):
    """When an endpoint's message came and its deadline, in seconds of one monotonic clock."""

    created_at: float
    deadline_at: float


class SourcePool(Protocol):
    """The pool of a send request's pages: of this daemon or of another one."""

    tenant: int
    name: str
    manifest: Manifest
    model: ModelIdentity | None

    @property
    def region(self) -> Region:
        """Return its memory, mapped for reading at least."""


class SendChunk(NamedTuple):
    """One accepted SEND. With steps, its layers become ready step by step; without, they are ready at once."""

    ranges: tuple[PageRange, ...]
    last: bool
    first_token: int | None
    payload: bytes
    steps: tuple[LayerStep, ...] = ()
    checksums: bool = False

    @property
    def carries_token(self) -> bool:
        """Return whether it has a first token or payload, which only one SEND of a request may have."""
        return self.first_token is not None or bool(self.payload)


class PlannedCopy(NamedTuple):
    """Coverage cells of one component that a step of a chunk fills, and the plan that fills them.

    ``pairs`` are the plan's entries; ``cut`` says which pages of the chunk's list they are, and which part of each.
    """

    component: str
    cells: Cells
    plan: Plan
    pairs: tuple[Pair, ...]
    cut: Cut
    step: int = 0


class Waived(NamedTuple):
    """Coverage cells of one component that stay unfilled, because the lists were cut to the shorter length."""

    component: str
    cells: Cells


class TransferOp(NamedTuple):
    """The copies of one step of a chunk for one receive request. It waits until the step is ready."""

    op_id: int
    send_request: SendRequest
    receive_request: ReceiveRequest
    planned_copies: tuple[PlannedCopy, ...]
    chunk: int
    step: int

    @property
    def checksums(self) -> bool:
        """Return whether either side asks for what arrives to be compared with checksums of the source's bytes."""
        return self.send_request.checksums or self.receive_request.checksums

    @property
    def ready(self) -> bool:
        """Return whether its step is ready, so that the source's bytes are there."""
        return self.step < self.send_request.ready[self.chunk]


class Endpoint:
    """What send requests and receive requests have in common.

    Attributes:
        key: identifies it among the endpoints of sessions here.
        half: the half of the request that it is part of.
        kind: which rows of the transition table apply.
        held: the pages that it reads or writes, until it has settled.
        changed_at: when something last happened to it: a message, the begin or end of a copy, its outcome.
    """

    direction: ClassVar[Literal["send", "receive"]]
    kind: Kind
    pool: SourcePool

    def __init__(self, pool: SourcePool, request_id: str, session_id: int, times: Clocked) -> None:
        self.request_id = request_id
        self.session_id = session_id
        self.key = EndpointKey(pool.tenant, request_id, pool.name, self.direction)
        self.half = Half(pool.tenant, request_id, self.direction)
        self.created_at = times.created_at
        self.deadline_at = times.deadline_at
        self.state = State.OPEN
        self.held: list[Held] = []
        self.generation = 0
        self.first_copy_at: float | None = None
        self.changed_at = times.created_at
        self.moved_bytes = 0
        self.skipped_source_entries = 0
        self.skipped_source_pages = 0
        self.covered_source_entries = 0
        self.trimmed_pages = 0

    def hold(self, held: Held, owner_id: int, field: str) -> None:
        """Hold pages, until ``release``.

        Raises:
            KvferryError: see ``Held.begin``; nothing is held then.
        """
        self.held.append(held)
        try:
            held.begin(owner_id, field)
        except Exception:
            self.held.pop()
            raise

    def release(self, keep: int = 0) -> None:
        """Release all that it holds but the first ``keep``; what cannot be released stays held."""
        while len(self.held) > keep:
            held = self.held.pop()
            try:
                held.release()
            except Exception:
                self.held.append(held)
                raise

    @property
    def pages(self) -> int:
        """Return how many pages this endpoint's messages listed."""
        raise NotImplementedError

    @property
    def unmet(self) -> int:
        """Return how many of its peers have not come."""
        raise NotImplementedError

    @property
    def matched(self) -> int:
        """Return how many of its peers have come."""
        raise NotImplementedError

    def waits_for(self) -> str:
        """Return what is missing, for STATUS and for a DEADLINE error."""
        raise NotImplementedError

    def finished_event(self, error: KvferryError | None, now: float) -> Finished:
        """Return the FINISHED event of this endpoint."""
        started = now if self.first_copy_at is None else self.first_copy_at
        return Finished(
            request_id=self.request_id,
            pool=self.pool.name,
            direction=self.direction,
            generation=self.generation,
            error=msgspec.structs.replace(error.info(), request_id=self.request_id) if error else None,
            pages=self.pages,
            moved_bytes=self.moved_bytes,
            skipped_source_entries=self.skipped_source_entries,
            skipped_source_pages=self.skipped_source_pages,
            waited_us=round((started - self.created_at) * 1e6),
            moved_us=round((now - started) * 1e6),
            trimmed_pages=self.trimmed_pages,
        )


class SendRequest(Endpoint):
    """The SENDs of one request from one pool. Holds its pages for reading until every receive request has settled.

    A send request with an ``origin`` is another daemon's: here it has one receive request and holds no pages.
    """

    direction = "send"

    def __init__(
        self,
        pool: SourcePool,
        request_id: str,
        session_id: int,
        times: Clocked,
        origin: Origin | None = None,
    ) -> None:
        super().__init__(pool, request_id, session_id, times)
        self.pool = pool
        self.origin = origin
        self.kind = Kind.SEND if origin is None else Kind.REMOTE_SEND
        self.region_key = ""
        self.chunks: list[SendChunk] = []
        self.checksums = False
        self.ready: list[int] = []
        self.receive_requests: list[ReceiveRequest | RemoteEndpoint] = []
        self.outcomes: dict[ReceiveRequest | RemoteEndpoint, KvferryError | None] = {}
        self._daemons: tuple[str, ...] = ()

    @property
    def destinations(self) -> int:
        """Return how many receive requests it fills, as the first of them says; one before that says so."""
        return self.receive_requests[0].destinations if self.receive_requests and self.origin is None else 1

    @property
    def unmet(self) -> int:
        """Return how many destinations have not come."""
        return self.destinations - len(self.receive_requests)

    @property
    def matched(self) -> int:
        """Return how many destinations have come."""
        return len(self.receive_requests)

    @property
    def holder(self) -> Pool | None:
        """Return the pool whose pages it holds; None for another daemon's send request, which holds none here."""
        return self.pool if isinstance(self.pool, Pool) else None

    @property
    def complete(self) -> bool:
        """Return whether the last SEND was accepted."""
        return bool(self.chunks) and self.chunks[-1].last

    @property
    def outlives_its_sender(self) -> bool:
        """Return whether it goes on if its engine dies: the last SEND was accepted, and all its bytes are there."""
        registered = (
            self.holder is not None and self.holder.registered_by is not None
        )  # registered memory is lost with its engine
        return self.complete and not registered and not any(self.waiting_steps)

    @property
    def waiting_steps(self) -> list[Sequence[LayerStep]]:
        """Return each chunk's steps that are not ready."""
        return [chunk.steps[ready:] for chunk, ready in zip(self.chunks, self.ready, strict=True)]

    @property
    def fully_matched(self) -> bool:
        """Return whether the last SEND and all RECEIVEs have come."""
        return self.complete and len(self.receive_requests) == self.destinations

    @property
    def daemons(self) -> tuple[str, ...]:
        """Return the addresses of other daemons whose receive requests it fills, or has filled."""
        remote = [one.announcement.home.address for one in self.receive_requests if isinstance(one, RemoteEndpoint)]
        return tuple(dict.fromkeys(remote)) if remote else self._daemons

    @property
    def carries_token(self) -> bool:
        """Return whether a SEND with a first token or payload was accepted."""
        return any(chunk.carries_token for chunk in self.chunks)

    @property
    def pages(self) -> int:
        """Return how many pages all SENDs listed."""
        return sum(len(one.ids) for chunk in self.chunks for one in chunk.ranges)

    def add(self, chunk: SendChunk) -> None:
        """Add an accepted chunk."""
        self.chunks.append(chunk)
        self.checksums |= chunk.checksums
        self.ready.append(0 if chunk.steps else 1)

    def forget_receivers(self) -> None:
        """Let its receive requests go, once it has settled: they know it too, so only a collection would free both."""
        self._daemons = self.daemons
        self.receive_requests, self.outcomes = [], {}

    def waits_for(self) -> str:
        """Return what is missing, for STATUS and for a DEADLINE error."""
        if len(self.receive_requests) < self.destinations:
            missing = self.destinations - len(self.receive_requests)
            return f"{missing} of {self.destinations} destinations: no RECEIVE yet"
        if not self.complete:
            return "its own last SEND"
        steps = sum(map(len, self.waiting_steps))
        return f"the events of {steps} layer steps" if steps else "copies"

    def last_range(self, component: str) -> PageRange | None:
        """Return the component's list in the latest chunk that has one."""
        return next((r for chunk in reversed(self.chunks) for r in chunk.ranges if r.component == component), None)


class ReceiveRequest(Endpoint):
    """A RECEIVE: the pages to fill, and what has arrived. Holds its pages for writing until it has settled."""

    direction = "receive"
    kind = Kind.RECEIVE

    def __init__(
        self,
        pool: Pool,
        request_id: str,
        session_id: int,
        times: Clocked,
        ranges: tuple[PageRange, ...],
        sources: int,
        destinations: int,
        source_daemons: tuple[str, ...] = (),
        source_pools: tuple[str, ...] = (),
        *,
        checksums: bool = False,
    ) -> None:
        super().__init__(pool, request_id, session_id, times)
        self.pool: Pool = pool
        self.sources = sources
        self.source_pools = source_pools
        self.destinations = destinations
        self.source_daemons = source_daemons
        self.checksums = checksums
        self.ranges = {one.component: one for one in ranges}
        self.coverage = {
            one.component: Coverage(
                entries_of(pool.manifest, one.component), len(one.ids), pool.manifest.optional_components
            )
            for one in ranges
        }
        self.epoch = 0  # set by the state machine: unlike the generation, unique in this daemon's life
        self.send_requests: list[SendRequest] = []
        self.ops: dict[int, TransferOp] = {}
        self.waiting: list[TransferOp] = []
        self.last_refusal: KvferryError | None = None
        self.unreachable: set[str] = set()  # source daemons to which there is no connection
        self.given_up: set[str] = set()  # source daemons whose SENDs had ended before

    @property
    def daemons(self) -> tuple[str, ...]:
        """Return the addresses of other daemons whose send requests fill it, or may."""
        joined = [one.origin.peer.address for one in self.send_requests if one.origin is not None]
        return tuple(dict.fromkeys((*self.source_daemons, *joined))) if joined else self.source_daemons

    @property
    def name(self) -> ReceiveName:
        """Return its name in messages to other daemons."""
        return ReceiveName(self.request_id, self.pool.name, self.pool.tenant, self.epoch)

    @property
    def listener(self) -> Hashable:
        """Return the key by which tombstones know the receiving pool."""
        return self.pool.name

    @property
    def pages(self) -> int:
        """Return how many pages the RECEIVE listed."""
        return sum(len(one.ids) for one in self.ranges.values())

    @property
    def arrived_pages(self) -> int:
        """Return how many of its pages have arrived in every required entry."""
        return sum(one.arrived_pages for one in self.coverage.values())

    @property
    def unmet(self) -> int:
        """Return how many sources have not come."""
        return max(0, self.sources - len(self.send_requests))

    @property
    def matched(self) -> int:
        """Return how many sources have come."""
        return len(self.send_requests)

    @property
    def all_planned(self) -> bool:
        """Return whether every source has sent its last SEND."""
        return len(self.send_requests) == self.sources and all(
            send_request.complete for send_request in self.send_requests
        )

    @property
    def token_chunk(self) -> SendChunk | None:
        """Return the chunk with the first token or payload, or None if it has not come."""
        givers = (one for one in self.send_requests if self.takes_token_of(one.pool.name))
        return next((c for send_request in givers for c in send_request.chunks if c.carries_token), None)

    def takes_token_of(self, pool: str) -> bool:
        """Return whether it takes a source's first token and payload."""
        return pool in self.source_pools[:1] or not self.source_pools

    def check_planned(self, waived: Sequence[Waived] = ()) -> None:
        """Check that every required cell but the ``waived`` ones is planned; see ``Coverage.check_planned``."""
        for component, coverage in self.coverage.items():
            coverage.check_planned([one.cells for one in waived if one.component == component])

    def waits_for(self) -> str:
        """Return what is missing, for STATUS and for a DEADLINE error."""
        if len(self.send_requests) < self.sources:
            missing = f"{self.sources - len(self.send_requests)} of {self.sources} sources: no SEND yet"
            if self.source_pools:
                come = {one.pool.name for one in self.send_requests}
                missing += f" of {', '.join(one for one in self.source_pools if one not in come)}"
            if self.unreachable:
                missing += f"; no connection to {', '.join(sorted(self.unreachable))}"
            return f"{missing}; refused: {self.last_refusal}" if self.last_refusal else missing
        if not self.all_planned:
            return "a source's last SEND"
        copies = f"copies: {self.arrived_pages} of {self.pages} pages there"
        return f"{copies}; the events of {len(self.waiting)} layer steps" if self.waiting else copies

    def finished_event(self, error: KvferryError | None, now: float) -> Finished:
        """Return the FINISHED event, with first token and payload if it succeeded."""
        event = super().finished_event(error, now)
        if error is None and self.pool.becomes_snapshot:
            event = msgspec.structs.replace(event, snapshot=self.pool.becomes_snapshot)
        chunk = self.token_chunk
        if error or chunk is None:
            return event
        return msgspec.structs.replace(event, first_token=chunk.first_token, payload=chunk.payload)


def shared_sources(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether a pool may fill two receive requests, by the ``source_pools`` of both."""
    return not one or not other or not set(one).isdisjoint(other)


def rows_by_step(layers: Sequence[int | None], steps: Sequence[LayerStep]) -> np.typing.NDArray[np.intp]:
    """Return each row's step: the first one that names its layer, or the last step if none does.

    Args:
        layers: the model's layer of each row; None for rows whose layers have numbers of their own (draft).
        steps: at least one.
    """
    first, counts = np.array([(step.first_layer, step.layers) for step in steps]).T
    rows = np.array([-1 if layer is None else layer for layer in layers])[:, None]
    named = (first <= rows) & (rows < first + counts)
    return np.where(named.any(axis=1), named.argmax(axis=1), len(steps) - 1)


class Announcement:
    """Another daemon's receive request, announced here. Local send requests join it by one remote endpoint each."""

    def __init__(
        self,
        home: Incarnation,
        receive_request: ReceiveName,
        deadline_at: float,
        destinations: int,
        source_pools: tuple[str, ...] = (),
    ) -> None:
        self.home = home
        self.receive_request = receive_request
        self.deadline_at = deadline_at
        self.destinations = destinations
        self.source_pools = source_pools
        self.remote_endpoints: list[RemoteEndpoint] = []
        self.half = Half(receive_request.tenant, receive_request.request_id, "receive")
        self.listener: Hashable = (home.address, receive_request.pool)
        """The key by which tombstones know the receiving pool."""

    @property
    def request_id(self) -> str:
        """Return the request id of its receive request."""
        return self.receive_request.request_id

    def __repr__(self) -> str:
        """Show which receive request, and how many send requests joined."""
        name = self.receive_request.request_id
        return f"<Announcement {name} of {self.home.address} sends={len(self.remote_endpoints)}>"


class RemoteEndpoint:
    """Another daemon's receive request as one local send request sees it, with the states of an endpoint.

    Attributes:
        kind: which rows of the transition table apply.
        number: identifies the send request in messages with the receive request's home.
        sending: the transfer ops that this daemon is writing to the home.
        region_key: by which the home may ask for the pool's memory; empty if it may not.
    """

    kind: ClassVar[Kind] = Kind.REMOTE_RECEIVE

    def __init__(
        self, announcement: Announcement, send_request: SendRequest, number: int, state: State, region_key: str = ""
    ) -> None:
        self.announcement = announcement
        self.send_request = send_request
        self.number = number
        self.state = state
        self.region_key = region_key
        self.sending: set[int] = set()

    @property
    def request_id(self) -> str:
        """Return the request id of its send request."""
        return self.send_request.request_id

    @property
    def destinations(self) -> int:
        """Return how many receive requests the send request fills, as this one says."""
        return self.announcement.destinations

    @property
    def listener(self) -> Hashable:
        """Return the key by which tombstones know the receiving pool."""
        return self.announcement.listener
