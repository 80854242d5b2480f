"""What a transfer leaves to do once prefill has ended: layer by layer while it computes, against whole at its end.

Prefill is simulated: a timer a layer, as long as a device that prefills ``PREFILL_TOKENS_A_SECOND`` would take, which
leaves this machine's cores to the daemon, as a device's compute does. The pages are full from the beginning; what is
timed is from the end of the last layer to FINISHED at decode, whose transfer waits already. The model has the layers of
SmolLM2-135M in fp32: 45 KiB a token, so that prefill fills 0.47 GB/s. Every byte is compared at the destination.
"""

from __future__ import annotations

import time
from functools import partial

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, compare
from benchmarks.pools import TIMEOUT_S, Pair, receive
from benchmarks.processes import two_engines
from benchmarks.transfer import spec
from kvferry.clients import EventRing, pages

PREFILL_TOKENS_A_SECOND = 10_000
LAYERS = 30
TOKENS = (256, 2048, 8192)


def measure(effort: Effort) -> list[Row]:
    """Measure prompts of 256, 2048 and 8192 tokens; quickly, the shortest."""
    with two_engines() as engines, engines[0].open_events() as ring:
        rows = []
        for tokens in TOKENS[: effort.pick(len(TOKENS), 1)]:
            with Pair(engines, spec(tokens, layers=LAYERS, kv_heads=3, head_dim=64)) as pair:
                rows.append(_row(tokens, pair, ring, effort))
        return rows


def _row(tokens: int, pair: Pair, ring: EventRing, effort: Effort) -> Row:
    layer_s = tokens / PREFILL_TOKENS_A_SECOND / LAYERS
    return compare(
        f"overlap/{tokens}_tokens",
        MILLISECONDS,
        ours=partial(_left_ms, pair, ring, layer_s, by_layers=True),
        peer=partial(_left_ms, pair, ring, layer_s, by_layers=False),
        peer_is="the same transfer, sent whole when prefill has ended",
        rounds=effort.pick(9, 1),
        target=Target(0.5),
        note=f"{tokens / PREFILL_TOKENS_A_SECOND * 1e3:.0f} ms of prefill in {LAYERS} layers; the rest after it",
    )


def _left_ms(pair: Pair, ring: EventRing, layer_s: float, *, by_layers: bool) -> float:
    """Return the milliseconds from prefill's end to FINISHED; ``by_layers``: sent before, each layer as it is ready."""
    source, target = pair.source, pair.target
    pair.clear()
    request_id, received = receive(target)
    send = partial(source.client.send, source.pool.name, request_id, [pages(source.ids)])
    steps = [ring.step(layer, 1) for layer in range(LAYERS)] if by_layers else []
    sent = send(steps=steps) if by_layers else None
    while sent is not None and sent.accepted is None:
        assert source.client.poll(TIMEOUT_S), "no reply to SEND"
    ends_at = ended_at = time.perf_counter()
    for layer in range(LAYERS):
        ends_at += layer_s
        time.sleep(max(0.0, ends_at - time.perf_counter()))
        ended_at = time.perf_counter()
        if by_layers:
            ring.record(steps[layer])
    sent = sent or send()
    target.client.wait_finished(received, TIMEOUT_S)
    left_ms = (time.perf_counter() - ended_at) * 1e3
    source.client.wait_settled(sent, TIMEOUT_S)
    target.client.wait_settled(received, TIMEOUT_S)
    pair.check()
    return left_ms
