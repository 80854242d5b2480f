"""Offload and restore through a real daemon, against memcpy of the same bytes and against the way engines do it today.

Ours is the whole way, from the call to the event that the operation is done: checked, queued, gathered block by block
into the host tier (or scattered from it), with and without checksums. Pages are random, and restored into other ones.
The peers have nothing before or after their copies. Every byte that came back is compared, outside the clock.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from benchmarks.bare_copies import memory_of, tier_limits
from benchmarks.measure import (
    GIGABYTES_A_SECOND,
    SETTLE,
    Contender,
    Effort,
    Row,
    Target,
    compare,
    gigabytes_a_second,
)
from benchmarks.pools import KIB, MIB, PAGE_SIZE, ROLES, TIMEOUT_S, Pair, Side, spec_of
from benchmarks.processes import running_daemon
from kvferry.clients import Client, pages
from kvferry.daemon.process.host import keep_freed_memory

PAGE_KIB = (16, 128, 1024)
AMOUNTS_MIB = (64, 256)
TARGETS = {(128, "without_checksums"): Target(1.1), (128, "with_checksums"): Target(0.9)}
TARGET_MIB = 64
"""More is measured without a target."""
TORCH_TARGET = Target(1.2)
WAYS = ("offload", "restore")
CHECKSUMS = {"without_checksums": "false", "with_checksums": "true"}
LAYERS = 4
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
    peers = dict.fromkeys(WAYS, _memcpy(pair))
    note = f"{pair.count} random pages of {LAYERS * len(ROLES)} entries"
    return _against(pair, what, peers, MEMCPY, target, note, effort)


def _rows_against_torch(pair: Pair, what: str, effort: Effort) -> list[Row]:
    chunks = torch_offload(pair)
    torch_restore(pair, chunks)
    pair.check()
    peers = {
        "offload": gigabytes_a_second(partial(torch_offload, pair), pair.size_bytes),
        "restore": gigabytes_a_second(partial(torch_restore, pair, chunks), pair.size_bytes),
    }
    note = "ours with checksums; torch without, on as many threads as it likes"
    return _against(pair, f"{what}/with_checksums/against_torch", peers, TORCH, TORCH_TARGET, note, effort)


def _against(
    pair: Pair,
    what: str,
    peers: Mapping[str, Contender],
    peer_is: str,
    target: Target | None,
    note: str,
    effort: Effort,
) -> list[Row]:
    in_unit = partial(gigabytes_a_second, size_bytes=pair.size_bytes)
    with snapshot(pair) as kept, tier_limits(pair, in_unit, checksums="with_checksums" in what) as limits:
        ours: dict[str, Contender] = {"offload": partial(offload, pair), "restore": partial(restore, pair, kept)}
        return [
            compare(
                f"offload/{direction}/{what}",
                GIGABYTES_A_SECOND,
                ours=ours[direction],
                peer=peers[direction],
                peer_is=peer_is,
                rounds=effort.pick(11, 1),
                settle=effort.pick(SETTLE, 1),
                target=target,
                note=note,
                limit=limit if target is not None else None,
            )
            for direction, limit in zip(WAYS, limits, strict=True)
        ]


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
    source, target = (memory_of(side) for side in (pair.source, pair.target))
    end = pair.size_bytes
    return gigabytes_a_second(partial(np.copyto, target.view()[:end], source.view()[:end]), end)
