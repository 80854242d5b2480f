"""A whole transfer through a real daemon: from ``send`` at prefill to FINISHED at decode, which waits already."""

from __future__ import annotations

from benchmarks.bare_copies import TRANSFER_THREADS, limit_of, transfer_of
from benchmarks.contention import running_load
from benchmarks.measure import MICROSECONDS, MILLISECONDS, SETTLE, Effort, Row, Target, compare, memcpy, milliseconds
from benchmarks.pools import MIB, PAGE_SIZE, Pair
from benchmarks.processes import running_daemon
from kvferry.clients import Client, MhaSpec

TOKENS = 1000
LOAD_MIB = 64
ONE_PAGE_TARGETS = {"": 3.0, "/with_other_work": 4.0}


def measure(effort: Effort) -> list[Row]:
    """Measure 1000 tokens of SmolLM2-135M, and one page of a tiny model, idle and beside an offloading engine."""
    rounds, load_bytes = effort.pick(15, 2), effort.pick(LOAD_MIB, 8) * MIB
    smollm2 = spec(TOKENS, layers=effort.pick(30, 2), kv_heads=3, head_dim=64)
    with (
        running_daemon(f"[tiers]\nhost_bytes = {2 * load_bytes}\n") as runtime_dir,
        Client.connect(runtime_dir, name="prefill") as prefill,
        Client.connect(runtime_dir, name="decode") as decode,
    ):
        with Pair((prefill, decode), smollm2) as full:
            big = compare(
                "transfer/smollm2_1000_tokens",
                MILLISECONDS,
                ours=lambda: full.transfer_s() * 1e3,
                peer=milliseconds(memcpy(full.size_bytes)),
                peer_is="one memcpy of as many bytes",
                rounds=rounds,
                settle=effort.pick(SETTLE, 1),
                target=Target(1.0),
                limit=limit_of(transfer_of(full), TRANSFER_THREADS, milliseconds, asked_by=prefill),
                note=f"{full.size_bytes / 1e6:.1f} MB in {full.count} random pages of {smollm2.layers * 2} entries",
            )
            full.check()
        rows = [big]
        with Pair((prefill, decode), spec(1, layers=1, kv_heads=1, head_dim=16)) as tiny:
            rows.append(_one_page(tiny, "", rounds * 10))
            with running_load(runtime_dir, load_bytes) as load, load.on():
                rows.append(_one_page(tiny, "/with_other_work", rounds * 10))
    return rows


def _one_page(tiny: Pair, work: str, rounds: int) -> Row:
    row = compare(
        f"transfer/one_small_page{work}",
        MICROSECONDS,
        ours=lambda: tiny.transfer_s() * 1e6,
        peer=lambda: tiny.source.client.ping() * 1e6,
        peer_is="one PING from the same client" + (", under the same load" if work else ""),
        rounds=rounds,
        target=Target(ONE_PAGE_TARGETS[work]),
        note=f"{tiny.size_bytes} bytes: what remains is messages and thread switches"
        + (f"; another engine offloads and restores {LOAD_MIB} MiB without a pause" if work else ""),
    )
    tiny.check()
    return row


def spec(tokens: int, layers: int, kv_heads: int, head_dim: int) -> MhaSpec:
    """Return the spec of so many tokens in fp32 in whole pages of 128."""
    whole = -(-tokens // PAGE_SIZE) * PAGE_SIZE
    return MhaSpec(
        layers=layers, tokens=whole, page_size=PAGE_SIZE, kv_heads=kv_heads, head_dim=head_dim, dtype="float32"
    )
