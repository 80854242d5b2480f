"""Replaying a request trace: hand-offs of as many pages as its prompts have, one after another, against memcpy.

A trace is a file of JSON objects, one a line, each with an ``input_length`` in tokens, as the Mooncake project's
traces are. Its times are not kept: the question is what a realistic mix of sizes costs.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.hand_off import PAGE_SIZE, Side, hand_off_s
from benchmarks.measure import GIGABYTES_A_SECOND, MILLISECONDS, Effort, Row, compare
from benchmarks.processes import running_daemon
from kvferry.clients import Client, MhaSpec
from kvferry.pools.layouts import manifest_of
from kvferry.pools.manifest import bytes_per_page


class TracedRequest(msgspec.Struct, frozen=True):
    """A line of a trace; its other fields are not used."""

    input_length: int


def measure(trace: Path, effort: Effort) -> list[Row]:
    """Measure the first requests of the trace: bytes a second over all, and the median hand-off."""
    lengths = read_lengths(trace, effort.pick(200, 10))
    model = MhaSpec(
        layers=4, tokens=max(lengths) + PAGE_SIZE, page_size=PAGE_SIZE, kv_heads=2, head_dim=64, dtype="float16"
    )
    sizes = [_pages_of(length) * bytes_per_page(manifest_of(model)) for length in lengths]
    source, destination = np.ones(max(sizes), np.uint8), np.ones(max(sizes), np.uint8)
    with (
        running_daemon() as runtime_dir,
        Client.connect(runtime_dir, name="prefill") as prefill,
        Client.connect(runtime_dir, name="decode") as decode,
    ):
        prefill.create_pool("prefill", model).close()
        decode.create_pool("decode", model).close()
        ours = partial(_hand_offs, prefill, decode, lengths)
        peer = partial(_memcpys, source, destination, sizes)
        what = f"the first {len(lengths)} prompts, {sum(lengths)} tokens, {sum(sizes) / 1e9:.2f} GB"
        rounds = effort.pick(5, 2)
        peer_is = "a memcpy of as many bytes for each"
        return [
            compare(
                "trace/throughput",
                GIGABYTES_A_SECOND,
                ours=lambda: sum(sizes) / sum(ours()) / 1e9,
                peer=lambda: sum(sizes) / sum(peer()) / 1e9,
                peer_is=peer_is,
                rounds=rounds,
                note=what,
            ),
            compare(
                "trace/median_hand_off",
                MILLISECONDS,
                ours=lambda: statistics.median(ours()) * 1e3,
                peer=lambda: statistics.median(peer()) * 1e3,
                peer_is=peer_is,
                rounds=rounds,
                note=what,
            ),
        ]


def read_lengths(trace: Path, count: int) -> list[int]:
    """Return the prompt lengths of the first requests."""
    with trace.open("rb") as lines:
        decoder = msgspec.json.Decoder(TracedRequest)
        return [decoder.decode(line).input_length for line, _ in zip(lines, range(count), strict=False)]


def _hand_offs(prefill: Client, decode: Client, lengths: list[int]) -> list[float]:
    return [_hand_off_s(prefill, decode, _pages_of(length)) for length in lengths]


def _hand_off_s(prefill: Client, decode: Client, count: int) -> float:
    source = Side(prefill, "prefill", prefill.allocate("prefill", count))
    destination = Side(decode, "decode", decode.allocate("decode", count))
    elapsed_s = hand_off_s(source, destination)
    for side in (source, destination):
        side.client.free(side.pool, side.ids)
    return elapsed_s


def _memcpys(
    source: np.typing.NDArray[np.uint8], destination: np.typing.NDArray[np.uint8], sizes: list[int]
) -> list[float]:
    times = []
    for size in sizes:
        started = time.perf_counter()
        np.copyto(destination[:size], source[:size])
        times.append(time.perf_counter() - started)
    return times


def _pages_of(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
