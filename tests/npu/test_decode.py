"""Prefill in one process, a transfer through the daemon, and graph-mode decode in another, all on a device.

The tokens are those of a plain model that computes every sequence anew on the host.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kvferry.clients import AttachedPool, BlockTableEntries, Client, EventRing, Tables, new_request_id, pages
from kvferry.daemon.daemon import Tuning
from tests.kit.daemons import Daemon
from tests.kit.started import Started, started
from tests.npu import prefill_engine
from tests.npu.tiny_model import CONTEXT, PAGE_SIZE, VOCABULARY, DecodeGraph, Model, model, reference, spec

SEED = 11
POOL = "decode"
PREFILL_S = 120.0
CLOSE = 1e-4
REPOSITORY = Path(__file__).resolve().parents[2]

TUNING = Tuning(whole_below_bytes=0)  # layer by layer
POOLS = {POOL: spec(pages=63)}


class Request(NamedTuple):
    """A prompt, and how many tokens to make of it."""

    prompt: list[int]
    tokens: int


class Row:
    """One request in the decode engine: its pages, its tokens so far, and the logits they came from."""

    def __init__(self, request: Request, ids: list[int], first_token: int) -> None:
        self.request = request
        self.pages = ids
        self.made = [first_token]
        self.logits: list[torch.Tensor] = []

    @property
    def length(self) -> int:
        """Tokens of the sequence, with the last one that was made."""
        return len(self.request.prompt) + len(self.made)


class DecodeEngine:
    """Decodes a batch of requests, whose rows close up when one of them ends."""

    def __init__(self, client: Client, pool: AttachedPool, weights: Model, device: str) -> None:
        self._client = client
        captured = (1, 2, 4, 6)
        self.tables: Tables = client.create_tables(
            "decode", POOL, max_batch=6, max_context_tokens=CONTEXT, captured=captured
        )
        self._ring: EventRing = client.open_events(device)
        self._graphs: Mapping[int, DecodeGraph] = {
            rows: DecodeGraph(weights, pool, self.tables, rows) for rows in captured
        }
        self.replayed: list[int] = []

    def run(self, rows: list[Row]) -> None:
        """Decode until every request has its tokens."""
        moved = dict(enumerate(rows))
        while rows:
            lengths = [row.length for row in rows]
            entries = self._grow(rows, moved)
            whole = {at: np.array(row.pages) for at, row in moved.items()}
            update = self._client.update_tables(
                self.tables, lengths, entries=entries, rows=whole, after=self._ring.record_event()
            )
            tokens = torch.tensor([row.made[-1] for row in rows])  # the engine's own work, beside the update
            graph = self._graphs[self._client.wait(update).replayed_rows]
            graph.tokens[: len(rows)].copy_(tokens)
            graph.start()
            self.replayed.append(graph.rows)
            for row, logits in zip(rows, graph.logits[: len(rows)].cpu(), strict=True):
                row.logits.append(logits)
                row.made.append(int(logits.argmax()))
            moved = self._close_up(rows)

    def _grow(self, rows: list[Row], moved: Mapping[int, Row]) -> BlockTableEntries:
        """Give a page to each row that needs one; return those of rows that are not sent as a whole."""
        entries = []
        for at, row in enumerate(rows):
            if row.length > len(row.pages) * PAGE_SIZE:
                [page] = self._client.allocate(POOL, 1).tolist()
                row.pages.append(page)
                if at not in moved:
                    entries.append((at, len(row.pages) - 1, page))
        return BlockTableEntries(*([one[field] for one in entries] for field in range(3)))

    def _close_up(self, rows: list[Row]) -> dict[int, Row]:
        """Take out rows that are done, let the last ones take their places, and return the rows that moved."""
        moved: dict[int, Row] = {}
        at = 0
        while at < len(rows):
            if len(rows[at].made) < rows[at].request.tokens:
                at += 1
                continue
            self._client.free(POOL, rows[at].pages, after=self._ring.record_event())
            last = rows.pop()
            moved.pop(len(rows), None)
            if at < len(rows):
                rows[at] = moved[at] = last
        return moved


@contextlib.contextmanager
def prefill_process(runtime_dir: Path, device: str) -> Iterator[Started]:
    """Run a prefill engine; it ends when its input does."""
    with started(["-m", prefill_engine.__name__, os.fspath(runtime_dir), device, str(SEED)]) as process:
        try:
            assert _line(process) == "ready"
            yield process
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(PREFILL_S) == 0
        finally:
            process.kill()


def _line(process: Started) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("Warning:"):  # torch_npu's, without CANN's own environment
            return line.strip()
    raise AssertionError(f"prefill has ended with status {process.wait()}")


@pytest.fixture
def requests() -> list[Request]:
    """Return prompts of one token and more, shorter than a page, ending in a page or at its end."""
    random = np.random.default_rng(2)
    wanted = ((13, 9), (4, 5), (1, 12), (30, 7), (8, 3), (21, 12))
    return [Request(random.integers(0, VOCABULARY, length).tolist(), tokens) for length, tokens in wanted]


def test_tokens_are_those_of_a_plain_model(
    daemon: Daemon, client: Client, device: str, requests: list[Request]
) -> None:
    on_host, pool = model(SEED), client.attach_pool(POOL)
    with prefill_process(daemon.runtime_dir, device) as prefill:
        for role in ("k", "v"):
            pool.tensor("main", role).fill_(7.0)  # what was there before must not be seen
        torch.accelerator.synchronize()
        rows = [_received(client, prefill, request) for request in requests]
        engine = DecodeEngine(client, pool, on_host.to(device), device)
        addresses = engine.tables.block_tables.data_ptr(), engine.tables.seq_lens.data_ptr()
        engine.run(list(rows))
        assert (engine.tables.block_tables.data_ptr(), engine.tables.seq_lens.data_ptr()) == addresses
        assert {6, 4, 2} <= set(engine.replayed)
    for row in rows:
        _assert_as_plain(on_host, row)


def _received(client: Client, prefill: Started, request: Request) -> Row:
    """Return a request whose prompt is in this engine's pages, which are not in order nor prefill's."""
    ids = client.allocate(POOL, -(-len(request.prompt) // PAGE_SIZE))[::-1].copy()
    request_id = new_request_id()
    transfer = client.receive(POOL, request_id, [pages(ids, tokens=len(request.prompt))])
    assert prefill.stdin is not None
    print(json.dumps([request_id, request.prompt]), file=prefill.stdin, flush=True)
    finished = client.wait_finished(transfer)
    assert finished.first_token is not None
    assert int(_line(prefill)) == finished.first_token
    client.wait_settled(transfer)
    return Row(request, ids.tolist(), finished.first_token)


def _assert_as_plain(on_host: Model, row: Row) -> None:
    tokens = list(row.request.prompt)
    for step, made in enumerate(row.made):
        logits = reference(on_host, tokens)
        best, second = logits.topk(2).values.tolist()
        assert best - second > 10 * CLOSE, "the model's seed gives a tie: take another"
        assert made == int(logits.argmax())
        if step:
            assert float((row.logits[step - 1] - logits).abs().max()) < CLOSE
        tokens.append(made)
