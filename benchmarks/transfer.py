"""A whole transfer through a real daemon: from ``send`` at prefill to FINISHED at decode, which waits already."""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.measure import MICROSECONDS, MILLISECONDS, Effort, Row, compare, milliseconds
from benchmarks.processes import running_daemon
from kvferry.clients import Client, MhaSpec, Transfer, new_request_id, pages
from kvferry.protocol.codec import PageIds

PAGE_SIZE = 128
POOL_TOKENS = 32 * PAGE_SIZE
TOKENS = 1000
TIMEOUT_S = 60.0


class Side(NamedTuple):
    """One engine: its client, its pool's name and the pages that it sends or fills."""

    client: Client
    pool: str
    ids: PageIds


def measure(effort: Effort) -> list[Row]:
    """Measure 1000 tokens of SmolLM2-135M, and one page of a tiny model."""
    rounds = effort.pick(15, 2)
    smollm2 = spec(layers=effort.pick(30, 2), kv_heads=3, head_dim=64)
    tiny = spec(layers=1, kv_heads=1, head_dim=16)
    with (
        running_daemon() as runtime_dir,
        Client.connect(runtime_dir, name="prefill") as prefill,
        Client.connect(runtime_dir, name="decode") as decode,
    ):
        full = [
            prepare(client, f"smollm2-{client_name}", smollm2, TOKENS)
            for client_name, client in _named(prefill, decode)
        ]
        small = [
            prepare(client, f"tiny-{client_name}", tiny, PAGE_SIZE) for client_name, client in _named(prefill, decode)
        ]
        size_bytes = moved_bytes(*full)
        source, destination = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
        return [
            compare(
                "transfer/smollm2_1000_tokens",
                MILLISECONDS,
                ours=lambda: transfer_s(*full) * 1e3,
                peer=milliseconds(partial(np.copyto, destination, source)),
                peer_is="one memcpy of as many bytes",
                rounds=rounds,
                note=f"{size_bytes / 1e6:.1f} MB in {len(full[0].ids)} random pages of {smollm2.layers * 2} entries",
            ),
            compare(
                "transfer/one_small_page",
                MICROSECONDS,
                ours=lambda: transfer_s(*small) * 1e6,
                peer=lambda: prefill.ping() * 1e6,
                peer_is="one PING from the same client",
                rounds=rounds * 10,
                note=f"{moved_bytes(*small)} bytes: what remains is messages and thread switches",
            ),
        ]


def spec(layers: int, kv_heads: int, head_dim: int) -> MhaSpec:
    """Return a pool's spec: fp32, 32 pages of 128 tokens."""
    return MhaSpec(
        layers=layers, tokens=POOL_TOKENS, page_size=PAGE_SIZE, kv_heads=kv_heads, head_dim=head_dim, dtype="float32"
    )


def prepare(client: Client, pool: str, pool_spec: MhaSpec, tokens: int) -> Side:
    """Create a pool and take shuffled pages for so many tokens."""
    client.create_pool(pool, pool_spec).close()
    taken = client.allocate(pool, POOL_TOKENS // PAGE_SIZE)
    count = -(-tokens // PAGE_SIZE)
    return Side(client, pool, np.random.default_rng(len(pool)).permutation(taken)[:count])


def transfer_s(prefill: Side, decode: Side) -> float:
    """Return the seconds from ``send`` to the receiver's FINISHED."""
    request_id = new_request_id()
    received = decode.client.receive(decode.pool, request_id, [pages(decode.ids)])
    while received.accepted is None:
        assert decode.client.poll(TIMEOUT_S), "no reply to RECEIVE"
    started = time.perf_counter()
    sent = prefill.client.send(prefill.pool, request_id, [pages(prefill.ids)])
    decode.client.wait_finished(received, TIMEOUT_S)
    elapsed_s = time.perf_counter() - started
    _settle(prefill, sent)
    _settle(decode, received)
    return elapsed_s


def moved_bytes(prefill: Side, decode: Side) -> int:
    """Return the bytes of one transfer, by the daemon's word."""
    request_id = new_request_id()
    received = decode.client.receive(decode.pool, request_id, [pages(decode.ids)])
    sent = prefill.client.send(prefill.pool, request_id, [pages(prefill.ids)])
    moved = decode.client.wait_finished(received, TIMEOUT_S).moved_bytes
    _settle(prefill, sent)
    _settle(decode, received)
    return moved


def _settle(side: Side, transfer: Transfer) -> None:
    side.client.wait_settled(transfer, TIMEOUT_S)


def _named(prefill: Client, decode: Client) -> list[tuple[str, Client]]:
    return [("prefill", prefill), ("decode", decode)]
