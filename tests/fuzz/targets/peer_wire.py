"""What another daemon may say about transfers, in any order, to one that is home of one and source of another.

The network and the copies are scripted, the rest is the daemon's own. The first frame says which: a *peer* takes part
in both transfers, a *home* asks the daemon's sender for bytes. Each other frame is a step of theirs.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

import msgspec
import numpy as np

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transfer.peer_transfers import op_of
from kvferry.daemon.transports.network_copier import NetworkCopier
from kvferry.daemon.transports.network_sender import NetworkSender
from kvferry.protocol.errors import KvferryError, MalformedError
from kvferry.protocol.peer_messages import (
    IncomingPeerMessage,
    OpEnded,
    OpRequest,
    PeerBody,
    PeerHead,
    PeerHeartbeat,
    PeerHello,
    WriteCredit,
    Written,
    decode_peer_body,
)
from tests.fuzz.inputs import frames_of, joined
from tests.kit.bytes import Bytes, fill_region, read_pages, write_pages
from tests.kit.network import BYTES, SEGMENTS, ManualExecutor, NetworkHarness, Said, network_memory
from tests.kit.peers import Meeting
from tests.kit.transfers import PAGE_BYTES
from tests.protocol.samples import PEER_MESSAGES, to_frames

ROUNDS: Final = 60
WAYS: Final[dict[bytes, Literal["ipc", "tcp"]]] = {b"i": "ipc", b"t": "tcp"}
SENT: Final = b"s"
HOME: Final = b"h"
SECRET: Final = 0xEE
"""Also what buffers have before they are used."""

PAGES: Final = 17
"""Of each pool."""

MOST_STEPS: Final = 64
MOST_LEFT: Final = 4 * MOST_STEPS


def seeds() -> list[bytes]:
    """Return whole transfers, by the peer itself and as they were said, and each kind of message by itself."""
    found: list[list[bytes]] = []
    for way in WAYS:
        for sent in (SENT, b"n"):
            found.append([way + sent, *_transfer(way, sent)])
            found.append([way + sent, *[b"d"] * 6, b"s", *[b"d"] * 6, b"s", *[b"d"] * 6, b"t\x09", b"l", b"u"])
    messages = [_as_steps(to_frames(*one)[1:]) for one in PEER_MESSAGES.values()]
    found += [[way + SENT, *message, b"d", b"s", b"d"] for message in messages for way in WAYS]
    return [joined(frames) for frames in [*found, *asyncio.run(_requests())]]


def take_one_input(data: bytes) -> None:
    """Let a peer say what the steps say: only its own transfers suffer, and all of it ends."""
    first, *steps = frames_of(data)
    if first[:1] in WAYS:
        peer = _Peer(first)
        for step in _grouped(steps):
            peer.take(step)
        peer.end()
    elif first == HOME:
        asyncio.run(_ask(_grouped(steps)))


def _grouped(steps: list[bytes]) -> list[list[bytes]]:
    """Return each step with the page lists that follow it."""
    found: list[list[bytes]] = []
    for step in steps[:MOST_STEPS]:
        if step[:1] == b"i" and found:
            found[-1].append(step[1:])
        else:
            found.append([step])
    return found


def _read(head: PeerHead, step: list[bytes]) -> IncomingPeerMessage | None:
    """Return the message that a step says, if it is one."""
    try:
        return decode_peer_body(head, [step[0][1:], *step[1:]])
    except MalformedError:
        return None


class _Peer:
    """A daemon that may say anything, and the node that hears it."""

    def __init__(self, first: bytes) -> None:
        self.meeting = Meeting(WAYS[first[:1]], sent=first[1:2] == SENT)
        self.node, self._harness = self.meeting.node, self.meeting.harness
        self._speaker = self.meeting.speaker
        self._asked = set(self.node.state_machine.endpoints.receive_requests)
        self._offered = set(self.node.state_machine.endpoints.send_requests)
        given = [self.node.held_pages(pool) if pool.name == "decode" else set() for pool in self.node.pools]
        self._other_ids = [np.setdiff1d(np.arange(1, PAGES), list(pages)) for pages in given]
        self._before = self._others()

    def take(self, step: list[bytes]) -> None:
        """Do what a step says."""
        if step[0][:1] == b"b":
            self._say(step)
        else:
            self._do(step[0])
        self._check()

    def _say(self, step: list[bytes]) -> None:
        head = PeerHead(self._speaker.address, self._speaker.boot_id, self.node.links.boot_id)
        incoming = _read(head, step)
        if incoming is None or isinstance(incoming.envelope.body, PeerHello | PeerHeartbeat):
            return  # these are the links', see tests/daemon/test_peers.py
        try:
            self.node.links.told.on_message(self._speaker, incoming.envelope.body, incoming.ids)
        except KvferryError as error:
            error.info()

    def _do(self, step: bytes) -> None:
        """Let something else happen, by the first byte."""
        match step[:1]:
            case b"d":  # what is on its way arrives
                self._deliver()
            case b"s":  # a copy goes on
                if (going_on := next(self._harness.steps(), None)) is not None:
                    self._harness.step(*going_on)
            case b"t":  # time passes
                self._harness.pass_time(step[1] if step[1:] else 1)
            case b"l":
                self.node.links.told.on_lost(self._speaker, "lost")
            case b"u":
                self.node.links.told.on_up(self._speaker)

    def end(self) -> None:
        """Let all go on to its end, and check that nothing is left."""
        self._run()
        self._harness.pass_time(1e12)
        self._run()
        self._check()
        self._harness.check_nothing_left()

    def _run(self) -> None:
        while self._deliver():
            pass
        while (going_on := next(self._harness.steps(), None)) is not None:
            self._harness.step(*going_on)
            while self._deliver():
                pass

    def _deliver(self) -> bool:
        busy = self._harness.network.busy()
        if busy:
            try:
                self._harness.network.deliver(busy[0])
            except KvferryError as error:
                error.info()
        return bool(busy)

    def _check(self) -> None:
        endpoints = self.node.state_machine.endpoints
        assert set(endpoints.receive_requests) <= self._asked, "a receive request that no engine has made"
        assert set(endpoints.send_requests) <= self._offered, "a send request that no engine has made"
        assert max(self.node.leftovers().values(), default=0) <= MOST_LEFT, self.node.leftovers()
        assert all(map(np.array_equal, self._others(), self._before)), "pages that nobody gave were written"

    def _others(self) -> list[Bytes]:
        """Return the bytes of all pages that no peer may write."""
        return [
            read_pages(pool.region, pool.manifest.entries, ids)
            for pool, ids in zip(self.node.pools, self._other_ids, strict=True)
        ]


def _transfer(way: bytes, sent: bytes) -> list[bytes]:
    """Return the steps of a transfer in which the peer's messages are said by the input."""
    meeting = Meeting(WAYS[way], sent=sent == SENT)
    harness, steps = meeting.harness, list[bytes]()
    while True:
        while busy := harness.network.busy():
            if busy[0].owner is meeting.peer.links:
                steps += _as_steps(busy[0].on_its_way[0][1:])
            harness.network.deliver(busy[0])
        if (going_on := next(harness.steps(), None)) is None:
            return steps
        harness.step(*going_on)
        steps.append(b"s")


