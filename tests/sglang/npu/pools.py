"""SGLang's pools for NPUs, made as SGLang makes them: each kind that kvferry carries, and what it refuses.

The tests' parameters, and so the table in docs/sglang.md: ``python -m tests.sglang.npu.docs_table`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from sglang.srt.hardware_backend.npu.memory_pool_npu import (
    NPUMHATokenToKOnlyPool,
    NPUMHATokenToKVPool,
    NPUMiniMaxSparseKVPool,
    NPUMLATokenToKVPool,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from tests.sglang.in_process import sparse_pool, states_pool, with_draft

PAGE: Final = 16
TOKENS: Final = 8 * PAGE
LAYERS: Final = 3
FIRST_LAYER: Final = 2


class Kind(NamedTuple):
    """A kind of pool: SGLang's class, what that is given beside sizes, and the environment that it reads."""

    kind: type[Any]
    given: Mapping[str, Any]
    environment: Mapping[str, str] = {}

    def make(self) -> Any:  # noqa: ANN401  SGLang's class
        """Return a pool, of the daemon where kvferry is chosen."""
        sizes: dict[str, Any] = {"size": TOKENS, "page_size": PAGE, "layer_num": LAYERS, "start_layer": FIRST_LAYER}
        sizes |= {"end_layer": FIRST_LAYER + LAYERS - 1, "device": "npu", "enable_memory_saver": False}
        return self.kind(**{**sizes, **self.given})


def _mha(dtype: torch.dtype, v_head_dim: int = 32, environment: Mapping[str, str] | None = None) -> Kind:
    given = {"dtype": dtype, "head_num": 2, "head_dim": 32, "v_head_dim": v_head_dim}
    return Kind(NPUMHATokenToKVPool, given, environment or {})


def _mla(dtype: torch.dtype, environment: Mapping[str, str] | None = None, **more: Any) -> Kind:  # noqa: ANN401
    return Kind(
        NPUMLATokenToKVPool, {"dtype": dtype, "kv_lora_rank": 128, "qk_rope_head_dim": 32, **more}, environment or {}
    )


HALF, BRAIN, FLOAT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
INDEX: Final[dict[str, Any]] = {"index_head_dim": 128}
SOME: Final[dict[str, Any]] = {**INDEX, "indexer_layer_ids": (2, 4)}
NONE: Final[dict[str, Any]] = {**INDEX, "indexer_layer_ids": ()}
PACKED: Final[dict[str, Any]] = {**INDEX, "kv_cache_dim": 128 + 4 + 64}
FIA: Final = {"ASCEND_USE_FIA": "1"}
NZ: Final = {"SGLANG_USE_FIA_NZ": "1"}

KINDS: Final = {
    "mha": _mha(HALF),
    "mha fia": _mha(BRAIN, environment=FIA),
    "mha narrow v": _mha(HALF, 16),
    "mha narrow v fia": _mha(BRAIN, 16, FIA),
    "mla": _mla(BRAIN),
    "mla nz": _mla(HALF, NZ),
    "mla index": _mla(BRAIN, **INDEX),
    "mla some index": _mla(BRAIN, **SOME),
    "mla some index nz": _mla(BRAIN, NZ, **SOME),
    "mla no index": _mla(BRAIN, **NONE),
    "mla packed": _mla(FLOAT8, **PACKED),
    "mla packed some index": _mla(FLOAT8, **{**PACKED, **SOME}),
}
"""What SGLang reads from a pool, and so its shapes, differ with the environment; its bytes only with NZ."""

INDEXED: Final = [
    name for name, kind in KINDS.items() if kind.given.get("indexer_layer_ids", kind.given.get("index_head_dim"))
]
LIBATB: Final = "SGLang writes by libatb, which is not simulated"
QUANT: Final = "SGLang writes by aclnnDynamicQuant, which is not simulated"
NOT_WRITTEN: Final = {
    "mha": LIBATB, "mha narrow v": LIBATB, "mla packed": QUANT, "mla packed some index": QUANT
}  # fmt: skip
WRITTEN: Final = [name for name in KINDS if name not in NOT_WRITTEN]


def _draft(name: str, **more: Any) -> Kind:  # noqa: ANN401
    """Return a draft model's pool, of one layer, beside this kind."""
    kind = KINDS[name]
    one: dict[str, Any] = {"layer_num": 1, "start_layer": 0, "end_layer": 0}
    one |= {"is_draft_worker": True} if kind.kind is NPUMLATokenToKVPool else {}
    return kind._replace(given={**kind.given, **one, **more})


