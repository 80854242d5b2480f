"""The receiving half of a transfer between hosts: transfer ops are granted bounce buffers, and scattered from them.

The source writes into a bounce buffer and says so; nothing of a page is touched before generation, length and checksum
are right. So a late write can only ever land in a bounce buffer, and a receive request that failed settles at once:
only its bounce buffers wait, for the source's word that its writes have ended, or in quarantine for a fence.

Where pages are written directly, which is an option, no bounce buffer stands between: what arrived is checked in its
pages, and a transfer op that failed is over only when nothing can land in them any more.
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

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transfer.endpoints import TransferOp
from kvferry.daemon.transfer.peer_forms import op_of
from kvferry.daemon.transfer.remote import Incarnation
from kvferry.daemon.transports.base import OnOpDone
from kvferry.daemon.transports.bounce_buffers import BounceBuffers
from kvferry.daemon.transports.direct_pages import DirectPages
from kvferry.daemon.transports.fence_watch import Fence, FenceWatch, State
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.copies import copy_by_size
from kvferry.pools.planning.gather import CopyChunk, cut_copy_chunks, memory_runs
from kvferry.protocol.errors import CancelledError, KvferryError, PeerLostError, TransferFailedError, raised
from kvferry.protocol.ids import BootId
from kvferry.protocol.peer_messages import MAX_RUNS, Grant, OpEnded, PeerBody, Written

GRANTS_PER_OP = 8
"""Bounce buffers of one transfer op at a time: enough for its source to know the next one when a buffer is free."""

SendToPeer = Callable[[Incarnation, PeerBody], bool]


class _Place(NamedTuple):
    """What a grant lets a peer write: the bounce buffer of that number, or pages (``runs``) that go by it."""

    number: int
    address: int
    runs: tuple[tuple[int, int], ...] = ()


class _Grant(NamedTuple):
    incoming: _IncomingOp
    place: _Place
    segment: int
    copy_chunk: CopyChunk


class _IncomingOp:
    """One transfer op: copy chunks not granted yet, grants under way, and the first error.

    ``direct`` are the segments whose pages are written directly, ``in_pages`` the grants of them that may still land.
    ``wanting``: it is in the row of those that a bounce buffer is sought for.
    """

    def __init__(self, op: TransferOp, peer: Incarnation, on_done: OnOpDone) -> None:
        self.on_done = on_done
        self.op = op
        self.peer = peer
        self.copy_chunks: deque[tuple[int, CopyChunk]] = deque()
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
        """Return whether another copy chunk should be granted."""
        return bool(self.copy_chunks) and self.granted < GRANTS_PER_OP


class NetworkReceiver:
    """See ``Transport``, for transfer ops whose source is on another host. All methods belong on the loop."""

    def __init__(
        self,
        send: SendToPeer,
        fence: Fence,
        bounce_buffers: BounceBuffers,
        executor: Executor,
        counters: Counters,
        pages: DirectPages | None = None,
    ) -> None:
        """Verify and scatter on ``executor``, which is shut down before the bounce buffers' memory goes.

        With ``pages``, whole pages are written directly.
        """
        self._send = send
        self._fence = fence
        self._bounce_buffers = bounce_buffers
        self._executor = executor
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._incoming: dict[int, _IncomingOp] = {}
        self._grants: dict[int, _Grant] = {}
        self._taking: set[int] = set()  # grants that have landed and are being scattered
        self._grant_ids = itertools.count(1)
        self._wanting: deque[_IncomingOp] = deque()
        self._watch = FenceWatch(fence, bounce_buffers, self, counters)
        self._silence_s = bounce_buffers.bounds.quarantined_s
        self._pages = pages
        self._quarantined: dict[int, _IncomingOp] = {}  # by the number of the pages in which something may still land
        self._closed = False
        if pages is not None:
            pages.subscribe(self._pages_changed)

    def __repr__(self) -> str:
        """Show what is under way."""
        return (
            f"<NetworkReceiver transfer ops={len(self._incoming)} grants={len(self._grants)} {self._bounce_buffers!r}>"
        )

    def start(self, op: TransferOp, on_done: OnOpDone) -> None:
        """See ``Transport.start``."""
        assert op.send_request.origin is not None, op
        incoming = _IncomingOp(op, op.send_request.origin.peer, on_done)
        self._incoming[op.op_id] = incoming
        if self._watch.state == "broken":
            self._fail(incoming, TransferFailedError("nothing can land here until this daemon is restarted"))
            return
        try:
            for number, planned_copy in enumerate(op.planned_copies):
                cut = cut_copy_chunks(planned_copy.plan.source, self._bounce_buffers.bounce_buffer_bytes)
                incoming.copy_chunks.extend((number, copy_chunk) for copy_chunk in cut)
                pool = op.receive_request.pool
                # The host tier is nobody's to write: what lands there goes by bounce buffers.
                in_pages = self._pages is not None and isinstance(pool.region, HostRegion) and not pool.lands_as
                if in_pages and not planned_copy.plan.destination.sliced.any():
                    incoming.direct.add(number)
        except KvferryError as error:
            self._fail(incoming, error)
            return
        if not self._send(incoming.peer, op_of(op)):
            self._fail(incoming, PeerLostError(f"the daemon at {incoming.peer.address} is gone"))
            return
        self._want(incoming)
        self.pump()

    def stop(self, op_id: int) -> None:
        """See ``Transport.stop``."""
        incoming = self._incoming.get(op_id)
        if incoming is not None:
            self._fail(incoming, CancelledError("the transfer ended before all had landed"))

    def written(self, peer: Incarnation, message: Written) -> None:
        """Take a peer's word that a grant is used up."""
        grant = self._grants.get(message.grant)
        if grant is None or grant.incoming.peer != peer or message.grant in self._taking:
            self._counters.add("network.unknown_grants")
            return
        incoming = grant.incoming
        incoming.granted -= 1
        if message.error is None and incoming.error is None:
            incoming.scattering += 1
            self._taking.add(message.grant)
            work = self._loop.run_in_executor(self._executor, self._take, grant, message.checksum)
            work.add_done_callback(lambda done: self._taken(message.grant, grant, done))
            return
        self._release(message.grant, grant, may_still_land=message.may_still_land)
        if message.error is not None:
            self._fail(incoming, raised(message.error))
        else:  # it had failed already, and may have waited for this
            self._check_done(incoming)
        self._want(incoming)
        self.pump()

    def peer_lost(self, peer: Incarnation, why: str) -> None:
        """Fail the transfer ops of a peer, whose bounce buffers rest from now on."""
        error = PeerLostError(f"the daemon at {peer.address} is gone: {why}")
        self.cut_off(set(self._bounce_buffers.quarantine_peer(BootId(peer.boot_id), time.monotonic())), error)
        for incoming in [one for one in self._incoming.values() if one.peer == peer]:
            self._fail(incoming, error)
        self._watch.look()

    def close(self) -> None:
        """See ``Transport.close``. The executor is shut down after it, the engine before."""
        self._closed = True
        self._incoming.clear()
        self._wanting.clear()
        self._watch.close()

    @property
    def state(self) -> State:
        """Return how the bounce buffers are; see ``FenceWatch``."""
        return self._watch.state

    def held_by(self) -> dict[str, int]:
        """Return how many grants each peer has not answered, by its address."""
        return dict(Counter(grant.incoming.peer.address for grant in self._grants.values()))

    @property
    def unanswered(self) -> bool:
        """See ``Grants``."""
        return any(grant.incoming.error is not None for grant in self._grants.values())

    def quarantine_unanswered(self, now_s: float) -> None:
        """See ``Grants``. A peer that lives and says nothing must not hold memory for ever."""
        silent = {
            number: grant
            for number, grant in self._grants.items()
            if grant.incoming.error is not None
            and number not in self._taking
            and now_s - grant.incoming.failed_s > self._silence_s
        }
        for number, grant in silent.items():
            incoming = grant.incoming
            self._bounce_buffers.quarantine(grant.place.number, incoming.boot_id, number, incoming.failed_s)
        if silent:
            self._counters.add("network.unanswered_grants", len(silent))
            self._forget(silent)

    def cut_off(self, numbers: set[int], error: KvferryError) -> None:
        """See ``Grants``. What has landed is taken all the same."""
        ended = {number: grant for number, grant in self._grants.items() if grant.place.number in numbers}
        self._forget({number: grant for number, grant in ended.items() if number not in self._taking})
        for grant in ended.values():
            self._fail(grant.incoming, error)

    def nothing_lands(self) -> None:
        """See ``Grants``."""
        rested, self._quarantined = self._quarantined, {}
        for incoming in rested.values():
            incoming.in_pages -= 1
            self._check_done(incoming)

    def pump(self) -> None:
        """Grant what bounce buffers there are, a copy chunk of each transfer op in turn."""
        while self._wanting:
            incoming = self._wanting[0]
            if not incoming.wants or self._awaits_pages(incoming):
                self._wanting.popleft().wanting = False
                continue
            number = next(self._grant_ids)
            place = self._place(incoming, number)
            if place is None:
                return
            self._wanting.popleft().wanting = False
            self._grant(incoming, number, place)
            self._want(incoming)

    def _want(self, incoming: _IncomingOp) -> None:
        """Put a transfer op at the end of the row."""
        if incoming.wants and not incoming.wanting:
            incoming.wanting = True
            self._wanting.append(incoming)

    def _pages_changed(self) -> None:
        for incoming in self._incoming.values():
            self._want(incoming)
        self.pump()

    def _grant(self, incoming: _IncomingOp, number: int, place: _Place) -> None:
        segment, copy_chunk = incoming.copy_chunks.popleft()
        grant = Grant(
            op=incoming.op.op_id,
            grant=number,
            segment=segment,
            first=copy_chunk.first,
            stop=copy_chunk.stop,
            session=self._fence.session_name,
            address=place.address,
            size_bytes=copy_chunk.size_bytes,
            runs=place.runs,
        )
        if not self._send(incoming.peer, grant):
            self._bounce_buffers.give_back(place.number, incoming.boot_id, number)
            self._fail(incoming, PeerLostError(f"the daemon at {incoming.peer.address} is gone"))
            return
        self._grants[number] = _Grant(incoming, place, segment, copy_chunk)
        incoming.granted += 1
        incoming.in_pages += bool(place.runs)

    def _awaits_pages(self, incoming: _IncomingOp) -> bool:
        """Return whether the transfer op's pool is being registered; then it comes back into the row by itself."""
        if self._pages is None or incoming.copy_chunks[0][0] not in incoming.direct:
            return False
        return self._pages.state(incoming.op.receive_request.pool) == "pending"

    def _place(self, incoming: _IncomingOp, number: int) -> _Place | None:
        """Return where the transfer op's next copy chunk may be written; None where it has to wait."""
        segment, copy_chunk = incoming.copy_chunks[0]
        pool = incoming.op.receive_request.pool
        if segment in incoming.direct and self._pages is not None and self._pages.state(pool) == "ready":
            side = incoming.op.planned_copies[segment].plan.destination
            assert isinstance(pool.region, HostRegion), pool
            runs = memory_runs(side, pool.region.address, copy_chunk.first, copy_chunk.stop)
            if len(runs) <= MAX_RUNS:
                taken = self._bounce_buffers.take_pages(incoming.boot_id, number, copy_chunk.size_bytes)
                return None if taken is None else _Place(taken, runs[0][0], tuple(runs))
        bounce_buffer = self._bounce_buffers.take(incoming.boot_id, number)
        return None if bounce_buffer is None else _Place(bounce_buffer.number, bounce_buffer.address)

    def _take(self, grant: _Grant, checksum: int) -> None:
        """On a thread: check what landed and put it where it belongs."""
        digest = xxhash.xxh3_64()
        for address, size_bytes in grant.place.runs or ((grant.place.address, grant.copy_chunk.size_bytes),):
            digest.update((ctypes.c_char * size_bytes).from_address(address))
        found = digest.intdigest()
        if found != checksum:
            raise TransferFailedError(f"what landed has checksum {found:016x}, the source sent {checksum:016x}")
        if grant.place.runs:
            return
        plan = grant.incoming.op.planned_copies[grant.segment].plan
        memory = grant.incoming.op.receive_request.pool.region
        memory.scatter(
            plan.destination, grant.copy_chunk.first, grant.copy_chunk.stop, grant.place.address, copy_by_size
        )

    def _taken(self, number: int, grant: _Grant, done: asyncio.Future[None]) -> None:
        incoming = grant.incoming
        incoming.scattering -= 1
        self._taking.discard(number)
        self._release(number, grant)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._counters.add("network.refused")
            known = isinstance(error, KvferryError)
            self._fail(incoming, error if known else TransferFailedError(f"scattering failed: {error}"))  # type: ignore[arg-type]
        elif grant.place.runs:
            self._counters.add("network.direct_bytes", grant.copy_chunk.size_bytes)
        self._check_done(incoming)
        self._want(incoming)
        self.pump()

    def _release(self, number: int, grant: _Grant, *, may_still_land: bool = False) -> None:
        self._grants.pop(number, None)
        place, incoming = grant.place, grant.incoming
        if may_still_land:
            self._bounce_buffers.quarantine(place.number, incoming.boot_id, number, time.monotonic())
            if place.runs:
                self._quarantined[place.number] = incoming
            self._watch.look()
        else:
            self._bounce_buffers.give_back(place.number, incoming.boot_id, number)
            incoming.in_pages -= bool(place.runs)

    def _forget(self, grants: dict[int, _Grant]) -> None:
        """Forget grants whose bounce buffers or pages rest."""
        for number, grant in grants.items():
            del self._grants[number]
            if grant.place.runs:
                self._quarantined[grant.place.number] = grant.incoming

    def _fail(self, incoming: _IncomingOp, error: KvferryError) -> None:
        if incoming.error is None:
            incoming.error = error
            incoming.failed_s = time.monotonic()
            incoming.copy_chunks.clear()
            self._send(incoming.peer, OpEnded(op=incoming.op.op_id))
            self._watch.look()
        self._check_done(incoming)

    def _check_done(self, incoming: _IncomingOp) -> None:
        """Report the transfer op once no byte of it can move: bounce buffers that are still granted are no pages."""
        if incoming.over or incoming.scattering or incoming.in_pages:
            return
        if incoming.error is None and (incoming.copy_chunks or incoming.granted):
            return
        incoming.over = True
        self._incoming.pop(incoming.op.op_id, None)
        if incoming.error is None:
            self._send(incoming.peer, OpEnded(op=incoming.op.op_id))
        if not self._closed:
            self._loop.call_soon(incoming.on_done, incoming.op.op_id, incoming.error)
