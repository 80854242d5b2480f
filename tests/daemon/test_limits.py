"""Bounds on what a session may have in flight, keep and wait for: BUSY, until something is over.

What one hostile session makes the daemon keep has a bound in bytes, and the daemon's memory is measured against it:
each attack sends what would keep ten times as much or more, of what only numbers used to bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import zmq

from kvferry.clients import Client, MhaSpec, Transfer, new_request_id, pages
from kvferry.daemon.control.control_socket import PAUSE_BYTES
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.services.transfers import FEW_EVENTS
from kvferry.protocol.base import Busy, DeviceEvent, ErrorReply, PageList, RequestBody
from kvferry.protocol.codec import PageIds, decode_from_daemon, encode
from kvferry.protocol.envelope import Batch, Reply, Request
from kvferry.protocol.errors import DeadlineError, InvalidFieldError, OverloadedError
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import Allocate, Allocated, Free
from kvferry.protocol.session_messages import OpenEvents, SessionStatus
from kvferry.protocol.settings import control_address
from kvferry.protocol.transfer_messages import Accepted, Cancel, Cancelled, Receive, Send
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user, soon
from tests.kit.kvferry_command import run_kvferry
from tests.kit.pools import SPEC
from tests.kit.raw_engine import RawEngine, raw_engine

MIB: Final = 1 << 20
REPLY_MS: Final = 20_000
TUNING = Tuning(limits=Limits(max_transfers_per_session=2, max_transfers=3, max_sessions=3))
LATE = Tuning(limits=Limits(max_deadline_ms=10_000, default_deadline_ms=500))


class Deaf:
    """A session that numbers its requests itself, acknowledges no event, and reads only when it is told to."""

    def __init__(self, engine: RawEngine, control: zmq.Socket[bytes], daemon: Daemon, observer: Client) -> None:
        self.number = 1000
        self.observer = observer
        self._opened = engine.channel.opened
        self._control = control
        self._memory = Path(f"/proc/{daemon.process.pid}/status")
        self._before = self._resident()

    @property
    def seen(self) -> SessionStatus:
        """Return it as another session sees it."""
        (one,) = [one for one in self.observer.status().sessions if one.session == self._opened.session]
        return one

    def has_grown_less_than(self, kept_bytes: int) -> bool:
        """Return whether the daemon's memory has grown by no more than this and what else it may."""
        return self._resident() - self._before < kept_bytes + MARGIN_BYTES

    def put(self, body: RequestBody, *ids: PageIds, number: int = 0) -> None:
        self.number += not number
        opened = self._opened
        request = Request(number or self.number, opened.boot_id, opened.secret, 600_000, 0, body)
        self._control.send_multipart(encode(request, ids))

    def take(self) -> Reply:
        while self._control.poll(REPLY_MS):
            message = decode_from_daemon(self._control.recv_multipart()).message
            if isinstance(message, Reply):  # no event
                return message
        pytest.fail("no reply")

    def ask(self, body: RequestBody, *ids: PageIds, number: int = 0) -> object:
        self.put(body, *ids, number=number)
        return self.take().body

    def _resident(self) -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", self._memory.read_text())
        assert found is not None
        return int(found[1]) << 10


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with kit.engine(daemon) as one:
        assert soon(lambda: len(one.status().sessions) == 1)
        for name in ("prefill", "decode"):
            one.create_pool(name, SPEC)
        yield one


def receive(client: Client, ids: PageIds, deadline_s: float | None = None) -> Transfer:
    return client.receive("decode", new_request_id(), [pages(ids)], deadline_s=deadline_s)


def test_transfers_of_a_session(client: Client) -> None:
    ids = client.allocate("decode", 3)
    first, second, third = (receive(client, ids[at : at + 1]) for at in range(3))
    with pytest.raises(OverloadedError, match="2 transfers of the session") as refused:
        client.wait_finished(third)
    assert refused.value.retry_after_ms == 50, "transfers end by themselves"
    client.cancel(first)
    client.wait_settled(first)
    client.ping()  # acknowledges it
    again = receive(client, ids[:1])
    client.ping()
    assert [one.state for one in (second, again)] == ["open", "open"]


def test_transfers_of_all_sessions(daemon: Daemon, client: Client) -> None:
    transfers: list[Transfer] = []
    with kit.engine(daemon) as other:
        for one in (client, other):
            ids = one.allocate("decode", 2)
            transfers = [receive(one, ids[at : at + 1]) for at in range(2)]
            one.ping()
        with pytest.raises(OverloadedError, match="3 transfers of all sessions"):
            other.wait_finished(transfers[1])


