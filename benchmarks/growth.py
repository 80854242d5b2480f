"""What a request costs as the daemon's load grows: engines, transfers that wait, pages of a pool, blocks of the index.

Each figure is a curve. The time of a request is the processor time of the daemon, which other processes on this machine
do not change; how late the control loop is, is the 99th percentile of PING, which they do. At each size both are
measured in turns with an engine of a daemon that does not grow.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zmq

from benchmarks.block_growth import STALL, blocks, router
from benchmarks.control_messages import ping_frame
from benchmarks.curves import BYTES, FLAT, Curves, Point, rounds_of, row_of_curve
from benchmarks.measure import MICROSECONDS, MILLISECONDS, Contender, Effort, Row, Target, row_of
from benchmarks.processes import anonymous_bytes, processor_s, running_daemon
from kvferry.clients import Client, MhaSpec, ModelIdentity, block_hashes, calls, new_request_id, pages
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.settings import control_address

SMALL_POOL = 1000
TIMEOUT_S = 60.0
WAIT_S = 3600.0
"""Of a transfer that waits: the longest deadline."""

WAITING_A_SESSION = 1000
"""Transfers that wait in one session, whose limit is 1024."""

IN_FLIGHT = 64
STEP_PAGES = 100_000
"""Pages of one ALLOCATE: many more do not fit into a message."""

REPEATS = {"ping": 500, "allocate": 200, "transfer": 60, "status": 3}
"""Requests of a round; STATUS alone may grow: it lists what there is."""

UNDISTURBED_S = 0.2

PROMPTS = 4
"""That the host tier has room for."""

HEARTBEAT_MS = 20
"""Of the daemons that are measured: a fiftieth of the usual time."""

LAG = Target(3.0)
"""Of a 99th percentile, which other processes on this machine disturb."""

TARGETS: dict[str, Target | None] = {
    "ping": FLAT,
    "allocate": FLAT,
    "transfer": FLAT,
    "status": None,
    "lag_p99": LAG,
}


class Running(NamedTuple):
    """A daemon, and a client of it that has a session."""

    runtime_dir: Path
    client: Client


def measure(effort: Effort) -> list[Row]:
    """Measure engines, transfers, pages, prompts, each in a daemon of its own or in one; then peers and blocks."""
    rows: list[Row] = []
    with daemon() as small:
        peer = Engine(small.client, "small", SMALL_POOL, effort)
        for part in (engines, transfers, pool_pages):
            with contextlib.nullcontext(small) if effort.quick else daemon() as grown:
                rows += part(grown, small, peer, effort)
        if effort.quick:
            rows += peers(small, "", effort)
    if not effort.quick:
        config = f"[peers]\ntimeout_ms = {3 * HEARTBEAT_MS}\n"
        with daemon(config) as grown:
            rows += peers(grown, config, effort)
    return [*rows, *prompts(effort), *router(effort), *blocks(effort)]


@contextlib.contextmanager
def daemon(config: str = "") -> Iterator[Running]:
    """Run one."""
    with running_daemon(config) as runtime_dir, Client.connect(runtime_dir, name="engine") as client:
        yield Running(runtime_dir, client)


class Engine:
    """What the requests of one engine cost its daemon; its pool is full but for four pages.

    Two of them, the first and the last that were left, are taken and given back, and two are sent and received.
    """

    def __init__(self, client: Client, pool: str, count: int, effort: Effort) -> None:
        """Make the pool, of so many pages, with the name ``pool``."""
        self._client = client
        self._pool = pool
        self._effort = effort
        self._pid = client.status().pid
        spec = MhaSpec(layers=1, tokens=count, page_size=1, kv_heads=1, head_dim=1, dtype="int8")
        client.create_pool(pool, spec).close()
        steps = [STEP_PAGES] * (count // STEP_PAGES) + [count % STEP_PAGES]
        taken = np.concatenate([client.allocate(pool, step) for step in steps if step])
        client.free(pool, taken[[0, -1]])
        self._source, self._target = pages(taken[1:2]), pages(taken[-2:-1])

    def ping(self) -> None:
        """Ask for nothing."""
        self._client.ping()

    def allocate(self) -> None:
        """Take two pages and give them back."""
        self._client.free(self._pool, self._client.allocate(self._pool, 2))

    def transfer(self) -> None:
        """Hand one page over, from the RECEIVE until both sides have settled."""
        request_id = new_request_id()
        received = self._client.receive(self._pool, request_id, [self._target])
        sent = self._client.send(self._pool, request_id, [self._source])
        self._client.wait_settled(received, TIMEOUT_S)
        self._client.wait_settled(sent, TIMEOUT_S)

    def status(self) -> None:
        """Ask for all that the daemon can say."""
        self._client.status()

    def cost_us(self, action: str) -> float:
        """Return the daemon's processor time for an ``action``, one of these methods, in microseconds."""
        one: Callable[[], None] = getattr(self, action)
        count = self._effort.pick(REPEATS[action], 3)
        started_s = processor_s(self._pid)
        for _ in range(count):
            one()
        return (processor_s(self._pid) - started_s) / count * 1e6

    def lag_us(self) -> float:
        """Return the 99th percentile of PING in microseconds."""
        times_s = [self._client.ping() for _ in range(self._effort.pick(1000, 10))]
        return float(np.percentile(times_s, 99)) * 1e6


