"""A whole transfer through a real daemon: from ``send`` at prefill to FINISHED at decode, which waits already."""

from __future__ import annotations

from benchmarks.measure import MICROSECONDS, MILLISECONDS, SETTLE, Effort, Row, Target, compare, memcpy, milliseconds
from benchmarks.pools import PAGE_SIZE, Pair
from benchmarks.processes import two_engines
from kvferry.clients import MhaSpec

TOKENS = 1000


def measure(effort: Effort) -> list[Row]:
    """Measure 1000 tokens of SmolLM2-135M, and one page of a tiny model."""
    rounds = effort.pick(15, 2)
    smollm2 = spec(TOKENS, layers=effort.pick(30, 2), kv_heads=3, head_dim=64)
    with two_engines() as engines:
        with Pair(engines, smollm2) as full:
            big = compare(
                "transfer/smollm2_1000_tokens",
                MILLISECONDS,
                ours=lambda: full.transfer_s() * 1e3,
                peer=milliseconds(memcpy(full.size_bytes)),
                peer_is="one memcpy of as many bytes",
                rounds=rounds,
                settle=effort.pick(SETTLE, 1),
                target=Target(1.0),
                note=f"{full.size_bytes / 1e6:.1f} MB in {full.count} random pages of {smollm2.layers * 2} entries",
            )
            full.check()
        with Pair(engines, spec(1, layers=1, kv_heads=1, head_dim=16)) as tiny:
            small = compare(
                "transfer/one_small_page",
                MICROSECONDS,
                ours=lambda: tiny.transfer_s() * 1e6,
                peer=lambda: engines[0].ping() * 1e6,
                peer_is="one PING from the same client",
                rounds=rounds * 10,
                target=Target(3.0),
                note=f"{tiny.size_bytes} bytes: what remains is messages and thread switches",
            )
            tiny.check()
    return [big, small]


def spec(tokens: int, layers: int, kv_heads: int, head_dim: int) -> MhaSpec:
    """Return the spec of so many tokens in fp32 in whole pages of 128."""
    whole = -(-tokens // PAGE_SIZE) * PAGE_SIZE
    return MhaSpec(
        layers=layers, tokens=whole, page_size=PAGE_SIZE, kv_heads=kv_heads, head_dim=head_dim, dtype="float32"
    )
