"""Offload and restore through a real daemon, against memcpy of the same bytes and against the way engines do it today.

Ours is the whole way, from the call to the event that the operation is done: checked, queued, gathered block by block
into the host tier (or scattered from it), with and without checksums. Pages are random, and restored into other ones.
The peers have nothing before or after their copies. Every byte that came back is compared, outside the clock. Rows
``…/limit`` are the C kernel alone on the same bytes, with checksums, on as many threads: no daemon can be faster.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from benchmarks.measure import GIGABYTES_A_SECOND, SETTLE, Contender, Effort, Row, Target, compare, gigabytes_a_second
from benchmarks.pools import KIB, MIB, PAGE_SIZE, ROLES, TIMEOUT_S, Pair, Side, spec_of
from benchmarks.processes import running_daemon
from kvferry.clients import Client, pages
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.daemon.services.tiers import MOST_COPY_THREADS
from kvferry.pools import copy_kernel
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.tiers.block_copies import offload_step_hashed, restore_step_hashed
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages, BlockStep

PAGE_KIB = (16, 128, 1024)
AMOUNTS_MIB = (64, 256)
TARGETS = {(128, "without_checksums"): Target(1.1), (128, "with_checksums"): Target(0.9)}
TARGET_MIB = 64
"""From some 200 MiB on memcpy itself goes past the caches; more is measured without a target."""
TORCH_TARGET = Target(1.2)
CHECKSUMS = {"without_checksums": "false", "with_checksums": "true"}
LAYERS = 4
COPYING_THREADS = min(MOST_COPY_THREADS, len(os.sched_getaffinity(0)))
"""As many as the daemon has."""
CHUNK_TOKENS = 8192
MEMCPY = "one numpy.copyto of one contiguous range, one thread"
TORCH = f'torch in the process: tensor[slots].to("cpu") and tensor[slots] = chunk, for {CHUNK_TOKENS} tokens of a layer'


def measure(effort: Effort) -> list[Row]:
    """Measure three page sizes and two amounts, with and without checksums."""
    keep_freed_memory()
    amounts_mib = (8,) if effort.quick else AMOUNTS_MIB
    rows = []
    for checksums, setting in CHECKSUMS.items():
        # Two snapshots at once: the one that restores read, and the one that is being offloaded.
        config = f"[tiers]\nhost_bytes = {(2 * amounts_mib[-1] + 1) * MIB}\nchecksums = {setting}\n"
        with running_daemon(config) as runtime_dir, Client.connect(runtime_dir, name="bench") as client:
            for kib, size_mib in itertools.product(PAGE_KIB, amounts_mib):
                spec = spec_of(kib * KIB, size_mib * MIB // (kib * KIB * LAYERS * len(ROLES)), LAYERS)
                with Pair((client, client), spec) as pair:
                    rows += _rows(
                        pair, f"{kib}KiB/{size_mib}MiB/{checksums}", _target(kib, size_mib, checksums), effort
                    )
                    if checksums == "with_checksums" and size_mib == amounts_mib[0]:
                        rows += _rows_against_torch(pair, f"{kib}KiB/{size_mib}MiB", effort)
    return rows


def _target(kib: int, size_mib: int, checksums: str) -> Target | None:
    return TARGETS.get((kib, checksums)) if size_mib <= TARGET_MIB else None


def _rows(pair: Pair, what: str, target: Target | None, effort: Effort) -> list[Row]:
    with snapshot(pair) as kept:
        return [
            compare(
                f"offload/{direction}/{what}",
                GIGABYTES_A_SECOND,
                ours=contender,
                peer=_memcpy(pair),
                peer_is=MEMCPY,
                rounds=effort.pick(11, 1),
                settle=effort.pick(SETTLE, 1),
                target=target,
                note=f"{pair.count} random pages of {LAYERS * len(ROLES)} entries",
            )
            for direction, contender in _both_ways(pair, kept).items()
        ]


def _rows_against_torch(pair: Pair, what: str, effort: Effort) -> list[Row]:
    chunks = torch_offload(pair)
    torch_restore(pair, chunks)
    pair.check()
    peers: dict[str, Callable[[], object]] = {
        "offload": partial(torch_offload, pair),
        "restore": partial(torch_restore, pair, chunks),
    }
    with snapshot(pair) as kept:
        rows = [
            compare(
                f"offload/{direction}/{what}/against_torch",
                GIGABYTES_A_SECOND,
                ours=contender,
                peer=gigabytes_a_second(peers[direction], pair.size_bytes),
                peer_is=TORCH,
                rounds=effort.pick(11, 1),
                settle=effort.pick(SETTLE, 1),
                target=TORCH_TARGET,
                note="ours with checksums; torch without, on as many threads as it likes",
            )
            for direction, contender in _both_ways(pair, kept).items()
        ]
    with _kernel_alone(pair) as limits:
        return rows + [
            compare(
                f"offload/{direction}/{what}/limit",
                GIGABYTES_A_SECOND,
                ours=gigabytes_a_second(limits[direction], pair.size_bytes),
                peer=gigabytes_a_second(peers[direction], pair.size_bytes),
                peer_is=TORCH,
                rounds=effort.pick(11, 1),
                settle=effort.pick(SETTLE, 1),
                note=f"the C kernel alone, with checksums, on {COPYING_THREADS} threads",
            )
            for direction in limits
        ]


@contextmanager
def _kernel_alone(pair: Pair) -> Iterator[dict[str, Callable[[], object]]]:
    """Yield what the C kernel does for an offload and for a restore, without anything around it."""
    manifest = pair.source.pool.manifest
    layout = BlockLayout(manifest, manifest.components[0].space)
    offsets = np.arange(pair.count) * layout.block_bytes
    cuts = [pair.count * number // COPYING_THREADS for number in range(COPYING_THREADS + 1)]
    steps = [BlockStep(*cut, 0, layout.content_bytes) for cut in pairwise(cuts)]
    digests = np.zeros(pair.count, np.uint64)
    blocks = HostRegion.create("blocks", pair.count * layout.block_bytes)

    def copy_out(step: BlockStep) -> None:
        memory, out = _memory(pair.source).view(), BlockPages(layout, pair.source.ids, offsets)
        digests[step.first : step.stop] = offload_step_hashed(memory, out, step, blocks.view(), copy_kernel.new_hash())

    def copy_back(step: BlockStep) -> None:
        memory, back = _memory(pair.target).view(), BlockPages(layout, pair.target.ids, offsets)
        found = restore_step_hashed(memory, back, step, blocks.view(), copy_kernel.new_hash())
        assert (found == digests[step.first : step.stop]).all()

    with blocks, ThreadPoolExecutor(COPYING_THREADS) as threads:
        yield {
            "offload": lambda: list(threads.map(copy_out, steps)),
            "restore": lambda: list(threads.map(copy_back, steps)),
        }


def _both_ways(pair: Pair, kept: str) -> dict[str, Contender]:
    return {"offload": partial(offload, pair), "restore": partial(restore, pair, kept)}


@contextmanager
def snapshot(pair: Pair) -> Iterator[str]:
    """Offload all of the source's pages and wait; yield the snapshot, which is dropped in the end."""
    client, pool, ids = pair.source
    operation = client.offload(pool.name, [pages(ids, tokens=pair.count * PAGE_SIZE)])
    moved_bytes = client.wait_done(operation, TIMEOUT_S).moved_bytes
    assert moved_bytes == pair.size_bytes, moved_bytes
    yield operation.snapshot
    client.drop_snapshot(operation.snapshot)


