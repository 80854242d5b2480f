"""What another daemon may say about transfers, in any order, to one that is home of one and source of another.

The network and the copies are scripted, the rest is the daemon's own. A frame is a step, see ``_Peer.step``.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from kvferry.protocol.errors import KvferryError, MalformedError
from kvferry.protocol.peer_messages import PeerBody, PeerHead, PeerHeartbeat, PeerHello, decode_peer_body
from tests.fuzz.inputs import frames_of, joined
from tests.kit.bytes import Bytes, read_pages
from tests.kit.peers import Meeting
from tests.protocol.samples import PEER_MESSAGES, to_frames

ROUNDS: Final = 100
WAYS: Final[dict[bytes, Literal["ipc", "tcp"]]] = {b"i": "ipc", b"t": "tcp"}
SENT: Final = b"s"
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
    return [joined(frames) for frames in found]


def take_one_input(data: bytes) -> None:
    """Let a peer say what the steps say: only its own transfers suffer, and all of it ends."""
    first, *steps = frames_of(data)
    if first[:1] in WAYS:
        peer = _Peer(first)
        said: list[bytes] = []
        for step in [*steps[:MOST_STEPS], b""]:
            if step[:1] != b"i" and said:
                peer.say(said)
                said = []
            if step[:1] in {b"b", b"i"}:
                said.append(step[1:])
            else:
                peer.step(step)
        peer.end()


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

    def say(self, frames: list[bytes]) -> None:
        """Say a message: the body's frame, and its page lists."""
        head = PeerHead(self._speaker.address, self._speaker.boot_id, self.node.links.boot_id)
        try:
            incoming = decode_peer_body(head, frames)
        except MalformedError:
            return
        body: PeerBody = incoming.envelope.body
        if isinstance(body, PeerHello | PeerHeartbeat):
            return  # the links', see tests/daemon/test_peers.py
        try:
            self.node.links.told.on_message(self._speaker, body, incoming.ids)
        except KvferryError as error:
            error.info()
        self._check()

    def step(self, step: bytes) -> None:
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
        self._check()

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
