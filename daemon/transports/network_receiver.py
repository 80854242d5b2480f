"""The receiving side of a transfer between hosts: gives write credits for bounce buffers, and scatters from them.

The source writes into a bounce buffer and reports that; no page is touched before incarnation, length and checksum are
verified, but whole pages of a host's memory, whose checksum is verified while they are copied. So a late write can only
land in a bounce buffer, and a failed receive request settles at once: only its bounce buffers stay, until the source
reports that its writes have ended, or quarantined until a fence.

Where pages are written directly (``network.direct``), there is no bounce buffer in between: the bytes are verified in
the pages, and a failed transfer op is reported only when nothing can land in them any more.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import structlog

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transfer.endpoints import Incarnation, TransferOp
from kvferry.daemon.transfer.peer_transfers import op_of
from kvferry.daemon.transports.arrival import check_arrived
from kvferry.daemon.transports.local import OnOpDone, SendToPeer
from kvferry.daemon.transports.network_copier import NetworkCopier
from kvferry.daemon.transports.network_memory import NetworkMemory, Target
from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.integrity import Walk
from kvferry.pools.planning.copies import CopyChunk, FlatCopies, cut_copy_chunks, memory_runs, offset_of
from kvferry.pools.planning.sides import PlanSide
from kvferry.protocol.errors import (
    CancelledError,
    InternalError,
    KvferryError,
    PeerLostError,
    TransferFailedError,
    raised,
)
from kvferry.protocol.peer_messages import MAX_RUNS, OpEnded, OpRequest, WriteCredit, Written
from kvferry.protocol.session_messages import NetworkStatus

KEPT_FOR_OTHERS = 8
"""A peer has all bounce buffers but one of so many: one that does not answer write credits leaves others the rest."""
CUT_INTO = 4
"""What a few bounce buffers hold is cut into so many copy chunks, if they are large enough: one is gathered, another
scattered, while a third is written."""
LEAST_CHUNK_BYTES = 4 << 20
"""Smaller ones cost more than that brings."""
CREDITS_PER_OP = 8
"""Concurrent write credits of a transfer op: enough for its source to have the next when a staging buffer is free."""

CHECK_INTERVAL_S = 0.5
"""How often quarantined memory is looked at."""

State = Literal["ready", "draining", "fencing", "broken"]
log = structlog.get_logger(__name__)


class _OutstandingCredit(NamedTuple):
    number: int
    incoming: _IncomingOp
    target: Target
    segment: int
    copy_chunk: CopyChunk


class _IncomingOp:
    """One transfer op: copy chunks not credited yet, write credits in flight, and the first error.

    ``direct`` are the segments whose pages are written directly, ``in_pages`` counts their write credits that may still
    land. ``scattering``: the write credits that were written and are being verified and scattered. ``queued``: it is in
    the queue of ops that wait for a bounce buffer.
    """

    def __init__(self, op: TransferOp, peer: Incarnation, on_done: OnOpDone) -> None:
        self.on_done = on_done
        self.op = op
        self.peer = peer
        self.copy_chunks: deque[tuple[int, CopyChunk]] = deque()
        self.direct: set[int] = set()
        self.in_pages = 0
        self.credited = 0
        self.scattering: set[int] = set()
        self.error: KvferryError | None = None
        self._copies: dict[int, FlatCopies] = {}
        self.queued = False
        self.failed_s = 0.0
        self.reported = False

    def copies_of(self, segment: int) -> FlatCopies:
        """On any thread: return the copies that scatter a segment of whole pages; made once for all its credits."""
        known = self._copies.get(segment)
        if known is None:
            known = self._copies[segment] = FlatCopies.scattering(self.op.planned_copies[segment].plan.destination)
        return known

    @property
    def awaits_credit(self) -> bool:
        """Return whether another copy chunk should be credited."""
        return bool(self.copy_chunks) and self.credited < CREDITS_PER_OP


class NetworkReceiver:
    """See ``Transport``, for transfer ops whose source is on another host. For the control loop."""

    def __init__(
        self,
        send: SendToPeer,
        write_bytes: Callable[[Incarnation], int],
        memory: NetworkMemory,
        copier: NetworkCopier,
        counters: Counters,
    ) -> None:
        """Verify and scatter by ``copier``, which is closed before ``memory`` is.

        ``write_bytes`` returns what a peer and this daemon both take for one write; 0: the peer sends to no other host.
        """
        self._send = send
        self._write_bytes = write_bytes
        self._engine = memory.engine
        self._bounce_buffers = memory.bounce_buffers
        self._pages = memory.pages
        self._copier = copier
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._incoming: dict[int, _IncomingOp] = {}
        self._credits: dict[int, _OutstandingCredit] = {}
        self._credited_to: Counter[Incarnation] = Counter()
        self._most_of_a_peer = self._bounce_buffers.count - self._bounce_buffers.count // KEPT_FOR_OTHERS
        self._credit_ids = itertools.count(1)
        self._queue: deque[_IncomingOp] = deque()
        self._watch = FenceWatch(memory, self, counters)
        self._quarantined_pages: dict[int, _IncomingOp] = {}  # by the number of the pages that may still be written
        self._closed = False
        if self._pages is not None:
            self._pages.subscribe(self._on_pages_changed)

    def __repr__(self) -> str:
        """Show what is in flight."""
        return f"<NetworkReceiver ops={len(self._incoming)} credits={len(self._credits)} {self._bounce_buffers!r}>"

    def start(self, op: TransferOp, on_done: OnOpDone) -> None:
        """See ``Transport.start``."""
        assert op.send_request.origin is not None, op
        incoming = _IncomingOp(op, op.send_request.origin.peer, on_done)
        self._incoming[op.op_id] = incoming
        if self._watch.state == "broken":
            self._fail(incoming, TransferFailedError("the engine could not be rebuilt: restart this daemon"))
            return
        try:
            write_bytes = self._write_bytes(incoming.peer)
            if not write_bytes:
                raise TransferFailedError(
                    f"the daemon at {incoming.peer.address} does not send to other hosts",
                    remedy="set network.transport in that daemon's configuration",
                )
            for number, planned_copy in enumerate(op.planned_copies):
                cut = _cut(planned_copy.plan.source, write_bytes)
                incoming.copy_chunks.extend((number, copy_chunk) for copy_chunk in cut)
                pool = op.receive_request.pool
                # Peers never write the host tier: what is received there goes through bounce buffers.
                in_pages = self._pages is not None and isinstance(pool.region, HostRegion) and not pool.becomes_snapshot
                if in_pages and planned_copy.plan.destination.is_whole:
                    incoming.direct.add(number)
            self._tell(incoming, op_of(op))
        except KvferryError as error:
            self._fail(incoming, error)
            return
        self._enqueue(incoming)
        self.pump()

    def stop(self, op_id: int) -> bool:
        """See ``Transport.stop``."""
        incoming = self._incoming.get(op_id)
        if incoming is not None:
            self._fail(incoming, CancelledError("the transfer ended before all bytes were received"))
        return incoming is not None

    def written(self, peer: Incarnation, message: Written) -> None:
        """Process a peer's answer to a write credit."""
        credit = self._credits.get(message.credit)
        if credit is None or credit.incoming.peer != peer or credit.number in credit.incoming.scattering:
            self._counters.add("network.unknown_credits")
            return
        incoming = credit.incoming
        incoming.credited -= 1
        if message.error is None and incoming.error is None:
            incoming.scattering.add(credit.number)
            try:
                self._scatter(credit, message.checksum)
            except Exception as cause:  # noqa: BLE001  no thread: as if it had failed there
                self._loop.call_soon(self._on_scattered, credit, message.checksum, 0.0, 0, cause)
            return
        self._release(credit, may_still_land=message.may_still_land)
        if message.error is not None:
            self._fail(incoming, raised(message.error))
        else:  # it has failed already, and may have waited for this answer
            self._check_done(incoming)
        self._enqueue(incoming)
        self.pump()

    def peer_lost(self, peer: Incarnation, why: str) -> None:
        """Fail the transfer ops of a peer and quarantine its bounce buffers."""
        error = PeerLostError(f"the daemon at {peer.address} is gone: {why}")
        self.fail_ops(set(self._bounce_buffers.quarantine_peer(peer, time.monotonic())), error)
        for incoming in [one for one in self._incoming.values() if one.peer == peer]:
            self._fail(incoming, error)
        self._watch.start_if_needed()

    def close(self) -> None:
        """See ``Transport.close``. The executor is shut down after it, the engine before."""
        self._closed = True
        self._incoming.clear()
        self._queue.clear()
        self._watch.close()

    def status(self) -> NetworkStatus:
        """Return the bounce buffers, and the peers that have not answered write credits, as STATUS shows them."""
        buffers = self._bounce_buffers
        return NetworkStatus(
            session=self._engine.session_name,
            bounce_buffer_bytes=buffers.bounce_buffer_bytes,
            bounce_buffers=buffers.count,
            free=buffers.free,
            credits=buffers.credits,
            quarantined=buffers.quarantined,
            quarantined_bytes=buffers.quarantined_bytes,
            direct=self._pages is not None,
            state=self._watch.state,
            held_by=dict(Counter(credit.incoming.peer.address for credit in self._credits.values())),
        )

    def problems(self) -> Walk:
        """Yield the bounce buffers that are not in exactly one state, and the write credits that nothing waits for."""
        yield from self._bounce_buffers.problems({credit.target.number for credit in self._credits.values()})

    # -- for the fence watch

    @property
    def unanswered(self) -> bool:
        """Return whether write credits of failed transfer ops are unanswered."""
        return any(credit.incoming.error is not None for credit in self._credits.values())

    def quarantine_unanswered(self, now_s: float) -> None:
        """Quarantine what is unanswered for too long: a live but silent peer must not hold memory forever."""
        bounds = self._bounce_buffers.bounds
        silent = [
            credit
            for credit in self._credits.values()
            if credit.incoming.error is not None
            and credit.number not in credit.incoming.scattering
            and now_s - credit.incoming.failed_s > (bounds.pages_s if credit.target.runs else bounds.quarantined_s)
        ]
        for credit in silent:
            incoming = credit.incoming
            self._bounce_buffers.quarantine(credit.target.number, incoming.peer, credit.number, incoming.failed_s)
            self._counters.add("network.unanswered_credits")
            self._forget(credit)

    def fail_ops(self, numbers: set[int], error: KvferryError) -> None:
        """Fail the ops whose bounce buffers or pages were quarantined; what is already reported is scattered."""
        ended = [credit for credit in self._credits.values() if credit.target.number in numbers]
        for credit in ended:
            if credit.number not in credit.incoming.scattering:
                self._forget(credit)
        for credit in ended:
            self._fail(credit.incoming, error)

    def on_fenced(self) -> None:
        """Release what was quarantined: no old write can land any more."""
        quarantined, self._quarantined_pages = self._quarantined_pages, {}
        for incoming in quarantined.values():
            incoming.in_pages -= 1
            self._check_done(incoming)

    def pump(self) -> None:
        """Give write credits for the free bounce buffers, one copy chunk per transfer op in turn."""
        passed_over = 0  # one after another, as their peers have their share
        while passed_over < len(self._queue):
            incoming = self._queue[0]
            if not incoming.awaits_credit or self._awaits_registration(incoming):
                self._queue.popleft().queued = False
                continue
            if self._credited_to[incoming.peer] >= self._most_of_a_peer:
                self._queue.rotate(-1)
                passed_over += 1
                continue
            try:
                if not self._credit_next(incoming):
                    return
                passed_over = 0
            except Exception as cause:
                log.exception("a copy chunk could not be credited", op=incoming.op.op_id, cause=str(cause))
                self._fail(incoming, InternalError(f"a write credit failed: {type(cause).__name__}: {cause}"))

    def _credit_next(self, incoming: _IncomingOp) -> bool:
        """Give a write credit for the next copy chunk of the op at the queue's head; return False if it must wait."""
        number = next(self._credit_ids)
        target = self._allocate(incoming, number)
        if target is None:
            return False
        self._queue.popleft().queued = False
        try:
            self._credit(incoming, number, target)
        except Exception:
            if number not in self._credits:  # the peer has not heard of it
                self._bounce_buffers.give_back(target.number, incoming.peer, number)
            raise
        self._enqueue(incoming)
        return True

    def _enqueue(self, incoming: _IncomingOp) -> None:
        """Append a transfer op to the queue, if it needs another write credit."""
        if incoming.awaits_credit and not incoming.queued:
            incoming.queued = True
            self._queue.append(incoming)

    def _on_pages_changed(self) -> None:
        for incoming in self._incoming.values():
            self._enqueue(incoming)
        self.pump()

    def _credit(self, incoming: _IncomingOp, number: int, target: Target) -> None:
        segment, copy_chunk = incoming.copy_chunks.popleft()
        credit = WriteCredit(
            op=incoming.op.op_id,
            credit=number,
            segment=segment,
            first=copy_chunk.first,
            stop=copy_chunk.stop,
            session=self._engine.session_name,
            address=target.address,
            size_bytes=copy_chunk.size_bytes,
            runs=target.runs,
        )
        credited = _OutstandingCredit(number, incoming, target, segment, copy_chunk)
        try:
            self._tell(incoming, credit)
        except KvferryError as error:
            self._bounce_buffers.give_back(target.number, incoming.peer, number)
            self._fail(incoming, error)
            return
        self._credits[number] = credited
        self._credited_to[incoming.peer] += 1
        incoming.credited += 1
        incoming.in_pages += bool(target.runs)

    def _tell(self, incoming: _IncomingOp, body: OpRequest | WriteCredit) -> None:
        """Send a message to an op's source.

        Raises:
            PeerLostError: the source's daemon is gone.
            TooLargeError: it does not take so large a message.
        """
        if not self._send(incoming.peer, body):
            raise PeerLostError(f"the daemon at {incoming.peer.address} is gone")

    def _awaits_registration(self, incoming: _IncomingOp) -> bool:
        """Return whether the op's pool is being registered; ``_on_pages_changed`` queues it again."""
        if self._pages is None or incoming.copy_chunks[0][0] not in incoming.direct:
            return False
        return self._pages.state(incoming.op.receive_request.pool) == "pending"

    def _allocate(self, incoming: _IncomingOp, number: int) -> Target | None:
        """Return the memory for the op's next copy chunk; None where it has to wait."""
        segment, copy_chunk = incoming.copy_chunks[0]
        pool = incoming.op.receive_request.pool
        if segment in incoming.direct and self._pages is not None and self._pages.state(pool) == "ready":
            side = incoming.op.planned_copies[segment].plan.destination
            assert isinstance(pool.region, HostRegion), pool
            runs = memory_runs(side, pool.region.address, copy_chunk.first, copy_chunk.stop)
            if len(runs) <= MAX_RUNS:
                return self._bounce_buffers.take_pages(incoming.peer, number, tuple(runs))
        return self._bounce_buffers.take(incoming.peer, number)

    def _scatter(self, credit: _OutstandingCredit, checksum: int) -> None:
        """Verify the checksum of the received bytes, and scatter them into their pages.

        Whole pages of a host's memory in one pass: what is damaged is in them then, but the transfer fails.
        """
        op, on_scattered = credit.incoming.op, partial(self._on_scattered, credit, checksum, time.perf_counter())
        region, (first, stop, _) = op.receive_request.pool.region, credit.copy_chunk
        is_whole = op.planned_copies[credit.segment].plan.destination.is_whole
        if credit.target.runs:  # what was written are the pages
            self._copier.run(partial(copy_kernel.digest, *credit.target.runs), on_scattered)
        elif is_whole and isinstance(region, HostRegion) and not op.checksums:
            self._copier.copy(stop - first, partial(_listed, credit, region), on_scattered)
        else:
            self._copier.run(partial(_scatter_on_thread, credit, checksum), on_scattered)

    def _on_scattered(
        self, credit: _OutstandingCredit, checksum: int, began_s: float, found: int, failed: Exception | None
    ) -> None:
        incoming = credit.incoming
        incoming.scattering.discard(credit.number)
        self._release(credit)
        if failed is None and found != checksum:
            detail = f"the received bytes have checksum {found:016x}, the source sent {checksum:016x}"
            failed = TransferFailedError(detail)
        if failed is not None:
            self._counters.add("network.refused")
            error = failed if isinstance(failed, KvferryError) else TransferFailedError(f"scattering failed: {failed}")
            self._fail(incoming, error)
        else:
            self._counters.observe("stages.scattered.network", time.perf_counter() - began_s)
            if credit.target.runs:
                self._counters.add("network.direct_bytes", credit.copy_chunk.size_bytes)
        self._check_done(incoming)
        self._enqueue(incoming)
        self.pump()

    def _release(self, credit: _OutstandingCredit, *, may_still_land: bool = False) -> None:
        """End a write credit: its memory is free, or quarantined where a write may still land in it."""
        target, incoming = credit.target, credit.incoming
        if may_still_land:
            self._bounce_buffers.quarantine(target.number, incoming.peer, credit.number, time.monotonic())
            self._forget(credit)
            self._watch.start_if_needed()
        else:
            self._drop(credit)
            self._bounce_buffers.give_back(target.number, incoming.peer, credit.number)
            incoming.in_pages -= bool(target.runs)

    def _forget(self, credit: _OutstandingCredit) -> None:
        """Forget a write credit whose bounce buffer or pages are quarantined."""
        self._drop(credit)
        if credit.target.runs:
            self._quarantined_pages[credit.target.number] = credit.incoming

    def _drop(self, credit: _OutstandingCredit) -> None:
        if self._credits.pop(credit.number, None) is None:
            return
        peer = credit.incoming.peer
        self._credited_to[peer] -= 1
        if not self._credited_to[peer]:
            del self._credited_to[peer]

    def _fail(self, incoming: _IncomingOp, error: KvferryError) -> None:
        if incoming.error is None:
            incoming.error = error
            incoming.failed_s = time.monotonic()
            incoming.copy_chunks.clear()
            self._say_ended(incoming)
            self._watch.start_if_needed()
        self._check_done(incoming)

    def _say_ended(self, incoming: _IncomingOp) -> None:
        try:
            self._send(incoming.peer, OpEnded(op=incoming.op.op_id))
        except Exception as cause:  # no memory: the source ends it with the receive request
            log.exception("the end of a transfer op could not be told", op=incoming.op.op_id, cause=str(cause))

    def _check_done(self, incoming: _IncomingOp) -> None:
        """Report the transfer op once no byte of its pages can move; bounce buffers may still be credited."""
        if incoming.reported or incoming.scattering or incoming.in_pages:
            return
        if incoming.error is None and (incoming.copy_chunks or incoming.credited):
            return
        incoming.reported = True
        self._incoming.pop(incoming.op.op_id, None)
        if not self._closed:
            self._loop.call_soon(incoming.on_done, incoming.op.op_id, incoming.error)
        if incoming.error is None:
            self._say_ended(incoming)