def _as_steps(frames: list[bytes]) -> list[bytes]:
    return [b"b" + frames[0], *(b"i" + one for one in frames[1:])]


# -- the daemon's sender


class _Asked:
    """A sender with one transfer op to send, and a home that may ask it for anything.

    Of the source's memory only the pages that were given do not have the byte ``SECRET``.
    """

    def __init__(self) -> None:
        self.harness = NetworkHarness()
        pool = self.harness.source_pool
        fill_region(pool.region, SECRET)
        self.op = self.harness.op()
        given = np.array(sorted(self.harness.source.held_pages(pool)))
        entries = pool.manifest.entries
        write_pages(pool.region, entries, given, np.zeros(len(given) * len(entries) * PAGE_BYTES, np.uint8))
        self.said, self.executor = Said(), ManualExecutor()
        self._engine, self._memory = network_memory(buffer_bytes=2 * BYTES)
        peers = self.harness.source.state_machine.peers
        self._sender = NetworkSender(self.said, self._memory, NetworkCopier(self.executor), peers, Counters())
        self._ended = self._credits = 0

    async def take(self, step: list[bytes]) -> None:
        """Say a message, or (``s``) let a thread and a write come to their end."""
        home = self.harness.to_home
        if step[0][:1] == b"b":
            incoming = _read(PeerHead(home.address, home.boot_id, ""), step)
            self._say(incoming.envelope.body if incoming is not None else None)
        elif step[0][:1] == b"s":
            await self._go_on()
        self._check()

    async def end(self) -> None:
        """Let the home be lost, and all end."""
        self._sender.peer_lost(self.harness.to_home)
        while self.executor.waiting or self._ended < len(self._engine.begun):
            await self._go_on()
        self._check()
        assert len(self.said.of(Written)) == self._credits, "each write credit has one answer"
        endpoints = self.harness.source.state_machine.endpoints.remote_endpoints.values()
        assert not any(one.sending for one in endpoints)

    def _say(self, body: PeerBody | None) -> None:
        home = self.harness.to_home
        try:
            match body:
                case OpRequest():
                    self._sender.op(home, body, lambda: None)
                case WriteCredit():
                    self._credits += 1
                    self._sender.credit(home, body)
                case OpEnded():
                    self._sender.op_over(home, body.op)
        except KvferryError as error:
            error.info()

    async def _go_on(self) -> None:
        if self.executor.waiting:
            await self.executor.run_one()
        if self._ended < len(self._engine.begun):
            self._ended += 1
            self._engine.begun[self._ended - 1].on_done(None)

    def _check(self) -> None:
        for one in self._engine.begun:
            assert SECRET not in one.content, "a page was read that was not given"


