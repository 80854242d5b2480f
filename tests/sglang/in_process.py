"""What SGLang makes of the plugin, in the tests' own process, without a scheduler.

``opened`` has its real device and host pools, and HiCache's storage as its controller makes and calls it. ``halves``
has both managers of a pair, over one pool, of which a request has some pages at either side.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel

from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import identity, pools, transfer
from tests.kit.servers import free_ports
from tests.sglang.servers import EXTRA

Kind: TypeAlias = Literal["mha", "mla"]
Layout: TypeAlias = Literal["layer_first", "page_first", "page_first_direct"]

LAYOUTS: Final[tuple[Layout, ...]] = ("layer_first", "page_first", "page_first_direct")
LAYERS: Final = 3
SOON_S: Final = 20.0


@contextlib.contextmanager
def told(
    environment: Mapping[str, str] | None = None, ranks: Mapping[str, object] | None = None, **options: object
) -> Iterator[None]:
    """Have SGLang's options, its ranks and this process's environment be these."""
    load_plugins()
    parallel = {"tp_rank": 0, "dp_rank": None, "attn_tp_rank": 0, "attn_cp_rank": 0, "attn_dp_rank": 0}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        patch.setattr(identity, "weights", identity.RunningWeights())
        stack.enter_context(get_context().override_server_args(**options))
        stack.enter_context(
            get_parallel().override(**{**parallel, "attn_dcp_rank": 0, "pp_group": None, **(ranks or {})})
        )
        yield


# -- HiCache: a host pool and its storage


class Opened(NamedTuple):
    """SGLang's device pool, its host pool (L2), and the backend of its storage (L3)."""

    device: Any
    host: Any
    storage: Any

    def fill(self, slots: torch.Tensor, seed: int) -> None:
        """Write to each element of these tokens a value of its own."""
        for number, view in enumerate(self._views()):
            chance = np.random.default_rng((seed, number))
            at = self._at(slots)
            view[at] = torch.from_numpy(chance.integers(-99, 99, tuple(view[at].shape)).astype(np.float32)).to(
                view.dtype
            )

    def content(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Return all layers' elements of these tokens."""
        return [view[self._at(slots)].clone() for view in self._views()]

    def take(self, pages: int) -> torch.Tensor:
        """Take pages of the host pool, as slots."""
        slots: torch.Tensor = self.host.alloc(pages * self.host.page_size)
        assert slots is not None
        return slots

    def _at(self, slots: torch.Tensor) -> Any:  # noqa: ANN401  an index
        size = self.host.page_size
        return (slots // size, slots % size) if self.host.layout == "page_first_direct" else slots

    def _views(self) -> list[torch.Tensor]:
        """Return a view of (tokens, ...) or (pages, tokens, ...) for each layer of each role."""
        whole = self.host.kv_buffer
        is_one = whole.dim() == 4 + (self.host.layout == "page_first_direct")
        buffers = [whole] if is_one else [*whole]
        if self.host.layout == "layer_first":
            return [layer for buffer in buffers for layer in buffer]
        return [buffer[:, layer] for buffer in buffers for layer in range(LAYERS)]


@contextlib.contextmanager
def opened(  # noqa: PLR0913  what a server may be told
    runtime_dir: Path,
    name: str,
    *,
    kind: Kind = "mha",
    layout: Layout = "layer_first",
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    memory: str = "daemon",
    pages: int = 24,
    rank: int = 0,
    ranks: int = 1,
    extra: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **arguments: object,
) -> Iterator[Opened]:
    """Open a host pool and its storage, as a server with these arguments does.

    Args:
        runtime_dir: the daemon's.
        name: of the server's pools.
        kind: of attention.
        layout: the host pool's.
        page_size: in tokens.
        dtype: of the KV.
        memory: who allocates it.
        pages: of the host pool, without page 0.
        rank: of tensor parallelism.
        ranks: how many.
        extra: in place of what is told of the storage backend.
        config: what the storage is told otherwise.
        arguments: SGLang's.
    """
    extra = EXTRA if extra is None else extra
    options = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
        "hicache_mem_layout": layout,
        "hicache_ratio": 2.0,
        "served_model_name": "model",
        "model_path": "nobody/model",
        **arguments,
    }
    environment = {
        "KVFERRY_RUNTIME_DIR": str(runtime_dir), "KVFERRY_SGLANG_POOL": name, "KVFERRY_SGLANG_MEMORY": memory
    }  # fmt: skip
    parallel = {"attn_tp_rank": rank, "attn_tp_size": ranks, "tp_rank": rank, "tp_size": ranks, "moe_tp_size": ranks}
    with told(environment, parallel, **options), contextlib.ExitStack() as stack:
        common = {"size": pages // 2 * page_size, "page_size": page_size, "dtype": dtype, "layer_num": LAYERS}
        common |= {"device": "cpu", "enable_memory_saver": False}
        if kind == "mha":
            device = MHATokenToKVPool(head_num=2, head_dim=16, **common)
        else:
            device = MLATokenToKVPool(kv_lora_rank=24, qk_rope_head_dim=8, **common)
        host = build_kv_host_pool(kv_pool=device, page_size=page_size)
        allocated = getattr(host.allocator, "host", None)
        if allocated is not None:
            stack.callback(allocated.pool.engine.close)
        storage = made_storage(host, is_mla=kind == "mla", extra=extra, **(config or {}))
        stack.callback(storage.close)
        yield Opened(device, host, storage)


def made_storage(host: Any, *, is_mla: bool, extra: dict[str, Any], **config: object) -> Any:  # noqa: ANN401
    """Make the storage as SGLang's controller does."""
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": is_mla,
        "enable_storage_metrics": False,
        "is_page_first_layout": host.layout == "page_first",
        "model_name": "model",
        "extra_config": dict(extra),
        **config,
    }
    storage = StorageBackendFactory.create_backend("dynamic", HiCacheStorageConfig(**fields), host)
    storage.register_mem_pool_host(host)
    storage.register_mem_host_pool_v2(host, PoolName.KV)
    storage.on_host_pools_registered()
    return storage


def keys_of(prompt: str, pages: int) -> list[str]:
    """Return the keys of a prompt's pages, a chain as SGLang's."""
    keys, before = [], ""
    for number in range(pages):
        before = hashlib.sha256(f"{before}{prompt}{number}".encode()).hexdigest()
        keys.append(before)
    return keys


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Return whether all bytes are equal."""
    return len(one) == len(other) and all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


# -- prefill and decode

PAGE: Final = 4
ROW_BYTES: Final = 100_000
"""Of metadata: hidden states for speculative decoding are more than 64 KiB."""
ROWS: Final = 4
LAST: Final = pools.current
"""The pool that was made last."""
KEPT: Final[list[object]] = []
"""Managers: they have sockets that nobody closes, and wait for it where they are collected."""


@contextlib.contextmanager
def chosen(environment: Mapping[str, str] | None = None, **options: object) -> Iterator[None]:
    """Have kvferry be the transfer backend of a prefill server, where nothing else is said."""
    backend = {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "kvferry", "host": "127.0.0.1"}
    with told(environment, None, **{**backend, **options}):
        yield


def mha_pool(tokens: int = 256, kind: type[Any] = MHATokenToKVPool, **more: object) -> Any:  # noqa: ANN401
    """Return a pool of SGLang's, of 3 layers of 2 heads."""
    return kind(tokens, PAGE, torch.float32, 2, 8, LAYERS, **{"device": "cpu", "enable_memory_saver": False, **more})


def mla_pool(tokens: int = 256, **more: object) -> Any:  # noqa: ANN401  SGLang's class
    """Return a pool of SGLang's, of 3 layers of rows of 16 + 8."""
    return MLATokenToKVPool(tokens, PAGE, torch.float32, 16, 8, LAYERS, "cpu", enable_memory_saver=False, **more)


@contextlib.contextmanager
def current_pool(pool: Callable[[], EnginePool | None]) -> Iterator[None]:
    """Have the plugin find this as the process's pool: these tests make several in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "current", pool)
        yield


def buffers_of(pool: Any) -> list[torch.Tensor]:  # noqa: ANN401  SGLang's class
    """Return what a pool has, a layer of a role each: (tokens, …)."""
    return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else [*pool.kv_buffer]


def manager(args: Any, mode: Any) -> transfer.KvferryKVManager:  # noqa: ANN401  SGLang's classes
    """Return a manager, made as the scheduler makes it."""
    one = transfer.KvferryKVManager(args, mode, None)
    KEPT.append(one)
    return one


class Halves:
    """Prefill's manager and decode's, and prefill's bootstrap server.

    Attributes:
        sglang: their pool, as SGLang has it.
        pool: the same as the daemon has it.
        rows, counts: of metadata, ROW_BYTES and 16 bytes each.
        address: the bootstrap server's.
        prefill, decode: the managers.
    """

    def __init__(self, sglang: Any, pool: EnginePool, bootstrap_port: int) -> None:  # noqa: ANN401
        self.sglang, self.pool = sglang, pool
        self.rows = np.zeros((ROWS, ROW_BYTES), np.uint8)
        self.counts = np.zeros((ROWS, 2), np.int64)
        self.address = f"127.0.0.1:{bootstrap_port}"
        self._rooms = 0
        self._bootstrap = transfer.KvferryKVBootstrapServer("127.0.0.1", bootstrap_port)
        args = self._told(self.rows, self.counts)
        self.prefill = manager(args, DisaggregationMode.PREFILL)
        self.decode = self.decode_with(args)

    def _told(self, *metadata: npt.NDArray[Any]) -> Any:  # noqa: ANN401  SGLang's class
        """Return what the scheduler tells a manager of the pool and of the buffers of metadata, a row a request."""
        args = KVArgs()
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.sglang.get_contiguous_buf_infos()
        args.aux_data_ptrs = [one.ctypes.data for one in metadata]
        args.aux_data_lens = [one.nbytes for one in metadata]
        args.aux_item_lens = [one[0].nbytes for one in metadata]
        args.state_types, args.state_item_lens = [], []
        args.page_size, args.kv_cache_dtype_str = PAGE, "float32"
        args.engine_rank, args.system_dp_rank, args.pp_rank = 0, 0, 0
        return args

    def decode_with(self, args: Any) -> transfer.KvferryKVManager:  # noqa: ANN401  SGLang's class
        """Return a manager of decode's that has been told this."""
        one = manager(args, DisaggregationMode.DECODE)
        assert one.try_ensure_parallel_info(self.address)
        return one

    def sender(self, room: int, count: int = 0, row: int = 0) -> Any:  # noqa: ANN401  of SGLang's methods, too
        """Return prefill's half of a request of so many pages, whose metadata is in this row."""
        one = transfer.KvferryKVSender(self.prefill, self.address, room)
        one.init(count, row)
        return one

    def receiver(self, room: int, manager: transfer.KvferryKVManager | None = None) -> Any:  # noqa: ANN401
        """Return decode's half of a request."""
        one = transfer.KvferryKVReceiver(manager or self.decode, self.address, room)
        one.init(0)
        return one

    def new_room(self) -> int:
        """Return a number for two halves that belong together."""
        self._rooms += 1
        return self._rooms

    def tokens(self, page_ids: Sequence[int]) -> torch.Tensor:
        """Return the rows of these pages in all layers."""
        return torch.stack([one.view(-1, PAGE, *one.shape[1:])[page_ids] for one in buffers_of(self.sglang)])

    def fill(self, page_ids: Sequence[int], value: float) -> None:
        """Write all layers of these pages."""
        for one in buffers_of(self.sglang):
            one.view(-1, PAGE, *one.shape[1:])[page_ids] = value

    def transfers(self) -> list[str]:
        """Return the ids of the daemon's live transfers."""
        with self.pool.engine.client() as client:
            return [one.request_id for one in client.status().transfers]

    def own_daemons(self) -> tuple[str, ...]:
        """Return the daemon's addresses."""
        with self.pool.engine.client() as client:
            return client.status().addresses


@contextlib.contextmanager
def halves(runtime_dir: Path, make: Callable[[], Any], **environment: str) -> Iterator[Halves]:
    """Make a pool as SGLang's constructor does where kvferry is chosen, and both managers over it."""
    port = free_ports(1)[0]
    environment = {"KVFERRY_RUNTIME_DIR": os.fspath(runtime_dir), **environment}
    with chosen(environment, disaggregation_bootstrap_port=port, served_model_name="tests"):
        with current_pool(lambda: None):
            sglang = make()
        pool = LAST()
        assert pool is not None
        with current_pool(lambda: pool):
            yield Halves(sglang, pool, port)


def polled(half: Any, state: int) -> bool:  # noqa: ANN401  of SGLang's methods, too
    """Return whether a half says so soon."""
    ends_at = time.monotonic() + SOON_S
    while (now := half.poll()) != state and time.monotonic() < ends_at:
        pass
    return bool(now == state)
