"""Entries from outside and manifests: contradictions, the digest, scales, and what ready specs give."""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.entry_checks import MAX_ADDRESS, check_entry
from kvferry.pools.layouts.models import MODELS, model_spec
from kvferry.pools.planning.manifest import SpaceSize, lay_out, layout_digest, space_sizes
from kvferry.protocol import errors
from kvferry.protocol.manifests import Entry

PAGED: Final = Entry(
    component="main", role="k", layer=4, base=1000, pages=10, page_bytes=16 * 2 * 8 * 2, page_tokens=16,
    head_start=2, heads=2, total_heads=8, dtype="float16", shape=(10, 16, 2, 8), format="ND",
)  # fmt: skip
FIA: Final = msgspec.structs.replace(PAGED, shape=(160, 1, 2, 8))
NZ: Final = msgspec.structs.replace(PAGED, shape=(10, 2, 1, 16, 16), page_bytes=16 * 2 * 16 * 2, format="FIA_NZ")
STATE: Final = msgspec.structs.replace(PAGED, shape=(10, 2, 16, 8), page_tokens=None)
SCALES: Final = msgspec.structs.replace(
    PAGED, role="k_scale", shape=(10, 2), page_tokens=None, page_bytes=2 * 4, dtype="float32", format="PAGE_HEADS"
)
INDEX_SCALE: Final = msgspec.structs.replace(
    PAGED, role="index_scale", shape=(9, 128, 1), pages=9, page_tokens=128, page_bytes=512, dtype="float32",
    head_start=0, heads=1, total_heads=1,
)  # fmt: skip
PACKED: Final = msgspec.structs.replace(
    PAGED, shape=(5, 128, 1, 656), pages=5, page_tokens=128, page_bytes=128 * 656, dtype="float8_e4m3fn",
    head_start=0, heads=1, total_heads=1, format="FP8_DS_MLA",
)  # fmt: skip
JOINED: Final = msgspec.structs.replace(
    PACKED, shape=(5, 128, 1, 40), page_bytes=128 * 40 * 2, dtype="float16", format="LATENT_ROPE_32_8"
)
JOINED_NZ: Final = msgspec.structs.replace(
    NZ, shape=(10, 1, 2, 16, 16), heads=1, total_heads=1, head_start=0, page_bytes=16 * 32 * 2,
    format="FIA_NZ_LATENT_ROPE_24_8",
)  # fmt: skip
SSM: Final = msgspec.structs.replace(
    PAGED, role="ssm", shape=(4, 4, 8, 8), pages=4, page_tokens=None, page_bytes=4 * 8 * 8 * 4, dtype="float32",
    head_start=0, heads=4, total_heads=16,
)  # fmt: skip
ONE_HEAD: Final = msgspec.structs.replace(SSM, shape=(4, 1, 8, 8), page_bytes=8 * 8 * 4, heads=1)
CONV: Final = msgspec.structs.replace(
    SSM, role="conv", shape=(4, 3, 8), page_bytes=3 * 8 * 4, head_start=1, heads=1, total_heads=4
)
SCALED: Final = msgspec.structs.replace(PAGED, dtype="int8", page_bytes=16 * 2 * 8, scales=(1.0, 2.0))
OPTIONAL: Final = ("page_tokens", "head_start", "heads", "total_heads", "dtype", "shape", "format")


@pytest.mark.parametrize(
    "entry",
    [PAGED, FIA, NZ, STATE, SCALES, INDEX_SCALE, PACKED, JOINED, JOINED_NZ, SSM, ONE_HEAD, CONV],
    ids=lambda entry: f"{entry.role} {entry.format} {entry.shape}",
)
def test_whatever_is_left_out_the_rest_goes_together(entry: Entry) -> None:
    for count in range(len(OPTIONAL) + 1):
        for names in itertools.combinations(OPTIONAL, count):
            if "format" in names and entry in {NZ, JOINED_NZ} and "shape" not in names:
                continue  # fractals that are not called so are no array of ours
            check_entry(msgspec.structs.replace(entry, **dict.fromkeys(names)), "x[1]")
    for shape, form in [((2, 10, 16, 8), "blocks of another engine"), ((10, 32, 8), "ND"), ((10, 256), None)]:
        check_entry(msgspec.structs.replace(PAGED, shape=shape, format=form), "x[1]")  # axes that nobody knows


