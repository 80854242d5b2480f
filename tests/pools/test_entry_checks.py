"""Entries from outside: each contradiction between two of their fields is found, and what may be left out is no lie."""

from __future__ import annotations

import itertools
from typing import Any, Final

import msgspec
import pytest

from kvferry.pools.layouts.entry_checks import MAX_ADDRESS, check_entry
from kvferry.protocol.errors import GeometryMismatchError, InvalidFieldError, KvferryError
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


@pytest.mark.parametrize(
    ("error", "field", "entry", "changes"),
    [
        (InvalidFieldError, "base", PAGED, {"base": MAX_ADDRESS}),
        (InvalidFieldError, "base", PAGED, {"pages": (1 << 31) - 1, "page_bytes": (1 << 62) - 1, "shape": None}),
        (InvalidFieldError, "heads", PAGED, {"head_start": 7}),
        (InvalidFieldError, "dtype", PAGED, {"dtype": "float12"}),
        (GeometryMismatchError, "page_bytes", PAGED, {"page_bytes": 32, "shape": (160, 1, 2, 8)}),  # a row, not a page
        (GeometryMismatchError, "page_bytes", PAGED, {"dtype": "float32"}),
        (GeometryMismatchError, "page_bytes", PAGED, {"page_bytes": 511, "shape": None}),
        (GeometryMismatchError, "page_bytes", PAGED, {"page_tokens": 24, "shape": None}),
        (GeometryMismatchError, "page_bytes", PAGED, {"heads": 3, "shape": None}),
        (GeometryMismatchError, "page_bytes", PAGED, {"heads": 32, "total_heads": 64, "shape": None}),
        (GeometryMismatchError, "shape", PAGED, {"page_tokens": 8}),
        (GeometryMismatchError, "shape", PAGED, {"heads": 1}),
        (GeometryMismatchError, "shape", PAGED, {"format": None, "heads": 1}),
        (GeometryMismatchError, "shape", PAGED, {"dtype": None, "shape": (10, 8, 2, 16)}),
        (GeometryMismatchError, "shape", PAGED, {"shape": (10, 2, 16, 8)}),
        (GeometryMismatchError, "shape", FIA, {"page_tokens": 8}),
        (GeometryMismatchError, "shape", NZ, {"heads": 1}),
        (GeometryMismatchError, "shape", JOINED, {"page_tokens": 64}),
        (GeometryMismatchError, "shape", JOINED_NZ, {"page_tokens": 8}),
        (GeometryMismatchError, "shape", NZ, {"shape": (2, 10, 1, 16, 16)}),
        (GeometryMismatchError, "shape", SCALES, {"heads": 1}),
        (GeometryMismatchError, "shape", SCALES, {"shape": (5, 4)}),
        (GeometryMismatchError, "page_bytes", SCALES, {"heads": 4, "shape": None}),
        (GeometryMismatchError, "page_bytes", PAGED, {"page_bytes": 32, "dtype": None}),
        (GeometryMismatchError, "page_bytes", PAGED, {"shape": (7, 16, 2, 8), "dtype": None}),
        (GeometryMismatchError, "shape", PAGED, {"pages": 5, "page_bytes": 1024, "page_tokens": None}),
        (GeometryMismatchError, "shape", PAGED, {"shape": (16, 10, 2, 8), "page_tokens": None}),
        (GeometryMismatchError, "shape", PAGED, {"shape": (5, 64, 8)}),
        (GeometryMismatchError, "shape", FIA, {"shape": (16, 1, 20, 8), "page_tokens": None}),
        (GeometryMismatchError, "shape", SCALES, {"pages": 5, "page_bytes": 16}),
        (GeometryMismatchError, "shape", INDEX_SCALE, {"page_tokens": 64}),
        (GeometryMismatchError, "shape", INDEX_SCALE, {"pages": 3, "page_bytes": 1536}),
        (GeometryMismatchError, "page_bytes", INDEX_SCALE, {"heads": 2, "total_heads": 2}),
        (GeometryMismatchError, "shape", PACKED, {"page_tokens": 64}),
        (GeometryMismatchError, "shape", PACKED, {"pages": 1, "page_bytes": 5 * 128 * 656}),
        (GeometryMismatchError, "shape", SSM, {"heads": 16}),
        (GeometryMismatchError, "shape", SSM, {"pages": 2, "page_bytes": 2 * 4 * 8 * 8 * 4}),
        (GeometryMismatchError, "shape", ONE_HEAD, {"pages": 2, "page_bytes": 2 * 8 * 8 * 4}),
        (GeometryMismatchError, "shape", CONV, {"pages": 2, "page_bytes": 2 * 3 * 8 * 4}),
    ],
)
def test_an_entry_that_contradicts_itself(
    error: type[KvferryError], field: str, entry: Entry, changes: dict[str, Any]
) -> None:
    check_entry(entry, "x[1]")
    with pytest.raises(error) as refused:
        check_entry(msgspec.structs.replace(entry, **changes), "x[1]")
    assert refused.value.field == f"x[1].{field}"


@pytest.mark.parametrize(
    ("shape", "form"),
    [((2, 10, 16, 8), "blocks of another engine"), ((10, 32, 8), "ND"), ((10, 2, 16, 8, 1), "ND"), ((10, 256), None)],
)
def test_a_shape_whose_axes_nobody_knows_contradicts_nothing(shape: tuple[int, ...], form: str | None) -> None:
    check_entry(msgspec.structs.replace(PAGED, shape=shape, format=form), "x[1]")
