"""SGLang's pools for NPUs: each kind that kvferry carries, made as SGLang makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool, NPUMLATokenToKVPool

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
    "mla packed": _mla(FLOAT8, **PACKED),
    "mla packed some index": _mla(FLOAT8, **{**PACKED, **SOME}),
}
"""What SGLang reads from a pool, and so its shapes, differ with the environment; its bytes only with NZ."""

INDEXED: Final = [name for name, kind in KINDS.items() if "index_head_dim" in kind.given]
WRITTEN: Final = [name for name in KINDS if "packed" not in name and (name.startswith("mla") or "fia" in name)]
"""Into the others SGLang writes by aclnnDynamicQuant or libatb, which are not simulated."""


def tensors_of(pool: Any) -> dict[str, list[torch.Tensor]]:  # noqa: ANN401  SGLang's class
    """Return all tensors that a pool has, by attribute; those of a list one by one."""
    found = {}
    for name, value in vars(pool).items():
        listed = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(one, torch.Tensor) for one in listed):
            found[name] = list(listed)
    return found
