"""Captured graphs of paged attention over a daemon's pool and tables, replayed while the daemon updates the tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.clients import BlockTableEntries, Client, MhaSpec, Tables, new_request_id, pages
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

    def __init__(self, client: Client) -> None:
        self.client = client
        self.small = Cache.random(client.attach_pool("small"), seed=1)
        client.attach_pool("long")
        self._made: list[Tables] = []

    def tables(self, pool: str = "small", **shape: Any) -> Tables:  # noqa: ANN401  of create_tables
        """Make tables, of two rows of up to 40 tokens unless said otherwise."""
        shape = {"max_batch": 2, "max_context_tokens": 40} | shape
        self._made.append(self.client.create_tables("tables", pool, **shape))
        return self._made[-1]

    def update(self, tables: Tables, lengths: Sequence[int], rows: Sequence[Any] = (), **more: Any) -> None:  # noqa: ANN401
        """Change tables, after the last replay; the first rows get these pages as a whole."""
        whole, after = dict(enumerate(rows)), tables.replayed()
        self.client.wait(self.client.update_tables(tables, lengths, rows=whole, after=after, **more))

    def close(self) -> None:
        for tables in self._made:
            self.client.delete_tables(tables)


@pytest.fixture
def engine(client: Client) -> Iterator[Engine]:
    one = Engine(client)
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


def test_a_row_grows_page_by_page_over_what_another_engine_has_sent(engine: Engine, other: Client, device: str) -> None:
    """Layer by layer, as events are recorded; the pages are not in order, nor those of the other engine."""
    sent = Cache.random(other.create_pool("prefill", POOLS["small"], device=device), seed=9)
    ring, request_id = other.open_events(device), new_request_id()
    theirs, ours = other.allocate("prefill", 3), engine.client.allocate("small", 8)[::-1].tolist()
    receiving = engine.client.receive("small", request_id, [pages(ours[:3])])
    step = ring.step(0, 1)
    sending = other.send("prefill", request_id, [pages(theirs)], steps=[step], first_token=7)
    ring.record(step)
    assert engine.client.wait_finished(receiving).first_token == 7
    other.wait_settled(sending)
    engine.small.host_keys[ours[:3]] = sent.host_keys[theirs]
    engine.small.host_values[ours[:3]] = sent.host_values[theirs]
    tables = engine.tables()
    graph = CapturedAttention(engine.small, tables, 2)
    addresses = tables.block_tables.data_ptr(), tables.seq_lens.data_ptr()
    rows = [ours[:1], ours[1:3]]
    engine.update(tables, [1, 15], rows)
    for step_number in range(20):
        lengths = [step_number + 1, step_number + 15]
        new = [(row, len(rows[row])) for row in range(2) if -(-lengths[row] // 8) > len(rows[row])]
        for row, _ in new:
            rows[row].append(ours[sum(map(len, rows))])
        entries = BlockTableEntries([row for row, _ in new], [at for _, at in new], [rows[row][at] for row, at in new])
        engine.update(tables, lengths, entries=entries)
        queries = torch.randn(2, 1, HEADS, HEAD_DIM)
        assert_close(graph.replay(queries), reference(engine.small, queries, rows, lengths))
    assert (tables.block_tables.data_ptr(), tables.seq_lens.data_ptr()) == addresses


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


def test_verify_with_a_row_for_each_draft_token(engine: Engine) -> None:
    """As operators of one query need it: a request's row as often as it has draft tokens, each a token longer."""
    draft = 3
    tables = engine.tables(max_batch=2 * draft, max_context_tokens=37, draft_tokens=draft)
    graph = CapturedAttention(engine.small, tables, 2 * draft)
    pages, lengths = [[5, 6, 7, 8, 9], [30, 20]], [37, 7]
    each = [length + 1 + number for length in lengths for number in range(draft)]
    engine.update(tables, each, [row for row in pages for _ in range(draft)])
    queries = torch.randn(2, draft, HEADS, HEAD_DIM)
    found = graph.replay(queries.view(-1, 1, HEADS, HEAD_DIM)).view(queries.shape)
    assert_close(found, reference(engine.small, queries, pages, [length + draft for length in lengths]))


def test_each_operator_of_a_graph_gets_the_lengths(engine: Engine) -> None:
    tables = engine.tables()
    graph = CapturedAttention(engine.small, tables, 2, operators=3)
    pages, lengths = [[5, 6, 7, 8], [30, 20]], [27, 9]
    engine.update(tables, lengths, pages)
    queries = torch.randn(2, 1, HEADS, HEAD_DIM)
    expected = queries
    for _ in range(3):
        expected = reference(engine.small, expected, pages, lengths)
    assert_close(graph.replay(queries), expected)


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
