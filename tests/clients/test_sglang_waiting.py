"""A scheduler of SGLang that has nothing to compute waits for the daemon's word, and misses none that came before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import pytest
import zmq

from kvferry.clients import Client, Transfer, new_request_id, pages
from kvferry.clients.engine import Engine
from kvferry.clients.sglang import pools, waiting
from tests.kit.daemons import Daemon, soon
from tests.kit.pools import SPEC

SHORT_S: Final = 0.05
LONG_S: Final = 60.0
SOON_S: Final = 20.0


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    """Return a scheduler process's way to the daemon."""
    one = Engine("waiting", str(daemon.runtime_dir))
    yield one
    one.close()


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[Client]:
    """Return the other server's client."""
    with Client.connect(daemon.runtime_dir, name="peer") as one:
        yield one


class Waiting(NamedTuple):
    """A RECEIVE of the engine's, and what ends it."""

    transfer: Transfer
    request_id: str
    source: str


@pytest.fixture
def received(engine: Engine, peer: Client, name: str) -> Waiting:
    """Return a RECEIVE for which nobody has sent yet."""
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


def test_the_daemons_word_ends_it(engine: Engine, peer: Client, received: Waiting) -> None:
    send(peer, received)
    elapsed_s = 0.0
    while not received.transfer.is_settled:
        elapsed_s += seconds_waited(engine, LONG_S)
    assert elapsed_s < SOON_S


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


def test_what_the_client_waits_for_is_readable_when_something_comes(
    engine: Engine, peer: Client, received: Waiting
) -> None:
    assert soon(lambda: seconds_waited(engine, SHORT_S) >= SHORT_S)
    poller = zmq.Poller()
    with engine.client() as client:
        for one in client.sockets:
            poller.register(one, zmq.POLLIN)
        assert not poller.poll(0)
        send(peer, received)
        while not received.transfer.is_settled:
            assert poller.poll(round(SOON_S * 1000))
            client.poll()


class Channels(NamedTuple):
    """Where a scheduler's requests come from; only that of the first rank has such."""

    recv_from_tokenizer: object
    recv_from_rpc: object


class Scheduler:
    """What SGLang's scheduler says of itself."""

    def __init__(self, *, idle: bool, requests: object = None) -> None:
        self.idle = idle
        self.calls = 0
        self.ipc_channels = Channels(requests, None)

    def on_idle(self) -> None:
        self.calls += 1

    def is_fully_idle(self) -> bool:
        return self.idle


class Engines:
    """Notes who waits."""

    def __init__(self) -> None:
        self.waited: list[tuple[float, list[zmq.Socket[bytes]]]] = []

    @property
    def engine(self) -> Engines:
        return self

    def wait_for_news(self, timeout_s: float, others: Sequence[zmq.Socket[bytes]] = ()) -> None:
        self.waited.append((timeout_s, list(others)))


@pytest.mark.parametrize(("chosen", "idle", "waits"), [(True, False, True), (True, True, False), (False, False, False)])
def test_only_a_scheduler_with_transfers_under_way_waits(
    *, chosen: bool, idle: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, pool = Scheduler(idle=idle), Engines()
    monkeypatch.setattr(pools, "current", lambda: pool if chosen else None)
    waiting.on_idle(Scheduler.on_idle, scheduler)
    assert (scheduler.calls, bool(pool.waited)) == (1, waits)


def test_it_waits_for_the_schedulers_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Engines()
    monkeypatch.setattr(pools, "current", lambda: pool)
    with zmq.Context() as context, context.socket(zmq.PAIR) as requests:
        for one in (requests, object()):  # an object: SGLang's server in Rust has no socket
            waiting.on_idle(Scheduler.on_idle, Scheduler(idle=False, requests=one))
    assert [others for _, others in pool.waited] == [[requests], []]