DRAFTS: Final = {
    "mha": _draft("mha", head_num=4),
    "mha fia": _draft("mha fia"),
    "mla": _draft("mla"),
    "mla nz": _draft("mla nz"),
    "mla index": _draft("mla index"),
    "mla packed": _draft("mla packed"),
    "mla some index": _draft("mla some index", indexer_layer_ids=None),
}
"""Draft models beside kinds of pools."""
NO_KERNELS: Final = "SGLang's kernels for it are in no package that the tests can have"

SERVED: Final = {
    "mha fia": "test_ascend_servers.test_tokens_are_those_of_a_plain_server_and_all_have_arrived",
    "mla": "test_ascend_configurations.test_latent_attention_in_chunks_and_retracted_requests",
    "mla nz": "test_ascend_kinds.test_pages_in_fractals",
    "mla index": "test_ascend_kinds.test_an_indexers_keys",
    "mha narrow v fia": "test_ascend_kinds.test_windows",
    "windows": "test_ascend_kinds.test_windows",
}
"""The test in which a pair of whole servers has such pools."""
SOME_INDEX: Final = "in a pair of servers SGLang has an index in all layers"
NOT_SERVED: Final = {
    **NOT_WRITTEN,
    **dict.fromkeys(("mla some index", "mla some index nz", "mla no index"), SOME_INDEX),
    "states": "SGLang computes states by Triton kernels, which are not simulated",
    "sparse": "SGLang's indexer is of operators that are not simulated",
}
"""Why no pair of servers is run with the others."""
HYBRIDS: Final = {"windows": SWAKVPool, "states": HybridLinearKVPool, "sparse": NPUMiniMaxSparseKVPool}
"""Pools of ``NPUMHATokenToKVPool`` beside another, by the test's parameter."""


class Refused(NamedTuple):
    """What is refused where kvferry is chosen: SGLang's class, how it is made, what the error says, and why."""

    kind: type[Any]
    make: Callable[[], object]
    says: str
    why: str
    environment: Mapping[str, str] = {}


SIZES: Final[dict[str, Any]] = {
    "size": TOKENS, "page_size": PAGE, "dtype": HALF, "head_num": 2, "head_dim": 32, "device": "npu"
}  # fmt: skip


REFUSED: Final = {
    "k only": Refused(
        NPUMHATokenToKOnlyPool,
        lambda: NPUMHATokenToKOnlyPool(TOKENS, PAGE, HALF, 1, 32, LAYERS, "npu", enable_memory_saver=False),
        "the KV pool NPUMHATokenToKOnlyPool", "SGLang makes it beside keys and values only: see sparse",
    ),
    "sparse values": Refused(
        NPUMiniMaxSparseKVPool, lambda: sparse_pool(disable_value_sparse_layer_ids=[2]),
        "an indexer's values", "SGLang itself hands none from prefill to decode",
    ),
    "sparse draft": Refused(
        NPUMiniMaxSparseKVPool,
        lambda: with_draft(
            sparse_pool,
            lambda: sparse_pool(
                dense_layer_ids=[], sparse_layer_ids=[0], disable_value_sparse_layer_ids=[0], start_layer=0, end_layer=1
            ),
        ),
        "an indexer of a draft model", "the daemon's drafts have keys and values, or latent rows",
    ),
    "latent states": Refused(
        HybridLinearKVPool,
        lambda: states_pool(
            use_mla=True, kv_lora_rank=16, qk_rope_head_dim=8, full_kv_pool_class=NPUMLATokenToKVPool
        ),
        "latent rows beside windows or states", "the daemon's pools of states have keys and values",
    ),
    "sparse kv": Refused(
        NPUMLATokenToKVPool, KINDS["mla index"].make, "the offload of sparse KV", "SGLang has no k and v on the NPU",
        {"SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD": "1"},
    ),
}  # fmt: skip


def tensors_of(pool: Any) -> dict[str, list[torch.Tensor]]:  # noqa: ANN401  SGLang's class
    """Return all tensors that a pool has, by attribute; those of a list one by one."""
    found = {}
    for name, value in vars(pool).items():
        listed = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(one, torch.Tensor) for one in listed):
            found[name] = list(listed)
    return found
