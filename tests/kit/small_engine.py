"""An engine of one process, as small as they come: ``python small_engine.py prefill|decode RUNTIME_DIR REQUEST_ID``.

Prefill computes what decode checks, layer by layer. With ``--tensors`` by torch, else it is numpy's alone. It runs in
environments that have kvferry and what that needs, so it imports nothing of the tests. Its last line says as JSON by
what it ran.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import metadata, util
from typing import Any, Final

import numpy as np

from kvferry.clients import AttachedPool, BlockTableEntries, Client, MhaSpec, pages

SPEC: Final = MhaSpec(layers=4, tokens=256, page_size=16, kv_heads=2, head_dim=8, dtype="bfloat16")
PAGES: Final = 5
TOKENS: Final = 75
FIRST_TOKEN: Final = 42
DEADLINE_S: Final = 60.0


def main() -> int:
    """Run one side; return 0 if all was as it must be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["prefill", "decode"])
    parser.add_argument("runtime_dir")
    parser.add_argument("request_id")
    parser.add_argument("--tensors", action="store_true")
    options = parser.parse_args()
    side = prefill if options.side == "prefill" else decode
    with Client.connect(options.runtime_dir, name=options.side) as client:
        pool = client.create_pool(options.side, SPEC)
        side(client, pool, options.request_id, tensors=options.tensors)
    if not options.tensors and "torch" in sys.modules:
        raise SystemExit("torch was imported, and nobody had asked for a tensor")
    if "prometheus_client" in sys.modules:
        raise SystemExit("what writes metrics was imported by an engine")
    names = ("torch", "numpy", "msgspec", "prometheus-client", "pyzmq", "structlog", "uvloop", "xxhash")
    modules = {"pyzmq": "zmq", "prometheus-client": "prometheus_client"}
    found = {name: metadata.version(name) for name in names if util.find_spec(modules.get(name, name))}
    sys.stdout.write(json.dumps({"python": platform.python_version(), **found}) + "\n")
    return 0


def prefill(client: Client, pool: AttachedPool, request_id: str, *, tensors: bool) -> None:
    """Fill pages layer by layer, while those before are on their way."""
    ids = client.allocate("prefill", PAGES)
    with client.open_events() as ring:
        steps = [ring.step(layer, 1) for layer in range(SPEC.layers)]
        lists, deadline = [pages(ids, tokens=TOKENS)], DEADLINE_S
        sent = client.send("prefill", request_id, lists, steps=steps, first_token=FIRST_TOKEN, deadline_s=deadline)
        for layer, step in enumerate(steps):
            for role in ("k", "v"):
                elements(pool, role, tensors=tensors)[layer, ids] = values(layer, role, tensors=tensors)
            ring.record(step)
        client.wait_finished(sent, DEADLINE_S)
        client.wait_settled(sent, DEADLINE_S)
    client.free("prefill", ids)


def decode(client: Client, pool: AttachedPool, request_id: str, *, tensors: bool) -> None:
    """Take the pages, look at every element, and point a table's row at them."""
    ids = client.allocate("decode", PAGES)[::-1].copy()  # torch knows no strides backwards
    transfer = client.receive("decode", request_id, [pages(ids, tokens=TOKENS)], deadline_s=DEADLINE_S)
    done = client.wait_finished(transfer, DEADLINE_S)
    assert done.first_token == FIRST_TOKEN, done
    for layer in range(SPEC.layers):
        for role in ("k", "v"):
            there, sent = elements(pool, role, tensors=tensors)[layer, ids], values(layer, role, tensors=tensors)
            assert (there.reshape(-1) == sent.reshape(-1)).all(), (layer, role)
    tables = client.create_tables("decode", "decode", max_batch=2, max_context_tokens=TOKENS)
    entries = BlockTableEntries([1] * PAGES, range(PAGES), ids)
    client.wait(client.update_tables(tables, [0, TOKENS], entries=entries))
    rows = tables.block_tables if tensors else tables.array("block_tables")
    lengths = tables.seq_lens if tensors else tables.array("seq_lens")
    assert rows.tolist() == [[0] * PAGES, ids.tolist()], rows
    assert lengths.tolist() == [0, TOKENS], lengths
    client.delete_tables(tables)
    client.free("decode", ids)


def elements(pool: AttachedPool, role: str, *, tensors: bool) -> Any:  # noqa: ANN401  a tensor or an array
    return pool.tensor("main", role) if tensors else pool.array("main", role)


def values(layer: int, role: str, *, tensors: bool) -> Any:  # noqa: ANN401  a tensor or an array
    """Return what a layer holds, ``(pages, page_size, heads, dim)``: numbers, or, without bfloat16, bits."""
    shape = (PAGES, SPEC.page_size, SPEC.kv_heads, SPEC.head_dim)
    bits = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape) + 1000 * layer + (7 if role == "v" else 0)
    if not tensors:
        return bits
    import torch  # noqa: PLC0415  not in every environment

    return torch.from_numpy(bits.astype(np.int32)).to(torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
