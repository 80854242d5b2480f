"""Manifests: uniqueness, their size, what is optional, the layout digest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.planning.manifest import check_unique, lay_out, layout_digest
from kvferry.protocol.errors import DuplicateEntryError, InvalidFieldError
from kvferry.protocol.manifests import Entry

PLAIN = Entry(
    component="main", role="k", layer=4, base=640, pages=5, page_bytes=256, page_tokens=4, head_start=2, heads=2,
    total_heads=8, dtype="float16", shape=(5, 4, 2, 16), format="ND",
)  # fmt: skip
GEOMETRY: dict[str, list[Any]] = {
    "component": ["draft"],
    "role": ["v", "index_k"],
    "layer": [0, 5],
    "page_bytes": [128, 512],
    "page_tokens": [8, None],
    "head_start": [0, None],
    "heads": [1, None],
    "total_heads": [4, None],
    "dtype": ["bfloat16", "float32", None],
    "format": ["NZ", None],
    "scales": [(0.5,), (0.5, 0.25)],
}
PLACE: dict[str, list[Any]] = {
    "base": [0, 641],
    "pages": [2, 6],
    "shape": [(20, 1, 2, 16), (1,), None],
    "replicas": [1, 8],
}


def changed(field: str, value: Any) -> Entry:  # noqa: ANN401  any field of an entry
    return msgspec.structs.replace(PLAIN, **{field: value})


@pytest.mark.parametrize("field", [*GEOMETRY, *PLACE])
def test_the_digest_covers_the_geometry_and_leaves_the_place_out(field: str) -> None:
    for value in (GEOMETRY | PLACE)[field]:
        assert (layout_digest([changed(field, value)]) == layout_digest([PLAIN])) == (field in PLACE), value
    assert sorted([*GEOMETRY, *PLACE]) == sorted(Entry.__struct_fields__)


def test_the_digest_knows_scales_by_what_they_are_as_float32() -> None:
    one, each, exact = (
        changed("scales", (0.1,)),
        changed("scales", (0.1, 0.1)),
        changed("scales", (0.10000000149011612,)),
    )
    assert layout_digest([one]) == layout_digest([each]) == layout_digest([exact])
    assert layout_digest([one]) != layout_digest([changed("scales", (0.1000001,))])


@given(st.permutations([(role, layer) for role in ("k", "v") for layer in range(3)]))
def test_the_digest_leaves_out_the_order(names: list[tuple[str, int]]) -> None:
    entries = [msgspec.structs.replace(PLAIN, role=role, layer=layer) for role, layer in names]
    assert layout_digest(entries) == layout_digest(sorted(entries, key=lambda one: one.name))


def test_the_digest_is_32_digits_and_never_changes() -> None:
    assert layout_digest([PLAIN, changed("layer", 5)]) != layout_digest([PLAIN])
    assert layout_digest([PLAIN]) == "3018d55864f00d0e8b28a59d91de5f75"


def test_a_second_entry_of_one_name_is_refused() -> None:
    check_unique([PLAIN, changed("layer", 5), changed("role", "v"), changed("component", "draft")], "entries")
    with pytest.raises(DuplicateEntryError, match="main/k/4 is entry 0 and entry 2") as refused:
        check_unique([PLAIN, changed("layer", 5), changed("base", 0)], "entries")
    assert refused.value.field == "entries[2]"


def test_a_region_has_a_bound() -> None:
    with pytest.raises(InvalidFieldError, match="the region would exceed") as refused:
        lay_out([changed("page_bytes", 1 << 49)])
    assert refused.value.field == "tokens"


@pytest.mark.parametrize("optional", [("drat",), ("main",), ("main", "draft")])
def test_optional_components_must_exist_and_leave_something(optional: tuple[str, ...]) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        lay_out([PLAIN], optional_components=optional)
    assert refused.value.field == "optional_components"
