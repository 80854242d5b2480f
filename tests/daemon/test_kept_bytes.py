"""What one hostile session makes the daemon keep has a bound in bytes: the daemon's memory is measured against it.

Each attack sends what would keep ten times as much as its bound or more, of what only numbers used to bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import zmq

from kvferry.clients import Client, MhaSpec, new_request_id
from kvferry.daemon.control.control_socket import PAUSE_BYTES
from kvferry.daemon.daemon import Tuning
from kvferry.protocol.base import Busy, DeviceEvent, ErrorReply, PageList, RequestBody
from kvferry.protocol.codec import PageIds, decode_from_daemon, encode
from kvferry.protocol.envelope import Batch, Reply, Request
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import Allocate, Allocated, Free
from kvferry.protocol.session_messages import OpenEvents
from kvferry.protocol.transfer_messages import Accepted, Send
from tests.kit.daemons import Daemon, soon
from tests.kit.raw_engine import RawEngine, raw_engine

MIB: Final = 1 << 20
REPLY_MS: Final = 20_000
KEPT_BYTES: Final = 4 * MIB
MARGIN_BYTES: Final = 24 * MIB
"""What the daemon's memory may grow beside: copies of messages under way, and the allocator's holes."""
TUNING: Final = Tuning(
    limits=Limits(
        max_message_bytes=4 * MIB,
        max_kept_session_request_bytes=KEPT_BYTES,
        max_kept_request_bytes=2 * KEPT_BYTES,
        max_kept_session_reply_bytes=KEPT_BYTES,
        max_kept_reply_bytes=3 * KEPT_BYTES,
    )
)
PAGES: Final = 64 << 10
LIST_BYTES: Final = 8 * PAGES
SPEC: Final = MhaSpec(layers=1, tokens=PAGES, page_size=1, kv_heads=1, head_dim=8, dtype="float16")


class Attack:
    """A session that numbers its requests itself, acknowledges no event, and reads only when it is told to."""

    def __init__(self, engine: RawEngine, daemon: Daemon, control: zmq.Socket[bytes]) -> None:
        self.number = 1000
        self._engine = engine
        self._control = control
        self._status = Path(f"/proc/{daemon.process.pid}/status")
        self._before = self._resident()

    def has_grown_less_than(self, kept_bytes: int) -> bool:
        """Return whether the daemon's memory has grown by no more than this and what else it may."""
        return self._resident() - self._before < kept_bytes + MARGIN_BYTES

    def put(self, body: RequestBody, *ids: PageIds, number: int = 0) -> None:
        """Send a request."""
        self.number += not number
        opened = self._engine.channel.opened
        request = Request(number or self.number, opened.boot_id, opened.secret, 600_000, 0, body)
        self._control.send_multipart(encode(request, ids))

    def take(self) -> Reply:
        """Return the next reply."""
        while self._control.poll(REPLY_MS):
            message = decode_from_daemon(self._control.recv_multipart()).message
            if isinstance(message, Reply):  # no event
                return message
        pytest.fail("no reply")

    def ask(self, body: RequestBody, *ids: PageIds, number: int = 0) -> object:
        """Send a request and return the body of its reply."""
        self.put(body, *ids, number=number)
        return self.take().body

    def _resident(self) -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", self._status.read_text())
        assert found is not None
        return int(found[1]) << 10


@pytest.fixture
def attack(daemon: Daemon, client: Client) -> Iterator[Attack]:
    """Return a session that may have all pages of a pool."""
    client.create_pool("pages", SPEC)
    with (
        raw_engine(daemon.runtime_dir, "hostile") as engine,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as control,
    ):
        control.rcvhwm = 1  # what it does not ask for, nobody reads
        control.connect(f"ipc://{daemon.runtime_dir / 'control.sock'}")
        one = Attack(engine, daemon, control)
        one.ask(OpenEvents())
        yield one
    assert client.ping() > 0
    assert soon(lambda: len(client.status().sessions) == 1)
    client.delete_pool("pages")


