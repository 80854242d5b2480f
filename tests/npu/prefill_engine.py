"""A prefill engine in a process of its own: ``python -m tests.npu.prefill_engine RUNTIME_DIR DEVICE SEED``.

Each line of its input is a request, its id and prompt as JSON; it answers with the first token once the transfer has
settled. Full pages but the last go layer by layer while it computes; the last page goes with the first token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from kvferry.clients import AttachedPool, Client, EventRing, pages
from tests.npu.tiny_model import LAYERS, PAGE_SIZE, Model, model, prefill, spec

POOL = "prefill"


def main(runtime_dir: str, device: str, seed: str) -> None:
    """Serve until the input ends."""
    with Client.connect(Path(runtime_dir), name="prefill") as client:
        pool = client.create_pool(POOL, spec(pages=63), device=device)
        ring = client.open_events(device)
        weights = model(int(seed)).to(device)
        _say("ready")
        for line in sys.stdin:
            request_id, prompt = json.loads(line)
            _say(str(_serve(client, pool, ring, weights, request_id, prompt)))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _serve(
    client: Client, pool: AttachedPool, ring: EventRing, weights: Model, request_id: str, prompt: list[int]
) -> int:
    ids = client.allocate(POOL, -(-len(prompt) // PAGE_SIZE))
    slots = (ids[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()[: len(prompt)]
    early = (len(prompt) - 1) // PAGE_SIZE  # pages that the first message send requests, before they are written
    steps = [ring.step(layer, 1) for layer in range(LAYERS)]
    if early:
        first = pages(ids[:early], first_page=0, tokens=early * PAGE_SIZE)
        client.send(POOL, request_id, [first], steps=steps, last=False)
    on_device = torch.from_numpy(slots).to(pool.tensor("main", "k").device)
    logits = prefill(weights, pool, prompt, on_device, lambda layer: ring.record(steps[layer]))
    first_token = int(logits.cpu().argmax())
    rest = pages(ids[early:], first_page=early, tokens=len(prompt) - early * PAGE_SIZE)
    transfer = client.send(POOL, request_id, [rest], first_token=first_token)
    client.wait_settled(transfer)
    client.free(POOL, ids)
    return first_token


if __name__ == "__main__":
    main(*sys.argv[1:])
