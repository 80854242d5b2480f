"""A pool's tensors and arrays lie where the manifest says, and what an engine registers is so, or named."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients import AttachedPool, MhaSpec, MlaSpec, SharedMemory
from kvferry.clients.registration import registered
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.protocol.errors import InvalidFieldError, KvferryError, TorchMissingError, UncoveredEntryError
from kvferry.protocol.ids import HOST
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.pool_messages import RegisteredArrays
from kvferry.protocol.session_stream import ShareFollows
from tests.kit.bytes import write_region
from tests.kit.devices import DEVICE, new_region
from tests.kit.pool_specs import pool_specs

SMALL: Final[dict[str, Any]] = {"tokens": 64, "page_size": 16, "dtype": "bfloat16"}


def attached(spec: PoolSpec) -> AttachedPool:
    manifest = manifest_of(spec)
    return AttachedPool("engine", manifest, new_region(manifest.region_bytes, "engine"))


@pytest.mark.any_device
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
        if DEVICE.name == HOST:
            array, whole = pool.entry_array(entry), pool.array(entry.component, entry.role)[layers.index(entry.layer)]
            assert np.shares_memory(array, whole)
            assert (array.shape, whole.shape) == (tuple(alone.shape), tuple(one.shape))
            assert array.ctypes.data == alone.data_ptr()
            assert array.itemsize == alone.element_size()
    pool.close()


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


def test_without_torch_a_tensor_is_refused_and_an_array_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = attached(MlaSpec(layers=1, kv_lora_rank=32, qk_rope_head_dim=8, **SMALL))
    monkeypatch.setitem(sys.modules, "torch", None)  # what an import of it finds
    with pytest.raises(TorchMissingError, match=r"not installed.*array\(\)"):
        pool.tensor("main", "k")
    with pytest.raises(TorchMissingError, match="not installed"):
        pool.entry_tensor(pool.manifest.entries[0])
    assert pool.array("main", "k").shape == (1, 5, 16, 1, 32)


def test_a_component_that_is_not_there_is_named() -> None:
    pool = attached(MlaSpec(layers=1, kv_lora_rank=32, qk_rope_head_dim=8, **SMALL))
    for ask in (pool.page_tokens, pool.space_of):
        with pytest.raises(InvalidFieldError, match="no component 'swa'"):
            ask("swa")
    for see in (pool.tensor, pool.array):
        with pytest.raises(InvalidFieldError, match="no main/index_k"):
            see("main", "index_k")


POOL: Final[dict[str, Any]] = {"tokens": 64, "page_size": 16}
HEADS: Final[dict[str, Any]] = {"layers": 2, **POOL, "kv_heads": 2}
MHA: Final = MhaSpec(first_layer=4, head_dim=16, v_head_dim=32, dtype="bfloat16", **HEADS)
LITTLE: Final = MhaSpec(head_dim=8, dtype="float16", **HEADS)


def registered_tensors(
    spec: PoolSpec, tensors: Mapping[tuple[Any, ...], Any]
) -> tuple[tuple[RegisteredArrays, ...], dict[str, torch.Tensor]]:
    """Return what is said of tensors, and those that are exported, by name."""
    exported: dict[str, torch.Tensor] = {}

    def export(name: str, by_name: Mapping[str, torch.Tensor], _: int) -> Sequence[ShareFollows]:
        assert name == "npu:0"
        exported.update(by_name)
        return ()

    found = registered(spec, tensors, "npu:0", export)
    found.said(1)
    assert all(one.offset_bytes is None for one in found.arrays)  # it is in the share
    return found.arrays, exported


def tensors_of(spec: PoolSpec, *, layer_by_layer: bool) -> dict[tuple[Any, ...], torch.Tensor]:
    """Return tensors as a pool of that spec gives them, in memory of their own."""
    manifest = manifest_of(spec)
    pool = AttachedPool("model", manifest, HostRegion.create("model", manifest.region_bytes))
    found: dict[tuple[Any, ...], torch.Tensor] = {}
    for component, role in dict.fromkeys((one.component, one.role) for one in manifest.entries):
        if not layer_by_layer:
            found[component, role] = pool.tensor(component, role).clone()
            continue
        for layer, one in zip(pool.layers(component, role), pool.tensor(component, role), strict=True):
            found[component, role, layer] = one.clone()
    pool.close()
    return found


@DEVICE.examples(60)
@given(pool_specs(), st.booleans())
def test_the_tensors_of_a_pool_are_what_its_spec_needs(spec: PoolSpec, layer_by_layer: bool) -> None:  # noqa: FBT001
    tensors = tensors_of(spec, layer_by_layer=layer_by_layer)
    said, by_name = registered_tensors(spec, tensors)
    assert list(by_name) == ["/".join(map(str, key)) for key in tensors]
    assert [one.shape for one in said] == [tuple(one.shape) for one in tensors.values()]
    assert [one.strides for one in said] == [one.stride() for one in tensors.values()]


WRONG: Final[dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]]] = {
    "a layer too few, of a larger storage": (lambda one: one[:-1], "shape"),
    "a page too many": (lambda one: torch.cat([one, one[:, :1]], dim=1), "shape"),
    "another shape of as many bytes": (lambda one: one.flatten(), "shape"),
    "another dtype of as many bytes": (lambda one: one.view(torch.int16), "dtype"),
    "pages before layers": (lambda one: one.transpose(0, 1).contiguous().transpose(0, 1), "strides"),
    "pages with bytes between them": (lambda one: torch.cat([one, one], dim=2)[:, :, : one.shape[2]], "strides"),
    "every second page": (lambda one: torch.cat([one, one], dim=1)[:, ::2], "strides"),
    "one page for all": (lambda one: one[:, :1].expand(one.shape), "strides"),
}


@pytest.mark.parametrize("change", WRONG)
def test_what_is_wrong_with_a_whole_array_is_named(change: str) -> None:
    wrong, field = WRONG[change]
    tensors = tensors_of(MHA, layer_by_layer=False)
    tensors["main", "v"] = wrong(tensors["main", "v"])
    with pytest.raises(InvalidFieldError, match=f"main/v: {field} is .*, the spec needs ") as refused:
        registered_tensors(MHA, tensors)
    assert refused.value.field == f"main/v.{field}"


def test_one_memory_is_not_two_arrays() -> None:
    k = torch.zeros(2, 5, 16, 2, 8, dtype=torch.float16)
    with pytest.raises(InvalidFieldError, match="each page needs bytes of its own") as refused:
        registered_tensors(LITTLE, {("main", "k"): k, ("main", "v"): k})
    assert refused.value.field == "main/v.storage"
    three = torch.zeros(3, 5, 16, 2, 8, dtype=torch.float16)
    with pytest.raises(InvalidFieldError) as refused:
        registered_tensors(LITTLE, {("main", "v"): three[1:], ("main", "k"): three[:2]})
    assert refused.value.field == "main/v.storage", "the one that begins in the other"


def test_a_tensor_needs_all_its_bytes() -> None:
    k, v = (torch.zeros(2, 5, 16, 2, 8, dtype=torch.float16) for _ in "kv")
    v.untyped_storage().resize_(v.untyped_storage().nbytes() - 2)
    with pytest.raises(InvalidFieldError) as refused:
        registered_tensors(LITTLE, {("main", "k"): k, ("main", "v"): v})
    assert refused.value.field == "main/v.storage"


@pytest.mark.parametrize(
    ("tensors", "error", "field"),
    [
        ({("main", "k"): torch.zeros(2, 5, 16, 2, 16, dtype=torch.bfloat16)}, UncoveredEntryError, "arrays"),
        ({("main", "w"): torch.zeros(1)}, InvalidFieldError, "arrays[0]"),
        ({"k": torch.zeros(1)}, InvalidFieldError, "tensors"),
        ([torch.zeros(1), torch.zeros(1)], InvalidFieldError, "tensors"),
        ({("main", "k"): [1.0], ("main", "v"): [1.0]}, InvalidFieldError, "main/k"),
        ({("main", "k"): torch.zeros(1).to_sparse(), ("main", "v"): None}, InvalidFieldError, "main/k"),
    ],
    ids=["a role too few", "a role that is none", "no key", "no mapping", "no tensor", "no array"],
)
def test_what_cannot_be_compared_is_named(tensors: Any, error: type[KvferryError], field: str) -> None:  # noqa: ANN401
    with pytest.raises(error) as refused:
        registered_tensors(MHA, tensors)
    assert refused.value.field == field


@pytest.mark.parametrize("kind", ["array", pytest.param("tensor", marks=pytest.mark.full)])
def test_shared_memory_is_held_by_its_arrays(kind: str) -> None:
    """Whoever made it need not keep it: its descriptor is there as long as one of them is."""
    shape = (2, 5, 16, 2, 8)
    arrays: dict[tuple[Any, ...], Any] = {}
    take = getattr(SharedMemory(1 << 16), kind)
    arrays["main", "k"] = take(shape, "float16")
    arrays["main", "v"] = take((2, *shape), "float16")[1]
    del take
    gc.collect()
    [fd] = registered(LITTLE, arrays, HOST, lambda *_: ()).fds
    del arrays["main", "k"]
    gc.collect()
    os.fstat(fd)
    arrays.clear()
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("bit", ["neg", "conj"])
def test_a_view_that_shows_other_values_than_its_memory_holds_is_refused(bit: str) -> None:
    spec = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=2, head_dim=8, dtype="float32")
    k = torch.zeros(2, 5, 16, 2, 8)
    conjugated = torch.zeros(k.shape, dtype=torch.complex64).conj()
    v = conjugated if bit == "conj" else conjugated.imag.as_strided(k.shape, k.stride())
    assert v.is_neg() == (bit == "neg")
    with pytest.raises(InvalidFieldError, match=rf"resolve_{bit}\(\)") as refused:
        registered_tensors(spec, {("main", "k"): k, ("main", "v"): v})
    assert refused.value.field == "main/v"
    registered_tensors(spec, {("main", "k"): k, ("main", "v"): torch.zeros_like(k)})