ALL: Final = Allocate(pool="pages", count=PAGES)
IDS: Final = np.arange(1, PAGES + 1)
GIVE_BACK: Final = Free(pool="pages", pages=PAGES)


def test_replies_kept_for_a_retry(attack: Attack, client: Client) -> None:
    for _ in range(100):
        assert isinstance(attack.ask(ALL), Allocated)
        attack.ask(GIVE_BACK, IDS)
    assert attack.has_grown_less_than(KEPT_BYTES)
    (hostile,) = [one for one in client.status().sessions if one.name == "hostile"]
    assert 0 < hostile.reply_bytes <= KEPT_BYTES
    first, last = attack.number - 199, attack.number
    assert isinstance(attack.ask(GIVE_BACK, IDS, number=last), type(attack.ask(GIVE_BACK, IDS, number=last)))
    gone = attack.ask(ALL, number=first)
    assert isinstance(gone, ErrorReply)
    assert gone.error.code == "REPLY_GONE"
    assert client.status().pools[0].free == PAGES, "it was not done a second time"


def test_replies_that_are_not_read(attack: Attack, client: Client) -> None:
    for _ in range(200):
        attack.put(ALL)
        attack.put(GIVE_BACK, IDS)
    assert soon(lambda: client.status().counters.get("connections.paused", 0) > 0)
    assert attack.has_grown_less_than(KEPT_BYTES + PAUSE_BYTES)
    assert {type(attack.take().body) for _ in range(400)} >= {Allocated}  # nothing was lost


def test_requests_that_wait(attack: Attack, client: Client) -> None:
    attack.ask(ALL)
    wait = Free(pool="pages", pages=PAGES, after=DeviceEvent(event=0, value=1))
    for _ in range(200):
        attack.put(wait, IDS)
    busy = [attack.take().body for _ in range(200 - KEPT_BYTES // (LIST_BYTES + 200))]
    for one in busy:
        assert isinstance(one, Busy)
        assert "max_kept_session_request_bytes" in one.detail
        assert one.retry_after_ms > 0
    assert attack.has_grown_less_than(KEPT_BYTES)
    (hostile,) = [one for one in client.status().sessions if one.name == "hostile"]
    assert KEPT_BYTES - 2 * LIST_BYTES < hostile.kept_bytes <= KEPT_BYTES


def test_lists_of_transfers(attack: Attack) -> None:
    attack.ask(ALL)
    replies = [
        attack.ask(Send(request_id=new_request_id(), pool="pages", lists=(PageList(pages=PAGES),), last=False), IDS)
        for _ in range(200)
    ]
    assert [type(one) for one in replies[:7]] == [Accepted] * 7
    assert {type(one) for one in replies[9:]} == {Busy}
    assert attack.has_grown_less_than(KEPT_BYTES)


def test_results_of_batches_that_wait(attack: Attack) -> None:
    attack.ask(ALL)
    attack.ask(GIVE_BACK, IDS)
    wait = Free(pool="pages", pages=1, after=DeviceEvent(event=0, value=1))
    turn = (Allocate(pool="pages", count=PAGES), Free(pool="pages", pages=PAGES))
    for _ in range(40):
        attack.put(Batch(requests=(*turn * 4, Allocate(pool="pages", count=1), wait)), *[IDS] * 4, IDS[:1])
    assert {type(attack.take().body) for _ in range(38)} == {Busy}
    assert attack.has_grown_less_than(2 * KEPT_BYTES)


def test_limits_are_a_part_of_what_may_be_kept() -> None:
    limits = Limits().within(64 << 20)
    assert (limits.max_message_bytes, limits.max_frame_bytes) == (8 << 20, 4 << 20)
    assert limits.max_kept_request_bytes == limits.max_kept_payload_bytes == 24 << 20
    assert limits.max_kept_session_request_bytes == limits.max_kept_session_payload_bytes == 12 << 20
    assert (limits.max_kept_reply_bytes, limits.max_kept_session_reply_bytes) == (8 << 20, 4 << 20)
    assert Limits().within(4 << 30) == Limits()
