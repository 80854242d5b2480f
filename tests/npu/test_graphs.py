"""Captured graphs of paged attention over a daemon's pool and tables, replayed while the daemon updates the tables."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from kvferry.clients import BlockTableEntries, Client, EventRing, HybridSwaSpec, MhaSpec, Tables
from kvferry.protocol.errors import TableOverflowError
from tests.cann_simulator.simulator import Race, Simulator
from tests.daemons import DaemonProcess, running_daemon
from tests.devices import DEVICE
from tests.npu.paged_attention import HEAD_DIM, HEADS, KV_HEADS, Cache, CapturedAttention, reference
from tests.npu.windowed_attention import WindowedGraph, window_reference

PAGE = 128
CLOSE = 1e-5
OPENING_S = 120.0  # the daemon imports torch_npu first
_numbers = itertools.count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Return a daemon that serves."""
    DEVICE.accelerator  # noqa: B018  this process has its device
    with running_daemon(tmp_path_factory.mktemp("graphs")) as one:
        yield one


@pytest.fixture(scope="module")
def client(daemon: DaemonProcess) -> Iterator[Client]:
    """Return an engine."""
    with Client.connect(daemon.runtime_dir, name="engine") as one:
        spec = MhaSpec(layers=1, tokens=63 * 8, page_size=8, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32")
        one.create_pool("small", spec, device=DEVICE.name, deadline_s=OPENING_S)
        yield one


@pytest.fixture(scope="module")
def ring(client: Client, device: str) -> EventRing:
    """Return the engine's events."""
    return client.open_events(device)


@pytest.fixture(scope="module")
def cache(client: Client, device: str) -> Cache:
    """Return a pool of 640 pages of 128 tokens, full of random numbers."""
    spec = MhaSpec(layers=1, tokens=639 * PAGE, page_size=PAGE, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32")
    client.create_pool("long", spec, device=device)
    return Cache.random(client.attach_pool("long"))


@pytest.fixture(scope="module")
def small(client: Client) -> Cache:
    """Return a pool of 64 pages of 8 tokens, full of random numbers."""
    return Cache.random(client.attach_pool("small"), seed=1)


@pytest.fixture
def name() -> str:
    """Return tables' name that no other test has."""
    return f"tables-{next(_numbers)}"


@pytest.fixture
def planted_races(simulator: Simulator) -> Iterator[Callable[[], list[Race]]]:
    """Return a function for the races that a test has planted; they are forgotten when it ends."""
    file = simulator.folder / "races.jsonl"
    before = file.read_bytes() if file.exists() else b""
    count = len(simulator.races())
    yield lambda: simulator.races()[count:]
    file.write_bytes(before)


def update(client: Client, tables: Tables, lengths: Sequence[int], **more: object) -> None:
    client.wait(client.update_tables(tables, lengths, **more))  # type: ignore[arg-type]


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).abs().max()) < CLOSE


def assert_differs(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).abs().max()) > 100 * CLOSE


# -- the longest requests


@pytest.mark.parametrize(("context", "row_tokens", "columns"), [(32768, 0, 257), (32752, 0, 256), (32752, 33_000, 258)])
def test_verify_at_the_end_of_the_longest_context(
    client: Client, ring: EventRing, cache: Cache, name: str, context: int, row_tokens: int, columns: int
) -> None:
    """16 draft tokens after the last token of the context: the 17 queries see the row's very last token."""
    draft = 16
    tables = client.create_tables(
        name, "long", max_batch=2, max_context_tokens=context, draft_tokens=draft, request_row_tokens=row_tokens
    )
    assert tables.columns == columns
    verify = CapturedAttention(cache, tables, rows=2, queries=draft + 1)
    random = np.random.default_rng(columns)
    pages = random.permutation(np.arange(1, 640))[: 2 * columns].reshape(2, columns)
    queries = torch.randn(2, draft + 1, HEADS, HEAD_DIM)
    rows = {0: pages[0], 1: pages[1]}
    for lengths in ([context, context - 1], [context - 127, 1], [PAGE - draft, PAGE - draft + 1], [context] * 2):
        update(client, tables, lengths, extra_tokens=draft, rows=rows, after=ring.record_event())
        rows = {}
        read = [length + draft for length in lengths]
        assert_close(verify.replay(queries), reference(cache, queries, pages.tolist(), read))
    too_long = columns * PAGE - draft + 1
    with pytest.raises(TableOverflowError) as raised:
        update(client, tables, [1, too_long], extra_tokens=draft, after=ring.record_event())
    for said in ("row 1", str(too_long), f"W = {columns}"):
        assert said in raised.value.detail
    read = [context + draft] * 2  # as they were
    assert_close(verify.replay(queries), reference(cache, queries, pages.tolist(), read))
    client.delete_tables(tables)


