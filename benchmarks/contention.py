"""What a running load of offloads and restores costs a transfer: its latency with the load against that without it.

Another engine's offloads and restores are the background here: they may not delay a transfer by more than the chunk
that is being copied when it starts. All processes share this machine's cores and its memory's bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, compare
from benchmarks.offload_load import OffloadLoad, running_load
from benchmarks.processes import running_daemon
from benchmarks.trace_replay import Transfers
from benchmarks.traces import read_trace
from kvferry.clients import Client

MIB = 1 << 20
TARGETS = {50: None, 99: Target(1.2)}
ONE_SIZE_TOKENS = 8192
WITHOUT = "the same transfers while the other engine rests"


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
    what: str,
    lengths: Sequence[int],
    run: Callable[[Sequence[int]], list[float]],
    load: OffloadLoad,
    effort: Effort,
) -> list[Row]:
    """Return a row for each percentile of all transfers of a round; both come from the same transfers."""
    rounds = effort.pick(7, 1)
    loaded: list[list[float]] = []
    alone: list[list[float]] = []
    moved_bytes, elapsed_s = 0, 0.0
    for _ in range(rounds + 1):  # the first one is not counted
        with load.on():
            before_bytes, started = load.moved_bytes, time.perf_counter()
            loaded.append(run(lengths))
            elapsed_s += time.perf_counter() - started
            moved_bytes += load.moved_bytes - before_bytes
        alone.append(run(lengths))
    return [
        compare(
            f"trace/transfer_under_offloads/{what}/p{percent}",
            MILLISECONDS,
            ours=iter([_percentile_ms(one, percent) for one in loaded]).__next__,
            peer=iter([_percentile_ms(one, percent) for one in alone]).__next__,
            peer_is=WITHOUT,
            rounds=rounds,
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
