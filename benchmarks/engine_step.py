"""What a step of an engine's scheduler costs its thread: 64 requests in one message, against 64 PINGs in a row.

A step takes pages for 13 requests, sends those of 13, receives those of 13, gives those of 13 back and looks 12 up. As
schedulers do, it takes and gives back the pages of all requests at once; a row has it request by request. Its thread
builds and sends that, then does other things; at the next step it takes what has come by ``poll(0)``: replies, and the
events of its transfers. Both parts count. Transfers are between two pools of the engine's own, so that a step's are
over by the next one; each result is looked at. The peer's thread waits for each PING's reply, as an engine does that
asks one thing at a time and needs the answer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from benchmarks.measure import MICROSECONDS, Effort, Row, Target, row_of
from benchmarks.processes import running_daemon
from kvferry.clients import Client, MhaSpec, ModelIdentity, Transfer, calls, new_request_id, pages
from kvferry.clients.batch import Batch
from kvferry.clients.calls import asked, joined
from kvferry.clients.submitting import PendingReply
from kvferry.protocol.codec import PageIds
from kvferry.protocol.ids import MAIN
from kvferry.protocol.pool_messages import Freed
from kvferry.protocol.tier_messages import HASH_BYTES, Found, Lookup

REQUESTS: Final = 64
OF_A_KIND: Final = 13
LOOKUPS: Final = REQUESTS - 4 * OF_A_KIND
PAGES: Final = 4
"""Of a request."""

PAGE_SIZE: Final = 16
TOKENS: Final = PAGES * PAGE_SIZE
BLOCKS: Final = 4
"""Of a prompt that is looked up."""

SPEC: Final = MhaSpec(layers=2, tokens=8192, page_size=PAGE_SIZE, kv_heads=1, head_dim=16, dtype="bfloat16")
SOURCE, DESTINATION = "prefill", "decode"
MODEL_S: Final = 0.02
"""Between two steps: what the engine's thread does then is not ours."""

HOST_TIER: Final = "[tiers]\nhost_bytes = 16777216\n"
PINGS: Final = f"{REQUESTS} PINGs in a row, by the same client"


class Times(NamedTuple):
    """Of one step, in microseconds: on the engine's thread, its share on a CPU, and on CPUs of the daemon's process."""

    thread: float
    thread_cpu: float
    daemon_cpu: float


class Stopwatch:
    """Adds up what the engine's thread does for a step."""

    def __init__(self, daemon: int) -> None:
        """``daemon``: its process id."""
        self._daemon_clock = ~daemon << 3 | 2  # as clock_getcpuclockid(3) makes it
        self._thread_s = self._cpu_s = 0.0
        self._daemon_s = time.clock_gettime(self._daemon_clock)

    def __enter__(self) -> None:
        """Go on."""
        self._cpu_s -= time.thread_time()
        self._thread_s -= time.perf_counter()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._thread_s += time.perf_counter()
        self._cpu_s += time.thread_time()

    def times(self) -> Times:
        """Return what has passed."""
        daemon_s = time.clock_gettime(self._daemon_clock) - self._daemon_s
        return Times(self._thread_s * 1e6, self._cpu_s * 1e6, daemon_s * 1e6)


class Step(NamedTuple):
    """What a step has asked for."""

    taken: PendingReply[list[PageIds]] | list[PendingReply[PageIds]]
    transfers: list[Transfer]
    freed: list[PendingReply[Freed]]
    found: list[PendingReply[Found]]


