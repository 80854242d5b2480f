"""Decode from a prefix that was cached group by group computes what the model computes without, to the bit.

The cache of a model's prompt (full attention, windows, states) is stored from the pages of one pool and loaded into
those of another, whose memory is NaN. The controls: before the load, and with any one part of it zeroed, the comparison
fails.
"""

from __future__ import annotations

import importlib.util
from typing import Final

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers, of the demo extra", allow_module_level=True)

from kvferry.clients import Client, block_hashes
from tests.identity.caches import Arrays, decoded, reference
from tests.identity.engines import Engine
from tests.identity.shares import Rank
from tests.identity.topologies import PAGE_SIZE, Side, Topology
from tests.kit.bytes import read_region, write_region

TOKENS: Final = 40
BLOCKS: Final = TOKENS // PAGE_SIZE
FOUND: Final = {
    "qwen3": (BLOCKS, 9),
    "gemma3": (BLOCKS + 4, 0),
    "qwen3-next": (BLOCKS + 1, 0),
    "jamba": (BLOCKS + 1, 0),
}
"""Blocks of all groups, and how many leading ones a prompt finds that differs in the last of them."""


@pytest.mark.parametrize("model", FOUND)
def test_decode_goes_on_from_a_cached_prefix(client: Client, model: str) -> None:
    client.evict_cached()
    topology, known = Topology(model, model, tokens=TOKENS), reference(model, TOKENS)
    source, target = (
        Engine(client, topology, f"{model}-{name}", range(topology.tiny.layers), Rank(1, 0), Side())
        for name in ("source", "target")
    )

    def compare() -> None:
        arrays: Arrays = {}
        target.read_into(arrays)
        logits = decoded(model, arrays, known, TOKENS, steps=1)
        torch.testing.assert_close(logits, known.logits[:1], rtol=0, atol=0)

    for one in (source, target):
        one.hold(is_source=True)
    source.write(known.arrays)
    blocks, shorter = FOUND[model]
    hashes = block_hashes(list(range(TOKENS + 2 * PAGE_SIZE)), PAGE_SIZE)
    source.store(hashes[:BLOCKS])
    with pytest.raises(AssertionError, match="Tensor-likes are not"):
        compare()
    found = client.lookup(target.pool.name, hashes, groups=target.groups)
    assert (found.blocks, found.host) == (BLOCKS, blocks)
    target.load(found)
    compare()
    for component, role in dict.fromkeys(key[:2] for key in target.arrays()):
        before = read_region(target.pool.region)
        target.zero(component, role)
        with pytest.raises(AssertionError, match="Tensor-likes are not"):
            compare()
        write_region(target.pool.region, before)
    compare()
    other = [*hashes[: BLOCKS - 1], b"another prompt's"]
    assert client.lookup(target.pool.name, other, groups=target.groups, pin=False).blocks == shorter
    for one in (source, target):
        one.close()
