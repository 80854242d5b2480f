"""SGLang's real device and host pools, and the storage as its controller makes and calls it, without a scheduler."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel

from kvferry.clients.sglang import identity

Kind: TypeAlias = Literal["mha", "mla"]
Layout: TypeAlias = Literal["layer_first", "page_first", "page_first_direct"]

LAYOUTS: Final[tuple[Layout, ...]] = ("layer_first", "page_first", "page_first_direct")
LAYERS: Final = 3
HEADS: Final = 2
WIDTH: Final = 16
LATENT: Final = (24, 8)
EXTRA: Final = {
    "backend_name": "kvferry",
    "module_path": "kvferry.clients.sglang.hicache",
    "class_name": "KvferryHiCacheStorage",
    "interface_v1": 1,
}


class Opened(NamedTuple):
    """A host pool and its storage.

    Attributes:
        device: SGLang's device pool.
        host: SGLang's host pool, L2.
        storage: the backend, L3.
    """

    device: Any
    host: Any
    storage: Any

    def fill(self, slots: torch.Tensor, seed: int) -> None:
        """Write to each element of these tokens a value of its own."""
        for number, view in enumerate(self._views()):
            tokens = view[slots]
            chance = np.random.default_rng((seed, number))
            noise = chance.integers(-99, 99, tuple(tokens.shape)).astype(np.float32)
            view[slots] = torch.from_numpy(noise).to(tokens.dtype)

    def content(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Return all layers' elements of these tokens."""
        return [view[slots].clone() for view in self._views()]

    def take(self, pages: int) -> torch.Tensor:
        """Take pages of the host pool, as slots."""
        slots: torch.Tensor = self.host.alloc(pages * self.host.page_size)
        assert slots is not None
        return slots

    def _views(self) -> list[torch.Tensor]:
        """Return a view of (tokens, ...) for each layer of each role, by what SGLang says of its layouts."""
        buffers = (
            [self.host.kv_buffer] if self.host.kv_buffer.dim() == 4 + _direct(self.host) else [*self.host.kv_buffer]
        )
        if self.host.layout == "layer_first":
            return [layer for buffer in buffers for layer in buffer]
        if self.host.layout == "page_first":
            return [buffer[:, layer] for buffer in buffers for layer in range(LAYERS)]
        return [Paged(buffer[:, layer]) for buffer in buffers for layer in range(LAYERS)]  # type: ignore[misc]


class Paged:
    """Tokens of (pages, page_size, ...), by their slots."""

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages

    def __repr__(self) -> str:
        """Show the shape."""
        return f"<Paged {tuple(self._pages.shape)}>"

    def __getitem__(self, slots: torch.Tensor) -> torch.Tensor:
        size = self._pages.shape[1]
        return self._pages[slots // size, slots % size]

    def __setitem__(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        size = self._pages.shape[1]
        self._pages[slots // size, slots % size] = values


def _direct(host: Any) -> int:  # noqa: ANN401  SGLang's object
    return int(host.layout == "page_first_direct")


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
    told = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(EXTRA if extra is None else extra),
        "hicache_mem_layout": layout,
        "hicache_ratio": 2.0,
        "served_model_name": "model",
        "model_path": "nobody/model",
        **arguments,
    }
    load_plugins()
    parallel = {
        "attn_tp_rank": rank,
        "attn_tp_size": ranks,
        "tp_rank": rank,
        "tp_size": ranks,
        "moe_tp_size": ranks,
        "dp_rank": None,
    }
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("KVFERRY_RUNTIME_DIR", str(runtime_dir))
        patch.setenv("KVFERRY_SGLANG_POOL", name)
        patch.setenv("KVFERRY_SGLANG_MEMORY", memory)
        patch.setattr(identity, "weights", identity.RunningWeights())
        stack.enter_context(get_context().override_server_args(**told))
        stack.enter_context(get_parallel().override(**parallel))
        size = pages // 2 * page_size
        common = {"size": size, "page_size": page_size, "dtype": dtype, "layer_num": LAYERS, "device": "cpu"}
        if kind == "mha":
            device = MHATokenToKVPool(head_num=HEADS, head_dim=WIDTH, enable_memory_saver=False, **common)
        else:
            device = MLATokenToKVPool(
                kv_lora_rank=LATENT[0], qk_rope_head_dim=LATENT[1], enable_memory_saver=False, **common
            )
        host = build_kv_host_pool(kv_pool=device, page_size=page_size)
        allocated = getattr(host.allocator, "host", None)
        if allocated is not None:
            stack.callback(allocated.pool.engine.close)
        storage = made_storage(host, is_mla=kind == "mla", extra=EXTRA if extra is None else extra, **(config or {}))
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
