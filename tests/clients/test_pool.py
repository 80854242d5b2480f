"""An attached pool's tensors and arrays in every layout: shapes, and that each element lies where the manifest says."""

from __future__ import annotations

import gc
import sys
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given

from kvferry.clients.pool import AttachedPool
from kvferry.pools.layouts import manifest_of
from kvferry.protocol.errors import InvalidFieldError, TorchMissingError
from kvferry.protocol.manifests import HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec, PoolSpec
from tests.kit.bytes import write_region
from tests.kit.devices import DEVICE, new_region
from tests.kit.pool_specs import pool_specs

pytestmark = pytest.mark.any_device

SMALL: Final[dict[str, Any]] = {"tokens": 64, "page_size": 16, "dtype": "bfloat16"}


def attached(spec: PoolSpec) -> AttachedPool:
    manifest = manifest_of(spec)
    return AttachedPool("engine", manifest, new_region(manifest.region_bytes, "engine"))


@DEVICE.examples(60)
@given(pool_specs())
def test_a_page_of_a_tensor_is_the_entrys_page(spec: PoolSpec) -> None:
    """Mark each entry's second page by its bytes, and read the marks back through the tensors."""
    pool = attached(spec)
    raw = np.zeros(pool.region.size_bytes, np.uint8)
    for number, entry in enumerate(pool.manifest.entries):
        start = entry.base + entry.page_bytes
        raw[start : start + entry.page_bytes] = number % 251 + 1
    write_region(pool.region, raw)
    for number, entry in enumerate(pool.manifest.entries):
        layers = pool.layers(entry.component, entry.role)
        one = pool.tensor(entry.component, entry.role)[layers.index(entry.layer)]
        alone = pool.entry_tensor(entry)
        assert (alone.data_ptr(), alone.shape, alone.dtype) == (one.data_ptr(), one.shape, one.dtype)
        pages = one.reshape(entry.pages, -1).view(torch.uint8).cpu()
        assert pages.shape == (entry.pages, entry.page_bytes)
        assert set(np.unique(pages[1].numpy())) == {number % 251 + 1}
        assert not pages[0].any()
    pool.close()


@pytest.mark.host_only
@DEVICE.examples(30)
@given(pool_specs())
def test_an_array_is_the_tensors_memory(spec: PoolSpec) -> None:
    """Write each entry's bytes as an array and read them back as a tensor; the two have one shape."""
    pool = attached(spec)
    for number, entry in enumerate(pool.manifest.entries):
        layer = pool.layers(entry.component, entry.role).index(entry.layer)
        array, tensor = pool.array(entry.component, entry.role), pool.tensor(entry.component, entry.role)
        assert array.shape == tuple(tensor.shape)
        assert array.itemsize == tensor.element_size()
        array.view(np.uint8)[layer] = number % 251 + 1
        assert set(np.unique(tensor[layer].contiguous().view(torch.uint8).numpy())) == {number % 251 + 1}
        assert np.shares_memory(pool.entry_array(entry), array[layer])
        assert pool.entry_array(entry).shape == tuple(pool.entry_tensor(entry).shape)
    pool.close()


@pytest.mark.host_only
def test_an_array_outlives_its_pool() -> None:
    pool = attached(MlaSpec(layers=1, kv_lora_rank=32, qk_rope_head_dim=8, **SMALL))
    k = pool.array("main", "k")
    k[:] = 7
    pool.close()
    del pool
    gc.collect()
    assert (k == 7).all()


@pytest.mark.device_only
def test_an_array_of_a_pool_on_a_device_is_refused() -> None:
    pool = attached(MlaSpec(layers=1, kv_lora_rank=32, qk_rope_head_dim=8, **SMALL))
    with pytest.raises(InvalidFieldError, match=r"use tensor\(\)"):
        pool.array("main", "k")


@pytest.mark.host_only
def test_without_torch_a_tensor_is_refused_and_an_array_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = attached(MlaSpec(layers=1, kv_lora_rank=32, qk_rope_head_dim=8, **SMALL))
    monkeypatch.setitem(sys.modules, "torch", None)  # what an import of it finds
    with pytest.raises(TorchMissingError, match=r"not installed.*array\(\)"):
        pool.tensor("main", "k")
    with pytest.raises(TorchMissingError, match="not installed"):
        pool.entry_tensor(pool.manifest.entries[0])
    assert pool.array("main", "k").shape == (1, 5, 16, 1, 32)


def test_scales_that_travel_have_no_token_axis() -> None:
    sizes = {**SMALL, "dtype": "int8"}
    pool = attached(MhaSpec(layers=3, kv_heads=3, head_dim=5, k_scale="page_head", v_scale="page", **sizes))
    assert (pool.tensor("main", "k_scale").shape, pool.tensor("main", "v_scale").shape) == ((3, 5, 3), (3, 5, 1))
    assert pool.tensor("main", "k_scale").dtype == torch.float32
    assert pool.page_size == 16
    names = pool.engine_lists().main.names
    assert names == tuple(f"main/{role}/{layer}" for role in ("k", "v", "k_scale", "v_scale") for layer in range(3))


def test_components_with_pages_of_their_own() -> None:
    layers: dict[str, Any] = {"full_layers": (5,), "window_layers": (0, 1), "window": 16, "window_tokens": 32}
    swa = attached(HybridSwaSpec(kv_heads=2, head_dim=8, **layers, **SMALL))
    assert swa.tensor("swa", "k").shape == (2, 3, 16, 2, 8)
    assert (swa.page_size, swa.page_tokens("swa"), swa.space_of("swa")) == (16, 16, "swa")
    mamba = attached(
        MambaSpec(state_layers=(0, 1), slots=3, conv_window=3, conv_channels=5, ssm_shape=(2, 4), dtype="bfloat16")
    )
    assert mamba.tensor("mamba", "conv").shape == (2, 4, 3, 5)
    assert mamba.tensor("mamba", "ssm").shape == (2, 4, 2, 4)
    assert mamba.tensor("mamba", "ssm").dtype == torch.float32
    assert (mamba.page_size, mamba.page_tokens("mamba"), mamba.space_of("mamba")) == (0, None, "mamba")


def test_a_component_that_is_not_there_is_named() -> None:
    pool = attached(MlaSpec(layers=1, kv_lora_rank=32, qk_rope_head_dim=8, **SMALL))
    for ask in (pool.page_tokens, pool.space_of):
        with pytest.raises(InvalidFieldError, match="no component 'swa'"):
            ask("swa")
    for see in (pool.tensor, pool.array):
        with pytest.raises(InvalidFieldError, match="no main/index_k"):
            see("main", "index_k")
