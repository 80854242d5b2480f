"""Offload and restore through a real daemon, against memcpy of the same bytes and against the way engines do it today.

Ours is the whole way, from the call to the event that the operation is done: checked, queued, gathered block by block
into the host tier (or scattered from it), with and without checksums. Pages are random, and restored into other ones.
The peers have nothing before or after their copies. Every byte that came back is compared, outside the clock.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.measure import GIGABYTES_A_SECOND, Contender, Effort, Row, Target, compare, gigabytes_a_second
from benchmarks.processes import running_daemon
from kvferry.clients import AttachedPool, Client, MhaSpec, pages
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.codec import PageIds

KIB, MIB = 1 << 10, 1 << 20
PAGE_KIB = (16, 128, 1024)
AMOUNTS_MIB = (64, 256)
TARGETS = {(128, "without_checksums"): Target(0.9), (128, "with_checksums"): Target(0.6)}
CHECKSUMS = {"without_checksums": "false", "with_checksums": "true"}
LAYERS = 4
ROLES = ("k", "v")
PAGE_SIZE = 128
NOISE = 10_007  # a prime number of 32-bit words: no two pages alike
CHUNK_TOKENS = 8192
TIMEOUT_S = 60.0
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
                with Engine(client, kib * KIB, size_mib * MIB) as engine:
                    rows += _rows(engine, f"{kib}KiB/{size_mib}MiB/{checksums}", TARGETS.get((kib, checksums)), effort)
                    if checksums == "with_checksums" and size_mib == amounts_mib[0]:
                        rows += _rows_against_torch(engine, f"{kib}KiB/{size_mib}MiB", effort)
    return rows


class Engine:
    """Two pools of one layout, the first filled with noise: pages leave it and come back into the second."""

    def __init__(self, client: Client, page_bytes: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.count = size_bytes // page_bytes // (LAYERS * len(ROLES))
        self._client = client
        self._taken: dict[str, PageIds] = {}
        self._source, self.source_ids = self._pool("source", page_bytes, 1)
        self._target, self.target_ids = self._pool("target", page_bytes, 2)
        for seed, role in enumerate(ROLES):
            noise = np.random.default_rng(seed).integers(0, 1 << 32, NOISE, np.uint32)
            view = _words(self._source, role)
            view[:] = np.resize(noise, view.size).reshape(view.shape)
            _words(self._target, role)[:] = 0

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the pools, so that the next ones have their memory."""
        for pool in (self._source, self._target):
            pool.close()
            self._client.free(pool.name, self._taken[pool.name])
            self._client.delete_pool(pool.name)

    def offload(self) -> float:
        """Offload all pages, drop the snapshot, and return how fast the offload was, in GB/s."""
        started = time.perf_counter()
        with self.snapshot():
            elapsed_s = time.perf_counter() - started
        return self.size_bytes / elapsed_s / 1e9

    @contextmanager
    def snapshot(self) -> Iterator[str]:
        """Offload all pages and wait; yield the snapshot, which is dropped in the end."""
        operation = self._client.offload(self._source.name, [pages(self.source_ids, tokens=self.count * PAGE_SIZE)])
        moved_bytes = self._client.wait_done(operation, TIMEOUT_S).moved_bytes
        assert moved_bytes == self.size_bytes, moved_bytes
        yield operation.snapshot
        self._client.drop_snapshot(operation.snapshot)

    def restore(self, snapshot: str) -> float:
        """Restore a snapshot into the second pool, check every byte, and return how fast it was, in GB/s."""
        self._forget()
        started = time.perf_counter()
        operation = self._client.restore(self._target.name, snapshot, [pages(self.target_ids)])
        self._client.wait_done(operation, TIMEOUT_S)
        elapsed_s = time.perf_counter() - started
        self.check()
        return self.size_bytes / elapsed_s / 1e9

    def torch_offload(self) -> list[torch.Tensor]:
        """Take all pages out as engines do today: layer by layer, chunk by chunk, by token slots."""
        return [
            layer[chunk].to("cpu", non_blocking=True)
            for layer in self._layers(self._source)
            for chunk in torch.split(slots_of(self.source_ids), CHUNK_TOKENS)
        ]

    def torch_restore(self, chunks: list[torch.Tensor]) -> None:
        """Put them into the second pool in the same way."""
        came = iter(chunks)
        for layer in self._layers(self._target):
            for chunk in torch.split(slots_of(self.target_ids), CHUNK_TOKENS):
                layer[chunk] = next(came).to(layer.device, non_blocking=True)

    def memcpy(self) -> Contender:
        """Return the other peer: as many contiguous bytes of the first pool's memory into the second's."""
        target, source = (_memory(pool)[: self.size_bytes] for pool in (self._target, self._source))
        return gigabytes_a_second(partial(np.copyto, target, source), self.size_bytes)

    def check(self) -> None:
        """See that the second pool's pages are the first one's."""
        for role in ROLES:
            came = _words(self._target, role)[:, self.target_ids]
            assert np.array_equal(came, _words(self._source, role)[:, self.source_ids]), f"{role} differs"

    def _forget(self) -> None:
        for role in ROLES:
            _words(self._target, role)[:, self.target_ids] = 0

    def _layers(self, pool: AttachedPool) -> list[torch.Tensor]:
        """Return each layer's keys or values by token slots, ``(tokens, heads, dim)``."""
        return [layer.flatten(0, 1) for role in ROLES for layer in pool.tensor("main", role)]

    def _pool(self, name: str, page_bytes: int, seed: int) -> tuple[AttachedPool, PageIds]:
        pool = self._client.create_pool(name, spec(page_bytes, self.count))
        self._taken[name] = self._client.allocate(name, self.count + self.count // 2)
        return pool, np.random.default_rng(seed).permutation(self._taken[name])[: self.count]


def spec(page_bytes: int, count: int) -> MhaSpec:
    """Return a pool's spec with half as many pages again as are moved: few of them are neighbours."""
    return MhaSpec(
        layers=LAYERS,
        tokens=(count + count // 2 + 1) * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=1,
        head_dim=page_bytes // PAGE_SIZE // 4,
        dtype="float32",
    )


def slots_of(ids: PageIds) -> torch.Tensor:
    """Return the token slots of pages, ``(n * PAGE_SIZE,)`` int64."""
    return torch.from_numpy((ids[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1))


def _rows(engine: Engine, what: str, target: Target | None, effort: Effort) -> list[Row]:
    with engine.snapshot() as snapshot:
        ours: dict[str, Contender] = {"offload": engine.offload, "restore": partial(engine.restore, snapshot)}
        return [
            compare(
                f"offload/{direction}/{what}",
                GIGABYTES_A_SECOND,
                ours=contender,
                peer=engine.memcpy(),
                peer_is=MEMCPY,
                rounds=effort.pick(11, 1),
                target=target,
                note=f"{engine.count} random pages of {LAYERS * len(ROLES)} entries",
            )
            for direction, contender in ours.items()
        ]


def _rows_against_torch(engine: Engine, what: str, effort: Effort) -> list[Row]:
    chunks = engine.torch_offload()
    engine.torch_restore(chunks)
    engine.check()
    torch_restore = partial(engine.torch_restore, chunks)
    with engine.snapshot() as snapshot:
        sides: dict[str, tuple[Contender, Callable[[], object]]] = {
            "offload": (engine.offload, engine.torch_offload),
            "restore": (partial(engine.restore, snapshot), torch_restore),
        }
        return [
            compare(
                f"offload/{direction}/{what}/against_torch",
                GIGABYTES_A_SECOND,
                ours=ours,
                peer=gigabytes_a_second(peer, engine.size_bytes),
                peer_is=TORCH,
                rounds=effort.pick(11, 1),
                note="ours with checksums; torch without, on as many threads as it likes",
            )
            for direction, (ours, peer) in sides.items()
        ]


def _words(pool: AttachedPool, role: str) -> npt.NDArray[np.uint32]:
    """Return a role's pages: ``(layers, pages, words of a page)``."""
    array = pool.tensor("main", role).numpy().view(np.uint32)
    return array.reshape(*array.shape[:2], -1)


def _memory(pool: AttachedPool) -> npt.NDArray[np.uint8]:
    region = pool.region
    assert isinstance(region, HostRegion), region
    return region.view()
