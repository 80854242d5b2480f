"""The sending side of a transfer between hosts: credited segments are gathered and written to the peer's bounce buffer.

Every write credit is answered with WRITTEN, whatever its outcome. The pages of a transfer op stay held until nothing is
gathered from them any more: a write that hangs reads staging.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import structlog

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transfer.endpoints import Incarnation, RemoteEndpoint
from kvferry.daemon.transfer.peer_transfers import PeerTransfers
from kvferry.daemon.transports.local import SendToPeer
from kvferry.daemon.transports.mooncake import WriteFailedError
from kvferry.daemon.transports.network_copier import NetworkCopier
from kvferry.daemon.transports.network_memory import NetworkMemory
from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.copies import FlatCopies, offset_of, total_segments
from kvferry.pools.planning.geometry import Heads, Tokens
from kvferry.pools.planning.plan import every
from kvferry.pools.planning.sides import PlanSide, make_side
from kvferry.protocol.errors import (
    CancelledError,
    InternalError,
    InvalidFieldError,
    KvferryError,
    OverloadedError,
    UnknownTransferError,
)
from kvferry.protocol.peer_messages import OpRequest, Segment, WriteCredit, Written

MAX_OPS = 65_536
MAX_CREDITS_PER_OP = 1024
MAX_REFUSED = 1024
ANSWER_AGAIN_S = 0.5
log = structlog.get_logger(__name__)


class _Key(NamedTuple):
    peer: Incarnation
    op: int


class _Sending:
    """A transfer op that a home has requested: its source segments, write credits in flight, those not gathered yet."""

    def __init__(
        self, remote_endpoint: RemoteEndpoint, sides: list[PlanSide], memory: Region, on_settled: Callable[[], None]
    ) -> None:
        self.remote_endpoint = remote_endpoint
        self.on_settled = on_settled
        self.sides = sides
        self.memory = memory
        self._copies: dict[int, FlatCopies] = {}
        self.waiting: deque[WriteCredit] = deque()
        self.in_flight = 0
        self.reading = 0
        self.ended = False

    def copies_of(self, segment: int) -> FlatCopies:
        """On any thread: return the copies that gather a source segment; made once for all its write credits."""
        known = self._copies.get(segment)
        if known is None:
            known = self._copies[segment] = FlatCopies.gathering(self.sides[segment])
        return known


class _Writing:
    """A write credit with a staging buffer, and its writes: one into a bounce buffer, or several into pages."""

    def __init__(self, key: _Key, sending: _Sending, credit: WriteCredit, buffer: int) -> None:
        self.key = key
        self.sending = sending
        self.credit = credit
        self.buffer = buffer
        self.checksum = 0
        self.began_s = time.perf_counter()
        self.in_flight = 0
        self.error: KvferryError | None = None
        self.answered = False

    def failed(self, error: KvferryError) -> None:
        """Record the first error, or a later one whose bytes may still land."""
        if self.error is None or _may_still_land(error):
            self.error = error


class NetworkSender:
    """Serves the write credits of all homes in order, through a few staging buffers. For the control loop."""

    def __init__(
        self,
        send: SendToPeer,
        memory: NetworkMemory,
        copier: NetworkCopier,
        state_machine: PeerTransfers,
        counters: Counters,
    ) -> None:
        """Gather by ``copier``, which is closed before ``memory`` is."""
        self._send = send
        self._engine = memory.engine
        self._staging_bytes = memory.config.bounce_buffer_bytes
        self._free = [memory.staging.address + at for at in range(0, memory.staging.size_bytes, self._staging_bytes)]
        self._timeout_s = memory.tuning.write_timeout_s
        self._copier = copier
        self._state_machine = state_machine
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._sendings: dict[_Key, _Sending] = {}
        self._queue: deque[_Key] = deque()  # one per waiting write credit; some are stale
        self._refused: dict[_Key, KvferryError] = {}  # refused ops that homes may still give credits for

    def __repr__(self) -> str:
        """Show what is in flight."""
        waiting = sum(len(one.waiting) for one in self._sendings.values())
        return f"<NetworkSender transfer ops={len(self._sendings)} waiting={waiting} free={len(self._free)}>"

    def op(self, peer: Incarnation, message: OpRequest, on_settled: Callable[[], None]) -> None:
        """Accept a home's description of a transfer op, which its write credits refer to; refuse them if it is invalid.

        ``on_settled`` is called after the state machine was notified that the transfer op is over.

        Raises:
            UnknownTransferError: the send request is over.
            InvalidFieldError: it names something that the send request does not have.
            OverloadedError: too many transfer ops are being sent.
        """
        key = _Key(peer, message.op)
        if key in self._sendings:
            raise InvalidFieldError(f"transfer op {message.op} is known already", field="op")
        try:
            self._begin(key, message, on_settled)
        except KvferryError as error:
            if len(self._refused) >= MAX_REFUSED:
                self._refused.pop(next(iter(self._refused)))
            self._refused[key] = error
            raise
        self._refused.pop(key, None)

    def _begin(self, key: _Key, message: OpRequest, on_settled: Callable[[], None]) -> None:
        if len(self._sendings) >= MAX_OPS:
            raise OverloadedError(f"{MAX_OPS} transfer ops are being sent from here")
        remote_endpoint = self._state_machine.open_remote(key.peer, message.send_request, message.receive_request)
        pool = remote_endpoint.send_request.holder
        assert pool is not None, remote_endpoint
        sides = [_side_of(segment, remote_endpoint, message.chunk) for segment in message.segments]
        sending = _Sending(remote_endpoint, sides, pool.region, on_settled)
        self._state_machine.begin_sending(remote_endpoint, message.op, time.monotonic())
        self._sendings[key] = sending

    def credit(self, peer: Incarnation, message: WriteCredit) -> None:
        """Queue a credited write."""
        key = _Key(peer, message.op)
        sending = self._sendings.get(key)
        error = self._refused.get(key) or _credit_error(sending, message, self._staging_bytes)
        if sending is not None and sending.in_flight >= MAX_CREDITS_PER_OP:
            error = OverloadedError(f"{MAX_CREDITS_PER_OP} write credits of the transfer op are in flight")
        if sending is None or error is not None:
            self._answer(peer, message, error)
            return
        sending.in_flight += 1
        sending.reading += 1
        sending.waiting.append(message)
        self._queue.append(key)
        self._pump()

    def op_over(self, peer: Incarnation, number: int) -> None:
        """End a transfer op: its home gives no more write credits."""
        key = _Key(peer, number)
        self._refused.pop(key, None)
        sending = self._sendings.get(key)
        if sending is not None:
            self._end(key, sending)

    def stop(self, remote_endpoint: RemoteEndpoint) -> None:
        """End the transfer ops of a remote endpoint; what is being gathered or written completes."""
        for key, sending in [item for item in self._sendings.items() if item[1].remote_endpoint is remote_endpoint]:
            self._end(key, sending)

    def peer_lost(self, peer: Incarnation) -> None:
        """End the transfer ops of a lost home."""
        for key, sending in [item for item in self._sendings.items() if item[0].peer == peer]:
            self._end(key, sending)

    def _end(self, key: _Key, sending: _Sending) -> None:
        sending.ended = True
        while sending.waiting:
            sending.in_flight -= 1
            sending.reading -= 1
            self._answer(key.peer, sending.waiting.popleft(), CancelledError("the transfer is over"))
        self._check_settled(key, sending)

    def _check_settled(self, key: _Key, sending: _Sending) -> None:
        if sending.ended and not sending.reading and self._sendings.pop(key, None) is not None:
            self._state_machine.sending_done(sending.remote_endpoint, key.op, time.monotonic())
            sending.on_settled()

    def _pump(self) -> None:
        while self._queue and self._free:
            key = self._queue.popleft()
            sending = self._sendings.get(key)
            if sending is None or not sending.waiting:
                continue
            writing = _Writing(key, sending, sending.waiting.popleft(), self._free.pop())
            try:
                self._gather(writing)
            except Exception as cause:  # noqa: BLE001  no thread: the home must hear of it
                self._loop.call_soon(self._on_gathered, writing, 0, cause)

    def _gather(self, writing: _Writing) -> None:
        sending, credit, buffer = writing.sending, writing.credit, writing.buffer
        on_gathered = functools.partial(self._on_gathered, writing)
        if isinstance(sending.memory, HostRegion):
            listed = functools.partial(_listed, sending, sending.memory, credit, buffer)
            self._copier.copy(credit.stop - credit.first, listed, on_gathered)
        else:
            self._copier.run(functools.partial(_gather_from_device, sending, credit, buffer), on_gathered)

    def _on_gathered(self, writing: _Writing, checksum: int, failed: Exception | None) -> None:
        writing.sending.reading -= 1
        if failed is None:
            writing.checksum = checksum
            self._observe("gathered", writing)
            self._write(writing)
        else:
            writing.error = failed if isinstance(failed, KvferryError) else InternalError(f"gathering failed: {failed}")
            self._finish(writing)
        self._check_settled(writing.key, writing.sending)

    def _write(self, writing: _Writing) -> None:
        credit, address = writing.credit, writing.buffer
        writing.in_flight = 1  # one count for this loop, until all writes have begun
        for remote_address, size_bytes in credit.runs or ((credit.address, credit.size_bytes),):
            try:
                self._engine.write(
                    credit.session,
                    address,
                    remote_address,
                    size_bytes,
                    functools.partial(self._on_written, writing),
                    timeout_s=self._timeout_s,
                    on_late=functools.partial(self._on_late, writing),
                )
            except Exception as cause:  # noqa: BLE001  what has begun ends by itself, and then the home hears of it
                error = cause if isinstance(cause, KvferryError) else InternalError(f"the write failed: {cause!r}")
                writing.failed(error)
                break
            writing.in_flight += 1
            address += size_bytes
        self._on_written(writing, None)

    def _on_late(self, writing: _Writing, _write: int) -> None:
        """Tell the home, which holds its memory for the write; the staging buffer is held here until it ends."""
        self._counters.add("network.late_writes")
        detail = f"a write of {writing.credit.size_bytes} bytes takes longer than {self._timeout_s:g} s"
        writing.failed(WriteFailedError(detail, may_still_land=True))
        self._answer_once(writing)

    def _on_written(self, writing: _Writing, error: KvferryError | None) -> None:
        if error is not None:
            writing.failed(error)
        writing.in_flight -= 1
        if not writing.in_flight:
            self._finish(writing)

    def _finish(self, writing: _Writing) -> None:
        self._free.append(writing.buffer)
        writing.sending.in_flight -= 1
        if writing.error is None:
            self._counters.add("network.sent_bytes", writing.credit.size_bytes)
            self._observe("written", writing)
        self._answer_once(writing)
        self._pump()

    def _observe(self, stage: str, writing: _Writing) -> None:
        """Count the time since the stage before."""
        now_s = time.perf_counter()
        self._counters.observe(f"stages.{stage}.network", now_s - writing.began_s)
        writing.began_s = now_s

    def _answer_once(self, writing: _Writing) -> None:
        if writing.answered:
            return
        writing.answered = True
        peer, error = writing.key.peer, writing.error
        if error is not None:
            request_id = writing.sending.remote_endpoint.request_id
            log.warning("a write credit was not written", home=peer.address, cause=str(error), request_id=request_id)
        self._answer(peer, writing.credit, error, writing.checksum)

    def _answer(self, peer: Incarnation, credit: WriteCredit, error: KvferryError | None, checksum: int = 0) -> None:
        try:
            info = error.info() if error else None
            written = Written(
                credit=credit.credit, checksum=checksum, error=info, may_still_land=_may_still_land(error)
            )
            self._send(peer, written)
        except Exception as cause:  # no memory: the home waits for it, and may hold pages until it has come
            log.exception("a write credit could not be answered yet", home=peer.address, cause=str(cause))
            self._loop.call_later(ANSWER_AGAIN_S, self._answer, peer, credit, error, checksum)


def _may_still_land(error: KvferryError | None) -> bool:
    return isinstance(error, WriteFailedError) and error.may_still_land


def _listed(sending: _Sending, memory: HostRegion, credit: WriteCredit, buffer: int) -> Copies:
    """On any thread: return the copies that gather the credited segments into ``buffer``."""
    flat_address = buffer - offset_of(sending.sides[credit.segment], credit.first)
    return sending.copies_of(credit.segment).listed(credit.first, credit.stop, memory.address, flat_address)


def _gather_from_device(sending: _Sending, credit: WriteCredit, buffer: int) -> int:
    """On a thread: gather the credited segments into ``buffer``; return their checksum."""
    sending.memory.gather(sending.sides[credit.segment], credit.first, credit.stop, buffer, copy_kernel.copy)
    return copy_kernel.digest((buffer, credit.size_bytes))


def _credit_error(sending: _Sending | None, credit: WriteCredit, staging_bytes: int) -> KvferryError | None:
    """Return why a write credit is invalid, or None."""
    if sending is None or sending.ended:
        return UnknownTransferError("the transfer op is over", field="op")
    if credit.segment >= len(sending.sides):
        return InvalidFieldError(f"segment {credit.segment} of {len(sending.sides)}", field="segment")
    side = sending.sides[credit.segment]
    if not credit.first < credit.stop <= total_segments(side):
        return InvalidFieldError(f"segments {credit.first}..{credit.stop} of {total_segments(side)}", field="stop")
    size_bytes = offset_of(side, credit.stop) - offset_of(side, credit.first)
    if size_bytes != credit.size_bytes or size_bytes > staging_bytes:
        return InvalidFieldError(
            f"{credit.size_bytes} bytes are credited for {size_bytes}, staging has {staging_bytes}",
            field="size_bytes",
        )
    runs_bytes = sum(size for _, size in credit.runs)
    if credit.runs and runs_bytes != size_bytes:
        return InvalidFieldError(f"the runs have {runs_bytes} bytes, the segments {size_bytes}", field="runs")
    return None


def _side_of(segment: Segment, remote_endpoint: RemoteEndpoint, chunk: int) -> PlanSide:
    """Return the source side of a segment, checked against the send request and its pool.

    Raises:
        InvalidFieldError: it names something that the send request does not have.
    """
    pool = remote_endpoint.send_request.holder
    assert pool is not None, remote_endpoint
    if chunk >= len(remote_endpoint.send_request.chunks):
        raise InvalidFieldError(f"chunk {chunk} of {len(remote_endpoint.send_request.chunks)}", field="chunk")
    entries = pool.manifest.entries
    ranges = {one.component: one for one in remote_endpoint.send_request.chunks[chunk].ranges}
    if segment.component not in ranges or len(segment.heads) != len(segment.entries):
        raise InvalidFieldError(f"a segment of component {segment.component!r}", field="segments")
    ids = every(ranges[segment.component].ids, segment.start, segment.step, segment.pages)
    wrong = [n for n in segment.entries if n >= len(entries) or entries[n].component != segment.component]
    if wrong or len(ids) != segment.pages or not segment.pages:
        raise InvalidFieldError(f"entry {wrong[:1]} or pages {segment.start}+{segment.pages}", field="segments")
    heads = [Heads(start, count) if count else None for start, count in segment.heads]
    first, count = segment.tokens
    return make_side([entries[n] for n in segment.entries], heads, ids, Tokens(first, count) if count else None)