@pytest.mark.parametrize(
    ("error", "field", "entry", "changes"),
    [
        (errors.InvalidFieldError, "base", PAGED, {"base": MAX_ADDRESS}),
        (errors.InvalidFieldError, "base", PAGED, {"pages": (1 << 31) - 1, "page_bytes": (1 << 62) - 1, "shape": None}),
        (errors.InvalidFieldError, "heads", PAGED, {"head_start": 7}),
        (errors.InvalidFieldError, "dtype", PAGED, {"dtype": "float12"}),
        (
            errors.GeometryMismatchError,
            "page_bytes",
            PAGED,
            {"page_bytes": 32, "shape": (160, 1, 2, 8)},
        ),  # a row, not a page
        (errors.GeometryMismatchError, "page_bytes", PAGED, {"dtype": "float32"}),
        (errors.GeometryMismatchError, "page_bytes", PAGED, {"page_bytes": 511, "shape": None}),
        (errors.GeometryMismatchError, "page_bytes", PAGED, {"page_tokens": 24, "shape": None}),
        (errors.GeometryMismatchError, "page_bytes", PAGED, {"heads": 3, "shape": None}),
        (errors.GeometryMismatchError, "page_bytes", PAGED, {"heads": 32, "total_heads": 64, "shape": None}),
        (errors.GeometryMismatchError, "shape", PAGED, {"page_tokens": 8}),
        (errors.GeometryMismatchError, "shape", PAGED, {"heads": 1}),
        (errors.GeometryMismatchError, "shape", PAGED, {"format": None, "heads": 1}),
        (errors.GeometryMismatchError, "shape", PAGED, {"dtype": None, "shape": (10, 8, 2, 16)}),
        (errors.GeometryMismatchError, "shape", PAGED, {"shape": (10, 2, 16, 8)}),
        (errors.GeometryMismatchError, "shape", FIA, {"page_tokens": 8}),
        (errors.GeometryMismatchError, "shape", NZ, {"heads": 1}),
        (errors.GeometryMismatchError, "shape", JOINED, {"page_tokens": 64}),
        (errors.GeometryMismatchError, "shape", JOINED_NZ, {"page_tokens": 8}),
        (errors.GeometryMismatchError, "shape", NZ, {"shape": (2, 10, 1, 16, 16)}),
        (errors.GeometryMismatchError, "shape", SCALES, {"heads": 1}),
        (errors.GeometryMismatchError, "shape", SCALES, {"shape": (5, 4)}),
        (errors.GeometryMismatchError, "page_bytes", SCALES, {"heads": 4, "shape": None}),
        (errors.GeometryMismatchError, "page_bytes", PAGED, {"page_bytes": 32, "dtype": None}),
        (errors.GeometryMismatchError, "page_bytes", PAGED, {"shape": (7, 16, 2, 8), "dtype": None}),
        (errors.GeometryMismatchError, "shape", PAGED, {"pages": 5, "page_bytes": 1024, "page_tokens": None}),
        (errors.GeometryMismatchError, "shape", PAGED, {"shape": (16, 10, 2, 8), "page_tokens": None}),
        (errors.GeometryMismatchError, "shape", PAGED, {"shape": (5, 64, 8)}),
        (errors.GeometryMismatchError, "shape", FIA, {"shape": (16, 1, 20, 8), "page_tokens": None}),
        (errors.GeometryMismatchError, "shape", SCALES, {"pages": 5, "page_bytes": 16}),
        (errors.GeometryMismatchError, "shape", INDEX_SCALE, {"page_tokens": 64}),
        (errors.GeometryMismatchError, "shape", INDEX_SCALE, {"pages": 3, "page_bytes": 1536}),
        (errors.GeometryMismatchError, "page_bytes", INDEX_SCALE, {"heads": 2, "total_heads": 2}),
        (errors.GeometryMismatchError, "shape", PACKED, {"page_tokens": 64}),
        (errors.GeometryMismatchError, "shape", PACKED, {"pages": 1, "page_bytes": 5 * 128 * 656}),
        (errors.GeometryMismatchError, "shape", SSM, {"heads": 16}),
        (errors.GeometryMismatchError, "shape", SSM, {"pages": 2, "page_bytes": 2 * 4 * 8 * 8 * 4}),
        (errors.GeometryMismatchError, "shape", ONE_HEAD, {"pages": 2, "page_bytes": 2 * 8 * 8 * 4}),
        (errors.GeometryMismatchError, "shape", CONV, {"pages": 2, "page_bytes": 2 * 3 * 8 * 4}),
        (errors.KvferryError, "scales", SCALED, {"scales": (1.0, 2.0, 3.0)}),
        (errors.KvferryError, "scales", SCALED, {"scales": (0.0,)}),
        (errors.KvferryError, "scales", SCALED, {"scales": (math.inf, 1.0)}),
        (errors.KvferryError, "scales", SCALED, {"heads": None}),
        (errors.KvferryError, "scales", SCALED, {"dtype": None}),
        (errors.KvferryError, "scales", SCALED, {"dtype": "bfloat16", "shape": None}),
    ],
)
def test_an_entry_that_contradicts_itself(
    error: type[errors.KvferryError], field: str, entry: Entry, changes: dict[str, Any]
) -> None:
    check_entry(entry, "x[1]")
    with pytest.raises(error) as refused:
        check_entry(msgspec.structs.replace(entry, **changes), "x[1]")
    assert refused.value.field == f"x[1].{field}"


