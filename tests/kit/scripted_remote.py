"""Transports between daemons that do nothing by themselves: a test moves the bytes and ends each transfer op.

By mapping, where the peer's address is of this host: the home copies, ends the copy, and has the source confirm. By
bounce buffers else: the source gathers what was credited, and its write ends; only then does the home touch a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvferry.daemon.transfer.endpoints import Incarnation, RemoteEndpoint, RemotePool, TransferOp
from kvferry.daemon.transfer.peer_transfers import PeerTransfers
from kvferry.daemon.transfer.transitions import State
from kvferry.daemon.transports.local import OnOpDone, SendToPeer
from kvferry.pools.devices.base import Region
from kvferry.pools.planning.copies import copy_one_by_one, total_segments
from kvferry.protocol.errors import (
    CancelledError,
    InvalidFieldError,
    KvferryError,
    PeerLostError,
    TransferFailedError,
    UnknownTransferError,
    raised,
)
from kvferry.protocol.peer_messages import Confirm, Confirmed, OpEnded, OpRequest, Segment, WriteCredit, Written
from tests.kit.bytes import read_region, write_region

ON_THIS_HOST = "ipc://"
SEGMENT = Segment(component="main", start=0, pages=1, entries=(0,), heads=((0, 0),))
"""What the transfer ops of a test say of themselves: the test moves them by their plans."""

RegionOf = Callable[[RemotePool], Region]
SendingKey: TypeAlias = tuple[Incarnation, int]


@dataclass
class Sending:
    """A transfer op that a source daemon sends.

    Attributes:
        writing: whether a write credit of it is being written.
        over: whether no write credit follows.
    """

    remote_endpoint: RemoteEndpoint
    on_settled: Callable[[], None]
    writing: bool = False
    over: bool = False


class Arriving:
    """A transfer op at its home.

    Attributes:
        stopped: whether the home wants it no more.
        confirming: whether the source was asked to confirm the copy.
    """

    def __init__(self, op: TransferOp, peer: Incarnation, region_of: RegionOf) -> None:
        self.op, self.peer = op, peer
        self._region_of = region_of
        self.error: KvferryError | None = None
        self.confirming = False

    @property
    def stopped(self) -> bool:
        """Return whether the copy is to end."""
        return self.error is not None

    @property
    def region(self) -> Region:
        """Return the source's memory; PEER_LOST where nobody has it."""
        pool = self.op.send_request.pool
        assert isinstance(pool, RemotePool)
        return self._region_of(pool)

    def gathered(self) -> list[bytes]:
        """Return what the source's memory holds now, a block each."""
        memory = read_region(self.region)
        return [
            memory[int(start) : int(start) + int(size)].tobytes()
            for planned_copy in self.op.planned_copies
            for start, _, size in planned_copy.plan.blocks().tolist()
        ]

    def copy(self) -> None:
        """Copy from the source's memory as it is now."""
        for planned_copy in self.op.planned_copies:
            plan = planned_copy.plan
            staging = np.empty(plan.total_bytes, np.uint8)
            stop, at = total_segments(plan.source), staging.ctypes.data
            self.region.gather(plan.source, 0, stop, at, copy_one_by_one)
            self.op.receive_request.pool.region.scatter(plan.destination, 0, stop, at, copy_one_by_one)

    def scatter(self, written: list[bytes]) -> None:
        """Put what landed into the pages."""
        content = iter(written)
        for planned_copy in self.op.planned_copies:
            for _, start, _ in planned_copy.plan.blocks().tolist():
                write_region(self.op.receive_request.pool.region, np.frombuffer(next(content), np.uint8), int(start))


