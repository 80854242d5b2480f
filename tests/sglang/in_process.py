"""What SGLang makes of the plugin, in the tests' own process, without a scheduler.

``opened`` has its real device and host pools, and HiCache's storage as its controller makes and calls it. ``halves``
has both managers of a pair, over one pool, of which a request has some pages at either side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode, setup_state_kv_args
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel

from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import bootstrap, identity, pools, transfer
from kvferry.protocol.ids import HOST
from tests.kit.devices import DEVICE
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
    parallel = {"tp_rank": 0, "pp_rank": 0, "dp_rank": None, "attn_tp_rank": 0, "attn_cp_rank": 0, "attn_dp_rank": 0}
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
ON: Final = DEVICE.name.partition(":")[0] if DEVICE.name != HOST else "cpu"
"""The run's device, as SGLang calls it."""
SLOTS: Final = 8
"""Of states."""
WINDOW_TOKENS: Final = 128
"""In all windows together."""
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


def windows_pool(tokens: int = 256, window_tokens: int = WINDOW_TOKENS, **more: object) -> Any:  # noqa: ANN401  SGLang's class
    """Return a pool of SGLang's for the run's device: layers 1 and 3 are full, 0, 2 and 4 windows of other widths."""
    layers = {"swa_attention_layer_ids": [0, 2, 4], "full_attention_layer_ids": [1, 3]}
    widths = {"head_num": 2, "head_dim": 8, "v_head_dim": 4, "swa_head_num": 4, "swa_head_dim": 6, "swa_v_head_dim": 6}
    sizes = {"size": tokens, "size_swa": window_tokens, "page_size": PAGE, "dtype": torch.float32, "device": ON}
    return SWAKVPool(**{**sizes, **layers, **widths, **_classes("token_to_kv_pool_class"), **more})


def states_pool(
    tokens: int = 256,
    states: Mapping[str, Any] | None = None,
    shape: Mapping[str, Any] | None = None,
    kind: type[MambaPool] = MambaPool,
    **more: object,
) -> Any:  # noqa: ANN401  SGLang's class
    """Return a pool of SGLang's for the run's device: layers 1 and 3 have pages, 0 and 2 both kinds of states.

    ``states``, ``shape``, ``kind``: what is told otherwise to its pool of states, and of a state; its class.
    """
    layers = [0, 2]
    usual = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=8, n_groups=1, num_heads=2, head_dim=4, state_size=5, conv_kernel=4
    )
    params = Mamba2CacheParams(
        shape=dataclasses.replace(usual, **(shape or {})),
        layers=layers,
        dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
    )
    told = {"size": SLOTS, "spec_state_size": 4, "mamba_layer_ids": layers, "device": ON, **(states or {})}
    sizes = {"size": tokens, "page_size": PAGE, "dtype": torch.float32, "head_num": 2, "head_dim": 8, "device": ON}
    sizes |= {"full_attention_layer_ids": [1, 3], **_classes("full_kv_pool_class")}
    slots = kind(cache_params=params, **told)
    return HybridLinearKVPool(**{**sizes, "mamba_pool": slots, **more})


def sparse_pool(**more: object) -> Any:  # noqa: ANN401  SGLang's class
    """Return a pool of SGLang's for an NPU: layers 1 to 4 have pages, 2 and 4 an indexer's keys, too."""
    from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMiniMaxSparseKVPool  # noqa: PLC0415  NPUs only

    sizes = {"size": 256, "page_size": PAGE, "dtype": torch.float32, "head_num": 2, "head_dim": 8, "device": ON}
    layers = {"dense_layer_ids": [0, 1, 3], "sparse_layer_ids": [2, 4, 5], "start_layer": 1, "end_layer": 5}
    sizes |= {"idx_head_dim": 16, "index_dtype": torch.bfloat16, "disable_value_sparse_layer_ids": [2, 4, 5]}
    return NPUMiniMaxSparseKVPool(**{**sizes, **layers, **more})


def _classes(name: str) -> dict[str, Any]:
    """Return what SGLang says of the classes within a hybrid pool, on the run's device."""
    if ON == "cpu":
        return {}
    from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool  # noqa: PLC0415  NPUs only

    return {name: NPUMHATokenToKVPool}


