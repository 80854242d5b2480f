"""Which stretch of a region each array of a lent pool holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.arrays import arrays_of
from kvferry.pools.layouts import manifest_of
from kvferry.protocol.errors import DuplicateEntryError, InvalidFieldError, UncoveredEntryError
from kvferry.protocol.manifests import MhaSpec, PoolSpec
from tests.pools.layouts.pool_specs import pool_specs

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
    for (component, role, layer), stretch in zip(arrays, arrays_of(manifest, arrays), strict=True):
        held[stretch.start : stretch.start + stretch.size_bytes] += 1
        at = stretch.start
        for entry in manifest.entries:
            if (entry.component, entry.role) == (component, role) and layer in {None, entry.layer}:
                assert entry.base == at, "layers lie one after another, as the engine's array has them"
                at += entry.pages * entry.page_bytes
        assert at == stretch.start + stretch.size_bytes
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
        ([K, ("main", "v", 3)], UncoveredEntryError, "arrays"),
        ([], UncoveredEntryError, "arrays"),
    ],
)
def test_what_is_wrong_is_named(arrays: list[tuple[str, str, int | None]], error: type[Exception], field: str) -> None:
    with pytest.raises(error) as refused:
        arrays_of(MANIFEST, arrays)
    assert refused.value.field == field  # type: ignore[attr-defined]


def test_which_entry_is_missing_is_said() -> None:
    with pytest.raises(UncoveredEntryError, match=r"main/v/4 is in no array"):
        arrays_of(MANIFEST, [K, ("main", "v", 3)])
