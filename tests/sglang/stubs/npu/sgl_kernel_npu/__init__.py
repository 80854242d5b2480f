"""In place of sgl-kernel-npu, kernels built with CANN, whose names SGLang's Ascend modules import at their top.

Any submodule and any name can be imported; a call of one that is not written out here raises an error with its name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor


def alloc_extend_kernel(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out: Tensor,
    _next_power_of_two: int,
    page_size: int,
    _most_tokens: int,
) -> None:
    """Write out the slots of requests that grow: what is left of their last page, then free pages."""
    prefixes, lengths, lasts, free = (one.tolist() for one in (prefix_lens, seq_lens, last_loc, free_pages))
    slots, taken = [], 0
    for prefix, length, last in zip(prefixes, lengths, lasts, strict=True):
        slot = last
        for position in range(prefix, length):
            slot += 1
            if position % page_size == 0:
                slot, taken = free[taken] * page_size, taken + 1
            slots.append(slot)
    out.copy_(torch.tensor(slots, dtype=out.dtype))


def fused_split_qk_norm(
    latent: Tensor,
    q_norm: torch.nn.Module,
    k_norm: torch.nn.Module,
    q_rank: int,
    k_rank: int,
    rope: int,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normed query latent, the normed KV latent and the rope part of DeepSeek's attention."""
    query, key, rotary = latent.split([q_rank, k_rank, rope], dim=-1)

    def normed(x: Tensor, norm: torch.nn.Module) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * norm.weight

    return normed(query, q_norm), normed(key, k_norm).unsqueeze(1), rotary.unsqueeze(1)


def fused_rope_qk_mqa(
    query: Tensor,
    key: Tensor,
    cos_sin: Tensor,
    rotary_dim: int,
    is_neox_style: bool,  # noqa: FBT001  SGLang's signature
) -> tuple[Tensor, Tensor]:
    """Return query and key, (tokens, heads, size), turned by their tokens' angles: (tokens, cosines and sines)."""
    cosine, sine = cos_sin.float().unsqueeze(1).chunk(2, -1)

    def turned(x: Tensor) -> Tensor:
        wide = x[..., :rotary_dim].float()
        first, second = wide.chunk(2, -1) if is_neox_style else (wide[..., ::2], wide[..., 1::2])
        both = [first * cosine - second * sine, second * cosine + first * sine]
        joined = torch.cat(both, -1) if is_neox_style else torch.stack(both, -1).flatten(-2)
        return torch.cat([joined.to(x.dtype), x[..., rotary_dim:]], -1)

    return turned(query), turned(key)


WRITTEN: Final[dict[str, Callable[..., Any]]] = {
    "sgl_kernel_npu.mem_cache.allocator.alloc_extend_kernel": alloc_extend_kernel,
    "sgl_kernel_npu.norm.fused_rope_qk_mqa.fused_rope_qk_mqa": fused_rope_qk_mqa,
    "sgl_kernel_npu.norm.fused_split_qk_norm.fused_split_qk_norm": fused_split_qk_norm,
}


class _Kernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401  any kernel's
        if self._name in WRITTEN:
            return WRITTEN[self._name](*given, **named)
        raise NotImplementedError(f"kernel of sgl_kernel_npu: {self._name}")

    def __getitem__(self, grid: object) -> _Kernel:
        return self  # a Triton launch: kernel[grid](...)

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.startswith("sgl_kernel_npu."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


sys.meta_path.insert(0, _Finder())
