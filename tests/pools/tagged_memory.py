"""The byte-level oracle: random models laid out by hand, memory whose every byte says where it belongs.

A source page is filled with bytes computed from (entry, logical page, token, head, byte of the element). Whoever
copies right puts exactly those bytes at the destination's page of the same logical number, and touches nothing else.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvferry.pools.geometry import DTYPE_BYTES
from kvferry.pools.pairing import Pairing, check_covered, pair_entries
from kvferry.pools.plan import Plan, make_plan
from kvferry.protocol.manifests import Entry

Memory: TypeAlias = npt.NDArray[np.uint8]
OPTIONAL = ("draft",)
UNTOUCHED = 0x5A
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Array(NamedTuple):
    """What a page of one (component, role, layer) is."""

    component: str
    role: str
    layer: int
    tokens: int
    heads: int
    width: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page."""
        return self.tokens * self.heads * self.width * DTYPE_BYTES[self.dtype]


class SourceSide(NamedTuple):
    """One pipeline stage: its entries, its memory, and the pages it sends."""

    entries: list[Entry]
    memory: Memory
    pages: npt.NDArray[np.int64]


class HandOffCase(NamedTuple):
    """A destination and the sources that fill it; ``prefix`` pages of the prompt are at the destination already."""

    sources: list[SourceSide]
    entries: list[Entry]
    pages: npt.NDArray[np.int64]
    region_bytes: int
    prefix: int
    arrays: dict[tuple[str, str, int], Array]


def tagged_page(array: Array, logical_page: int) -> Memory:
    """Return the bytes of one logical page: ``(page_bytes,)`` uint8."""
    token, head, byte = np.indices((array.tokens, array.heads, array.page_bytes // array.tokens // array.heads))
    page_tag = zlib.crc32(f"{array.component}/{array.role}/{array.layer}/{logical_page}".encode())
    tags = (page_tag << 16) + (token * 1024 + head * 256 + byte).astype(np.uint64)
    mixed: Memory = ((tags * _MIX) >> np.uint64(56)).astype(np.uint8)
    return mixed.reshape(-1)


def plans_of(case: HandOffCase) -> list[Plan]:
    """Plan every source into the destination, as the daemon does, with all checks."""
    return [make_plan(pairing_of(case, one), one.pages[case.prefix :], case.pages) for one in case.sources]


def pairing_of(case: HandOffCase, source: SourceSide) -> Pairing:
    """Pair one source's entries with the destination's."""
    pairing = pair_entries(source.entries, case.entries)
    if len(case.sources) == 1:
        check_covered(pairing, OPTIONAL)
    return pairing


def expected_memory(case: HandOffCase) -> Memory:
    """Return the destination's memory as it must be in the end, computed without any code of kvferry's."""
    memory = np.full(case.region_bytes, UNTOUCHED, np.uint8)
    sent = {(entry.component, entry.role, entry.layer) for source in case.sources for entry in source.entries}
    for entry in case.entries:
        key = (entry.component, entry.role, entry.layer)
        if key not in sent:
            continue
        for number, page in enumerate(case.pages.tolist()):
            start = entry.base + page * entry.page_bytes
            memory[start : start + entry.page_bytes] = tagged_page(case.arrays[key], case.prefix + number)
    return memory


@st.composite
def cases(draw: st.DrawFn) -> HandOffCase:
    """Draw a model, its split into stages, both sides' layouts, and the page lists."""
    main, draft = _arrays(draw, "main"), _arrays(draw, "draft") if draw(st.booleans()) else []
    prefix = draw(st.integers(0, 3))
    count = prefix + draw(st.integers(1, 6))
    stages = _stages(draw, main)
    if draw(st.booleans()):
        stages[-1] += draft
    pages = draw(st.integers(count - prefix + 1, 12))
    kept = [array for array in main if array.role != "surplus"] + draft
    entries, region_bytes = _layout(draw, kept, pages)
    return HandOffCase(
        [_source(draw, stage, count) for stage in stages],
        entries,
        np.array(draw(st.permutations(range(1, pages)))[: count - prefix], np.int64),
        region_bytes,
        prefix,
        {(array.component, array.role, array.layer): array for array in main + draft},
    )


def _arrays(draw: st.DrawFn, component: str) -> list[Array]:
    layers = draw(st.integers(1, 4))
    first = draw(st.integers(0, 3)) if component == "main" else 0
    tokens, heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    roles = ["k", "v", *draw(st.sets(st.sampled_from(["index_k", "index_scale", "surplus"])))]
    arrays = []
    for role in sorted(roles):
        width, dtype = draw(st.integers(1, 4)), draw(st.sampled_from(sorted(DTYPE_BYTES)))
        role_layers = layers if role in {"k", "v"} else draw(st.integers(1, layers))  # a compact indexer has fewer
        arrays += [Array(component, role, first + n, tokens, heads, width, dtype) for n in range(role_layers)]
    return arrays


def _stages(draw: st.DrawFn, arrays: list[Array]) -> list[list[Array]]:
    layers = sorted({array.layer for array in arrays})
    cuts = draw(st.sets(st.sampled_from(layers[1:]))) if len(layers) > 1 else set()
    stages: list[list[Array]] = []
    for start, stop in zip([layers[0], *sorted(cuts)], [*sorted(cuts), layers[-1] + 1], strict=True):
        stages.append([array for array in arrays if start <= array.layer < stop])
    return stages


def _layout(draw: st.DrawFn, arrays: list[Array], pages: int) -> tuple[list[Entry], int]:
    """Lay entries out in random order with random gaps; some say all of themselves, some only what they must."""
    entries, base = [], draw(st.integers(0, 9))
    for array in draw(st.permutations(arrays)):
        entry = Entry(
            component=array.component,
            role=array.role,
            layer=array.layer,
            base=base,
            pages=pages,
            page_bytes=array.page_bytes,
        )
        if draw(st.booleans()):
            rows = draw(st.sampled_from([(pages, array.tokens), (pages * array.tokens, 1)]))
            entry = msgspec.structs.replace(
                entry,
                page_tokens=array.tokens,
                head_start=0,
                heads=array.heads,
                total_heads=array.heads,
                dtype=array.dtype,
                shape=(*rows, array.heads, array.width),
                format="ND",
            )
        entries.append(entry)
        base += pages * array.page_bytes + draw(st.integers(0, 9))
    return entries, base


def _source(draw: st.DrawFn, arrays: list[Array], count: int) -> SourceSide:
    pages = draw(st.integers(count + 1, 14))
    sent = draw(st.permutations(range(1, pages)))[:count]
    entries, region_bytes = _layout(draw, arrays, pages)
    memory = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, region_bytes, np.uint8)
    by_key = {(array.component, array.role, array.layer): array for array in arrays}
    for entry in entries:
        array = by_key[entry.component, entry.role, entry.layer]
        for logical, page in enumerate(sent):
            start = entry.base + page * entry.page_bytes
            memory[start : start + entry.page_bytes] = tagged_page(array, logical)
    return SourceSide(entries, memory, np.array(sent, np.int64))
