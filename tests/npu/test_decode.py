"""Prefill of one engine, a transfer through the daemon, and graph-mode decode of another, all on a device.

The tokens are those of a plain model that computes every sequence anew on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from kvferry.clients import AttachedPool, BlockTableEntries, Client, EventRing, Tables, new_request_id, pages
from kvferry.daemon.daemon import Tuning
from tests.npu.tiny_model import (
    CONTEXT,
    LAYERS,
    PAGE_SIZE,
    VOCABULARY,
    DecodeGraph,
    Model,
    model,
    prefill,
    reference,
    spec,
)

SEED = 11
POOL = "decode"
CLOSE = 1e-4

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


class PrefillEngine:
    """Computes prompts in a pool of its own: full pages go layer by layer, the last one with the first token."""

    def __init__(self, client: Client, weights: Model, device: str) -> None:
        self._client = client
        self._pool = client.create_pool("prefill", spec(pages=63), device=device)
        self._ring: EventRing = client.open_events(device)
        self._weights = weights

    def send(self, request_id: str, prompt: list[int]) -> int:
        """Compute a prompt and send it; return the first token."""
        ids = self._client.allocate("prefill", -(-len(prompt) // PAGE_SIZE))
        slots = (ids[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()[: len(prompt)]
        early = (len(prompt) - 1) // PAGE_SIZE  # pages that the first message sends, before they are written
        steps = [self._ring.step(layer, 1) for layer in range(LAYERS)]
        if early:
            first = pages(ids[:early], first_page=0, tokens=early * PAGE_SIZE)
            self._client.send("prefill", request_id, [first], steps=steps, last=False)
        on_device = torch.from_numpy(slots).to(self._pool.tensor("main", "k").device)
        logits = prefill(self._weights, self._pool, prompt, on_device, lambda layer: self._ring.record(steps[layer]))
        first_token = int(logits.cpu().argmax())
        rest = pages(ids[early:], first_page=early, tokens=len(prompt) - early * PAGE_SIZE)
        self._client.wait_settled(self._client.send("prefill", request_id, [rest], first_token=first_token))
        self._client.free("prefill", ids)
        return first_token


LENGTHS = ((13, 9), (4, 5), (1, 12), (30, 7), (8, 3), (21, 12))
"""Of prompts, and tokens to make: one token and more, shorter than a page, ending in a page or at its end."""


def test_tokens_are_those_of_a_plain_model(client: Client, other: Client, device: str) -> None:
    random = np.random.default_rng(2)
    requests = [Request(random.integers(0, VOCABULARY, length).tolist(), tokens) for length, tokens in LENGTHS]
    on_host, pool = model(SEED), client.attach_pool(POOL)
    on_device = on_host.to(device)
    prefill_engine = PrefillEngine(other, on_device, device)
    for role in ("k", "v"):
        pool.tensor("main", role).fill_(7.0)  # what was there before must not be seen
    torch.accelerator.synchronize()
    rows = []
    for request in requests:  # their pages are not in order, nor those of the prefill engine
        ids = client.allocate(POOL, -(-len(request.prompt) // PAGE_SIZE))[::-1].copy()
        request_id = new_request_id()
        transfer = client.receive(POOL, request_id, [pages(ids, tokens=len(request.prompt))])
        first_token = prefill_engine.send(request_id, request.prompt)
        assert client.wait_finished(transfer).first_token == first_token
        client.wait_settled(transfer)
        rows.append(Row(request, ids.tolist(), first_token))
    engine = DecodeEngine(client, pool, on_device, device)
    addresses = engine.tables.block_tables.data_ptr(), engine.tables.seq_lens.data_ptr()
    engine.run(list(rows))
    assert (engine.tables.block_tables.data_ptr(), engine.tables.seq_lens.data_ptr()) == addresses
    assert {6, 4, 2} <= set(engine.replayed)
    for row in rows:
        tokens = list(row.request.prompt)
        for step, made in enumerate(row.made):
            logits = reference(on_host, tokens)
            best, second = logits.topk(2).values.tolist()
            assert best - second > 10 * CLOSE, "the model's seed gives a tie: take another"
            assert made == int(logits.argmax())
            if step:
                assert float((row.logits[step - 1] - logits).abs().max()) < CLOSE
            tokens.append(made)
