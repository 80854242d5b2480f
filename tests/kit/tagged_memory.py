"""The byte-level oracle: random models laid out by hand, memory whose every byte says where it belongs.

A source page is filled with bytes computed from (entry, logical page, token, head, byte of the element). Whoever
copies right puts exactly those bytes at the destination's page of the same logical number, and touches nothing else.
Each side may be split over the ranks of a tensor parallelism of its own; heads are the model's.
"""

from __future__ import annotations

import itertools
import zlib
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvferry.pools.planning.coverage import Cells, Coverage, cells_of
from kvferry.pools.planning.geometry import DTYPE_BYTES, PAGE_HEADS
from kvferry.pools.planning.pairing import check_covered, pair_entries
from kvferry.pools.planning.plan import Plan, make_plan
from kvferry.protocol.manifests import Entry

Memory: TypeAlias = npt.NDArray[np.uint8]
OPTIONAL = ("draft",)
UNTOUCHED = 0x5A
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Array(NamedTuple):
    """What a page of one (component, role, layer) is; a row of a convolution's state has parts, each with all heads."""

    component: str
    role: str
    layer: int
    tokens: int
    heads: int
    width: int
    dtype: str
    parts: tuple[int, ...] = ()  # the widths of a head in each, of ``width`` in all

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page."""
        return self.tokens * self.heads * self.width * DTYPE_BYTES[self.dtype]


class Split(NamedTuple):
    """One rank of so many."""

    size: int = 1
    rank: int = 0

    def heads(self, total: int) -> range:
        """Return the heads that the rank holds: those which its share of the model touches."""
        return range(self.rank * total // self.size, -(-(self.rank + 1) * total // self.size))


class SourceSide(NamedTuple):
    """One rank of a pipeline stage: its entries, its memory, and the pages it sends."""

    entries: list[Entry]
    memory: Memory
    pages: npt.NDArray[np.int64]


class Planned(NamedTuple):
    """What one source sends."""

    source: SourceSide
    cells: Cells
    plan: Plan


class TransferCase(NamedTuple):
    """A destination and the sources that fill it; ``prefix`` pages of the prompt are at the destination already."""

    sources: list[SourceSide]
    entries: list[Entry]
    pages: npt.NDArray[np.int64]
    region_bytes: int
    prefix: int
    arrays: dict[tuple[str, str, int], Array]
    split: Split


def tagged_page(array: Array, logical_page: int, split: Split) -> Memory:
    """Return the bytes of one logical page at one rank: uint8."""
    token, head, byte = np.indices((array.tokens, array.heads, array.page_bytes // array.tokens // array.heads))
    page_tag = zlib.crc32(f"{array.component}/{array.role}/{array.layer}/{logical_page}".encode())
    tags = (page_tag << 16) + (token * 1024 + head * 256 + byte).astype(np.uint64)
    mixed: Memory = ((tags * _MIX) >> np.uint64(56)).astype(np.uint8)
    ends = np.cumsum([0, *(array.parts or (array.width,))]) * DTYPE_BYTES[array.dtype]
    held = mixed[:, split.heads(array.heads)]
    parts = [held[:, :, start:end].reshape(array.tokens, -1) for start, end in itertools.pairwise(ends.tolist())]
    return np.concatenate(parts, axis=1).reshape(-1)


def plans_of(case: TransferCase) -> list[Planned]:
    """Plan every source into the destination, as the daemon does, with all checks. Replicas are not sent twice."""
    coverage = Coverage(case.entries, len(case.pages), OPTIONAL)
    planned = []
    for source in case.sources:
        pairing = pair_entries(source.entries, case.entries)
        if len(case.sources) == 1:
            check_covered(pairing, OPTIONAL)
        cells = cells_of(pairing, 0, len(case.pages))
        replicated = np.array([(pair.source.replicas or 1) > 1 for pair in pairing.pairs], bool)
        extents = coverage.free_extents(cells, replicated)
        if not extents:
            continue
        ((free, _, _),) = extents
        cells = cells.of(free)
        coverage.plan(cells)
        kept = msgspec.structs.replace(pairing, pairs=tuple(itertools.compress(pairing.pairs, free)))
        planned.append(Planned(source, cells, make_plan(kept, source.pages[case.prefix :], case.pages)))
    coverage.check_planned()
    for one in planned:
        assert not coverage.complete
        coverage.arrive(one.cells)
    assert coverage.complete
    assert coverage.arrived_pages == len(case.pages)
    return planned


def expected_memory(case: TransferCase) -> Memory:
    """Return the destination's memory as it must be in the end, computed without any code of kvferry's."""
    memory = np.full(case.region_bytes, UNTOUCHED, np.uint8)
    sent = {(entry.component, entry.role, entry.layer) for source in case.sources for entry in source.entries}
    for entry in case.entries:
        key = (entry.component, entry.role, entry.layer)
        if key not in sent:
            continue
        for number, page in enumerate(case.pages.tolist()):
            start = entry.base + page * entry.page_bytes
            content = tagged_page(case.arrays[key], case.prefix + number, case.split)
            memory[start : start + entry.page_bytes] = content
    return memory


@st.composite
def cases(draw: st.DrawFn) -> TransferCase:
    """Draw a model, its split into stages and ranks, both sides' layouts, and the page lists."""
    main, draft = _arrays(draw, "main"), _arrays(draw, "draft") if draw(st.booleans()) else []
    prefix = draw(st.integers(0, 3))
    count = prefix + draw(st.integers(1, 6))
    stages = _stages(draw, main)
    if draw(st.booleans()):
        stages[-1] += draft
    pages = draw(st.integers(count - prefix + 1, 12))
    kept = [array for array in main if array.role != "surplus"] + draft
    heads = {array.heads for array in main + draft}
    sizes = [size for size in range(1, 7) if all(most % size == 0 or size % most == 0 for most in heads)]
    size = draw(st.sampled_from(sizes))
    split = Split(size, draw(st.integers(0, size - 1)))
    source_size = draw(st.sampled_from(sizes))
    one_rank = split.size == source_size == 1
    entries, region_bytes = _layout(draw, kept, pages, split, must_say_all=not one_rank)
    ranks = draw(st.permutations([Split(source_size, rank) for rank in range(source_size)]))
    return TransferCase(
        [_source(draw, stage, count, rank, must_say_all=not one_rank) for stage in stages for rank in ranks],
        entries,
        np.array(draw(st.permutations(range(1, pages)))[: count - prefix], np.int64),
        region_bytes,
        prefix,
        {(array.component, array.role, array.layer): array for array in main + draft},
        split,
    )


