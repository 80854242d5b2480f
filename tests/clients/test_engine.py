"""What an engine has its daemon told, of which nobody waits for the answer, and how it waits for the daemon's word."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Final, NamedTuple

import pytest
import zmq

from kvferry.clients import Client, MhaSpec, Transfer, new_request_id, pages
from kvferry.clients.calls import asked
from kvferry.clients.engine import Engine, Word
from kvferry.clients.sglang import pools, waiting
from kvferry.protocol.errors import CancelledError, ClientClosedError, PageOutOfRangeError, PeerCancelledError
from kvferry.protocol.session_messages import Status, StatusReport
from kvferry.protocol.tier_messages import CancelOperation, Unpin
from kvferry.protocol.transfer_messages import Abandon, Cancel
from tests import kit
from tests.kit.daemons import Daemon, soon

SPEC: Final = MhaSpec(layers=1, tokens=2048, page_size=4, kv_heads=1, head_dim=8, dtype="float16")
MANY: Final = 300
"""More than a session may have requests under way."""


@pytest.fixture(scope="module")
def kept_daemon() -> Iterator[Daemon]:
    with kit.daemon(keep=True) as one:
        yield one


@pytest.fixture
def engine(kept_daemon: Daemon) -> Iterator[Engine]:
    one = Engine("engine", str(kept_daemon.runtime_dir))
    with one.client() as client:
        client.create_pool("kv", SPEC)
    yield one
    one.close()


def test_many_words_at_once(engine: Engine) -> None:
    with engine.client() as client:
        ids = client.allocate("kv", MANY)
        waiting = [client.receive("kv", new_request_id(), [pages(ids[at : at + 1])]) for at in range(MANY)]
    for one in waiting:
        engine.say(asked(Cancel(request_id=one.key.request_id, pool="kv", direction="receive", wait=False)))
    assert soon(lambda: all(one.is_settled for one in waiting))


def settled_at(engine: Engine, transfers: list[Transfer]) -> bool:
    """Take what has arrived, and return whether all of these have settled."""
    engine.poll()
    return all(one.is_settled for one in transfers)


def messages(engine: Engine) -> int:
    """Return how many messages the daemon has taken, this one too."""
    with engine.client() as client:
        return client.status().counters["messages.received"]


def test_words_and_what_a_step_collects_go_in_a_message_each(engine: Engine) -> None:
    with engine.client() as client:
        ids = client.allocate("kv", 64).reshape(32, 2)
    before, request_ids = messages(engine), [new_request_id() for _ in ids]
    transfers: list[Transfer] = []
    for one, (source, target) in zip(request_ids, ids, strict=True):  # as objects of an adapter do, one by one
        with engine.step() as step:
            transfers += [step.send("kv", one, [pages([source])]), step.receive("kv", one, [pages([target])])]
    assert {one.state for one in transfers} == {"sent"}
    engine.poll()
    assert soon(lambda: settled_at(engine, transfers))
    assert {one.error for one in transfers} == {None}
    assert messages(engine) == before + 2
    for one in request_ids:
        engine.say(asked(Abandon(request_id=one, direction="receive")))
    engine.poll()
    assert messages(engine) == before + 4


def test_who_asks_for_the_client_finds_what_the_step_has_begun(engine: Engine) -> None:
    with engine.client() as client:
        ids = client.allocate("kv", 2)
    with engine.step() as step:
        waiting = step.receive("kv", new_request_id(), [pages(ids)])
        bad = step.free("kv", [1 << 20])
    with engine.client() as client:
        assert not client.cancel(waiting).was_finished
        with pytest.raises(PageOutOfRangeError):
            client.wait(bad)
        client.wait_settled(waiting)
    assert isinstance(waiting.error, CancelledError)


def test_what_a_step_collects_is_refused_where_the_client_is_given_up(engine: Engine) -> None:
    with engine.client() as client:
        ids = client.allocate("kv", 2)
    with engine.step() as step:
        waiting = step.receive("kv", new_request_id(), [pages(ids)])
    client.close()
    engine.flush()
    assert waiting.is_settled
    assert isinstance(waiting.error, ClientClosedError)


def test_a_word_waits_for_the_daemon_to_be_back(engine: Engine, kept_daemon: Daemon) -> None:
    request_id = new_request_id()
    kept_daemon.kill()
    engine.say(asked(Abandon(request_id=request_id, direction="receive", reason="nobody comes")))
    kept_daemon.start()
    with contextlib.closing(Client.connect(kept_daemon.runtime_dir)) as peer:
        peer.create_pool("kv", SPEC)
        ids = peer.allocate("kv", 1)

        def is_told() -> bool:
            sent = peer.send("kv", request_id, [pages(ids)])
            with contextlib.suppress(PeerCancelledError):
                peer.cancel(sent)
            return isinstance(sent.error, PeerCancelledError)

        assert soon(is_told)


def test_an_answer_that_nobody_takes_is_heard_of_all_the_same(engine: Engine) -> None:
    """What a late lookup has pinned is given back, also where the engine has nothing else to do."""
    heard: list[StatusReport] = []
    with engine.client() as client:
        engine.when_answered(client.begin(asked(Status())), heard.append)
    assert soon(lambda: len(heard) == 1)


def test_the_next_daemon_is_not_told_to_end_what_ended_with_another() -> None:
    """By its number it may be something else there."""
    request_id = new_request_id()
    ends = (Cancel(request_id=request_id, pool="kv", direction="send"), CancelOperation(operation=1), Unpin(lease=1))
    assert [Word(asked(one), "this").is_for("next") for one in ends] == [False] * 3
    assert Word(asked(ends[0]), "this").is_for("this")
    assert Word(asked(Abandon(request_id=request_id, direction="send")), "this").is_for("next")


SHORT_S: Final = 0.05
LONG_S: Final = 60.0
SOON_S: Final = 20.0


@pytest.fixture
def peer(kept_daemon: Daemon) -> Iterator[Client]:
    with Client.connect(kept_daemon.runtime_dir, name="peer") as one:
        yield one


class Waiting(NamedTuple):
    """A RECEIVE of the engine's, and what ends it."""

    transfer: Transfer
    request_id: str
    source: str