async def _ask(steps: list[list[bytes]]) -> None:
    asked = _Asked()
    for step in steps:
        await asked.take(step)
    await asked.end()


async def _requests() -> list[list[bytes]]:
    """Return what a home says of one transfer op: whole, in halves, and into pages of its own."""
    op = op_of(_Asked().op)
    credit = WriteCredit(
        op=op.op, credit=1, segment=0, first=0, stop=SEGMENTS, session="home:1", address=1 << 20, size_bytes=BYTES
    )
    half = msgspec.structs.replace(credit, credit=2, stop=SEGMENTS // 2, size_bytes=BYTES // 2)
    runs = msgspec.structs.replace(credit, runs=((1 << 20, BYTES // 2), (1 << 22, BYTES // 2)))
    sliced = [msgspec.structs.replace(one, heads=((0, 1),) * len(one.entries)) for one in op.segments]
    parts = [msgspec.structs.replace(one, pages=1, start=1, tokens=(1, 2)) for one in sliced]
    over = OpEnded(op=op.op)
    found: list[list[PeerBody]] = [[op, credit, over], [op, half, half, over], [op, runs, over], [credit, op, over]]
    for segments, size_bytes in ((sliced, BYTES), (parts, BYTES // 6)):
        its = msgspec.structs.replace(credit, stop=size_bytes // PAGE_BYTES or 1, size_bytes=size_bytes)
        found.append([msgspec.structs.replace(op, segments=tuple(segments)), its, over])
    said = [[b"b" + msgspec.msgpack.encode(one) for one in bodies] for bodies in found]
    return [[HOME, *messages[:2], b"s", *messages[2:], b"s"] for messages in said]
