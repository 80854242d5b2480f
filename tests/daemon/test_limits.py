"""Bounds on what a session may have in flight: BUSY, and transfer again once something is over."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.clients import Client, MhaSpec, Transfer, new_request_id, pages
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.services.transfers import FEW_EVENTS
from kvferry.protocol.base import Busy, PageList, RequestBody
from kvferry.protocol.codec import PageIds, decode_from_daemon, encode
from kvferry.protocol.envelope import Reply, Request
from kvferry.protocol.errors import OverloadedError
from kvferry.protocol.limits import Limits
from kvferry.protocol.transfer_messages import Accepted, Cancel, Cancelled, Receive
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user
from tests.kit.raw_engine import raw_engine

SPEC = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
TUNING = Tuning(limits=Limits(max_transfers_per_session=2, max_transfers=3, max_sessions=3))


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Run a daemon with small limits."""
    with kit.daemon(tuning=TUNING) as one:
        yield one


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """Return a client with two pools."""
    with Client.connect(daemon.runtime_dir) as one:
        one.create_pool("prefill", SPEC)
        one.create_pool("decode", SPEC)
        yield one


def receive(client: Client, ids: PageIds) -> Transfer:
    return client.receive("decode", new_request_id(), [pages(ids)])


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
    with Client.connect(daemon.runtime_dir) as other:
        for one in (client, other):
            ids = one.allocate("decode", 2)
            transfers = [receive(one, ids[at : at + 1]) for at in range(2)]
            one.ping()
        with pytest.raises(OverloadedError, match="3 transfers of all sessions"):
            other.wait_finished(transfers[1])


def test_transfers_of_one_user_leave_some_to_others() -> None:
    limits = Limits(max_transfers_per_session=3, max_transfers=3)
    with kit.daemon(tuning=Tuning(limits=limits)) as daemon:
        said = said_by_another_user(
            daemon,
            "from kvferry.clients import new_request_id, pages\n"
            "spec = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype='float32')\n"
            "with Client.connect(sys.argv[1]) as one:\n"
            "    one.create_pool('decode', spec)\n"
            "    ids = one.allocate('decode', 3)\n"
            "    sent = [one.receive('decode', new_request_id(), [pages(ids[n : n + 1])]) for n in range(3)]\n"
            "    one.ping()\n"
            "    print([each.state for each in sent], sent[-1].refused)",
        )
    assert "2 of them of user 12345, of at most 3" in said


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


def refused_while_deaf(daemon: Daemon, rounds: int, observer: Client) -> tuple[str, int]:
    """Let an engine use one request id again and again, and acknowledge nothing.

    Return why its next request is refused then, and how many events it has not acknowledged.
    """
    with raw_engine(daemon.runtime_dir, "deaf") as engine:
        opened, numbers = engine.channel.opened, itertools.count(100)

        def ask(body: RequestBody, *ids: PageIds) -> object:
            engine.control.send_multipart(
                encode(Request(next(numbers), opened.boot_id, opened.secret, 0, 0, body), ids)
            )
            while not isinstance(message := decode_from_daemon(engine.control.recv_multipart()).message, Reply):
                pass  # an event
            return message.body

        transfer = Receive(request_id=new_request_id(), pool="decode", lists=(PageList(pages=1),))
        cancel = Cancel(request_id=transfer.request_id, pool="decode", direction="receive")
        engine.say("ALLOCATE", pool="decode", count=1)
        for _ in range(rounds):
            assert isinstance(ask(transfer, np.array([1])), Accepted)
            assert isinstance(ask(cancel), Cancelled)
        busy = ask(transfer, np.array([1]))
        assert isinstance(busy, Busy)
        (deaf,) = [one for one in observer.status().sessions if one.name == "deaf"]
        return busy.detail, deaf.unacknowledged_events


def test_events_that_are_never_acknowledged(daemon: Daemon, client: Client) -> None:
    why, events = refused_while_deaf(daemon, 2, client)
    assert ("4 events of the session are unacknowledged" in why, events) == (True, 4)


def test_events_of_all_sessions_that_are_never_acknowledged() -> None:
    tuning = Tuning(limits=Limits(max_transfers=FEW_EVENTS))
    with kit.daemon(tuning=tuning) as daemon, Client.connect(daemon.runtime_dir) as client:
        client.create_pool("decode", SPEC)
        why, events = refused_while_deaf(daemon, FEW_EVENTS, client)
        assert why.startswith(f"{2 * FEW_EVENTS} events of all sessions are unacknowledged")
        assert events == 2 * FEW_EVENTS


def test_sessions(daemon: Daemon, client: Client) -> None:
    with Client.connect(daemon.runtime_dir), Client.connect(daemon.runtime_dir) as last:
        with pytest.raises(OverloadedError, match="3 sessions live") as refused:
            Client.connect(daemon.runtime_dir)
        assert refused.value.retry_after_ms == 1000, "an engine has to go first"
        with Client.connect(daemon.runtime_dir, session=False) as looker:
            looker.ping()
        last.close()
        while len(client.status().sessions) > 2:
            pass  # each look is a round trip
        Client.connect(daemon.runtime_dir).close()
