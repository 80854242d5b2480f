"""Replaying a trace's blocks through a real daemon's cache, one request after another: look up, load, store, unpin.

Each block is one small page, so that a cache of as many blocks as the simulation had fits anywhere. Every page that is
loaded is compared with what was stored under its hash. The hit rate must be that of the simulation, block for block:
the simulation shares no code with the daemon's cache but the policy itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.eviction import PERCENT, POLICIES, cache_sizes, hit_rate
from benchmarks.measure import MICROSECONDS, THOUSANDS_A_SECOND, Effort, Row, Target, row_of
from benchmarks.processes import running_daemon
from benchmarks.traces import TracedRequest, count_blocks, read_trace
from kvferry.clients import Client, MhaSpec, ModelIdentity

POOL = "replay"
MODEL = ModelIdentity(name="replay")
BLOCK_BYTES = 4096
PAGE_TOKENS = 512
SIZE_INDEX = -4
"""Which of the simulated sizes: the cache has an eighth of the different blocks, unless the longest prompt has more."""

SIMULATION = "the simulation's at the same size"
PING = "one PING from the same client"
OPERATIONS = ("lookup", "load", "store", "unpin")
PINGS = 2000
T = TypeVar("T")


def measure(trace: Path, effort: Effort) -> list[Row]:
    """Replay the trace with every policy: the hit rate, operations a second, and how long each takes."""
    requests = read_trace(trace, effort.pick(1 << 40, 100))
    size_blocks = cache_sizes(requests)[SIZE_INDEX:][0]
    return [row for policy in POLICIES for row in _rows(requests, size_blocks, policy, effort)]


class Replay:
    """One engine's pool, and the seconds that its operations took."""

    def __init__(self, client: Client, longest: int) -> None:
        self._client = client
        spec = MhaSpec(
            layers=1,
            tokens=(longest + 1) * PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            kv_heads=1,
            head_dim=BLOCK_BYTES // 2 // PAGE_TOKENS // 4,
            dtype="float32",
        )
        pool = client.create_pool(POOL, spec, model=MODEL)
        self._ids = client.allocate(POOL, longest)
        self._views = [pool.tensor("main", role).numpy()[0].view(np.int32) for role in ("k", "v")]
        self.times_s: dict[str, list[float]] = {name: [] for name in OPERATIONS}

    def request(self, blocks: Sequence[int]) -> int:
        """Ask for a prompt's blocks, load those that are there, store the others; return how many there were."""
        client, hashes = self._client, [block.to_bytes(16, "little") for block in blocks]
        found = self._timed("lookup", partial(client.lookup, POOL, hashes))
        there, rest = self._ids[: found.blocks], self._ids[found.blocks : len(blocks)]
        if found.blocks:
            for view in self._views:
                view[there] = -1
            self._timed("load", lambda: client.wait_done(client.load(POOL, found.lease, there)))
            self._check(blocks[: found.blocks])
        if len(rest):
            for view in self._views:
                view[rest] = np.asarray(blocks[found.blocks :])[:, None, None, None]
            parent = hashes[found.blocks - 1] if found.blocks else None
            new = hashes[found.blocks :]
            self._timed("store", lambda: client.wait_done(client.store(POOL, new, rest, parent=parent)))
        if found.lease:
            self._timed("unpin", partial(client.unpin, found.lease))
        return found.blocks

    def _check(self, blocks: Sequence[int]) -> None:
        expected = np.asarray(blocks)[:, None, None, None]
        for view in self._views:
            assert (view[self._ids[: len(blocks)]] == expected).all(), "a page is not what was stored"

    def _timed(self, operation: str, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = call()
        self.times_s[operation].append(time.perf_counter() - started)
        return result


def _rows(requests: Sequence[TracedRequest], size_blocks: int, policy: str, effort: Effort) -> list[Row]:
    config = f'[tiers]\nhost_bytes = {size_blocks * BLOCK_BYTES}\npolicy = "{policy}"\n'
    with running_daemon(config) as runtime_dir, Client.connect(runtime_dir, name="replay") as client:
        pings_s = [client.ping() for _ in range(effort.pick(PINGS, 20))]
        replay = Replay(client, max(len(one.hash_ids) for one in requests))
        hits = sum(replay.request(one.hash_ids) for one in requests)
    what = f"trace/replay/{policy}"
    note = f"{len(requests)} requests, {count_blocks(requests)} blocks of {BLOCK_BYTES} B, cache of {size_blocks}"
    all_s = [one for times in replay.times_s.values() for one in times]
    hit_rates = [100 * hits / count_blocks(requests)], [100 * hit_rate(requests, size_blocks, policy)]
    speeds = [len(all_s) / sum(all_s) / 1e3], [1e-3 / statistics.mean(pings_s)]
    return [
        row_of(f"{what}/hit_rate", PERCENT, *hit_rates, peer_is=SIMULATION, target=Target(1.0), note=note),
        row_of(f"{what}/operations", THOUSANDS_A_SECOND, *speeds, peer_is=PING),
        *(
            row_of(
                f"{what}/{operation}_p{percent}",
                MICROSECONDS,
                [_us(times_s, percent)],
                [_us(pings_s, percent)],
                peer_is=PING,
            )
            for operation, times_s in replay.times_s.items()
            for percent in (50, 99)
            if times_s
        ),
    ]


def _us(times_s: Sequence[float], percent: int) -> float:
    return float(np.percentile(times_s, percent)) * 1e6