def offload(pair: Pair) -> float:
    """Offload all pages, drop the snapshot, and return how fast the offload was, in GB/s."""
    started = time.perf_counter()
    with snapshot(pair):
        elapsed_s = time.perf_counter() - started
    return pair.size_bytes / elapsed_s / 1e9


def restore(pair: Pair, kept: str) -> float:
    """Restore a snapshot into the target, check every byte, and return how fast it was, in GB/s."""
    pair.clear()
    client, pool, ids = pair.target
    started = time.perf_counter()
    client.wait_done(client.restore(pool.name, kept, [pages(ids)]), TIMEOUT_S)
    elapsed_s = time.perf_counter() - started
    pair.check()
    return pair.size_bytes / elapsed_s / 1e9


def torch_offload(pair: Pair) -> list[torch.Tensor]:
    """Take all pages out as engines do today: layer by layer, chunk by chunk, by token slots."""
    return [
        layer[chunk].to("cpu", non_blocking=True) for layer in _layers(pair.source) for chunk in _slots(pair.source)
    ]


def torch_restore(pair: Pair, chunks: list[torch.Tensor]) -> None:
    """Put them into the target in the same way."""
    came = iter(chunks)
    for layer in _layers(pair.target):
        for chunk in _slots(pair.target):
            layer[chunk] = next(came).to(layer.device, non_blocking=True)


def _layers(side: Side) -> list[torch.Tensor]:
    """Return each layer's keys or values by token slots, ``(tokens, heads, dim)``."""
    return [layer.flatten(0, 1) for role in ROLES for layer in side.pool.tensor("main", role)]


def _slots(side: Side) -> tuple[torch.Tensor, ...]:
    """Return the token slots of the pages in chunks, int64."""
    slots = (side.ids[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)
    return torch.split(torch.from_numpy(slots), CHUNK_TOKENS)


def _memcpy(pair: Pair) -> Contender:
    """Return a copy of as many contiguous bytes from the one pool's memory into the other's."""
    source, target = (_memory(side) for side in (pair.source, pair.target))
    end = pair.size_bytes
    return gigabytes_a_second(partial(np.copyto, target.view()[:end], source.view()[:end]), end)


def _memory(side: Side) -> HostRegion:
    assert isinstance(side.pool.region, HostRegion)
    return side.pool.region