class Engine:
    """An engine with pages of requests that come, travel and go."""

    def __init__(self, client: Client) -> None:
        """Make its pools, and take the pages of requests that are under way."""
        self._client = client
        self._daemon = client.status().pid
        for name in (SOURCE, DESTINATION):
            client.create_pool(name, SPEC, model=ModelIdentity(name="bench")).close()
        self._sources = [client.allocate(SOURCE, PAGES) for _ in range(OF_A_KIND)]
        self._destinations = [client.allocate(DESTINATION, PAGES) for _ in range(OF_A_KIND)]
        self._held = [client.allocate(DESTINATION, PAGES) for _ in range(OF_A_KIND)]
        self._prompts = [
            [bytes([number, block]) * (HASH_BYTES // 2) for block in range(BLOCKS)] for number in range(LOOKUPS)
        ]

    def step(self, *, batched: bool = True, each: bool = False) -> Times:
        """Do a step, and take what comes of it at the next ones.

        Args:
            batched: in one message; else each request has its own, and none is waited for.
            each: whether pages are taken and given back request by request.
        """
        ids = [new_request_id() for _ in range(OF_A_KIND)]
        watch = Stopwatch(self._daemon)
        with watch:
            if batched:
                with self._client.batched() as batch:
                    asked_for = self._ask(batch, ids, each=each)
            else:
                asked_for = self._ask(self._client, ids, each=each)
        while True:
            time.sleep(MODEL_S)
            with watch:
                self._client.poll(0)
                if all(one.is_settled for one in asked_for.transfers):
                    break
        with watch:
            self._take(asked_for)
        return watch.times()

    def pings(self) -> Times:
        """Ask as often for a PONG."""
        watch = Stopwatch(self._daemon)
        with watch:
            for _ in range(REQUESTS):
                self._client.ping()
        return watch.times()

    def _ask(self, to: Batch | Client, ids: Sequence[str], *, each: bool) -> Step:
        taken: PendingReply[list[PageIds]] | list[PendingReply[PageIds]]
        if each:
            taken = [to.begin(calls.allocate(DESTINATION, PAGES, MAIN)) for _ in range(OF_A_KIND)]
        else:
            taken = to.begin(calls.allocate_each(DESTINATION, [PAGES] * OF_A_KIND, MAIN))
        transfers = [
            to.send(SOURCE, one, [pages(its, tokens=TOKENS)], first_token=7)
            for one, its in zip(ids, self._sources, strict=True)
        ]
        transfers += [
            to.receive(DESTINATION, one, [pages(its, tokens=TOKENS)])
            for one, its in zip(ids, self._destinations, strict=True)
        ]
        back: Iterable[PageIds] = self._held if each else (np.concatenate(self._held),)
        freed = [to.begin(calls.free(DESTINATION, its, MAIN, None)) for its in back]
        found = [to.begin(asked(Lookup(pool=SOURCE, hashes=joined(one), pin=False))) for one in self._prompts]
        return Step(taken, transfers, freed, found)

    def _take(self, step: Step) -> None:
        wait = self._client.wait
        taken = step.taken
        self._held = wait(taken) if isinstance(taken, PendingReply) else [wait(one) for one in taken]
        freed = sum([wait(one).freed for one in step.freed])
        found = sum([wait(one).blocks for one in step.found])
        errors = [one.error for one in step.transfers if one.error is not None]
        assert (freed, found, errors) == (PAGES * OF_A_KIND, 0, []), (freed, found, errors)


def measure(effort: Effort) -> list[Row]:
    """Measure steps in one message, in 64 messages, and PINGs, in turns."""
    with running_daemon(HOST_TIER) as runtime_dir, Client.connect(runtime_dir, name="engine") as client:
        engine = Engine(client)
        step, each, alone, pings = _in_turns(
            effort.pick(100, 2),
            engine.step,
            partial(engine.step, each=True),
            partial(engine.step, each=True, batched=False),
            engine.pings,
        )
    row = partial(row_of, unit=MICROSECONDS, peer_is=PINGS)
    return [
        row(
            "engine_step",
            ours=[one.thread for one in step],
            peer=[one.thread for one in pings],
            target=Target(0.1),
            note=f"for {REQUESTS} requests, in one message: building and sending it, and all that comes back, as time "
            "of the engine's thread",
        ),
        row(
            "engine_step/each",
            ours=[one.thread for one in each],
            peer=[one.thread for one in pings],
            note="the same, of which each request takes and gives back its pages by itself",
        ),
        row(
            "engine_step/cpu",
            ours=[one.thread_cpu for one in step],
            peer=[one.thread_cpu for one in pings],
            note="engine_step as CPU time of that thread: where cores are few, a daemon that is woken takes its",
        ),
        row(
            "engine_step/one_by_one",
            ours=[one.thread for one in alone],
            peer=[one.thread for one in pings],
            note="engine_step/each, in a message for each, none waited for",
        ),
        row(
            "engine_step/daemon",
            ours=[one.daemon_cpu for one in step],
            peer=[one.daemon_cpu for one in pings],
            note="the daemon's CPU time for engine_step, of all its threads: with the copies",
        ),
        row(
            "engine_step/daemon/one_by_one",
            ours=[one.daemon_cpu for one in alone],
            peer=[one.daemon_cpu for one in pings],
            note="the same of engine_step/one_by_one",
        ),
    ]


def _in_turns(rounds: int, *contenders: Callable[[], Times]) -> list[list[Times]]:
    """Return each one's times, without those of a first round, and without the garbage collector."""
    found: list[list[Times]] = [[] for _ in contenders]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds + 1):
            for mine, contender in zip(found, contenders, strict=True):
                mine.append(contender())
    finally:
        gc.enable()
    return [one[1:] for one in found]
