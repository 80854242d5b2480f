"""In place of sgl-kernel-npu, kernels built with CANN, whose names SGLang's Ascend modules import at their top.

Any submodule and any name can be imported; a call of one that is not written out here raises an error with its name.
"""

from __future__ import annotations

import enum
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


class TransferDirection(enum.Enum):
    """Which way pages go."""

    H2D = 1
    D2H = 2


def transfer_kv_dim_exchange(  # noqa: PLR0913  the operator's
    *,
    device_indices: Tensor,
    host_indices: Tensor,
    device_k: Tensor,
    host_k: Tensor,
    device_v: Tensor,
    host_v: Tensor,
    device_index_k: Tensor | None = None,
    host_index_k: Tensor | None = None,
    device_index_k_scale: Tensor | None = None,
    host_index_k_scale: Tensor | None = None,
    page_size: int,
    direction: TransferDirection,
) -> None:
    """Copy pages, given by their slots, between a device's (layers, pages, …) and a host's (pages, layers, …).

    A stand-in. sgl-kernel-npu's operator (csrc/transfer_kv_dim_exchange) copies a page of an array by one
    ``aclrtMemcpy2dAsync`` on the current stream, with a row a layer, and synchronizes nothing; this copies each row.
    """
    pages = [(one[::page_size] // page_size).tolist() for one in (device_indices, host_indices)]
    for device, host in (
        (device_k, host_k),
        (device_v, host_v),
        (device_index_k, host_index_k),
        (device_index_k_scale, host_index_k_scale),
    ):
        if device is None or host is None:
            continue
        assert (device.shape[0], *device.shape[2:]) == host.shape[1:], (device.shape, host.shape)
        for there, here in zip(*pages, strict=True):
            for layer in range(len(device)):
                if direction is TransferDirection.H2D:
                    device[layer, there].copy_(host[here, layer], non_blocking=True)
                else:
                    host[here, layer].copy_(device[layer, there], non_blocking=True)


def transfer_mamba_state(
    *, device_buf: Tensor, host_buf: Tensor, device_indices: Tensor, host_indices: Tensor, direction: TransferDirection
) -> None:
    """Copy slots between a device's (layers, slots, …) and a host's (slots, layers, 1, …), as the above does pages."""
    for there, here in zip(device_indices.tolist(), host_indices.tolist(), strict=True):
        for layer in range(len(device_buf)):
            if direction is TransferDirection.H2D:
                device_buf[layer, there].copy_(host_buf[here, layer, 0], non_blocking=True)
            else:
                host_buf[here, layer, 0].copy_(device_buf[layer, there], non_blocking=True)


WRITTEN: Final[dict[str, Callable[..., Any]]] = {
    "sgl_kernel_npu.kvcacheio.TransferDirection": TransferDirection,
    "sgl_kernel_npu.kvcacheio.transfer_kv_dim_exchange": transfer_kv_dim_exchange,
    "sgl_kernel_npu.kvcacheio.transfer_mamba_state": transfer_mamba_state,
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
    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  a kernel or a class
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        written = WRITTEN.get(path)
        return written if isinstance(written, type) else _Kernel(path)


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
