"""Planning a transfer: pairing, all checks, runs, addresses; against a loop over entries and runs, and SGLang's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, compare, milliseconds
from benchmarks.peers import sglang
from benchmarks.peers.sglang import Buffers, SGLang, address_lists
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.daemon.transports.local import MAX_BLOCK_BYTES
from kvferry.pools.planning.copies import chunk_bounds, split_blocks
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.planning.page_ids import coalesce
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.planning.plan import Blocks, make_plan
from kvferry.protocol.codec import PageIds
from kvferry.protocol.manifests import Entry

LAYERS = 61
PAGE_BYTES = {"k": 131_072, "v": 16_384, "index_k": 32_768}
POOL_PAGES = 4096
PAGES = 2048
CHUNK_BYTES = 4 << 20
LOOP = "a Python loop that builds a tuple for each entry and run, without checks"


def measure(effort: Effort) -> list[Row]:
    """Measure 183 entries (MLA with an indexer, 61 layers) x 2048 random pages."""
    keep_freed_memory()
    rng = np.random.default_rng(0)
    count = effort.pick(PAGES, 32)
    entries = manifest_entries()
    source = rng.permutation(np.arange(1, POOL_PAGES))[:count]
    destination = rng.permutation(np.arange(1, POOL_PAGES))[:count]
    blocks = plan_blocks(entries, source, destination)
    assert [tuple(block) for block in blocks.tolist()] == loop_blocks(entries, source, destination)
    what = f"{len(entries)} entries x {count} random pages: {len(blocks)} blocks"
    peer = milliseconds(lambda: loop_blocks(entries, source, destination))
    row = partial(compare, unit=MILLISECONDS, peer=peer, peer_is=LOOP, rounds=effort.pick(15, 2))
    rows = [
        row(
            "plan",
            ours=milliseconds(lambda: plan_blocks(entries, source, destination)),
            target=Target(3, "ours"),
            note=f"{what}; pairing and every check included",
        ),
        row(
            "plan/and_what_the_transport_adds",
            ours=milliseconds(lambda: _for_transport(plan_blocks(entries, source, destination))),
            note=f"{what}; then absolute addresses, blocks split and chunks cut, which happens off the loop",
        ),
    ]
    if (found := sglang.find()) is not None:
        rows += against_sglang(found, entries, source, destination, effort)
    return rows


def against_sglang(
    peer: SGLang, entries: Sequence[Entry], source: PageIds, destination: PageIds, effort: Effort
) -> list[Row]:
    """Compare with SGLang's function for Ascend, after looking that it plans the same blocks."""
    bases = [entry.base for entry in entries]
    buffers = Buffers(bases, bases, [entry.page_bytes for entry in entries])
    indices = source.astype(np.int32), destination.astype(np.int32)
    blocks = plan_blocks(entries, source, destination)
    assert [tuple(block) for block in blocks.tolist()] == sglang.plan_blocks(peer, buffers, *indices)
    assert blocks.T.tolist() == list(address_lists(peer, buffers, *indices))
    row = partial(compare, unit=MILLISECONDS, rounds=effort.pick(15, 2))
    what = f"{len(entries)} entries x {len(source)} random pages: {len(blocks)} blocks"
    return [
        row(
            "plan/against_sglang",
            ours=milliseconds(lambda: plan_blocks(entries, source, destination)),
            peer=milliseconds(lambda: sglang.plan_blocks(peer, buffers, *indices)),
            peer_is=f"SGLang {peer.version}: AscendKVManager.send_kvcache up to its transfer, without checks",
            note=f"{what}; ours with pairing and every check, as an array, theirs as tuples,"
            " and without the garbage collector, which these set off",
        ),
        row(
            "plan/for_the_transport_against_sglang",
            ours=milliseconds(lambda: _for_transport(plan_blocks(entries, source, destination))),
            peer=milliseconds(lambda: address_lists(peer, buffers, *indices)),
            peer_is=f"SGLang {peer.version}: the same and _transfer_data, up to the engine's three lists",
            note=f"{what}; what each side's transport starts from",
        ),
    ]


def manifest_entries() -> tuple[Entry, ...]:
    """Return the 183 entries, laid out in a region."""
    return lay_out(
        [
            Entry(component="main", role=role, layer=layer, base=0, pages=POOL_PAGES, page_bytes=size, page_tokens=128)
            for role, size in PAGE_BYTES.items()
            for layer in range(LAYERS)
        ]
    ).entries


def plan_blocks(entries: Sequence[Entry], source: PageIds, destination: PageIds) -> Blocks:
    """Return every block, as the daemon plans a SEND."""
    return make_plan(pair_entries(entries, entries), source, destination).blocks()


def loop_blocks(entries: Sequence[Entry], source: PageIds, destination: PageIds) -> list[tuple[int, int, int]]:
    """Return every block as a tuple; the peer."""
    runs = [one.tolist() for one in coalesce(source, destination)]
    blocks = []
    for entry in entries:
        for first, to, pages in zip(*runs, strict=True):
            size = entry.page_bytes
            blocks.append((entry.base + first * size, entry.base + to * size, pages * size))
    return blocks


def _for_transport(blocks: Blocks) -> object:
    blocks[:, 0] += np.uint64(1 << 40)
    blocks[:, 1] += np.uint64(1 << 41)
    return chunk_bounds(split_blocks(blocks, MAX_BLOCK_BYTES), CHUNK_BYTES)