def costs(grown: Engine, peer: Engine) -> dict[str, tuple[Contender, Contender]]:
    """Return what each request costs at two engines, and how late their daemons are."""
    figures = {name: (partial(grown.cost_us, name), partial(peer.cost_us, name)) for name in REPEATS}
    return {**figures, "lag_p99": (grown.lag_us, peer.lag_us)}


# -- engines


class Pinging:
    """A session whose PING was encoded before."""

    def __init__(self, runtime_dir: Path, context: zmq.Context[zmq.Socket[bytes]], stack: contextlib.ExitStack) -> None:
        """Connect; ``stack`` closes it."""
        channel = stack.enter_context(contextlib.closing(SessionChannel.open(runtime_dir, calls.session_open("raw"))))
        self.socket = stack.enter_context(context.socket(zmq.DEALER))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(control_address(runtime_dir))
        self.request = ping_frame(channel, 1)


class Together:
    """Engines that ping at the same time."""

    def __init__(self, running: Running, stack: contextlib.ExitStack) -> None:
        """Begin with none; ``stack`` closes those that come."""
        self._running = running
        self._stack = stack
        self._context = stack.enter_context(zmq.Context())
        self._engines: list[Pinging] = []
        self._pid = running.client.status().pid

    def grow(self, count: int) -> None:
        """Connect engines until there are so many."""
        for _ in range(count - len(self._engines)):
            self._engines.append(Pinging(self._running.runtime_dir, self._context, self._stack))

    def cost_us(self, count: int) -> float:
        """Return the daemon's processor time for a PING, of ``count`` or some more, in microseconds."""
        turns = -(-count // len(self._engines))
        started_s = processor_s(self._pid)
        for _ in range(turns):
            for one in self._engines:
                one.socket.send(one.request)
            for one in self._engines:
                one.socket.recv()
        return (processor_s(self._pid) - started_s) / turns / len(self._engines) * 1e6


def engines(grown: Running, small: Running, peer: Engine, effort: Effort) -> list[Row]:
    """Measure up to 64 engines: one of them while the others are idle, and all of them, with a PING in flight each."""
    sizes, count = ((1, 2), 4) if effort.quick else ((1, 4, 16, 64), 2000)
    curves, engine = Curves("growth/engines", "engines", effort), Engine(grown.client, "mine", SMALL_POOL, effort)
    with contextlib.ExitStack() as stack:
        alone, together = Together(small, stack), Together(grown, stack)
        alone.grow(1)
        began_bytes = memory_bytes(grown)
        for size in sizes:
            together.grow(size)
            all_ping = partial(together.cost_us, count), partial(alone.cost_us, count)
            curves.add(size, {**costs(engine, peer), "all_ping": all_ping})
        each_bytes = (memory_bytes(grown) - began_bytes) / sizes[-1]
    note = f"one PING in flight of each; an engine takes {each_bytes / 1024:.0f} KiB"
    return [*curves.rows(MICROSECONDS, TARGETS), curves.row("all_ping", MICROSECONDS, FLAT, note)]


# -- transfers


class Sender:
    """An engine that sends, and is not received."""

    def __init__(self, client: Client, pool: str, count: int) -> None:
        """Take ``count`` pages of the pool."""
        self._client = client
        self._pool = pool
        self._ids = client.allocate(pool, count)
        self._sent = 0

    @property
    def is_full(self) -> bool:
        """Return whether it has sent all of its pages."""
        return self._sent == len(self._ids)

    def send(self) -> float:
        """Send the next page; return the milliseconds until the daemon has accepted it."""
        page = self._ids[self._sent : self._sent + 1]
        started = time.perf_counter()
        sent = self._client.send(self._pool, new_request_id(), [pages(page)], deadline_s=WAIT_S)
        while sent.accepted is None:
            self._client.poll(TIMEOUT_S)
        self._sent += 1
        return (time.perf_counter() - started) * 1e3


def transfers(grown: Running, _small: Running, peer: Engine, effort: Effort) -> list[Row]:
    """Measure up to 10,000 transfers that wait: SENDs without a RECEIVE, of several engines."""
    sizes = (0, 4, 12) if effort.quick else (0, 100, 1000, 10_000)
    curves, engine = Curves("growth/transfers", "waiting", effort), Engine(grown.client, "own", SMALL_POOL, effort)
    spec = MhaSpec(layers=1, tokens=sizes[-1] + 1, page_size=1, kv_heads=1, head_dim=1, dtype="int8")
    grown.client.create_pool("sent", spec).close()
    memory: list[Point] = []
    waiting, longest_ms = 0, 0.0
    with contextlib.ExitStack() as stack:
        sender: Sender | None = None
        for size in sizes:
            began_bytes = memory_bytes(grown)
            for number in range(waiting, size):
                if sender is None or sender.is_full:
                    client = stack.enter_context(Client.connect(grown.runtime_dir, name="sender"))
                    sender = Sender(client, "sent", min(WAITING_A_SESSION, sizes[-1] - number))
                longest_ms = max(longest_ms, sender.send())
            if size:
                memory.append(memory_point(size, memory_bytes(grown) - began_bytes, size - waiting, memory))
            waiting = size
            curves.add(size, costs(engine, peer))
        undisturbed_ms = longest_ping_ms(grown.client, partial(time.sleep, UNDISTURBED_S))
        ended_ms = longest_ping_ms(grown.client, stack.close)
    return [
        *curves.rows(MICROSECONDS, TARGETS),
        row_of_curve(
            "growth/transfers/memory",
            BYTES,
            memory,
            of="waiting",
            note=f"the longest SEND took {longest_ms:.1f} ms",
        ),
        row_of(
            "growth/transfers/ended",
            MILLISECONDS,
            [ended_ms],
            [undisturbed_ms],
            peer_is="the same while no engine ends",
            note=f"the longest PING of an engine while others end, which have {waiting} waiting transfers, "
            f"{WAITING_A_SESSION} each",
        ),
    ]


# -- pages


def pool_pages(grown: Running, _small: Running, peer: Engine, effort: Effort) -> list[Row]:
    """Measure pools of up to a million pages, all in one daemon."""
    sizes = (100, SMALL_POOL) if effort.quick else (SMALL_POOL, 10_000, 100_000, 1_000_000)
    curves, memory = Curves("growth/pages", "pages", effort), list[Point]()
    for size in sizes:
        began_bytes = memory_bytes(grown)
        engine = Engine(grown.client, f"of-{size}", size, effort)
        memory.append(memory_point(size, memory_bytes(grown) - began_bytes, size, memory))
        curves.add(size, costs(engine, peer))
    return [
        *curves.rows(MICROSECONDS, TARGETS),
        row_of_curve("growth/pages/memory", BYTES, memory, of="pages", target=None, note="that of a pool is in it"),
    ]


# -- other daemons


def peers(grown: Running, config: str, effort: Effort) -> list[Row]:
    """Measure what up to 8 other daemons of this host cost one that exchanges nothing with them but heartbeats."""
    sizes, watched_s = ((1,), 0.1) if effort.quick else ((1, 2, 4, 8), 3.0)
    costs_us, memory, had = list[Point](), list[Point](), 0
    spec = MhaSpec(layers=1, tokens=100, page_size=1, kv_heads=1, head_dim=1, dtype="int8")
    grown.client.create_pool("received", spec).close()
    with contextlib.ExitStack() as stack:
        time.sleep(watched_s)  # it still populates memory
        for size in sizes:
            others = [stack.enter_context(daemon(config)) for _ in range(had, size)]
            began_bytes = memory_bytes(grown)
            for other in others:
                page, address = grown.client.allocate("received", 1), other.client.status().addresses[0]
                grown.client.receive(
                    "received", new_request_id(), [pages(page)], source_daemons=[address], deadline_s=WAIT_S
                )
            while sum(one.state == "up" for one in grown.client.status().peers) < size:
                time.sleep(HEARTBEAT_MS / 1000)
            memory.append(memory_point(size, memory_bytes(grown) - began_bytes, size - had, memory))
            had = size
            each = [max(1e-9, busy_s(grown, watched_s)) / (size * watched_s * 1000 / HEARTBEAT_MS) * 1e6]
            costs_us.append(Point(size, each, costs_us[0].ours if costs_us else each))
    return [
        row_of_curve("growth/peers/heartbeat", MICROSECONDS, costs_us, of="daemons", note="one sent, one answered"),
        row_of_curve("growth/peers/memory", BYTES, memory, of="daemons", target=None),
    ]


# -- long prompts


class Prompts:
    """An engine whose prompts have so many blocks of one page, in a host tier that is full of them."""

    def __init__(self, client: Client, other: Client, blocks: int) -> None:
        """Fill the tier; ``other`` is an engine that asks for PONGs."""
        self._client, self._other, self._blocks = client, other, blocks
        self._pid = client.status().pid
        self._stored = 0
        spec = MhaSpec(layers=1, tokens=2 * blocks * 16, page_size=16, kv_heads=1, head_dim=64, dtype="bfloat16")
        client.create_pool("prompts", spec, model=ModelIdentity(name="bench")).close()
        self._source, self._target = (client.allocate("prompts", blocks) for _ in range(2))
        for _ in range(PROMPTS):
            self.store(self.prompt())

    def prompt(self) -> list[bytes]:
        """Return the hashes of a prompt that is not there."""
        self._stored += 1
        return block_hashes(np.full(16 * self._blocks, self._stored), 16)

    def store(self, hashes: list[bytes]) -> None:
        """Store a prompt."""
        self._client.wait_done(self._client.store("prompts", hashes, self._source), TIMEOUT_S)

    def use(self, hashes: list[bytes]) -> None:
        """Store a prompt, which others go for, look it up, load it, and offload its pages, which others go for, too."""
        self.store(hashes)
        found = self._client.lookup("prompts", hashes)
        assert found.blocks == self._blocks, found
        self._client.wait_done(self._client.load("prompts", found.lease, self._target, unpin=True), TIMEOUT_S)
        operation = self._client.offload("prompts", [pages(self._target)])
        self._client.wait_done(operation, TIMEOUT_S)
        self._client.drop_snapshot(operation.snapshot)

    def cost_us(self) -> float:
        """Return the daemon's processor time for a block of a prompt that is used, in microseconds."""
        hashes, started_s = self.prompt(), processor_s(self._pid)
        self.use(hashes)
        return (processor_s(self._pid) - started_s) / self._blocks * 1e6

    def longest_ms(self) -> float:
        """Return the longest PING of the other engine while a prompt is used, in milliseconds."""
        return longest_ping_ms(self._other, partial(self.use, self.prompt()))


def prompts(effort: Effort) -> list[Row]:
    """Measure prompts of up to 4096 blocks: what a block costs, and how long another engine waits for one request."""
    sizes = (8, 32) if effort.quick else (64, 512, 4096)
    rounds = effort.pick(7, 1)
    found: dict[str, list[Point]] = {"longest": [], "block": []}
    for size in sizes:
        with (
            running_daemon(f"[tiers]\nhost_bytes = {PROMPTS * size * 4096}\n") as runtime_dir,
            Client.connect(runtime_dir, name="engine") as client,
            Client.connect(runtime_dir, name="other") as other,
        ):
            engine = Prompts(client, other, size)
            for name, figures in zip(found, rounds_of(rounds, engine.longest_ms, engine.cost_us), strict=True):
                found[name].append(Point(size, figures, found[name][0].ours if found[name] else figures))
    return [
        row_of_curve(
            "growth/prompts/longest",
            MILLISECONDS,
            found["longest"],
            of="blocks",
            target=STALL,
            note="the longest PING of another engine while a prompt is stored, looked up, loaded and offloaded, and as "
            "many blocks go for it",
        ),
        row_of_curve(
            "growth/prompts/block",
            MICROSECONDS,
            found["block"],
            of="blocks",
            note="the daemon's processor time for all that",
        ),
    ]


def longest_ping_ms(other: Client, work: Callable[[], None]) -> float:
    """Return the longest PING of an engine while others work, in milliseconds."""
    ended, times_s = threading.Event(), list[float]()

    def ask() -> None:
        while not ended.is_set():
            times_s.append(other.ping())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return max(times_s) * 1e3


def busy_s(running: Running, watched_s: float) -> float:
    """Return the processor time that a daemon uses in so many seconds."""
    pid = running.client.status().pid
    started_s = processor_s(pid)
    time.sleep(watched_s)
    return processor_s(pid) - started_s


def memory_bytes(grown: Running) -> int:
    """Return what a daemon has of memory that it shares with none: pools are not in it."""
    return anonymous_bytes(grown.client.status().pid)


def memory_point(size: int, more_bytes: int, count: int, points: Sequence[Point]) -> Point:
    """Return the point of so many bytes more for ``count`` things; its peer is the first of the points."""
    each = [max(1, more_bytes) / count]
    return Point(size, each, points[0].ours if points else each)
