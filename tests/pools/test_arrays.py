"""What each array of a pool is, and where in its region; what is said of registered ones is compared with it."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients.pool import AttachedPool
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.arrays import (
    Held,
    array_of,
    arrays_of,
    check_apart,
    check_storage,
    engine_lists,
    viewed_as,
)
from kvferry.protocol.errors import DuplicateEntryError, InvalidFieldError, PoolExistsError, UncoveredEntryError
from kvferry.protocol.manifests import DraftSpec, MhaSpec, PoolSpec
from tests.kit.pool_specs import MAMBA, MHA, MLA, SWA, changed, pool_specs

SPEC = MhaSpec(layers=2, first_layer=3, tokens=64, page_size=4, kv_heads=2, head_dim=4, v_head_dim=2, dtype="float32")
MANIFEST = manifest_of(SPEC)
K, V = ("main", "k", None), ("main", "v", None)


@given(pool_specs(), st.data())
def test_arrays_hold_every_entry_where_the_manifest_has_it(spec: PoolSpec, data: st.DataObject) -> None:
    manifest = manifest_of(spec)
    roles = dict.fromkeys((one.component, one.role) for one in manifest.entries)
    arrays: list[tuple[str, str, int | None]] = []
    for component, role in roles:
        layers = [one.layer for one in manifest.entries if (one.component, one.role) == (component, role)]
        apart = data.draw(st.booleans())
        arrays += [(component, role, layer) for layer in layers] if apart else [(component, role, None)]
    arrays = data.draw(st.permutations(arrays))
    held = np.zeros(manifest.region_bytes, int)
    for (component, role, layer), extent in zip(arrays, arrays_of(manifest, arrays), strict=True):
        held[extent.start : extent.start + extent.size_bytes] += 1
        at = extent.start
        for entry in manifest.entries:
            if (entry.component, entry.role) == (component, role) and layer in {None, entry.layer}:
                assert entry.base == at, "layers lie one after another, as the engine's array has them"
                at += entry.pages * entry.page_bytes
        assert at == extent.start + extent.size_bytes
    assert held.max() == 1
    entries = np.zeros(manifest.region_bytes, int)
    for entry in manifest.entries:
        entries[entry.base : entry.base + entry.pages * entry.page_bytes] += 1
    assert (held == entries).all()


@pytest.mark.parametrize(
    ("arrays", "error", "field"),
    [
        ([K, ("main", "index_k", None)], InvalidFieldError, "arrays[1]"),
        ([K, ("main", "v", 3), ("main", "v", 5)], InvalidFieldError, "arrays[2]"),
        ([K, ("draft", "k", None)], InvalidFieldError, "arrays[1]"),
        ([K, V, ("main", "k", 3)], DuplicateEntryError, "arrays[2]"),
        ([K, K, V], DuplicateEntryError, "arrays[1]"),
        ([K], UncoveredEntryError, "arrays"),
        ([K, ("main", "v", 3)], UncoveredEntryError, "arrays"),  # main/v/4 is missing
        ([], UncoveredEntryError, "arrays"),
    ],
)
def test_what_is_wrong_is_named(arrays: list[tuple[str, str, int | None]], error: type[Exception], field: str) -> None:
    with pytest.raises(error) as refused:
        arrays_of(MANIFEST, arrays)
    assert refused.value.field == field  # type: ignore[attr-defined]
    assert error is not UncoveredEntryError or re.search(r"main/[kv]/[34] is in no array", str(refused.value))


def test_an_array_of_layers_that_lie_apart_is_none() -> None:
    first, *rest = MANIFEST.entries
    moved = msgspec.structs.replace(
        MANIFEST, entries=(first, *(msgspec.structs.replace(one, base=one.base + 64) for one in rest))
    )
    with pytest.raises(InvalidFieldError, match="the layers of main/k differ in spacing"):
        array_of(moved, "main", "k")
    assert array_of(moved, "main", "k", 4).shape == (17, 4, 2, 4)
    assert array_of(moved, "main", "v").shape == (2, 17, 4, 2, 2)


@pytest.mark.parametrize(
    ("offset_bytes", "storage_bytes", "fits"),
    [(0, 4352, True), (4, 4356, True), (0, 4351, False), (4, 4352, False), (2, 8192, False), (1 << 60, 1 << 20, False)],
)
def test_an_array_ends_within_its_storage(offset_bytes: int, storage_bytes: int, fits: bool) -> None:  # noqa: FBT001
    array = array_of(MANIFEST, "main", "k")
    assert array.size_bytes == 4352
    if fits:
        check_storage(array, offset_bytes, storage_bytes)
        return
    with pytest.raises(InvalidFieldError) as refused:
        check_storage(array, offset_bytes, storage_bytes)
    assert refused.value.field == "main/k.storage"


@given(st.permutations([Held(0, 10, "a"), Held(10, 20, "b"), Held(25, 30, "c")]))
def test_arrays_may_touch_and_not_overlap(held: list[Held]) -> None:
    check_apart(held)
    with pytest.raises(InvalidFieldError) as refused:
        check_apart([*held, Held(29, 40, "d")])
    assert refused.value.field == "d.storage"
    with pytest.raises(InvalidFieldError) as refused:
        check_apart([*held, Held(-5, 100, "all")])
    assert refused.value.field == "a.storage"


def test_another_view_is_the_same_pool_and_another_size_is_not() -> None:
    fia = manifest_of(msgspec.structs.replace(SPEC, view="fia"))
    assert array_of(viewed_as(MANIFEST, fia, "pool"), "main", "k").shape == (2, 68, 1, 2, 4)
    with pytest.raises(PoolExistsError):
        viewed_as(MANIFEST, manifest_of(msgspec.structs.replace(SPEC, tokens=32)), "pool")
    with pytest.raises(PoolExistsError, match="windows"):
        viewed_as(changed(SWA, window=199), changed(SWA), "pool")
    one, each = (changed(SPEC, dtype="int8", k_scale=scales) for scales in (0.5, ((0.5, 0.5),) * 2))
    assert viewed_as(one, each, "pool").entries == each.entries, "one scale for all heads is that of each"


# -- pointer lists against what SGLang's pools compute from their tensors.


DRAFT: Final = DraftSpec(layers=1)
INDEXED: Final = msgspec.structs.replace(MLA, index_layers=(11, 13), index_scale=True)
K_AND_V: Final = ("main/k", "main/v")
LATENT: Final = (*K_AND_V, "main/index_k", "main/index_scale")
LATENT_DRAFT: Final = ("draft/k", "draft/v", "draft/index_k", "draft/index_scale")


@pytest.mark.parametrize(
    ("spec", "changes", "main", "state"),
    [
        (MHA, {}, K_AND_V, ()),
        (MHA, {"draft": DraftSpec(layers=1, head_dim=16)}, (*K_AND_V, "draft/k", "draft/v"), ()),
        (MHA, {"view": "fia"}, K_AND_V, ()),
        (
            INDEXED,
            {"draft": DraftSpec(layers=1, index_head_dim=16)},
            LATENT + LATENT_DRAFT,
            LATENT[2:] + LATENT_DRAFT[2:],
        ),
        (INDEXED, {"packed": "ascend", "dtype": "float8_e4m3fn"}, LATENT[:1] + LATENT[2:], LATENT[2:]),
        (INDEXED, {"joined": True, "draft": DRAFT}, (*LATENT[:1], *LATENT[2:], "draft/k"), LATENT[2:]),
        (SWA, {"draft": DRAFT}, (*K_AND_V, "draft/k", "draft/v"), ("swa/k", "swa/v")),
        (MAMBA, {}, K_AND_V, ("mamba/conv", "mamba/ssm")),
    ],
    ids=str,
)
def test_the_lists_are_those_that_the_engine_computes_from_its_tensors(
    spec: PoolSpec, changes: dict[str, Any], main: tuple[str, ...], state: tuple[str, ...]
) -> None:
    manifest = changed(spec, **changes)
    pool = AttachedPool("engine", manifest, HostRegion.create("engine", manifest.region_bytes))
    rows = 128 if changes.get("view") == "fia" else 1  # an item of the FIA view is a page, not a row
    for pointers, roles in zip((pool.engine_lists().main, pool.engine_lists().state), (main, state), strict=True):
        named = [one.name for role in roles for one in pool.manifest.entries if one.name.startswith(f"{role}/")]
        assert list(pointers.names) == named
        buffers = [one for role in roles for one in pool.tensor(*role.split("/"))]
        assert list(pointers.data_ptrs) == [one.data_ptr() for one in buffers]
        assert list(pointers.data_lens) == [one.nbytes for one in buffers]
        assert list(pointers.item_lens) == [one[0].nbytes * rows for one in buffers]
        del buffers
    pool.close()
    offsets, addresses = engine_lists(manifest), engine_lists(manifest, 1 << 40)
    assert {*offsets.main.names, *offsets.state.names} == {entry.name for entry in manifest.entries}
    for low, high in ((offsets.main, addresses.main), (offsets.state, addresses.state)):
        assert [one + (1 << 40) for one in low.data_ptrs] == list(high.data_ptrs)