def test_transfers_of_one_user_leave_some_to_others() -> None:
    code = (
        "from kvferry.clients import new_request_id, pages\n"
        "spec = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype='float32')\n"
        "with Client.connect(sys.argv[1]) as one:\n"
        "    one.create_pool('theirs', spec)\n"
        "    ids = one.allocate('theirs', 3)\n"
        "    sent = [one.receive('theirs', new_request_id(), [pages(ids[n : n + 1])]) for n in range(3)]\n"
        "    one.ping()\n"
        "    print(sent[-1].refused)"
    )
    with kit.daemon(tuning=Tuning(limits=Limits(max_transfers_per_session=3, max_transfers=3))) as daemon:
        assert "2 of them of user 12345, of at most 3" in said_by_another_user(daemon, code)


def test_a_full_session_may_go_on_with_what_it_has_begun(client: Client) -> None:
    ids, received = client.allocate("prefill", 4), client.allocate("decode", 2)
    requests = [new_request_id(), new_request_id()]
    for at, request_id in enumerate(requests):
        client.send("prefill", request_id, [pages(ids[2 * at : 2 * at + 1])], last=False)
    for at, request_id in enumerate(requests):
        sending = client.send("prefill", request_id, [pages(ids[2 * at + 1 : 2 * at + 2], first_page=1)])
        client.ping()
        assert sending.refused is None
    with pytest.raises(OverloadedError):
        client.wait_finished(receive(client, received[:1]))


def check_events_are_bounded(daemon: Daemon, client: Client, rounds: int, why: str) -> None:
    """Let an engine use one request id again and again, and acknowledge nothing."""
    with raw_engine(daemon.runtime_dir) as engine:
        deaf = Deaf(engine, engine.control, daemon, client)
        transfer = Receive(request_id=new_request_id(), pool="decode", lists=(PageList(pages=1),))
        cancel = Cancel(request_id=transfer.request_id, pool="decode", direction="receive")
        engine.say("ALLOCATE", pool="decode", count=1)
        for _ in range(rounds):
            assert isinstance(deaf.ask(transfer, np.array([1])), Accepted)
            assert isinstance(deaf.ask(cancel), Cancelled)
        busy = deaf.ask(transfer, np.array([1]))
        assert isinstance(busy, Busy)
        assert f"{2 * rounds} events of {why} are unacknowledged" in busy.detail
        assert deaf.seen.unacknowledged_events == 2 * rounds


def test_events_that_are_never_acknowledged(daemon: Daemon, client: Client) -> None:
    check_events_are_bounded(daemon, client, 2, "the session")


@pytest.mark.full
def test_events_of_all_sessions_that_are_never_acknowledged() -> None:
    with kit.daemon(tuning=Tuning(limits=Limits(max_transfers=FEW_EVENTS))) as daemon, kit.engine(daemon) as client:
        client.create_pool("decode", SPEC)
        check_events_are_bounded(daemon, client, FEW_EVENTS, "all sessions")


def test_sessions(daemon: Daemon, client: Client) -> None:
    with kit.engine(daemon, instance="one"), kit.engine(daemon, instance="one") as last:
        with pytest.raises(OverloadedError, match="3 sessions live") as refused:
            Client.connect(daemon.runtime_dir)
        assert refused.value.retry_after_ms == 1000, "an engine has to go first"
        with kit.engine(daemon, session=False) as looker:
            looker.ping()
        last.close()
        assert soon(lambda: len(client.status().sessions) <= 2)
        Client.connect(daemon.runtime_dir).close()


def test_a_client_takes_its_daemons_word_for_the_longest_deadline() -> None:
    with kit.daemon(tuning=LATE) as late, kit.engine(late) as client:
        client.create_pool("decode", SPEC)
        held = client.allocate("decode", 2)
        client.wait_done(client.offload("decode", [pages(held)]))
        alone = receive(client, held)
        with pytest.raises(DeadlineError, match="no SEND yet"):  # the daemon's default
            client.wait_finished(alone)
        client.wait_settled(alone)
        for refuse in (
            lambda: receive(client, held, deadline_s=10.1),
            lambda: client.lookup("decode", [b"h" * 16], deadline_s=10.1),
        ):
            with pytest.raises(InvalidFieldError, match="at most 10,") as refused:
                refuse()
            assert refused.value.field == "deadline_s"
        assert receive(client, held, deadline_s=10).refused is None
        fields = json.dumps({"pool": "nowhere", "count": 1, "space": "main"})
        for options, said in (((), "UNKNOWN_POOL"), (("--timeout", "11"), "at most 10 s")):
            assert said in run_kvferry("probe", "--runtime-dir", late.runtime_dir, *options, "ALLOCATE", fields).stdout