PLAIN = Entry(
    component="main", role="k", layer=4, base=640, pages=5, page_bytes=256, page_tokens=4, head_start=2, heads=2,
    total_heads=8, dtype="float16", shape=(5, 4, 2, 16), format="ND",
)  # fmt: skip
GEOMETRY: dict[str, list[Any]] = {
    "component": ["draft"], "role": ["v", "index_k"], "layer": [0, 5], "page_bytes": [128, 512],
    "page_tokens": [8, None], "head_start": [0, None], "heads": [1, None], "total_heads": [4, None],
    "dtype": ["bfloat16", "float32", None], "format": ["NZ", None], "scales": [(0.5,), (0.5, 0.25)],
}  # fmt: skip
PLACE: dict[str, list[Any]] = {
    "base": [0, 641], "pages": [2, 6], "shape": [(20, 1, 2, 16), (1,), None], "replicas": [1, 8],
}  # fmt: skip


def changed(field: str, value: Any) -> Entry:  # noqa: ANN401  any field of an entry
    return msgspec.structs.replace(PLAIN, **{field: value})


@pytest.mark.parametrize("field", [*GEOMETRY, *PLACE])
def test_the_digest_covers_the_geometry_and_leaves_the_place_out(field: str) -> None:
    for value in (GEOMETRY | PLACE)[field]:
        assert (layout_digest([changed(field, value)]) == layout_digest([PLAIN])) == (field in PLACE), value
    assert sorted([*GEOMETRY, *PLACE]) == sorted(Entry.__struct_fields__)


def test_the_digest_never_changes_and_knows_scales_by_what_they_are_as_float32() -> None:
    assert layout_digest([PLAIN]) == "3018d55864f00d0e8b28a59d91de5f75"
    scales = [(0.1,), (0.1, 0.1), (0.10000000149011612,), (0.1000001,)]
    one, each, exact, another = (layout_digest([changed("scales", said)]) for said in scales)
    assert one == each == exact != another


@given(st.permutations([(role, layer) for role in ("k", "v") for layer in range(3)]))
def test_the_digest_leaves_out_the_order(names: list[tuple[str, int]]) -> None:
    entries = [msgspec.structs.replace(PLAIN, role=role, layer=layer) for role, layer in names]
    assert layout_digest(entries) == layout_digest(sorted(entries, key=lambda one: one.name))
    assert layout_digest(entries) != layout_digest(entries[1:])


@pytest.mark.parametrize(
    ("field", "value", "optional"),
    [
        ("tokens", 1 << 49, ()),
        *(("optional_components", 256, optional) for optional in (("drat",), ("main",), ("main", "draft"))),
    ],
    ids=str,
)
def test_a_region_has_a_bound_and_optional_components_must_leave_something(
    field: str, value: int, optional: tuple[str, ...]
) -> None:
    with pytest.raises(errors.InvalidFieldError) as refused:
        lay_out([changed("page_bytes", value)], optional_components=optional)
    assert refused.value.field == field


def sizes_of(name: str, **options: Any) -> dict[str, SpaceSize]:  # noqa: ANN401  any option of model_spec
    options.setdefault("tokens", 1024)
    return {one.space: one for one in space_sizes(manifest_of(model_spec(name, **options)))}


