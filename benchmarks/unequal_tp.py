"""Unequal tensor parallelism: slices of pages through staging, against one copy for each token of each page.

Both run on one thread and move the same bytes between the same two host regions; the peer has its list of copies ready.
"""

from __future__ import annotations

import ctypes

import numpy as np

from benchmarks.measure import GIGABYTES_A_SECOND, Effort, Row, Target, compare, gigabytes_a_second
from benchmarks.pools import PAGE_SIZE, check_last_pages, regions
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.daemon.transports.local import STAGING_BYTES
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.copies import cut_copy_chunks, gather, scatter
from kvferry.pools.planning.geometry import rank_heads
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.planning.plan import Plan, make_plan
from kvferry.protocol.manifests import Entry

LAYERS = 8
HEADS = 8
HEAD_BYTES = {"k": 256, "v": 128}  # 16-bit elements; V half as wide
SPLITS = ((1, 2), (1, 8), (4, 2), (8, 1))
WRITES = "one memmove for each token of each page, from a list made before, one thread"


def measure(effort: Effort) -> list[Row]:
    """Measure splits in both directions, rank 0 to rank 0, random pages."""
    keep_freed_memory()
    rows, pages = [], effort.pick(128, 8)
    for split in SPLITS:
        manifests = [lay_out(entries_of(size, pages)) for size in split]
        rng = np.random.default_rng(0)
        ids = [rng.permutation(np.arange(1, pages + 1)) for _ in split]
        plan = make_plan(pair_entries(*(one.entries for one in manifests)), *ids)
        with regions(*(one.region_bytes for one in manifests)) as (source, target):
            rows.append(_row("unequal_tp/{}_to_{}".format(*split), plan, source, target, effort))
            check_last_pages((manifests[0], source, ids[0]), (manifests[1], target, ids[1]))
    return rows


def entries_of(size: int, pages: int) -> list[Entry]:
    """Return k and v of all layers as rank 0 of ``size`` holds them."""
    held = rank_heads(HEADS, size, 0)
    return [
        Entry(
            component="main",
            role=role,
            layer=layer,
            base=0,
            pages=pages + 1,
            page_bytes=PAGE_SIZE * held.count * head_bytes,
            page_tokens=PAGE_SIZE,
            head_start=held.start,
            heads=held.count,
            total_heads=HEADS,
        )
        for role, head_bytes in HEAD_BYTES.items()
        for layer in range(LAYERS)
    ]


def _row(name: str, plan: Plan, source: HostRegion, target: HostRegion, effort: Effort) -> Row:
    staging = np.empty(STAGING_BYTES, np.uint8).ctypes
    copy_chunks = cut_copy_chunks(plan.source, STAGING_BYTES)
    blocks = plan.blocks()
    starts = blocks[:, :2] + np.array([source.address, target.address], np.uint64)
    writes = list(zip(starts[:, 0].tolist(), starts[:, 1].tolist(), blocks[:, 2].tolist(), strict=True))

    def staged() -> None:  # as the local transport's threads do
        for chunk in copy_chunks:
            gather(plan.source, source.address, chunk.first, chunk.stop, staging.data)
            scatter(plan.destination, target.address, chunk.first, chunk.stop, staging.data)

    def written() -> None:
        memmove = ctypes.memmove
        for start, to, size in writes:
            memmove(to, start, size)

    return compare(
        name,
        GIGABYTES_A_SECOND,
        ours=gigabytes_a_second(staged, plan.total_bytes),
        peer=gigabytes_a_second(written, plan.total_bytes),
        peer_is=WRITES,
        rounds=effort.pick(11, 2),
        target=Target(2),
        note=f"{plan.total_bytes >> 20} MiB, {len(writes)} writes of {plan.total_bytes // len(writes)} bytes each",
    )
