"""Captured graphs of paged attention over a daemon's pool and tables, replayed while the daemon updates the tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.clients import Client, MhaSpec, Tables
from kvferry.protocol.errors import TableOverflowError
from tests.cann_simulator.simulator import Simulator
from tests.npu.paged_attention import HEAD_DIM, HEADS, KV_HEADS, Cache, CapturedAttention, reference

PAGE = 128
CLOSE = 1e-5


def _spec(page_size: int, pages: int) -> MhaSpec:
    tokens = page_size * (pages - 1)
    return MhaSpec(layers=1, tokens=tokens, page_size=page_size, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32")


POOLS = {"small": _spec(8, pages=64), "long": _spec(PAGE, pages=640)}


class Engine:
    """An engine with the small pool's pages full of random numbers; the tables that it makes go with the test."""

    def __init__(self, client: Client, device: str) -> None:
        self.client = client
        self.small = Cache.random(client.attach_pool("small"), seed=1)
        self._ring = client.open_events(device)
        self._made: list[Tables] = []

    def tables(self, pool: str = "small", **shape: Any) -> Tables:  # noqa: ANN401  of create_tables
        """Make tables, of two rows of up to 40 tokens unless said otherwise."""
        shape = {"max_batch": 2, "max_context_tokens": 40} | shape
        self._made.append(self.client.create_tables("tables", pool, **shape))
        return self._made[-1]

    def update(self, tables: Tables, lengths: Sequence[int], pages: Sequence[Any] = (), extra_tokens: int = 0) -> None:
        """Change tables, after the last replay; the first rows get these pages as a whole."""
        after = self._ring.record_event()
        rows = dict(enumerate(pages))
        update = self.client.update_tables(tables, lengths, rows=rows, after=after, extra_tokens=extra_tokens)
        self.client.wait(update)

    def close(self) -> None:
        """Give up all tables."""
        for tables in self._made:
            self.client.delete_tables(tables)


@pytest.fixture
def engine(client: Client, device: str) -> Iterator[Engine]:
    """Return an engine."""
    one = Engine(client, device)
    yield one
    one.close()


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).abs().max()) < CLOSE


# -- the longest requests


@pytest.mark.parametrize(("context", "row_tokens", "columns"), [(32768, 0, 257), (32752, 33_000, 258)])
def test_verify_at_the_end_of_the_longest_context(engine: Engine, context: int, row_tokens: int, columns: int) -> None:
    """16 draft tokens after the last token of the context: the 17 queries see the row's very last token."""
    draft = 16
    tables = engine.tables("long", max_context_tokens=context, draft_tokens=draft, request_row_tokens=row_tokens)
    assert tables.columns == columns
    cache = Cache.random(engine.client.attach_pool("long"))
    verify = CapturedAttention(cache, tables, rows=2, queries=draft + 1)
    random = np.random.default_rng(columns)
    pages = random.permutation(np.arange(1, 640))[: 2 * columns].reshape(2, columns)
    queries = torch.randn(2, draft + 1, HEADS, HEAD_DIM)
    rows: Sequence[Any] = list(pages)
    for lengths in ([context, context - 1], [context - 127, 1], [PAGE - draft, PAGE - draft + 1], [context] * 2):
        engine.update(tables, lengths, rows, extra_tokens=draft)
        rows = ()
        read = [length + draft for length in lengths]
        assert_close(verify.replay(queries), reference(cache, queries, pages.tolist(), read))
    too_long = columns * PAGE - draft + 1
    with pytest.raises(TableOverflowError) as raised:
        engine.update(tables, [1, too_long], extra_tokens=draft)
    for said in ("row 1", str(too_long), f"W = {columns}"):
        assert said in raised.value.detail
    read = [context + draft] * 2  # as they were
    assert_close(verify.replay(queries), reference(cache, queries, pages.tolist(), read))