def test_other_forms_windows_and_states() -> None:
    """What each model's tokens take is in the tables of docs/layouts.md, which are compared with the code."""
    assert sizes_of("llama-3-8b", dtype="int8")["main"].token_bytes == 64 << 10
    assert sizes_of("deepseek-v3", packed="ds_mla")["main"].token_bytes == 61 * 656
    assert sizes_of("DeepSeek-V3.2", packed="ascend")["main"].token_bytes == 61 * (656 + 128 + 4)
    assert sizes_of("deepseek-v3", joined=True) == sizes_of("deepseek-v3")
    gemma = sizes_of("gemma-3-27b", requests=10)["swa"]
    assert gemma.token_bytes == 52 * 2 * 16 * 128 * 2
    assert gemma.pages == 10 * (1024 // 128 + 1)
    state = sizes_of("qwen3-next-80b-a3b", requests=10)["mamba"]
    assert state.pages == 10
    assert state.page_bytes == 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)


@pytest.mark.parametrize("name", MODELS)
def test_the_ranks_hold_each_head_once_or_as_replicas(name: str) -> None:
    seen: dict[tuple[str, int], int] = {}
    specs = [model_spec(name, tokens=1024, tp_size=tp_of(name), tp_rank=rank) for rank in range(tp_of(name))]
    for spec in specs:
        for entry in manifest_of(spec).entries:
            if entry.role == "conv":
                continue
            for head in range(entry.head_start or 0, (entry.head_start or 0) + (entry.heads or 0)):
                key = (entry.name, head)
                seen[key] = seen.get(key, 0) + 1
                assert entry.replicas in {None, tp_of(name)} or len(specs) % entry.replicas == 0
    expected = {
        entry.name: (entry.total_heads, entry.replicas or 1)
        for entry in manifest_of(specs[0]).entries
        if entry.role != "conv"
    }
    assert seen == {(key, head): count for key, (total, count) in expected.items() for head in range(total or 0)}


def tp_of(name: str) -> int:
    return {"smollm2-135m": 3}.get(name, 8)


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_each_layer_once(name: str) -> None:
    layers = MODELS[name].layers
    cuts = [0, 1, layers // 2, layers]
    stages = [
        manifest_of(model_spec(name, tokens=1024, first_layer=start, layers=end - start))
        for start, end in itertools.pairwise(cuts)
    ]
    whole = manifest_of(model_spec(name, tokens=1024))
    assert sorted(one.name for stage in stages for one in stage.entries) == sorted(one.name for one in whole.entries)


@pytest.mark.parametrize("name", [name for name, facts in MODELS.items() if facts.draft_layers])
def test_the_draft_is_on_the_last_stage(name: str) -> None:
    layers = MODELS[name].layers
    assert model_spec(name, tokens=1024, layers=layers - 1, draft=True).draft is None
    last = manifest_of(model_spec(name, tokens=1024, first_layer=layers - 1, draft=True))
    main = {entry.role for entry in last.entries if entry.component == "main"}
    assert {entry.role for entry in last.entries if entry.component == "draft"} == main


@pytest.mark.parametrize(
    ("error", "field", "name", "options"),
    [
        (errors.InvalidFieldError, "model", "llama-4-9b", {}),
        (errors.InvalidFieldError, "layers", "llama-3-8b", {"first_layer": 32}),
        (errors.InvalidFieldError, "layers", "llama-3-8b", {"layers": 0}),
        (errors.InvalidFieldError, "tp_rank", "llama-3-8b", {"tp_size": 2, "tp_rank": 2}),
        (errors.InvalidFieldError, "tp_rank", "deepseek-v3", {"tp_size": 0}),
        (errors.InvalidFieldError, "tokens", "llama-3-8b", {"tokens": 0}),
        (errors.InvalidFieldError, "page_size", "gemma-3-1b", {"page_size": 0}),
        (errors.InvalidFieldError, "window_tokens", "gemma-3-1b", {"requests": 0}),
        (errors.InvalidFieldError, "slots", "qwen3-next-80b-a3b", {"requests": 0}),
        (errors.InvalidFieldError, "draft", "llama-3-8b", {"draft": True}),
        (errors.InvalidFieldError, "packed", "llama-3-8b", {"packed": "ascend"}),
        (errors.HeadsIndivisibleError, "tp_size", "llama-3-8b", {"tp_size": 3}),
        (errors.HeadsIndivisibleError, "tp_size", "qwen3-next-80b-a3b", {"tp_size": 32}),
    ],
)
def test_what_cannot_be(error: type[errors.KvferryError], field: str, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(error) as refused:
        model_spec(name, **{"tokens": 1024, **options})
    assert refused.value.field == field
