"""Pointer lists against what SGLang's pools compute from their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import pytest
import torch

from kvferry.clients.pool import AttachedPool
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.arrays import PointerList, engine_lists
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec, PoolSpec

Attach = Callable[[PoolSpec], AttachedPool]
MHA: Final = MhaSpec(
    layers=3, first_layer=7, tokens=64, page_size=16, kv_heads=2, head_dim=8, v_head_dim=4, dtype="float16"
)
MLA: Final = MlaSpec(
    layers=4,
    tokens=64,
    page_size=16,
    kv_lora_rank=32,
    qk_rope_head_dim=8,
    index_head_dim=16,
    index_layers=(1, 3),
    index_scale=True,
    dtype="bfloat16",
)
SWA: Final = HybridSwaSpec(
    full_layers=(2,),
    window_layers=(0, 1, 3),
    tokens=64,
    window_tokens=32,
    window=24,
    page_size=16,
    kv_heads=2,
    head_dim=8,
    dtype="float16",
)
MAMBA: Final = MambaSpec(
    state_layers=(0, 1),
    slots=3,
    conv_window=3,
    conv_channels=6,
    ssm_shape=(2, 4, 4),
    attention_layers=(2,),
    tokens=64,
    page_size=16,
    kv_heads=1,
    head_dim=8,
    dtype="bfloat16",
)


@pytest.fixture
def attach() -> Iterator[Attach]:
    pools: list[AttachedPool] = []

    def of(spec: PoolSpec) -> AttachedPool:
        manifest = manifest_of(spec)
        pools.append(AttachedPool("engine", manifest, HostRegion.create("engine", manifest.region_bytes)))
        return pools[-1]

    yield of
    for pool in pools:
        pool.close()


def infos(buffers: list[torch.Tensor], *, rows_an_item: int = 1) -> tuple[list[int], list[int], list[int]]:
    """Return pointers, lengths and item lengths as SGLang's pools do; a FIA buffer's item is ``page_size`` rows."""
    return (
        [one.data_ptr() for one in buffers],
        [one.nbytes for one in buffers],
        [one[0].nbytes * rows_an_item for one in buffers],
    )


def layers(pool: AttachedPool, component: str, *roles: str) -> list[torch.Tensor]:
    return [one for role in roles for one in pool.tensor(component, role)]


def as_lists(pointers: PointerList) -> tuple[list[int], list[int], list[int]]:
    return list(pointers.data_ptrs), list(pointers.data_lens), list(pointers.item_lens)


def test_multi_head(attach: Attach) -> None:
    pool = attach(msgspec.structs.replace(MHA, draft=DraftSpec(layers=1, head_dim=16)))
    lists = pool.engine_lists()
    assert as_lists(lists.main) == infos([*layers(pool, "main", "k", "v"), *layers(pool, "draft", "k", "v")])
    assert as_lists(lists.state) == ([], [], [])
    assert lists.main.names == (
        *("main/k/7", "main/k/8", "main/k/9", "main/v/7", "main/v/8", "main/v/9"),
        *("draft/k/0", "draft/v/0"),
    )


def test_an_item_of_the_fia_view_is_a_page_not_a_row(attach: Attach) -> None:
    pool = attach(msgspec.structs.replace(MHA, view="fia"))
    assert as_lists(pool.engine_lists().main) == infos(layers(pool, "main", "k", "v"), rows_an_item=16)
    paged = attach(MHA).engine_lists().main
    assert pool.engine_lists().main.item_lens == paged.item_lens


def test_latent(attach: Attach) -> None:
    pool = attach(msgspec.structs.replace(MLA, draft=DraftSpec(layers=1, index_head_dim=16)))
    lists = pool.engine_lists()
    roles = ("k", "v", "index_k", "index_scale")
    assert as_lists(lists.main) == infos([*layers(pool, "main", *roles), *layers(pool, "draft", *roles)])
    index = [*layers(pool, "main", *roles[2:]), *layers(pool, "draft", *roles[2:])]
    assert as_lists(lists.state) == infos(index)
    assert [name for name in lists.state.names if name.startswith("main")] == [
        *("main/index_k/1", "main/index_k/3", "main/index_scale/1", "main/index_scale/3")
    ]


def test_packed_latent(attach: Attach) -> None:
    packed = msgspec.structs.replace(MLA, packed="ascend", kv_lora_rank=128, dtype="float8_e4m3fn")
    pool = attach(packed)
    assert as_lists(pool.engine_lists().main) == infos(layers(pool, "main", "k", "index_k", "index_scale"))


def test_joined_latent(attach: Attach) -> None:
    pool = attach(msgspec.structs.replace(MLA, joined=True, draft=DraftSpec(layers=1)))
    rows = [*layers(pool, "main", "k", "index_k", "index_scale"), *layers(pool, "draft", "k")]
    assert as_lists(pool.engine_lists().main) == infos(rows)


def test_the_window_pool_is_the_state(attach: Attach) -> None:
    pool = attach(msgspec.structs.replace(SWA, draft=DraftSpec(layers=1)))
    lists = pool.engine_lists()
    assert as_lists(lists.main) == infos([*layers(pool, "main", "k", "v"), *layers(pool, "draft", "k", "v")])
    assert as_lists(lists.state) == infos(layers(pool, "swa", "k", "v"))


def test_the_slots_of_requests_are_the_state(attach: Attach) -> None:
    pool = attach(MAMBA)
    lists = pool.engine_lists()
    assert as_lists(lists.main) == infos(layers(pool, "main", "k", "v"))
    assert as_lists(lists.state) == infos(layers(pool, "mamba", "conv", "ssm"))
    assert lists.state.item_lens == (3 * 6 * 2, 3 * 6 * 2, 2 * 4 * 4 * 4, 2 * 4 * 4 * 4)


@pytest.mark.parametrize("spec", [MHA, MLA, SWA, MAMBA], ids=lambda spec: str(spec.__struct_config__.tag))
def test_offsets_plus_the_base_are_the_addresses(spec: PoolSpec) -> None:
    manifest = manifest_of(spec)
    offsets, addresses = engine_lists(manifest), engine_lists(manifest, 1 << 40)
    for low, high in ((offsets.main, addresses.main), (offsets.state, addresses.state)):
        assert [one + (1 << 40) for one in low.data_ptrs] == list(high.data_ptrs)
    assert {*offsets.main.names, *offsets.state.names} == {entry.name for entry in manifest.entries}
