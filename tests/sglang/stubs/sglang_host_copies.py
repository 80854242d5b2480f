"""What SGLang's HiCache lacks on a CPU, as a plugin of the test environment: its copy kernels, and pinned memory.

SGLang has kernels that copy between its device pool and its host pool for accelerators only. These do the same in
torch, where both pools are in the host's memory.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = Sequence[Tensor]

_HOST = "sglang.srt.mem_cache.pool_host."


def register() -> None:
    """Put the copies where SGLang looks for its kernels, before its first host pool is allocated."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    HookRegistry.register(f"{_HOST}common._cuda_host_register", lambda *_, **__: None, HookType.REPLACE)
    HookRegistry.register(f"{_HOST}base.HostKVCache._allocate_host_buffer", _put_copies, HookType.BEFORE)


def _put_copies(_: object) -> None:
    importlib.import_module(f"{_HOST}base").HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30  # of 10 GiB
    for module in ("mha", "mla", "mamba"):
        for copy in COPIES:
            setattr(importlib.import_module(_HOST + module), copy.__name__, copy)


# -- io backend direct


def transfer_kv_direct(
    src_layers: Tensors, dst_layers: Tensors, src_indices: Tensor, dst_indices: Tensor, **_: int
) -> None:
    """Copy tokens, layout layer_first, both ways."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Tensor, dst_indices: Tensor, layer_id: int, page_size: int
) -> None:
    """Copy a layer's tokens from a host pool of layout page_first_direct."""
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        destination[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """Copy all layers' tokens to a host pool of layout page_first_direct."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        destination = dst_ptrs[number // layers]
        destination[dst_indices // page_size, number % layers, dst_indices % page_size] = source[src_indices]


# -- io backend kernel


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    **_: int,
) -> None:
    """Copy a layer's tokens from a host pool of layout page_first."""
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, layer_id: int, **_: int
) -> None:
    """Copy a layer's latents from a host pool of layout page_first."""
    dst[dst_indices] = src[src_indices, layer_id]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    **_: int,
) -> None:
    """Copy all layers' tokens to a host pool of layout page_first."""
    _to_page_first(src_k_layers, dst_k, src_indices, dst_indices)
    _to_page_first(src_v_layers, dst_v, src_indices, dst_indices)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, **_: int
) -> None:
    """Copy all layers' latents to a host pool of layout page_first."""
    _to_page_first(src_layers, dst, src_indices, dst_indices)


def _to_page_first(layers: Tensor, destination: Tensor, src_indices: Tensor, dst_indices: Tensor) -> None:
    """Copy from tensors that are given by their addresses."""
    if not len(src_indices):
        return
    row = destination[0, 0]
    rows = int(src_indices.max()) + 1
    for layer, address in enumerate(layers.tolist()):
        memory = (ctypes.c_uint8 * (rows * row.nbytes)).from_address(address)
        source = torch.frombuffer(memory, dtype=row.dtype).view(rows, *row.shape)
        destination[dst_indices, layer] = source[src_indices]


COPIES = (
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_per_layer_mla_pf_lf,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_all_layer_mla_lf_pf,
)