# -- batches


def test_batches_of_all_sizes_go_through_the_captured_ones(
    client: Client, ring: EventRing, small: Cache, name: str
) -> None:
    captured = (1, 2, 4, 8)
    tables = client.create_tables(name, "small", max_batch=8, max_context_tokens=40, captured=captured)
    graphs = {rows: CapturedAttention(small, tables, rows) for rows in captured}
    random = np.random.default_rng(0)
    for batch in (1, 3, 8, 0, 2, 5, 4, 0, 7):
        lengths = random.integers(1, 41, batch).tolist()
        pages = {row: random.permutation(np.arange(1, 64))[:5] for row in range(batch)}
        update(client, tables, lengths, rows=pages, after=ring.record_event())
        lengths_of_replay = tables.host_lengths().for_update()
        graph = graphs[len(lengths_of_replay)]
        assert lengths_of_replay == lengths + [0] * (len(lengths_of_replay) - batch)
        queries = torch.randn(batch, 1, HEADS, HEAD_DIM)
        found = graph.replay(queries)
        if batch:
            assert_close(found, reference(small, queries, [pages[row].tolist() for row in range(batch)], lengths))
    client.delete_tables(tables)


def test_a_row_grows_page_by_page(client: Client, ring: EventRing, small: Cache, name: str) -> None:
    tables = client.create_tables(name, "small", max_batch=2, max_context_tokens=40)
    graph = CapturedAttention(small, tables, 2)
    pages = [[17], [40, 2]]
    rows = {row: np.array(ids) for row, ids in enumerate(pages)}
    for step in range(20):
        lengths = [step + 1, step + 15]
        new = [(row, len(pages[row])) for row in range(2) if -(-lengths[row] // 8) > len(pages[row])]
        for row, column in new:
            pages[row].append(50 - 4 * column - row)
        entries = BlockTableEntries([row for row, _ in new], [at for _, at in new], [pages[row][at] for row, at in new])
        update(client, tables, lengths, entries=entries, rows=rows, after=ring.record_event())
        rows = {}
        queries = torch.randn(2, 1, HEADS, HEAD_DIM)
        assert_close(graph.replay(queries), reference(small, queries, pages, lengths))
    client.delete_tables(tables)


def test_a_multi_step_draft_reads_one_token_more_each_step(
    client: Client, ring: EventRing, small: Cache, name: str
) -> None:
    draft = 3
    tables = client.create_tables(name, "small", max_batch=2, max_context_tokens=37, draft_tokens=draft)
    graph = CapturedAttention(small, tables, 2)
    pages = [[5, 6, 7, 8, 9], [30, 20]]
    lengths = [37, 7]
    update(client, tables, lengths, extra_tokens=draft, rows=dict(enumerate(pages)), after=ring.record_event())
    for step in range(draft):
        queries = torch.randn(2, 1, HEADS, HEAD_DIM)
        read = [length + step + 1 for length in lengths]
        assert_close(graph.replay(queries, draft_step=step), reference(small, queries, pages, read))
    client.delete_tables(tables)


def test_lengths_that_the_graph_was_not_told_of_give_another_output(
    client: Client, ring: EventRing, small: Cache, name: str
) -> None:
    tables = client.create_tables(name, "small", max_batch=1, max_context_tokens=40)
    graph = CapturedAttention(small, tables, 1)
    queries = torch.randn(1, 1, HEADS, HEAD_DIM)
    pages = [[3, 1, 2]]
    update(client, tables, [9], rows={0: pages[0]}, after=ring.record_event())
    stale = tables.graph_inputs()
    assert_close(graph.replay(queries), reference(small, queries, pages, [9]))
    update(client, tables, [20], after=ring.record_event())
    graph.queries.copy_(queries)
    graph.start(inputs=stale)
    assert_differs(graph.out(1), reference(small, queries, pages, [20]))
    assert_close(graph.out(1), reference(small, queries, pages, [9]))
    assert_close(graph.replay(queries), reference(small, queries, pages, [20]))
    client.delete_tables(tables)


# -- hybrid windows


def test_the_window_layers_see_their_window_only(client: Client, ring: EventRing, device: str, name: str) -> None:
    """A row of 29 tokens loses the window pages that its window of 11 leaves, and they serve another row."""
    window, page_size = 11, 4
    spec = HybridSwaSpec(
        full_layers=(0,),
        window_layers=(1,),
        tokens=31 * page_size,
        window_tokens=9 * page_size,
        window=window,
        page_size=page_size,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
    )
    client.create_pool("hybrid", spec, device=device)
    pool = client.attach_pool("hybrid")
    full, local = Cache.random(pool), Cache.random(pool, seed=5, component="swa")
    tables = client.create_tables(name, "hybrid", max_batch=2, max_context_tokens=32, window=window)
    graph, window_graph = CapturedAttention(full, tables, 2), WindowedGraph(local, tables, 2, window)
    pages: list[list[int]] = [[], []]
    bound: dict[int, int] = {}  # the window page of each full page
    free_full, free_window = list(range(31, 0, -1)), list(range(1, 10))
    for step in range(29):
        lengths = [step + 1, max(0, step - 10)]
        entries, released, fresh = [], [], []
        for row, length in enumerate(lengths):
            first = max(length - window, 0) // page_size
            released += [page for page in pages[row][:first] if page in bound]
            free_window += [bound.pop(page) for page in pages[row][:first] if page in bound]
            if -(-length // page_size) > len(pages[row]):
                pages[row].append(free_full.pop())
                entries.append((row, len(pages[row]) - 1, pages[row][-1]))
                fresh.append(pages[row][-1])
                bound[fresh[-1]] = free_window.pop(0)
        three = BlockTableEntries(*map(list, zip(*entries, strict=True))) if entries else None
        to_bind = (fresh, [bound[page] for page in fresh])
        update(client, tables, lengths, entries=three, released=released, bound=to_bind, after=ring.record_event())
        queries = torch.randn(sum(length > 0 for length in lengths), 1, HEADS, HEAD_DIM)
        used = range(len(queries))
        found = graph.replay(queries)
        assert_close(found, reference(full, queries, [pages[row] for row in used], [lengths[row] for row in used]))
        seen = [(pages[row], lengths[row]) for row in used]
        assert_close(window_graph.replay(queries), window_reference(local, queries, seen, bound, window))
    client.delete_tables(tables)


# -- the order with replays


def test_an_update_does_not_overtake_the_replay_that_reads_the_tables(
    client: Client, ring: EventRing, small: Cache, name: str, simulator: Simulator
) -> None:
    tables = client.create_tables(name, "small", max_batch=2, max_context_tokens=40)
    graph = CapturedAttention(small, tables, 2)
    old, new = [[1, 2, 3], [4, 5, 6]], [[11, 12, 13, 14], [15]]
    queries = torch.randn(2, 1, HEADS, HEAD_DIM)
    update(client, tables, [20, 24], rows=dict(enumerate(old)), after=ring.record_event())
    graph.replay(queries)
    compute = torch.get_device_module("npu").current_stream().npu_stream
    with simulator.held(process=os.getpid(), stream=compute):
        graph.start()
        pending = client.update_tables(tables, [32, 3], rows=dict(enumerate(new)), after=ring.record_event())
        client.wait(pending)  # the copies have been given to the daemon's stream, where they wait
        assert tables.host_lengths().lengths == [32, 3]
    assert_close(graph.out(2), reference(small, queries, old, [20, 24]))
    assert_close(graph.replay(queries), reference(small, queries, new, [32, 3]))
    client.delete_tables(tables)


def test_a_replay_does_not_read_half_written_tables(
    client: Client, ring: EventRing, small: Cache, name: str, simulator: Simulator
) -> None:
    tables = client.create_tables(name, "small", max_batch=2, max_context_tokens=40)
    graph = CapturedAttention(small, tables, 2)
    queries = torch.randn(2, 1, HEADS, HEAD_DIM)
    update(client, tables, [1, 1], rows={0: [1], 1: [2]}, after=ring.record_event())
    graph.replay(queries)
    simulator.slow_copies(to_device_us=30_000)
    try:
        for step in range(3):
            pages = [[7 + step, 9 + step], [20 + step, 30 + step]]
            update(client, tables, [16, 9 + step], rows=dict(enumerate(pages)), after=ring.record_event())
            graph.start()  # before the copies have come
            assert_close(graph.out(2), reference(small, queries, pages, [16, 9 + step]))
    finally:
        simulator.slow_copies()
    client.delete_tables(tables)


def test_an_engine_runs_ahead_of_its_device(
    client: Client, ring: EventRing, small: Cache, name: str, simulator: Simulator
) -> None:
    """Steps are given to the device without a look at it; every one reads its own tables."""
    tables = client.create_tables(name, "small", max_batch=2, max_context_tokens=40)
    graph = CapturedAttention(small, tables, 2)
    queries = torch.randn(2, 1, HEADS, HEAD_DIM)
    graph.queries.copy_(queries)
    steps = [([[step + 1, step + 20], [step + 40]], [step + 9, step + 1]) for step in range(6)]
    outs = []
    simulator.slow_kernels(5_000)
    try:
        for pages, lengths in steps:
            update(client, tables, lengths, rows=dict(enumerate(pages)), after=ring.record_event())
            graph.start()
            outs.append(graph.clone())
    finally:
        simulator.slow_kernels(0)
    for (pages, lengths), out in zip(steps, outs, strict=True):
        assert_close(out.cpu(), reference(small, queries, pages, lengths))
    client.delete_tables(tables)


# -- and without it


READ, WRITE = "aclnnFusedInferAttentionScoreV3", "aclrtMemcpyAsync"


def test_an_update_that_waits_for_no_replay_is_a_race(
    client: Client,
    ring: EventRing,
    small: Cache,
    name: str,
    simulator: Simulator,
    planted_races: Callable[[], list[Race]],
) -> None:
    tables = client.create_tables(name, "small", max_batch=2, max_context_tokens=40)
    graph = CapturedAttention(small, tables, 2)
    old, new = [[1, 2, 3], [4, 5, 6]], [[11, 12, 13, 14], [15]]
    queries = torch.randn(2, 1, HEADS, HEAD_DIM)
    update(client, tables, [20, 24], rows=dict(enumerate(old)), after=ring.record_event())
    graph.replay(queries)
    assert planted_races() == []
    compute = torch.get_device_module("npu").current_stream().npu_stream
    with simulator.held(process=os.getpid(), stream=compute):
        graph.start()
        update(client, tables, [32, 3], rows=dict(enumerate(new)))
        update(client, tables, [32, 3])  # the copies of the one before have been made when this one's begin
    assert_differs(graph.out(2), reference(small, queries, old, [20, 24]))
    assert {frozenset((one.first.operation, one.second.operation)) for one in planted_races()} == {
        frozenset((READ, WRITE))
    }
    client.delete_tables(tables)


def test_a_replay_that_waits_for_no_update_is_a_race(
    client: Client,
    ring: EventRing,
    small: Cache,
    name: str,
    simulator: Simulator,
    planted_races: Callable[[], list[Race]],
) -> None:
    tables = client.create_tables(name, "small", max_batch=2, max_context_tokens=40)
    graph = CapturedAttention(small, tables, 2)
    pages = [[7, 9], [20, 30]]
    queries = torch.randn(2, 1, HEADS, HEAD_DIM)
    graph.queries.copy_(queries)
    update(client, tables, [16, 9], rows={0: [1, 2], 1: [3, 4]}, after=ring.record_event())
    graph.start()
    graph.out(2)
    assert planted_races() == []
    simulator.slow_copies(to_device_us=300_000)
    try:
        update(client, tables, [16, 9], rows=dict(enumerate(pages)), after=ring.record_event())
        graph.start(ordered=False)
        torch.accelerator.current_stream().synchronize()
    finally:
        simulator.slow_copies()
    assert_differs(graph.out(2), reference(small, queries, pages, [16, 9]))
    tables.order()
    torch.accelerator.synchronize()
    assert {frozenset((one.first.operation, one.second.operation)) for one in planted_races()} == {
        frozenset((READ, WRITE))
    }
    client.delete_tables(tables)