# -- bytes

KEPT_BYTES: Final = 4 * MIB
MARGIN_BYTES: Final = 24 * MIB
"""What the daemon's memory may grow beside: copies of messages under way, and the allocator's holes."""
KEEPING: Final = Tuning(
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
LARGE: Final = MhaSpec(layers=1, tokens=PAGES, page_size=1, kv_heads=1, head_dim=8, dtype="float16")
ALL: Final = Allocate(pool="pages", count=PAGES)
IDS: Final = np.arange(1, PAGES + 1)
GIVE_BACK: Final = Free(pool="pages", pages=PAGES)


@pytest.fixture(scope="module")
def keeping() -> Iterator[Daemon]:
    with kit.daemon(tuning=KEEPING) as one:
        yield one


@pytest.fixture
def attack(keeping: Daemon) -> Iterator[Deaf]:
    """Return a session that may have all pages of a pool."""
    with kit.engine(keeping) as client:
        client.create_pool("pages", LARGE)
        with (
            raw_engine(keeping.runtime_dir) as engine,
            zmq.Context() as context,
            context.socket(zmq.DEALER) as control,
        ):
            control.rcvhwm = 1  # what it does not ask for, nobody reads
            control.connect(control_address(keeping.runtime_dir))
            one = Deaf(engine, control, keeping, client)
            one.ask(OpenEvents())
            yield one
        assert soon(lambda: len(client.status().sessions) == 1)
        client.delete_pool("pages")


def test_replies_kept_for_a_retry(attack: Deaf) -> None:
    for _ in range(100):
        assert isinstance(attack.ask(ALL), Allocated)
        attack.ask(GIVE_BACK, IDS)
    assert attack.has_grown_less_than(KEPT_BYTES)
    assert 0 < attack.seen.reply_bytes <= KEPT_BYTES
    first, last = attack.number - 199, attack.number
    assert isinstance(attack.ask(GIVE_BACK, IDS, number=last), type(attack.ask(GIVE_BACK, IDS, number=last)))
    gone = attack.ask(ALL, number=first)
    assert isinstance(gone, ErrorReply)
    assert gone.error.code == "REPLY_GONE"
    assert attack.observer.status().pools[0].free == PAGES, "it was not done a second time"


def test_replies_that_are_not_read(attack: Deaf) -> None:
    for _ in range(200):
        attack.put(ALL)
        attack.put(GIVE_BACK, IDS)
    assert soon(lambda: attack.observer.status().counters.get("connections.paused", 0) > 0)
    assert attack.has_grown_less_than(KEPT_BYTES + PAUSE_BYTES)
    assert {type(attack.take().body) for _ in range(400)} >= {Allocated}  # nothing was lost


def test_requests_that_wait(attack: Deaf) -> None:
    attack.ask(ALL)
    wait = Free(pool="pages", pages=PAGES, after=DeviceEvent(event=0, value=1))
    for _ in range(200):
        attack.put(wait, IDS)
    for _ in range(200 - KEPT_BYTES // (LIST_BYTES + 200)):
        one = attack.take().body
        assert isinstance(one, Busy)
        assert "max_kept_session_request_bytes" in one.detail
        assert one.retry_after_ms > 0
    assert attack.has_grown_less_than(KEPT_BYTES)
    assert KEPT_BYTES - 2 * LIST_BYTES < attack.seen.kept_bytes <= KEPT_BYTES


def test_lists_of_transfers(attack: Deaf) -> None:
    attack.ask(ALL)
    replies = [
        attack.ask(Send(request_id=new_request_id(), pool="pages", lists=(PageList(pages=PAGES),), last=False), IDS)
        for _ in range(200)
    ]
    assert [type(one) for one in replies[:7]] == [Accepted] * 7
    assert {type(one) for one in replies[9:]} == {Busy}
    assert attack.has_grown_less_than(KEPT_BYTES)


def test_results_of_batches_that_wait(attack: Deaf) -> None:
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