class ScriptedRemote:
    """What ``RemoteTransports`` is to a daemon; see there.

    Attributes:
        mapped: transfer ops that this daemon copies from a peer's memory, by id.
        landing: transfer ops that a peer is to write to this daemon's slots, by id.
        sending: transfer ops that homes have asked this daemon for, by home and number.
        slots: what peers have written to this daemon's slots, by the peer's boot id and write credit.
        done: transfer ops that have ended and are not reported yet.
    """

    def __init__(self, say: SendToPeer, state_machine: PeerTransfers, region_of: RegionOf) -> None:
        self.mapped: dict[int, Arriving] = {}
        self.network: dict[int, Arriving] = {}
        self.sending: dict[SendingKey, Sending] = {}
        self.slots: dict[tuple[str, int], list[bytes]] = {}
        self.done: list[tuple[int, KvferryError | None]] = []
        self._say = say
        self._state_machine = state_machine
        self._on_done: dict[int, OnOpDone] = {}
        self._region_of = region_of

    def written_here(self) -> list[TransferOp]:
        """Return the transfer ops that may write to pages of this daemon."""
        return [arriving.op for arriving in (*self.mapped.values(), *self.network.values())]

    def report(self) -> None:
        """Report the transfer ops that have ended: never from within ``start`` or ``stop``."""
        while self.done:
            op_id, error = self.done.pop(0)
            self._on_done.pop(op_id)(op_id, error)

    # -- at the home

    def can_reach(self, _address: str) -> bool:
        return True

    def start(self, op: TransferOp, on_done: OnOpDone) -> None:
        self._on_done[op.op_id] = on_done
        assert op.send_request.origin is not None
        peer = op.send_request.origin.peer
        arriving = Arriving(op, peer, self._region_of)
        if peer.address.startswith(ON_THIS_HOST):
            self._map(arriving)
            return
        self.network[op.op_id] = arriving
        origin, number = op.send_request.origin, op.op_id
        asked = OpRequest(
            receive_request=op.receive_request.name,
            send_request=origin.send_request,
            op=number,
            chunk=op.chunk,
            segments=(SEGMENT,),
        )
        credit = WriteCredit(op=number, credit=number, segment=0, first=0, stop=1, session="", address=0, size_bytes=1)
        if not (self._say(peer, asked) and self._say(peer, credit)):
            self._end_network(number, PeerLostError("gone"))

    def _map(self, arriving: Arriving) -> None:
        number = arriving.op.op_id
        try:
            assert arriving.region.size_bytes
        except PeerLostError as error:
            self.done.append((number, error))
            return
        self.mapped[number] = arriving

    def stop(self, op_id: int) -> bool:
        is_known = op_id in self.network or op_id in self.mapped
        self._fail(op_id, CancelledError("stopped"))
        return is_known

    def peer_lost(self, peer: Incarnation, why: str) -> None:
        for op_id in [n for n, one in (self.mapped | self.network).items() if one.peer == peer]:
            self._fail(op_id, PeerLostError(why))
        for key in [key for key in self.sending if key[0] == peer]:
            self._over(key)

    def end_copy(self, op_id: int, error: KvferryError | None = None) -> None:
        """End the copy of a mapped transfer op; ask the source to confirm it, if all is well."""
        arriving = self.mapped[op_id]
        arriving.error = arriving.error or error
        if arriving.error is not None:
            self._end_mapped(op_id)
            return
        arriving.confirming = True
        origin = arriving.op.send_request.origin
        assert origin is not None
        asked = Confirm(receive_request=arriving.op.receive_request.name, send_request=origin.send_request, op=op_id)
        if not self._say(arriving.peer, asked):
            arriving.error = PeerLostError("gone")
            self._end_mapped(op_id)

    def confirmed(self, peer: Incarnation, message: Confirmed) -> None:
        arriving = self.mapped.get(message.op)
        if arriving is not None and arriving.peer == peer and arriving.confirming:
            arriving.error = raised(message.error) if message.error else None
            self._end_mapped(message.op)

    def written(self, peer: Incarnation, message: Written) -> None:
        arriving = self.network.get(message.credit)
        slot = self.slots.pop((peer.boot_id, message.credit), None)
        if arriving is None or arriving.peer != peer:
            return
        error = raised(message.error) if message.error else None
        if error is None and slot is None:
            error = TransferFailedError("the checksum is wrong: nothing came")
        if error is None and slot is not None:
            arriving.scatter(slot)
        self._end_network(message.credit, error)

    def _fail(self, op_id: int, error: KvferryError) -> None:
        if op_id in self.network:
            self._end_network(op_id, error)
            return
        arriving = self.mapped.get(op_id)
        if arriving is not None:
            arriving.error = arriving.error or error
            if arriving.confirming:
                self._end_mapped(op_id)

    def _end_network(self, op_id: int, error: KvferryError | None) -> None:
        arriving = self.network.pop(op_id)
        self._say(arriving.peer, OpEnded(op=op_id))
        self.done.append((op_id, error))

    def _end_mapped(self, op_id: int) -> None:
        self.done.append((op_id, self.mapped.pop(op_id).error))

    # -- at the source

    def op_asked(self, peer: Incarnation, message: OpRequest, on_settled: Callable[[], None]) -> None:
        remote_endpoint = self._state_machine.open_remote(peer, message.send_request, message.receive_request)
        if (peer, message.op) in self.sending:
            raise InvalidFieldError("known already", field="op")
        self._state_machine.begin_sending(remote_endpoint, message.op, remote_endpoint.send_request.created_at)
        self.sending[peer, message.op] = Sending(remote_endpoint, on_settled)

    def credited(self, peer: Incarnation, message: WriteCredit) -> None:
        sending = self.sending.get((peer, message.op))
        if sending is None or sending.over:
            self._say(peer, Written(credit=message.credit, error=UnknownTransferError("over", field="op").info()))
        else:
            sending.writing = True

    def op_over(self, peer: Incarnation, message: OpEnded) -> None:
        self._over((peer, message.op))

    def stop_sending(self, remote_endpoint: RemoteEndpoint) -> None:
        for key in [key for key, one in self.sending.items() if one.remote_endpoint is remote_endpoint]:
            self._over(key)

    def end_write(self, key: SendingKey, error: KvferryError | None = None) -> None:
        """End the write of a write credit: its pages are not read any more."""
        peer, number = key
        sending = self.sending[key]
        assert sending.writing, "nothing was credited"
        assert sending.remote_endpoint.send_request.state is not State.SETTLED, "pages are read that nobody holds"
        sending.writing = False
        self._say(peer, Written(credit=number, error=error.info() if error else None))
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
            self._state_machine.sending_done(sending.remote_endpoint, key[1], now=0.0)
            sending.on_settled()
