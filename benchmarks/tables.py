"""Graph tables in steady-state decode: from the engine's call to the visible table, against torch in the process.

256 rows of 257 columns (pages of 128 tokens, context 32768, 16 draft tokens), up to the end of the context. Each step
makes every row one token longer, so that two rows get a page. The peer is what SGLang does for each step: it gathers
each request's row of its token map, divides it by the page size and copies it into the table that the graph reads, on
one thread, as our daemon has one; without a message, without a check. Both tables are compared after every round.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.measure import MICROSECONDS, Effort, Row, Target, compare
from benchmarks.processes import running_daemon
from kvferry.clients import BlockTableEntries, Client, MhaSpec

ROWS = 256
PAGE_SIZE = 128
CONTEXT_TOKENS = 32_768
DRAFT_TOKENS = 16
COLUMNS = 257
POOL = "decode"
TORCH = "torch in the process: block_tables[:bs, :W].copy_(req_to_token[indices, : W * ps : ps] // ps); seq_lens.copy_"
Int64s = npt.NDArray[np.int64]


class Step(NamedTuple):
    """One decode step: the lengths, and the pages that rows get; made before the clock starts."""

    lengths: Int64s
    entries: BlockTableEntries


class Times(NamedTuple):
    """The medians of a round's steps, in microseconds: until the call returned, and until the table was visible."""

    call_us: float
    visible_us: float


class Requests:
    """The requests of a batch: which pages each has, and the steps that take them to the end of the context."""

    def __init__(self, steps: int) -> None:
        """Lay out the last ``steps`` steps."""
        drawn = np.random.default_rng(0).permutation(ROWS * COLUMNS)
        self.pages: Int64s = 1 + drawn.reshape(ROWS, COLUMNS)
        first = CONTEXT_TOKENS - steps - np.arange(ROWS) % PAGE_SIZE
        self.first = self._step(first, first - 1)
        self.steps = [self._step(first + number, first + number - 1) for number in range(1, steps + 1)]
        self.last: Int64s = first + steps

    def rows(self) -> dict[int, Int64s]:
        """Return the pages that each row has at first."""
        counts = -(-self.first.lengths // PAGE_SIZE)
        return {row: self.pages[row, :count] for row, count in enumerate(counts.tolist())}

    def table(self) -> Int64s:
        """Return what the table is after the last step."""
        counts = -(-self.last // PAGE_SIZE)
        return np.where(np.arange(COLUMNS) < counts[:, None], self.pages, 0)

    def _step(self, lengths: Int64s, before: Int64s) -> Step:
        [rows] = np.nonzero(-(-lengths // PAGE_SIZE) > -(-before // PAGE_SIZE))
        columns = (lengths[rows] - 1) // PAGE_SIZE
        return Step(lengths, BlockTableEntries(rows, columns, self.pages[rows, columns]))


class OurTables:
    """An engine's side of the daemon's tables, in the host's memory."""

    def __init__(self, client: Client, requests: Requests) -> None:
        client.create_pool(POOL, spec()).close()
        self._client = client
        self._requests = requests
        self._ring = client.open_events()
        self._tables = client.create_tables(
            "decode", POOL, max_batch=ROWS, max_context_tokens=CONTEXT_TOKENS, draft_tokens=DRAFT_TOKENS
        )
        assert self._tables.columns == COLUMNS, self._tables

    def round(self, *, marked: bool = False) -> Times:
        """Take all steps once, from the beginning; ``marked``: each waits for a point that is recorded with it."""
        client, tables = self._client, self._tables
        client.wait(client.update_tables(tables, self._requests.first.lengths, rows=self._requests.rows()))
        called, visible = [], []
        for lengths, entries in self._requests.steps:
            started = time.perf_counter()
            update = client.update_tables(
                tables, lengths, entries=entries, after=self._ring.record_event() if marked else None
            )
            called.append(time.perf_counter() - started)
            client.wait(update)
            visible.append(time.perf_counter() - started)
        assert np.array_equal(tables.block_tables.numpy(), self._requests.table()), "our table is wrong"
        assert np.array_equal(tables.seq_lens.numpy(), self._requests.last), "our lengths are wrong"
        return Times(statistics.median(called) * 1e6, statistics.median(visible) * 1e6)


class TorchTables:
    """The same by torch alone."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        tokens = requests.pages[:, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
        self._indices = torch.from_numpy(np.random.default_rng(1).permutation(ROWS))
        self._req_to_token = torch.empty(ROWS, COLUMNS * PAGE_SIZE, dtype=torch.int32)
        self._req_to_token[self._indices] = torch.from_numpy(tokens.reshape(ROWS, -1).astype(np.int32))
        self._block_tables = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
        self._seq_lens = torch.zeros(ROWS, dtype=torch.int32)

    def round_us(self) -> float:
        """Return the median of all steps."""
        times = []
        for lengths, _ in self._requests.steps:
            given = torch.from_numpy(lengths)
            started = time.perf_counter()
            self._block_tables[:ROWS, :COLUMNS].copy_(
                self._req_to_token[self._indices, : COLUMNS * PAGE_SIZE : PAGE_SIZE] // PAGE_SIZE
            )
            self._seq_lens[:ROWS].copy_(given)
            times.append(time.perf_counter() - started)
        assert np.array_equal(self._block_tables.numpy(), self._requests.pages), "torch's table is wrong"
        assert np.array_equal(self._seq_lens.numpy(), self._requests.last), "torch's lengths are wrong"
        return statistics.median(times) * 1e6


def measure(effort: Effort) -> list[Row]:
    """Measure one update of all rows."""
    rounds = effort.pick(15, 2)
    requests = Requests(effort.pick(300, 10))
    with one_thread(), running_daemon() as runtime_dir, Client.connect(runtime_dir, name="decode") as client:
        ours, peer = OurTables(client, requests), TorchTables(requests)

        row = partial(compare, unit=MICROSECONDS, peer=peer.round_us, peer_is=TORCH, rounds=rounds)
        return [
            row(
                "tables",
                ours=lambda: ours.round().visible_us,
                target=Target(1.0),
                note="p50 from update_tables to its reply",
            ),
            row(
                "tables/call",
                ours=lambda: ours.round().call_us,
                note="the part of it that an engine cannot hide: the call itself",
            ),
            row(
                "tables/marked",
                ours=lambda: ours.round(marked=True).visible_us,
                note="with after=ring.record_event(), as on a device",
            ),
        ]


def spec() -> MhaSpec:
    """Return a pool's spec: as many pages as the rows name, as small as can be."""
    return MhaSpec(
        layers=1, tokens=ROWS * COLUMNS * PAGE_SIZE, page_size=PAGE_SIZE, kv_heads=1, head_dim=1, dtype="int8"
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