def _arrays(draw: st.DrawFn, component: str) -> list[Array]:
    layers = draw(st.integers(1, 4))
    first = draw(st.integers(0, 3)) if component == "main" else 0
    tokens, heads = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 4, 6]))
    roles = ["k", "v", *draw(st.sets(st.sampled_from(["index_k", "index_scale", "k_scale", "surplus", "conv", "ssm"])))]
    arrays = []
    for role in sorted(roles):
        if role == "k_scale":  # a number a page and head: no token axis
            arrays += [Array(component, role, first + n, 1, heads, 1, "float32") for n in range(layers)]
            continue
        if role in {"conv", "ssm"}:
            rows = draw(st.integers(1, 3)) if role == "conv" else 1
            parts = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
            arrays += [
                Array(component, role, first, rows, heads, sum(parts), "float16", parts if role == "conv" else ())
            ]
            continue
        width, dtype = draw(st.integers(1, 4)), draw(st.sampled_from(sorted(DTYPE_BYTES)))
        role_layers = layers if role in {"k", "v"} else draw(st.integers(1, layers))  # a compact indexer has fewer
        its_heads = heads if role in {"k", "v"} else 1
        arrays += [Array(component, role, first + n, tokens, its_heads, width, dtype) for n in range(role_layers)]
    return arrays


def _stages(draw: st.DrawFn, arrays: list[Array]) -> list[list[Array]]:
    layers = sorted({array.layer for array in arrays})
    cuts = draw(st.sets(st.sampled_from(layers[1:]))) if len(layers) > 1 else set()
    stages: list[list[Array]] = []
    for start, stop in zip([layers[0], *sorted(cuts)], [*sorted(cuts), layers[-1] + 1], strict=True):
        stages.append([array for array in arrays if start <= array.layer < stop])
    return stages


def _layout(
    draw: st.DrawFn, arrays: list[Array], pages: int, split: Split, *, must_say_all: bool
) -> tuple[list[Entry], int]:
    """Lay entries out in random order with random gaps; some say all of themselves, some only what they must."""
    entries, base = [], draw(st.integers(0, 9))
    for array in draw(st.permutations(arrays)):
        held = split.heads(array.heads)
        entry = Entry(
            component=array.component,
            role=array.role,
            layer=array.layer,
            base=base,
            pages=pages,
            page_bytes=array.page_bytes // array.heads * len(held),
            replicas=split.size * len(held) // array.heads if split.size > array.heads else None,
        )
        if must_say_all or draw(st.booleans()):
            rows = draw(st.sampled_from([(pages, array.tokens), (pages * array.tokens, 1)]))
            entry = msgspec.structs.replace(
                entry,
                page_tokens=array.tokens,
                head_start=held.start,
                heads=len(held),
                total_heads=array.heads,
                dtype=array.dtype,
                shape=(*rows, len(held), array.width),
                format="ND",
            )
            if array.role == "k_scale":
                entry = msgspec.structs.replace(entry, page_tokens=None, shape=(pages, len(held)), format=PAGE_HEADS)
            if array.role in {"conv", "ssm"}:
                entry = _as_state(entry, array)
        entries.append(entry)
        base += pages * entry.page_bytes + draw(st.integers(0, 9))
    return entries, base


def _as_state(entry: Entry, array: Array) -> Entry:
    held = entry.heads or 1
    if array.role == "ssm":
        return msgspec.structs.replace(entry, page_tokens=None, shape=(entry.pages, held, array.width))
    shape, form = (entry.pages, array.tokens, array.width * held), "_".join(["CONV", *map(str, array.parts)])
    return msgspec.structs.replace(entry, page_tokens=None, shape=shape, format=form)


def _source(draw: st.DrawFn, arrays: list[Array], count: int, split: Split, *, must_say_all: bool) -> SourceSide:
    pages = draw(st.integers(count + 1, 14))
    sent = draw(st.permutations(range(1, pages)))[:count]
    entries, region_bytes = _layout(draw, arrays, pages, split, must_say_all=must_say_all)
    memory = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, region_bytes, np.uint8)
    by_key = {(array.component, array.role, array.layer): array for array in arrays}
    for entry in entries:
        array = by_key[entry.component, entry.role, entry.layer]
        for logical, page in enumerate(sent):
            start = entry.base + page * entry.page_bytes
            memory[start : start + entry.page_bytes] = tagged_page(array, logical, split)
    return SourceSide(entries, memory, np.array(sent, np.int64))
