"""Retraction with graph-mode decode: a request leaves the device, another uses its pages, it goes on in others.

One captured graph decodes all the while, over graph tables whose addresses never change. The tokens are those of the
run in which nobody had to go, and of a plain model on the host.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

import numpy as np
import pytest
import torch

from kvferry.clients import AttachedPool, Client, EventRing, Tables, pages
from kvferry.clients.core.followed import TierOperation
from kvferry.clients.slots import pages_from_slots, slots_from_pages
from kvferry.protocol.errors import DeadlineError
from tests.cann_simulator.simulator import Simulator
from tests.npu.tiny_model import CONTEXT, PAGE_SIZE, VOCABULARY, DecodeGraph, Model, model, prefill, reference, spec

SEED: Final = 11
POOL: Final = "engine"
TOKENS: Final = 14
TURN: Final = 6  # tokens before the first request has to go: inside a page
CLOSE: Final = 1e-4
CONFIG: Final = f"[tiers]\nhost_bytes = {1 << 20}\n"
POOLS: Final = {POOL: spec(pages=13)}


class Row(NamedTuple):
    """One request: its prompt, where its tokens lie, and what it has made."""

    prompt: list[int]
    slots: list[int]
    made: list[int]

    @property
    def length(self) -> int:
        """Tokens of the sequence, with the last one that was made."""
        return len(self.prompt) + len(self.made)

    @property
    def pages(self) -> list[int]:
        """The pages of the tokens whose keys and values are there."""
        ids: list[int] = pages_from_slots(self.slots, PAGE_SIZE).tolist()
        return ids


class Engine:
    """Decodes rows of up to two requests with one graph, and knows where each token is, as SGLang does."""

    def __init__(self, client: Client, pool: AttachedPool, weights: Model, device: str) -> None:
        self.client = client
        self.ring: EventRing = client.open_events(device)
        self.tables: Tables = client.create_tables(
            "decode", POOL, max_batch=2, max_context_tokens=CONTEXT, captured=(2,)
        )
        self._pool = pool
        self._weights = weights
        self._graph = DecodeGraph(weights, pool, self.tables, 2)
        self._device = device

    def start(self, prompt: list[int]) -> Row:
        """Compute a prompt in fresh pages."""
        ids = self.client.allocate(POOL, -(-len(prompt) // PAGE_SIZE))[::-1]
        slots = slots_from_pages(ids, PAGE_SIZE, len(prompt))
        on_device = torch.from_numpy(slots).to(self._device)
        logits = prefill(self._weights, self._pool, prompt, on_device, lambda _layer: None)
        return Row(prompt, slots.tolist(), [int(logits.cpu().argmax())])

    def decode(self, rows: list[Row], tokens: int) -> None:
        """Give each row so many tokens more, one of each at a time."""
        for _ in range(tokens):
            self.prepare(rows)
            self.start_replay()
            self.collect(rows)

    def prepare(self, rows: list[Row]) -> None:
        """Give each row a place for its next token, and tell the tables."""
        for row in rows:
            self._grow(row)
        whole = {at: np.array(row.pages) for at, row in enumerate(rows)}
        lengths = [row.length for row in rows]
        self.client.wait(self.client.update_tables(self.tables, lengths, rows=whole, after=self.ring.record_event()))
        self._graph.tokens[: len(rows)].copy_(torch.tensor([row.made[-1] for row in rows]))

    def start_replay(self) -> None:
        """Have the device compute the next tokens; returns before it has."""
        self._graph.start()

    def collect(self, rows: list[Row]) -> None:
        """Wait for the tokens and take them."""
        for row, logits in zip(rows, self._graph.logits[: len(rows)].cpu(), strict=True):
            row.made.append(int(logits.argmax()))

    def retract(self, row: Row) -> TierOperation:
        """Have a row's pages copied to the host tier, after the last replay, and given up."""
        lists = [pages(row.pages, tokens=len(row.slots))]
        return self.client.offload(POOL, lists, release=True, after=self.ring.record_event())

    def restore(self, row: Row, operation: TierOperation) -> None:
        """Bring a row back into pages that the daemon takes."""
        back = self.client.restore(POOL, operation.snapshot, drop=True, after=self.ring.record_event())
        self.client.wait_done(back)
        row.slots[:] = slots_from_pages(back.pages["main"], PAGE_SIZE, len(row.slots)).tolist()

    def _grow(self, row: Row) -> None:
        """Find a slot for the token that comes next: after the last one, or in a new page."""
        if len(row.slots) % PAGE_SIZE:
            row.slots.append(row.slots[-1] + 1)
        else:
            row.slots.append(int(self.client.allocate(POOL, 1)[0]) * PAGE_SIZE)


def test_a_retracted_requests_tokens_are_those_of_the_undisturbed_run(
    client: Client, device: str, simulator: Simulator
) -> None:
    on_host = model(SEED)
    pool = client.attach_pool(POOL)
    for role in ("k", "v"):
        pool.tensor("main", role).fill_(7.0)  # what was there before must not be seen
    torch.accelerator.synchronize()
    engine = Engine(client, pool, on_host.to(device), device)
    addresses = engine.tables.block_tables.data_ptr(), engine.tables.seq_lens.data_ptr()
    random = np.random.default_rng(5)
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in (9, 23)]
    undisturbed = [alone(engine, prompt) for prompt in prompts]

    first = engine.start(prompts[0])
    others = client.allocate(POOL, 6)  # of the others, the second request will have too few
    engine.decode([first], TURN - 1)
    engine.prepare([first])
    compute = torch.get_device_module("npu").current_stream().npu_stream
    with simulator.held(process=os.getpid(), stream=compute):
        engine.start_replay()
        operation = engine.retract(first)
        with pytest.raises(DeadlineError):  # its last key and value are not there yet
            client.wait_done(operation, timeout_s=0.2)
    engine.collect([first])
    was_in = first.pages
    assert len(first.slots) % PAGE_SIZE, "it goes inside a page"
    client.wait_done(operation)
    second = engine.start(prompts[1])
    assert len(set(second.pages) & set(was_in)) >= 3
    engine.decode([second], 1)
    client.free(POOL, others)
    engine.restore(first, operation)
    assert len(set(first.pages) & set(was_in)) <= 1
    engine.decode([second, first], 3)
    client.free(POOL, second.pages, after=engine.ring.record_event())
    engine.decode([first], 1 + TOKENS - len(first.made))

    assert first.made == undisturbed[0]
    assert second.made == undisturbed[1][:5]
    for prompt, made in zip(prompts, undisturbed, strict=True):
        assert_as_plain(on_host, prompt, made)
    assert (engine.tables.block_tables.data_ptr(), engine.tables.seq_lens.data_ptr()) == addresses
    assert client.snapshots() == ()


def alone(engine: Engine, prompt: list[int]) -> list[int]:
    """Return the tokens of a request that nobody disturbs."""
    row = engine.start(prompt)
    engine.decode([row], TOKENS)
    engine.client.free(POOL, row.pages, after=engine.ring.record_event())
    return row.made


def assert_as_plain(on_host: Model, prompt: list[int], made: list[int]) -> None:
    """Check tokens against a model that computes every sequence anew."""
    tokens = list(prompt)
    for token in made:
        logits = reference(on_host, tokens)
        best, second = logits.topk(2).values.tolist()
        assert best - second > 10 * CLOSE, "the model's seed gives a tie: take another"
        assert token == int(logits.argmax())
        tokens.append(token)