def with_draft(
    model: Callable[[], Any], draft: Callable[[], Any] | None = None, *, heads: int = 2, model_type: str = ""
) -> tuple[Any, Any]:
    """Make SGLang's pools of a model and, if it has one, of its draft model, as a scheduler does.

    ``heads``: of KV of either, over all ranks.
    """
    made = []
    drafts = SimpleNamespace(_draft_model_runners=lambda: ("runner",))

    def init_memory_pools(_: object) -> None:
        config = SimpleNamespace(
            get_total_num_kv_heads=lambda: heads,
            get_swa_num_kv_heads=lambda _: heads,
            hf_text_config=SimpleNamespace(model_type=model_type),
        )
        for one, is_draft in ((model, False), (draft, True)):
            if one is not None:
                pools.note_model(SimpleNamespace(model_config=config, is_draft_worker=is_draft))
                made.append(one())

    with current_pool(lambda: None):
        pools.make_pools(init_memory_pools, SimpleNamespace(draft_worker=None if draft is None else drafts))
    return made[0], made[1] if draft else None


@contextlib.contextmanager
def current_pool(pool: Callable[[], EnginePool | None]) -> Iterator[None]:
    """Have the plugin find this as the process's pool: these tests make several in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "current", pool)
        yield


def buffers_of(pool: Any) -> list[torch.Tensor]:  # noqa: ANN401  SGLang's class
    """Return what a pool has on the pages of whole prompts, a layer of a role each: (tokens, …)."""
    pool = getattr(pool, "full_kv_pool", pool)
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
        draft: SGLang's pool of their draft model, if they have one.
        pool: the same as the daemon has it.
        rows, counts: of metadata, ROW_BYTES and 16 bytes each.
        address: the bootstrap server's.
        prefill, decode: the managers.
    """

    def __init__(self, sglang: Any, pool: EnginePool, bootstrap_port: int, draft: Any = None) -> None:  # noqa: ANN401
        self.sglang, self.pool, self.draft = sglang, pool, draft
        self.rows = np.zeros((ROWS, ROW_BYTES), np.uint8)
        self.counts = np.zeros((ROWS, 2), np.int64)
        self.address = f"127.0.0.1:{bootstrap_port}"
        self._rooms = 0
        self._bootstrap = bootstrap.KvferryKVBootstrapServer("127.0.0.1", bootstrap_port)
        args = self._told(self.rows, self.counts)
        self.prefill = manager(args, DisaggregationMode.PREFILL)
        self.decode = self.decode_with(args)

    def _told(self, *metadata: npt.NDArray[Any]) -> Any:  # noqa: ANN401  SGLang's class
        """Return what the scheduler tells a manager of the pool and of the buffers of metadata, a row a request."""
        args = KVArgs()
        lists = [one.get_contiguous_buf_infos() for one in (self.sglang, self.draft) if one is not None]
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = map(list, map(itertools.chain, *lists))
        args.num_draft_entries = sum(len(one[0]) for one in lists[1:])
        args.aux_data_ptrs = [one.ctypes.data for one in metadata]
        args.aux_data_lens = [one.nbytes for one in metadata]
        args.aux_item_lens = [one[0].nbytes for one in metadata]
        setup_state_kv_args(args, self.sglang)
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
def halves(runtime_dir: Path, *make: Callable[[], Any], **environment: str) -> Iterator[Halves]:
    """Make a pool as SGLang's constructor does where kvferry is chosen, and both managers over it.

    ``make``: the pool, and that of a draft model if there is one.
    """
    port = free_ports(1)[0]
    environment = {"KVFERRY_RUNTIME_DIR": os.fspath(runtime_dir), **environment}
    with chosen(environment, disaggregation_bootstrap_port=port, served_model_name="tests"):
        made = with_draft(*make)
        pool = LAST()
        assert pool is not None
        with current_pool(lambda: pool):
            yield Halves(made[0], pool, port, made[1])


def polled(half: Any, state: int) -> bool:  # noqa: ANN401  of SGLang's methods, too
    """Return whether a half says so soon."""
    ends_at = time.monotonic() + SOON_S
    while (now := half.poll()) != state and time.monotonic() < ends_at:
        pass
    return bool(now == state)


def reason(half: Any) -> str:  # noqa: ANN401  of SGLang's methods, too
    """Return why a half has failed, as the scheduler is told."""
    with pytest.raises(KVTransferError) as raised:
        half.failure_exception()
    return str(raised.value)