def _cut(side: PlanSide, write_bytes: int) -> list[CopyChunk]:
    """Cut a source into copy chunks of at most ``write_bytes``: as few as are good for it.

    Raises:
        BounceBufferTooSmallError: a page of an entry is larger.
    """
    largest = max(1, int(side.segment_bytes.max(initial=0)))
    total = int(side.segment_bytes.sum()) * len(side.ids)
    wanted = -(-total // (CUT_INTO * largest)) * largest
    return cut_copy_chunks(side, min(write_bytes, max(wanted, LEAST_CHUNK_BYTES)))


def _listed(credit: _OutstandingCredit, memory: HostRegion) -> Copies:
    """On any thread: return the copies of the received bytes to the whole pages that they are for."""
    side, (first, stop, _) = credit.incoming.op.planned_copies[credit.segment].plan.destination, credit.copy_chunk
    flat_address = credit.target.address - offset_of(side, first)
    return credit.incoming.copies_of(credit.segment).listed(first, stop, memory.address, flat_address)


def _scatter_on_thread(credit: _OutstandingCredit, checksum: int) -> int:
    """On a thread: return the checksum of what was received; where it is the source's, scatter, and check that."""
    op, address = credit.incoming.op, credit.target.address
    side, pool = op.planned_copies[credit.segment].plan.destination, op.receive_request.pool
    first, stop, size_bytes = credit.copy_chunk
    if side.is_whole and isinstance(pool.region, HostRegion):
        found = copy_kernel.copy_with_digest(_listed(credit, pool.region))
    else:
        found = copy_kernel.digest((address, size_bytes))
        if found == checksum:
            pool.region.scatter(side, first, stop, address, copy_kernel.copy)
    if op.checksums and found == checksum:
        arrived = np.empty(size_bytes, np.uint8)
        pool.region.gather(side, first, stop, arrived.ctypes.data, copy_kernel.copy)
        sent = np.frombuffer(memoryview((ctypes.c_char * size_bytes).from_address(address)), np.uint8)
        check_arrived(sent, arrived, side, first, pool.manifest)
    return found


class FenceWatch:
    """Decides when to fence, and fences: runs while anything is quarantined. For the control loop.

    A fence rebuilds the network engine, which also aborts this daemon's own writes, so that their homes would have to
    fence in turn. So while a fence waits for live write credits, no write begins, and it waits for the writes in flight
    as well.
    """

    def __init__(self, memory: NetworkMemory, receiver: NetworkReceiver, counters: Counters) -> None:
        self._engine = memory.engine
        self._bounce_buffers = memory.bounce_buffers
        self._receiver = receiver
        self._counters = counters
        self._watching: asyncio.Task[None] | None = None
        self._state: State = "ready"
        self._closed = False

    @property
    def state(self) -> State:
        """Return the state for STATUS; ``broken``: the engine could not be rebuilt, and nothing can be received."""
        return "draining" if self._state == "ready" and self._bounce_buffers.draining else self._state

    def start_if_needed(self) -> None:
        """Start watching if anything is quarantined or unanswered."""
        if self._watching is None and not self._closed and self._needed:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()

    @property
    def _needed(self) -> bool:
        return self._state != "broken" and bool(self._bounce_buffers.quarantined_bytes or self._receiver.unanswered)

    async def _watch(self) -> None:
        try:
            while self._needed:
                self._receiver.quarantine_unanswered(time.monotonic())
                due = self._bounce_buffers.fence_due(time.monotonic(), writing=self._engine.writing)
                self._engine.hold(held=self._bounce_buffers.draining)
                if due:
                    await self._do_fence()
                    self._engine.hold(held=self._bounce_buffers.draining)
                self._receiver.pump()
                await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            self._engine.hold(held=False)
            self._watching = None

    async def _do_fence(self) -> None:
        self._state = "fencing"
        numbers = set(self._bounce_buffers.fence_begins(time.monotonic()))
        self._receiver.fail_ops(numbers, TransferFailedError("its bounce buffer was fenced during the transfer"))
        try:
            await self._engine.rebuild()
        except Exception as error:
            self._state = "broken"
            log.exception(
                "the fence failed: bounce buffers stay quarantined, nothing is received; restart this daemon",
                cause=str(error),
            )
            return
        self._state = "ready"
        freed = self._bounce_buffers.fenced()
        self._receiver.on_fenced()
        self._counters.add("network.fences")
        log.warning("bounce buffers fenced", freed=freed)
