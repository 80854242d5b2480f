"""A scheduler of SGLang that has nothing to compute waits for the daemon's word, and misses none that came before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest

from kvferry.clients import Client, MhaSpec, Transfer, new_request_id, pages
from kvferry.clients.sglang import pools, waiting
from kvferry.clients.sglang.engine import Engine
from tests.daemons import DaemonProcess, soon

SHORT_S: Final = 0.05
LONG_S: Final = 60.0
SOON_S: Final = 20.0


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[Engine]:
    """Return a scheduler process's way to the daemon."""
    one = Engine("waiting", str(daemon.runtime_dir))
    yield one
    one.close()


@pytest.fixture
def peer(daemon: DaemonProcess) -> Iterator[Client]:
    """Return the other server's client."""
    with Client.connect(daemon.runtime_dir, name="peer") as one:
        yield one


class Waiting(NamedTuple):
    """A RECEIVE of the engine's, and what ends it."""

    transfer: Transfer
    request_id: str
    source: str


@pytest.fixture
def received(engine: Engine, peer: Client, name: str, spec: MhaSpec) -> Waiting:
    """Return a RECEIVE for which nobody has sent yet."""
    request_id, source = new_request_id(), f"{name}-source"
    peer.create_pool(source, spec)
    with engine.client() as client:
        client.create_pool(name, spec)
        transfer = client.receive(name, request_id, [pages(client.allocate(name, 1))])
    return Waiting(transfer, request_id, source)


def send(peer: Client, to: Waiting) -> None:
    peer.wait_settled(peer.send(to.source, to.request_id, [pages(peer.allocate(to.source, 1))]))


def seconds_waited(engine: Engine, longest_s: float) -> float:
    started = time.monotonic()
    engine.wait_for_news(longest_s)
    return time.monotonic() - started


def test_it_waits_no_longer_than_it_is_told(engine: Engine, received: Waiting) -> None:
    assert soon(lambda: SHORT_S <= seconds_waited(engine, SHORT_S) < SOON_S)  # the daemon has said that it heard
    assert not received.transfer.is_finished


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


class Scheduler:
    """What SGLang's scheduler says of itself."""

    def __init__(self, *, idle: bool) -> None:
        self.idle = idle
        self.calls = 0

    def on_idle(self) -> None:
        self.calls += 1

    def is_fully_idle(self) -> bool:
        return self.idle


class Engines:
    """Notes who waits."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    @property
    def engine(self) -> Engines:
        return self

    def wait_for_news(self, timeout_s: float) -> None:
        self.waited.append(timeout_s)


@pytest.mark.parametrize(("chosen", "idle", "waits"), [(True, False, True), (True, True, False), (False, False, False)])
def test_only_a_scheduler_with_transfers_under_way_waits(
    *, chosen: bool, idle: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, pool = Scheduler(idle=idle), Engines()
    monkeypatch.setattr(pools, "current", lambda: pool if chosen else None)
    waiting.on_idle(Scheduler.on_idle, scheduler)
    assert (scheduler.calls, bool(pool.waited)) == (1, waits)
