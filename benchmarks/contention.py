"""What a running load of offloads and restores costs a transfer: its latency with the load against that without it.

Another engine's offloads and restores are the background here: they may not delay a transfer by more than the chunk
that is being copied when it starts. All processes share this machine's cores and its memory's bandwidth.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

TARGETS = {50: None, 99: Target(1.2)}
ONE_SIZE_TOKENS = 8192
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
    ):
        transfers = Transfers(prefill, decode, max(*lengths, ONE_SIZE_TOKENS))
        return [
            *_rows("traced_lengths", lengths, transfers.run, load, effort),
            *_rows(f"{ONE_SIZE_TOKENS}_tokens", [ONE_SIZE_TOKENS] * count, transfers.run, load, effort),
        ]


def _rows(
    what: str, lengths: Sequence[int], run: Callable[[Sequence[int]], list[float]], load: OffloadLoad, effort: Effort
) -> list[Row]:
    """Return a row for each percentile of all transfers of a round; both come from the same transfers."""
    loaded: list[list[float]] = []
    alone: list[list[float]] = []
    moved_bytes, elapsed_s = 0, 0.0
    for _ in range(effort.pick(7, 1) + 1):  # the first one is not counted
        with load.on():
            before_bytes, started = load.moved_bytes, time.perf_counter()
            loaded.append(run(lengths))
            elapsed_s += time.perf_counter() - started
            moved_bytes += load.moved_bytes - before_bytes
        alone.append(run(lengths))
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
        )
        for percent, target in TARGETS.items()
    ]


def _percentile_ms(times_s: Sequence[float], percent: int) -> float:
    return float(np.percentile(times_s, percent)) * 1e3


# -- the load: an engine in a process of its own that offloads and restores without a pause, when it is told to


class Signals(NamedTuple):
    """What the two processes share."""

    go: Event
    """The load is wanted."""
    moved: Event
    """One offload and one restore ended."""
    resting: Event
    moved_bytes: Synchronized[int]


class OffloadLoad:
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
def running_load(runtime_dir: Path, size_bytes: int) -> Iterator[OffloadLoad]:
    """Run the engine; it moves ``size_bytes`` in each direction at a time."""
    context = multiprocessing.get_context("spawn")
    signals = Signals(context.Event(), context.Event(), context.Event(), context.Value("q", 0))
    process = context.Process(target=_run, args=(runtime_dir, size_bytes, signals))
    process.start()
    try:
        assert signals.resting.wait(TIMEOUT_S), "the load's engine does not start"
        yield OffloadLoad(signals)
    finally:
        process.terminate()
        process.join()


def _run(runtime_dir: Path, size_bytes: int, signals: Signals) -> None:
    count = size_bytes // PAGE_BYTES // LAYERS // 2
    with Client.connect(runtime_dir, name="load") as client:
        client.create_pool(POOL, spec_of(PAGE_BYTES, 2 * count, LAYERS)).close()
        ids = client.allocate(POOL, 2 * count)
        while True:
            if not signals.go.is_set():
                signals.resting.set()
                signals.go.wait()
            operation = client.offload(POOL, [pages(ids[::2])])
            client.wait_done(operation, TIMEOUT_S)
            back = client.restore(POOL, operation.snapshot, [pages(ids[1::2])], drop=True)
            client.wait_done(back, TIMEOUT_S)
            signals.moved_bytes.value += 2 * size_bytes
            signals.moved.set()
