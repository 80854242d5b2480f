"""Unequal tensor parallelism: slices of pages through staging, against one copy for each token of each page.

Both run on one thread and move the same bytes between the same two host regions; the peer has its list of copies ready.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from benchmarks.measure import GIGABYTES_A_SECOND, Effort, Row, Target, compare, gigabytes_a_second
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.daemon.transports.local import STAGING_BYTES
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.copies import CopyChunk, cut_copy_chunks, gather, scatter
from kvferry.pools.planning.geometry import rank_heads
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.planning.plan import Blocks, Plan, make_plan
from kvferry.protocol.manifests import Entry, Manifest

LAYERS = 8
HEADS = 8
PAGE_TOKENS = 128
HEAD_BYTES = {"k": 256, "v": 128}  # 16-bit elements; V half as wide
NOISE_BYTES = 10_000_019  # a prime: no two pages alike
SPLITS = ((1, 2), (1, 8), (4, 2), (8, 1))
WRITES = "one memmove for each token of each page, from a list made before, one thread"


class Moved(NamedTuple):
    """Two regions and the plan between them."""

    plan: Plan
    source: HostRegion
    destination: HostRegion


def measure(effort: Effort) -> list[Row]:
    """Measure splits in both directions, rank 0 to rank 0, random pages."""
    keep_freed_memory()
    rows = []
    for ours, theirs in SPLITS:
        with moving(ours, theirs, effort.pick(128, 8)) as moved:
            rows.append(_row(f"unequal_tp/{ours}_to_{theirs}", moved, effort))
    return rows


@contextmanager
def moving(source_size: int, destination_size: int, pages: int) -> Iterator[Moved]:
    """Make populated regions of both ranks 0, the source filled with noise, and the plan of random pages."""
    manifests = [lay_out(entries_of(size, pages)) for size in (source_size, destination_size)]
    rng = np.random.default_rng(0)
    ids = [rng.permutation(np.arange(1, pages + 1)) for _ in manifests]
    plan = make_plan(pair_entries(*(one.entries for one in manifests)), *ids)
    with (
        HostRegion.create("bench-source", manifests[0].region_bytes) as source,
        HostRegion.create("bench-destination", manifests[1].region_bytes) as destination,
    ):
        source.view()[:] = np.resize(rng.integers(0, 256, NOISE_BYTES, np.uint8), manifests[0].region_bytes)
        destination.view()[:] = 1
        moved = Moved(plan, source, destination)
        yield moved
        _check(moved, manifests)


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
            page_bytes=PAGE_TOKENS * held.count * head_bytes,
            page_tokens=PAGE_TOKENS,
            head_start=held.start,
            heads=held.count,
            total_heads=HEADS,
        )
        for role, head_bytes in HEAD_BYTES.items()
        for layer in range(LAYERS)
    ]


def staged(moved: Moved, copy_chunks: list[CopyChunk], staging_address: int) -> None:
    """Copy as the local transport's threads do."""
    for copy_chunk in copy_chunks:
        gather(moved.plan.source, moved.source.address, copy_chunk.first, copy_chunk.stop, staging_address)
        scatter(moved.plan.destination, moved.destination.address, copy_chunk.first, copy_chunk.stop, staging_address)


def written(writes: list[tuple[int, int, int]]) -> None:
    """Copy token by token; the peer."""
    memmove = ctypes.memmove
    for source, destination, size in writes:
        memmove(destination, source, size)


def _row(name: str, moved: Moved, effort: Effort) -> Row:
    staging = np.empty(STAGING_BYTES, np.uint8)
    copy_chunks = cut_copy_chunks(moved.plan.source, STAGING_BYTES)
    blocks: Blocks = moved.plan.blocks()
    writes = list(
        zip(
            (blocks[:, 0] + np.uint64(moved.source.address)).tolist(),
            (blocks[:, 1] + np.uint64(moved.destination.address)).tolist(),
            blocks[:, 2].tolist(),
            strict=True,
        )
    )
    size_bytes = moved.plan.total_bytes
    return compare(
        name,
        GIGABYTES_A_SECOND,
        ours=gigabytes_a_second(lambda: staged(moved, copy_chunks, staging.ctypes.data), size_bytes),
        peer=gigabytes_a_second(lambda: written(writes), size_bytes),
        peer_is=WRITES,
        rounds=effort.pick(11, 2),
        target=Target(2),
        note=f"{size_bytes >> 20} MiB, {len(writes)} writes of {size_bytes // len(writes)} bytes on average",
    )


def _check(moved: Moved, manifests: list[Manifest]) -> None:
    """Check the last pages of every entry, head by head."""
    sides = zip(manifests, (moved.source, moved.destination), (moved.plan.source, moved.plan.destination), strict=True)
    shown = []
    for manifest, region, side in sides:
        pages = []
        for entry in manifest.entries:
            held = region.view()[entry.base : entry.base + entry.pages * entry.page_bytes]
            pages.append(held.reshape(entry.pages, PAGE_TOKENS, entry.heads or 1, -1)[side.ids[-8:]])
        shown.append(pages)
    for sent, received in zip(*shown, strict=True):
        common = min(sent.shape[2], received.shape[2])
        assert np.array_equal(sent[:, :, :common], received[:, :, :common])
