"""What an engine registers is what the spec needs, for every kind of pool, in both forms, or what is not is named."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pytest
import torch

from kvferry.clients import AttachedPool, DraftSpec, HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec, SharedMemory
from kvferry.clients.registration import registered
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.protocol.errors import InvalidFieldError, KvferryError, UncoveredEntryError
from kvferry.protocol.ids import HOST
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.pool_messages import RegisteredArrays
from kvferry.protocol.session_stream import ShareFollows

POOL: Final[dict[str, Any]] = {"tokens": 64, "page_size": 16}
HEADS: Final[dict[str, Any]] = {"layers": 2, **POOL, "kv_heads": 2}
LATENTS: Final[dict[str, Any]] = {**POOL, "qk_rope_head_dim": 8}
MHA: Final = MhaSpec(first_layer=4, head_dim=16, v_head_dim=32, dtype="bfloat16", **HEADS)
SMALL: Final = MhaSpec(head_dim=8, dtype="float16", **HEADS)
SPECS: Final[dict[str, PoolSpec]] = {
    "paged": MHA,
    "fia": MhaSpec(head_dim=16, dtype="float16", view="fia", **HEADS),
    "nz": MhaSpec(head_dim=32, dtype="float16", view="nz", **HEADS),
    "draft": MhaSpec(head_dim=8, dtype="int8", draft=DraftSpec(layers=1), **HEADS),
    "mla": MlaSpec(
        layers=3, kv_lora_rank=128, index_head_dim=16, index_layers=(0, 2), index_scale=True, index_dtype="int8",
        dtype="float16", **LATENTS,
    ),
    "packed": MlaSpec(layers=2, kv_lora_rank=128, dtype="float8_e4m3fn", packed="ds_mla", **LATENTS),
    "joined": MlaSpec(layers=2, kv_lora_rank=32, dtype="bfloat16", joined=True, **LATENTS),
    "page-first": MhaSpec(head_dim=8, dtype="bfloat16", view="page_first", **HEADS),
    "page-first-direct": MlaSpec(
        layers=2, kv_lora_rank=32, dtype="bfloat16", joined=True, view="page_first_direct", **LATENTS
    ),
    "hybrid": HybridSwaSpec(
        full_layers=(0, 2), window_layers=(1, 3), window_tokens=32, window=16, kv_heads=1, head_dim=8, dtype="float16",
        **POOL,
    ),
    "mamba": MambaSpec(
        state_layers=(0, 1), slots=3, conv_window=3, conv_channels=8, ssm_shape=(2, 4, 4), dtype="bfloat16"
    ),
}  # fmt: skip


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


@pytest.mark.parametrize("form", ["whole", "a view a layer"])
@pytest.mark.parametrize("kind", SPECS)
def test_the_tensors_of_a_pool_are_what_its_spec_needs(kind: str, form: str) -> None:
    tensors = tensors_of(SPECS[kind], layer_by_layer=form != "whole")
    said, by_name = registered_tensors(SPECS[kind], tensors)
    assert list(by_name) == ["/".join(map(str, key)) for key in tensors]
    assert [one.shape for one in said] == [tuple(one.shape) for one in tensors.values()]
    assert [one.strides for one in said] == [one.stride() for one in tensors.values()]


# -- what is not as the spec needs it

WRONG: Final[dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]]] = {
    "a layer too few, of a larger storage": (lambda one: one[:-1], "shape"),
    "a page too many": (lambda one: torch.cat([one, one[:, :1]], dim=1), "shape"),
    "a page too few": (lambda one: one[:, :-1].contiguous(), "shape"),
    "another shape of as many bytes": (lambda one: one.flatten(), "shape"),
    "a dimension more": (lambda one: one[None], "shape"),
    "another dtype of as many bytes": (lambda one: one.view(torch.int16), "dtype"),
    "a wider dtype": (lambda one: one.float(), "dtype"),
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


@pytest.mark.parametrize("change", [name for name in WRONG if "layer" not in name])
def test_what_is_wrong_with_one_layer_is_named(change: str) -> None:
    wrong, field = WRONG[change]
    tensors = tensors_of(MHA, layer_by_layer=True)
    tensors["main", "v", 5] = wrong(tensors["main", "v", 5][None])[0]
    with pytest.raises(InvalidFieldError) as refused:
        registered_tensors(MHA, tensors)
    assert refused.value.field == f"main/v/5.{field}"


def test_one_memory_is_not_two_arrays() -> None:
    k = torch.zeros(2, 5, 16, 2, 8, dtype=torch.float16)
    with pytest.raises(InvalidFieldError, match="each page needs bytes of its own") as refused:
        registered_tensors(SMALL, {("main", "k"): k, ("main", "v"): k})
    assert refused.value.field == "main/v.storage"
    three = torch.zeros(3, 5, 16, 2, 8, dtype=torch.float16)
    with pytest.raises(InvalidFieldError) as refused:
        registered_tensors(SMALL, {("main", "v"): three[1:], ("main", "k"): three[:2]})
    assert refused.value.field == "main/v.storage", "the one that begins in the other"


def test_a_tensor_needs_all_its_bytes() -> None:
    k, v = (torch.zeros(2, 5, 16, 2, 8, dtype=torch.float16) for _ in "kv")
    v.untyped_storage().resize_(v.untyped_storage().nbytes() - 2)
    with pytest.raises(InvalidFieldError) as refused:
        registered_tensors(SMALL, {("main", "k"): k, ("main", "v"): v})
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


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_shared_memory_is_held_by_its_arrays(kind: str) -> None:
    """Whoever made it need not keep it: its descriptor is there as long as one of them is."""
    shape = (2, 5, 16, 2, 8)
    arrays: dict[tuple[Any, ...], Any] = {}
    take = getattr(SharedMemory(1 << 16), kind)
    arrays["main", "k"] = take(shape, "float16")
    arrays["main", "v"] = take((2, *shape), "float16")[1]
    del take
    gc.collect()
    [fd] = registered(SMALL, arrays, HOST, lambda *_: ()).fds
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