def test_batches_of_all_sizes_go_through_the_captured_ones(engine: Engine) -> None:
    captured = (1, 2, 4, 8)
    tables = engine.tables(max_batch=8, captured=captured)
    graphs = {rows: CapturedAttention(engine.small, tables, rows) for rows in captured}
    random = np.random.default_rng(0)
    for batch in (1, 3, 8, 0, 2, 5, 4, 0, 7):
        lengths = random.integers(1, 41, batch).tolist()
        pages = [random.permutation(np.arange(1, 64))[:5].tolist() for _ in range(batch)]
        engine.update(tables, lengths, pages)
        lengths_of_replay = tables.host_lengths().for_update()
        graph = graphs[len(lengths_of_replay)]
        assert lengths_of_replay == lengths + [0] * (len(lengths_of_replay) - batch)
        queries = torch.randn(batch, 1, HEADS, HEAD_DIM)
        found = graph.replay(queries)
        if batch:
            assert_close(found, reference(engine.small, queries, pages, lengths))


def test_a_multi_step_draft_reads_one_token_more_each_step(engine: Engine) -> None:
    draft = 3
    tables = engine.tables(max_context_tokens=37, draft_tokens=draft)
    graph = CapturedAttention(engine.small, tables, 2)
    pages = [[5, 6, 7, 8, 9], [30, 20]]
    lengths = [37, 7]
    engine.update(tables, lengths, pages, extra_tokens=draft)
    for step in range(draft):
        queries = torch.randn(2, 1, HEADS, HEAD_DIM)
        read = [length + step + 1 for length in lengths]
        assert_close(graph.replay(queries, draft_step=step), reference(engine.small, queries, pages, read))


# -- the order with replays


def test_an_update_does_not_overtake_the_replay_that_reads_the_tables(engine: Engine, simulator: Simulator) -> None:
    tables = engine.tables()
    graph = CapturedAttention(engine.small, tables, 2)
    old, new = [[1, 2, 3], [4, 5, 6]], [[11, 12, 13, 14], [15]]
    queries = torch.randn(2, 1, HEADS, HEAD_DIM)
    engine.update(tables, [20, 24], old)
    graph.replay(queries)
    compute = torch.get_device_module("npu").current_stream().npu_stream
    with simulator.held(process=os.getpid(), stream=compute):
        graph.start()
        engine.update(tables, [32, 3], new)  # the copies have been given to the daemon's stream, where they wait
        assert tables.host_lengths().lengths == [32, 3]
    assert_close(graph.out(2), reference(engine.small, queries, old, [20, 24]))
    assert_close(graph.replay(queries), reference(engine.small, queries, new, [32, 3]))


def test_a_replay_does_not_read_half_written_tables(engine: Engine, simulator: Simulator) -> None:
    tables = engine.tables()
    graph = CapturedAttention(engine.small, tables, 2)
    queries = torch.randn(2, 1, HEADS, HEAD_DIM)
    engine.update(tables, [1, 1], [[1], [2]])
    graph.replay(queries)
    simulator.slow_copies(to_device_us=30_000)
    try:
        for step in range(3):
            pages = [[7 + step, 9 + step], [20 + step, 30 + step]]
            engine.update(tables, [16, 9 + step], pages)
            graph.start()  # before the copies have come
            assert_close(graph.out(2), reference(engine.small, queries, pages, [16, 9 + step]))
    finally:
        simulator.slow_copies()


def test_an_engine_runs_ahead_of_its_device(engine: Engine, simulator: Simulator) -> None:
    """Steps are given to the device without a look at it; every one reads its own tables."""
    tables = engine.tables()
    graph = CapturedAttention(engine.small, tables, 2)
    queries = torch.randn(2, 1, HEADS, HEAD_DIM)
    graph.queries.copy_(queries)
    steps = [([[step + 1, step + 20], [step + 40]], [step + 9, step + 1]) for step in range(6)]
    outs = []
    simulator.slow_kernels(5_000)
    try:
        for pages, lengths in steps:
            engine.update(tables, lengths, pages)
            graph.start()
            outs.append(graph.clone())
    finally:
        simulator.slow_kernels(0)
    for (pages, lengths), out in zip(steps, outs, strict=True):
        assert_close(out.cpu(), reference(engine.small, queries, pages, lengths))
