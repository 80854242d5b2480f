"""What a running load of offloads and restores costs a transfer: its latency with the load against that without it.

Another engine's offloads and restores are the background here: they may not delay a transfer by more than the chunk
that is being copied when it starts. All processes share this machine's cores and its memory's bandwidth. The limit is
what remains where the other engine moves nothing, and asks for a PONG after the other: processes that wait for a core.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, row_of
from benchmarks.pools import MIB, TIMEOUT_S, spec_of
from benchmarks.processes import running_daemon
from benchmarks.trace_replay import Transfers
from benchmarks.traces import read_trace
from kvferry.clients import Client, pages
from kvferry.protocol.codec import PageIds

TARGETS = {50: None, 99: Target(1.2)}
ONE_SIZE_TOKENS = 8192
PINGS = "the same transfers while the other engine sends PINGs without a pause, and nothing else is copied"
WITHOUT = "the same transfers while the other engine rests"
POOL = "load"
LAYERS = 4
PAGE_BYTES = 128 << 10


def measure(trace: Path, effort: Effort) -> list[Row]:
    """Measure transfers as long as the trace's first prompts, and such of one size: medians and 99th percentiles."""
    count, load_bytes = effort.pick(200, 5), effort.pick(64, 8) * MIB
    lengths = [one.input_length for one in read_trace(trace, count)]
    config = f"[tiers]\nhost_bytes = {2 * load_bytes}\n"
    with (
        running_daemon(config) as runtime_dir,
        Client.connect(runtime_dir, name="prefill") as prefill,
        Client.connect(runtime_dir, name="decode") as decode,
        running_load(runtime_dir, load_bytes) as load,
        running_load(runtime_dir, 0) as pings,
    ):
        transfers = Transfers(prefill, decode, max(*lengths, ONE_SIZE_TOKENS))
        return [
            *_rows("traced_lengths", lengths, transfers.run, load, pings, effort),
            *_rows(f"{ONE_SIZE_TOKENS}_tokens", [ONE_SIZE_TOKENS] * count, transfers.run, load, pings, effort),
        ]


def _rows(
    what: str,
    lengths: Sequence[int],
    run: Callable[[Sequence[int]], list[float]],
    load: Load,
    pings: Load,
    effort: Effort,
) -> list[Row]:
    """Return a row for each percentile of all transfers of a round; all come from the same transfers."""
    loaded: list[list[float]] = []
    alone: list[list[float]] = []
    pinged: list[list[float]] = []
    moved_bytes, elapsed_s = 0, 0.0
    for _ in range(effort.pick(7, 1) + 1):  # the first one is not counted
        with load.on():
            before_bytes, started = load.moved_bytes, time.perf_counter()
            loaded.append(run(lengths))
            elapsed_s += time.perf_counter() - started
            moved_bytes += load.moved_bytes - before_bytes
        alone.append(run(lengths))
        with pings.on():
            pinged.append(run(lengths))
    return [
        row_of(
            f"trace/transfer_under_offloads/{what}/p{percent}",
            MILLISECONDS,
            [_percentile_ms(one, percent) for one in loaded[1:]],
            [_percentile_ms(one, percent) for one in alone[1:]],
            peer_is=WITHOUT,
            target=target,
            note=(
                f"{len(lengths)} transfers a round, one after another; the other engine offloads and restores without "
                f"a pause, {moved_bytes / elapsed_s / 1e9:.2f} GB/s meanwhile"
            ),
            limits=[[_percentile_ms(one, percent) for one in pinged[1:]]],
            limit_is=PINGS,
        )
        for percent, target in TARGETS.items()
    ]


def _percentile_ms(times_s: Sequence[float], percent: int) -> float:
    return float(np.percentile(times_s, percent)) * 1e3


# -- the load: an engine in a process of its own that offloads and restores, or only asks, without a pause, when told to


class Signals(NamedTuple):
    """What the two processes share."""

    go: Event
    """The load is wanted."""
    moved: Event
    """One offload and one restore ended, or a PING."""
    resting: Event
    moved_bytes: Synchronized[int]


class Load:
    """Switches the load; it is off at first."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    @property
    def moved_bytes(self) -> int:
        """Return how much was offloaded and restored so far."""
        moved_bytes: int = self._signals.moved_bytes.value
        return moved_bytes

    @contextmanager
    def on(self) -> Iterator[None]:
        """Offload and restore meanwhile: under way when this begins, over when it ends.

        Raises:
            AssertionError: the engine has died, or nothing was moved.
        """
        go, moved, resting, _ = self._signals
        moved.clear()
        resting.clear()
        go.set()
        try:
            assert moved.wait(TIMEOUT_S), "no restore ended"
            yield
        finally:
            go.clear()
        assert resting.wait(TIMEOUT_S), "the load does not stop"


@contextmanager
def running_load(runtime_dir: Path, size_bytes: int) -> Iterator[Load]:
    """Run the engine; it moves ``size_bytes`` in each direction at a time. 0: it sends PINGs."""
    context = multiprocessing.get_context("spawn")
    signals = Signals(context.Event(), context.Event(), context.Event(), context.Value("q", 0))
    process = context.Process(target=_run, args=(runtime_dir, size_bytes, signals))
    process.start()
    try:
        assert signals.resting.wait(TIMEOUT_S), "the load's engine does not start"
        yield Load(signals)
    finally:
        process.terminate()
        process.join()


def _run(runtime_dir: Path, size_bytes: int, signals: Signals) -> None:
    with Client.connect(runtime_dir, name="load") as client:
        act = partial(_out_and_back, client, _pages(client, size_bytes)) if size_bytes else client.ping
        while True:
            if not signals.go.is_set():
                signals.resting.set()
                signals.go.wait()
            act()
            signals.moved_bytes.value += 2 * size_bytes
            signals.moved.set()


def _pages(client: Client, size_bytes: int) -> PageIds:
    count = size_bytes // PAGE_BYTES // LAYERS // 2
    client.create_pool(POOL, spec_of(PAGE_BYTES, 2 * count, LAYERS)).close()
    return client.allocate(POOL, 2 * count)


def _out_and_back(client: Client, ids: PageIds) -> None:
    operation = client.offload(POOL, [pages(ids[::2])])
    client.wait_done(operation, TIMEOUT_S)
    back = client.restore(POOL, operation.snapshot, [pages(ids[1::2])], drop=True)
    client.wait_done(back, TIMEOUT_S)
