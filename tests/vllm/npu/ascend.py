"""vllm-ascend's worker up to ``register_kv_caches``, without it: what it allocates, and what it says of its cache.

Read off vllm-ascend 0.23 (``vllm_ascend/worker/model_runner_v1.py``, ``vllm_ascend/core/kv_cache_interface.py``), and
run once with that itself: sizes, order, alignment and shapes of the tensors were these.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec

from kvferry.clients.vllm.ascend import RUNNER
from kvferry.clients.vllm.connector import KvferryConnector
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE
from tests.kit.folders import TINY_MHA

LAYERS: Final = 5
BLOCKS: Final = 8
BLOCK: Final = 128
ALIGNMENT: Final = 2 << 20
RANK, ROPE, INDEX = 512, 64, 128
HEADS, WIDTH = 2, 128
NAMES: Final = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]

Caches = dict[str, tuple[torch.Tensor, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AscendMLAAttentionSpec(MLAAttentionSpec):
    """Latents as vllm-ascend says them, with its fields."""

    scale_dim: int = 0
    sparse_head_dim: tuple[int, ...] | None = None
    cache_sparse_sfa_c8: bool = False
    cache_sparse_li_c8: bool = False
    sfa_dcp_replicated_indexer_size: int = 1


class Kind(NamedTuple):
    """A kind of attention: what vllm-ascend says of a layer, and a token's shape in each of its tensors."""

    spec: Any
    tokens: tuple[tuple[int, int], ...]


def latents(**more: Any) -> AscendMLAAttentionSpec:  # noqa: ANN401  of vllm-ascend's
    """Return what it says of latents."""
    told = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": RANK + ROPE, "dtype": torch.bfloat16, **more}
    return AscendMLAAttentionSpec(**told)


KINDS: Final[Mapping[str, Kind]] = {
    "mha": Kind(
        FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.bfloat16),
        ((HEADS, WIDTH), (HEADS, WIDTH)),
    ),
    "mla": Kind(latents(), ((1, RANK), (1, ROPE))),
    "sparse": Kind(
        latents(head_size=RANK + ROPE + INDEX, sparse_head_dim=(RANK, ROPE, INDEX)), ((1, RANK), (1, ROPE), (1, INDEX))
    ),
}


class NPUModelRunner:
    """Its runner, as far as it makes a KV cache."""

    def initialize_kv_cache(self, kind: Kind, kv_cache_config: Any, blocks: int = BLOCKS) -> Caches:  # noqa: ANN401  vLLM's
        """Allocate a tensor for each layer and role, and return them in their shapes."""
        caches = {}
        for tensor in kv_cache_config.kv_cache_tensors:
            (name,) = tensor.shared_by
            parts = []
            for heads, width in kind.tokens:
                shape = (blocks, BLOCK, heads, width)
                size = torch.Size(shape).numel() * kind.spec.dtype.itemsize
                raw = self._allocate_int8_cache_tensor(size, ALIGNMENT)
                assert not raw.data_ptr() % 512
                parts.append(raw.view(kind.spec.dtype).view(shape))
            caches[name] = tuple(parts)
        return caches

    def _allocate_int8_cache_tensor(self, numel: int, alignment: int) -> torch.Tensor:
        raw = torch.zeros(numel + alignment, dtype=torch.int8, device=DEVICE.name)
        return raw[-raw.data_ptr() % alignment :][:numel]


def kv_cache_config(kind: Kind, blocks: int = BLOCKS) -> Any:  # noqa: ANN401  vLLM's of 0.23
    """Return what vLLM 0.23 says of a KV cache of one group."""
    size = kind.spec.page_size_bytes * blocks
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_tensors=[SimpleNamespace(size=size, shared_by=[name]) for name in NAMES],
        kv_cache_groups=[KVCacheGroupSpec(list(NAMES), kind.spec)],
    )


def vllm_config(daemon: Daemon, pool: str, memory: str) -> Any:  # noqa: ANN401  vLLM's
    """Return what of vLLM's configuration a worker's side reads."""
    model = SimpleNamespace(
        model=str(TINY_MHA),
        revision=None,
        seed=0,
        dtype=torch.bfloat16,
        quantization=None,
        hf_overrides={},
        hf_text_config=SimpleNamespace(kv_lora_rank=RANK, qk_rope_head_dim=ROPE),
        served_model_name="model",
        enable_sleep_mode=False,
        get_total_num_kv_heads=lambda: HEADS,
        get_num_layers=lambda _: LAYERS,
    )
    transfer = SimpleNamespace(
        kv_connector_extra_config={"runtime_dir": str(daemon.runtime_dir), "pool": pool, "memory": memory},
        engine_id=pool,
        is_kv_producer=True,
        is_kv_consumer=True,
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=model,
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK, enable_prefix_caching=True),
        device_config=SimpleNamespace(device_type="npu"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1, data_parallel_rank=0),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        speculative_config=None,
        additional_config={},
    )


class Worker(NamedTuple):
    """A worker's side of the connector, and vllm-ascend's tensors by layer and role."""

    connector: KvferryConnector
    caches: Caches
    config: Any

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return all of them."""
        return [one for parts in self.caches.values() for one in parts]


@contextmanager
def worker(
    daemon: Daemon,
    pool: str,
    kind: Kind,
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
    runner: type = NPUModelRunner,
) -> Iterator[Worker]:
    """Start a worker's side: the connector is made, then the tensors, which it is then given."""
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", lambda: 0)
    module = ModuleType(RUNNER)
    vars(module)["NPUModelRunner"] = runner
    monkeypatch.setitem(sys.modules, RUNNER, module)
    told, config = kv_cache_config(kind), vllm_config(daemon, pool, memory)
    connector = KvferryConnector(config, KVConnectorRole.WORKER, told)
    try:
        with torch.Stream(DEVICE.name) as stream:  # a stream has segments of its own, as a process has
            caches = NPUModelRunner().initialize_kv_cache(kind, told)
        stream.synchronize()
        connector.register_kv_caches(dict(reversed(caches.items())))
        yield Worker(connector, caches, config)
    finally:
        connector.shutdown()
