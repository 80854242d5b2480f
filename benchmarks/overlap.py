"""What a transfer leaves to do once prefill has ended: layer by layer while it computes, against whole at its end.

Prefill is simulated: a timer a layer, as long as a device that prefills ``PREFILL_TOKENS_A_SECOND`` would take, which
leaves this machine's cores to the daemon, as a device's compute does. The pages are full from the beginning; what is
timed is from the end of the last layer to FINISHED at decode, whose transfer waits already. The model has the layers of
SmolLM2-135M in fp32: 45 KiB a token, so that prefill fills 0.47 GB/s. Every byte is compared at the destination.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

import numpy as np

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, compare
from benchmarks.processes import running_daemon
from kvferry.clients import AttachedPool, Client, EventRing, MhaSpec, Transfer, new_request_id, pages
from kvferry.protocol.codec import PageIds

PREFILL_TOKENS_A_SECOND = 10_000
PAGE_SIZE = 128
LAYERS = 30
TOKENS = (256, 2048, 8192)
ROLES = ("k", "v")
TIMEOUT_S = 60.0


class Side(NamedTuple):
    """One engine: its client, its pool and the pages that it sends or fills."""

    client: Client
    pool: AttachedPool
    ids: PageIds


def measure(effort: Effort) -> list[Row]:
    """Measure prompts of 256, 2048 and 8192 tokens; quickly, the shortest."""
    with (
        running_daemon() as runtime_dir,
        Client.connect(runtime_dir, name="prefill") as prefill,
        Client.connect(runtime_dir, name="decode") as decode,
        prefill.open_events() as ring,
    ):
        return [
            _row(tokens, Transfers(prefill, decode, ring, tokens), effort)
            for tokens in TOKENS[: effort.pick(len(TOKENS), 1)]
        ]


class Transfers:
    """Transfers of one length of prompt. Both ways return the milliseconds left after prefill's end."""

    def __init__(self, prefill: Client, decode: Client, ring: EventRing, tokens: int) -> None:
        self._ring = ring
        self._layer_s = tokens / PREFILL_TOKENS_A_SECOND / LAYERS
        self._source = _side(prefill, f"prefill-{tokens}", tokens)
        self._destination = _side(decode, f"decode-{tokens}", tokens)
        for seed, role in enumerate(ROLES):
            view = self._source.pool.tensor("main", role).numpy()
            view[:] = np.random.default_rng(seed).random(view.shape, np.float32)

    def whole_ms(self) -> float:
        """Send all at once after prefill."""
        request_id, received = self._receive()
        self._prefill()
        ended_at = time.perf_counter()
        sent = self._source.client.send(self._source.pool.name, request_id, [pages(self._source.ids)])
        return self._end(sent, received, ended_at)

    def by_layers_ms(self) -> float:
        """Send before prefill, each layer as it is ready."""
        request_id, received = self._receive()
        steps = [self._ring.step(layer, 1) for layer in range(LAYERS)]
        sent = self._source.client.send(self._source.pool.name, request_id, [pages(self._source.ids)], steps=steps)
        while sent.accepted is None:
            assert self._source.client.poll(TIMEOUT_S), "no reply to SEND"
        ended_at = self._prefill(after_layer=lambda layer: self._ring.record(steps[layer]))
        return self._end(sent, received, ended_at)

    def _receive(self) -> tuple[str, Transfer]:
        """Empty the destination's pages and make a transfer for them."""
        client, pool, ids = self._destination
        for role in ROLES:
            pool.tensor("main", role).numpy()[:] = 0
        request_id = new_request_id()
        received = client.receive(pool.name, request_id, [pages(ids)])
        while received.accepted is None:
            assert client.poll(TIMEOUT_S), "no reply to RECEIVE"
        return request_id, received

    def _prefill(self, after_layer: Callable[[int], None] = lambda _: None) -> float:
        """Wait for each layer's time to pass; return when the last one has ended."""
        ends_at = ended_at = time.perf_counter()
        for layer in range(LAYERS):
            ends_at += self._layer_s
            time.sleep(max(0.0, ends_at - time.perf_counter()))
            ended_at = time.perf_counter()
            after_layer(layer)
        return ended_at

    def _end(self, sent: Transfer, received: Transfer, ended_at: float) -> float:
        self._destination.client.wait_finished(received, TIMEOUT_S)
        left_ms = (time.perf_counter() - ended_at) * 1e3
        self._source.client.wait_settled(sent, TIMEOUT_S)
        self._destination.client.wait_settled(received, TIMEOUT_S)
        for role in ROLES:
            source, destination = (side.pool.tensor("main", role).numpy() for side in (self._source, self._destination))
            for layer in range(LAYERS):
                came = destination[layer, self._destination.ids]
                assert np.array_equal(came, source[layer, self._source.ids]), f"{role} of layer {layer} differs"
        return left_ms

    def close(self) -> None:
        """Free both pools' memory."""
        for client, pool, ids in (self._source, self._destination):
            client.free(pool.name, ids)
            pool.close()
            client.delete_pool(pool.name)


def _side(client: Client, name: str, tokens: int) -> Side:
    count = tokens // PAGE_SIZE
    model = MhaSpec(
        layers=LAYERS,
        tokens=(count + count // 2) * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=3,
        head_dim=64,
        dtype="float32",
    )
    pool = client.create_pool(name, model)
    ids = client.allocate(name, count)
    return Side(client, pool, np.random.default_rng(len(name)).permutation(ids))


def _row(tokens: int, transfers: Transfers, effort: Effort) -> Row:
    with closing(transfers):
        return compare(
            f"overlap/{tokens}_tokens",
            MILLISECONDS,
            ours=transfers.by_layers_ms,
            peer=transfers.whole_ms,
            peer_is="the same transfer, sent whole when prefill has ended",
            rounds=effort.pick(9, 1),
            target=Target(0.5),
            note=f"{tokens / PREFILL_TOKENS_A_SECOND * 1e3:.0f} ms of prefill in {LAYERS} layers; the rest after it",
        )