@pytest.fixture
def received(engine: Engine, peer: Client, name: str) -> Waiting:
    request_id, source = new_request_id(), f"{name}-source"
    peer.create_pool(source, SPEC)
    with engine.client() as client:
        client.create_pool(name, SPEC)
        transfer = client.receive(name, request_id, [pages(client.allocate(name, 1))])
    return Waiting(transfer, request_id, source)


def send(peer: Client, to: Waiting) -> None:
    peer.wait_settled(peer.send(to.source, to.request_id, [pages(peer.allocate(to.source, 1))]))


def seconds_waited(engine: Engine, longest_s: float) -> float:
    started = time.monotonic()
    engine.wait_for_news(longest_s)
    return time.monotonic() - started


def test_it_does_not_wait_for_what_a_look_has_taken(engine: Engine, peer: Client, received: Waiting) -> None:
    assert soon(lambda: seconds_waited(engine, SHORT_S) >= SHORT_S)
    send(peer, received)
    ends_at = time.monotonic() + SOON_S
    while not received.transfer.is_settled:
        engine.poll()
        assert time.monotonic() < ends_at
    assert seconds_waited(engine, LONG_S) < SOON_S
    assert soon(lambda: seconds_waited(engine, SHORT_S) >= SHORT_S)


def test_what_else_the_scheduler_has_to_read_ends_it(engine: Engine, received: Waiting) -> None:
    assert soon(lambda: seconds_waited(engine, SHORT_S) >= SHORT_S)
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://requests")
        theirs.connect("inproc://requests")
        theirs.send(b"a request")
        started = time.monotonic()
        engine.wait_for_news(LONG_S, [ours])
        assert time.monotonic() - started < SOON_S
        assert ours.recv(zmq.NOBLOCK) == b"a request"
    assert not received.transfer.is_finished


@pytest.mark.parametrize(("chosen", "idle", "waits"), [(True, False, True), (True, True, False), (False, False, False)])
def test_only_a_scheduler_with_transfers_under_way_waits(
    *, chosen: bool, idle: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for its own requests, too, which the first rank has; an object: SGLang's server in Rust has no socket."""
    calls, waited = list[object](), list[list[object]]()
    engine = SimpleNamespace(wait_for_news=lambda _timeout_s, others=(): waited.append([*others]))
    monkeypatch.setattr(pools, "current", lambda: SimpleNamespace(engine=engine) if chosen else None)
    with zmq.Context() as context, context.socket(zmq.PAIR) as requests:
        for one in (requests, object()):
            channels = SimpleNamespace(recv_from_tokenizer=one, recv_from_rpc=None)
            scheduler = SimpleNamespace(is_fully_idle=lambda: idle, ipc_channels=channels)
            waiting.on_idle(calls.append, scheduler)
        assert len(calls) == 2
        assert waited == ([[requests], []] if waits else [])
