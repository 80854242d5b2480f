"""Replaying a request trace: transfers of as many pages as its prompts have, one after another, against memcpy.

The trace's times are not kept: the question is what a realistic mix of sizes costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.measure import GIGABYTES_A_SECOND, MILLISECONDS, Effort, Row, compare
from benchmarks.pools import PAGE_SIZE, Side, transfer_s
from benchmarks.processes import two_engines
from benchmarks.traces import read_trace
from kvferry.clients import Client, MhaSpec
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.manifest import bytes_per_page


class Transfers:
    """A prefill engine's pool and a decode engine's, of a small model, for prompts of up to ``longest`` tokens."""

    def __init__(self, prefill: Client, decode: Client, longest: int) -> None:
        tokens = (-(-longest // PAGE_SIZE) + 1) * PAGE_SIZE
        model = MhaSpec(layers=4, tokens=tokens, page_size=PAGE_SIZE, kv_heads=2, head_dim=64, dtype="float16")
        self.page_bytes = bytes_per_page(manifest_of(model))
        self._pools = [(one, one.create_pool(name, model)) for one, name in ((prefill, "prefill"), (decode, "decode"))]

    def run(self, lengths: Sequence[int]) -> list[float]:
        """Hand over prompts of these lengths in tokens, one after another; return the seconds of each."""
        return [self._transfer_s(pages_of(length)) for length in lengths]

    def _transfer_s(self, count: int) -> float:
        sides = [Side(client, pool, client.allocate(pool.name, count)) for client, pool in self._pools]
        elapsed_s = transfer_s(*sides)
        for client, pool, ids in sides:
            client.free(pool.name, ids)
        return elapsed_s


def measure(trace: Path, effort: Effort) -> list[Row]:
    """Measure the first requests of the trace: bytes a second over all, and the median transfer."""
    lengths = [one.input_length for one in read_trace(trace, effort.pick(200, 10))]
    with two_engines() as engines:
        transfers = Transfers(*engines, max(lengths))
        sizes = [pages_of(length) * transfers.page_bytes for length in lengths]
        source, destination = np.ones(max(sizes), np.uint8), np.ones(max(sizes), np.uint8)
        ours = partial(transfers.run, lengths)
        peer = partial(_memcpys, source, destination, sizes)
        what = f"the first {len(lengths)} prompts, {sum(lengths)} tokens, {sum(sizes) / 1e9:.2f} GB"
        peer_is = "a memcpy of as many bytes for each"
        row = partial(compare, peer_is=peer_is, rounds=effort.pick(5, 2), note=what)
        return [
            row(
                "trace/throughput",
                GIGABYTES_A_SECOND,
                ours=lambda: sum(sizes) / sum(ours()) / 1e9,
                peer=lambda: sum(sizes) / sum(peer()) / 1e9,
            ),
            row(
                "trace/median_transfer",
                MILLISECONDS,
                ours=lambda: statistics.median(ours()) * 1e3,
                peer=lambda: statistics.median(peer()) * 1e3,
            ),
        ]


def pages_of(tokens: int) -> int:
    """Return how many pages a prompt has."""
    return -(-tokens // PAGE_SIZE)


def _memcpys(
    source: np.typing.NDArray[np.uint8], destination: np.typing.NDArray[np.uint8], sizes: list[int]
) -> list[float]:
    times = []
    for size in sizes:
        started = time.perf_counter()
        np.copyto(destination[:size], source[:size])
        times.append(time.perf_counter() - started)
    return times
