"""Bounds on what a session may have in flight: BUSY, and transfer again once something is over. Bounds on deadlines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.clients import Client, Transfer, new_request_id, pages
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.services.transfers import FEW_EVENTS
from kvferry.protocol.base import Busy, PageList, RequestBody
from kvferry.protocol.codec import PageIds, decode_from_daemon, encode
from kvferry.protocol.envelope import Reply, Request
from kvferry.protocol.errors import DeadlineError, InvalidFieldError, OverloadedError
from kvferry.protocol.limits import Limits
from kvferry.protocol.transfer_messages import Accepted, Cancel, Cancelled, Receive
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user, soon
from tests.kit.kvferry_command import run_kvferry
from tests.kit.pools import SPEC
from tests.kit.raw_engine import raw_engine

TUNING = Tuning(limits=Limits(max_transfers_per_session=2, max_transfers=3, max_sessions=3))
LATE = Tuning(limits=Limits(max_deadline_ms=10_000, default_deadline_ms=500))


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """Return the only client, with two pools."""
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


def refused_while_deaf(daemon: Daemon, rounds: int, observer: Client) -> tuple[str, int]:
    """Let an engine use one request id again and again, and acknowledge nothing.

    Return why its next request is refused then, and how many events it has not acknowledged.
    """
    with raw_engine(daemon.runtime_dir, "deaf") as engine:
        opened, numbers = engine.channel.opened, itertools.count(100)

        def ask(body: RequestBody, *ids: PageIds) -> object:
            request = Request(next(numbers), opened.boot_id, opened.secret, 0, 0, body)
            engine.control.send_multipart(encode(request, ids))
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


@pytest.mark.full
def test_events_of_all_sessions_that_are_never_acknowledged() -> None:
    with kit.daemon(tuning=Tuning(limits=Limits(max_transfers=FEW_EVENTS))) as daemon, kit.engine(daemon) as client:
        client.create_pool("decode", SPEC)
        why, events = refused_while_deaf(daemon, FEW_EVENTS, client)
        assert why.startswith(f"{2 * FEW_EVENTS} events of all sessions are unacknowledged")
        assert events == 2 * FEW_EVENTS


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
