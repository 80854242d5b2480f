"""Sides of plans for tests: entries of any small size, whole or a slice of them, on pages in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from hypothesis import strategies as st

from kvferry.pools.planning.copies import total_segments
from kvferry.pools.planning.geometry import Heads
from kvferry.pools.planning.sides import PlanSide, make_side
from kvferry.protocol.codec import PageIds
from kvferry.protocol.manifests import Entry

ENTRY_BYTES: Final = 2000
"""From one entry to the next: more than any of them has."""

SIZES: Final = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=5)


def side_of(
    sizes: Sequence[tuple[int, int, int]], pages: int, *, cut: bool, held: int = 1, ids: PageIds | None = None
) -> PlanSide:
    """Return a side of entries of (tokens, heads, bytes of a head); of each the last ``held`` heads, where it is cut.

    The ids are all pages but page 0, descending, unless others are given.
    """
    entries = [
        Entry(
            component="main",
            role="k",
            layer=layer,
            base=ENTRY_BYTES * layer,
            pages=pages + 1,
            page_bytes=tokens * heads * size,
            page_tokens=tokens,
            heads=heads,
        )
        for layer, (tokens, heads, size) in enumerate(sizes)
    ]
    heads = [Heads(max(0, count - held), min(held, count)) if cut else None for _, count, _ in sizes]
    return make_side(entries, heads, np.arange(pages, 0, -1) if ids is None else ids)


def state_side_of(window: int, heads: int, parts: Sequence[int], held: int, ids: PageIds) -> PlanSide:
    """Return a side of one state of a convolution: of each part, of so many bytes a head, the last ``held`` heads."""
    pages = int(ids.max()) + 1
    entry = Entry(
        component="mamba",
        role="conv",
        layer=0,
        base=0,
        pages=pages,
        page_bytes=window * heads * sum(parts),
        heads=heads,
        shape=(pages, window, heads * sum(parts)),
        format="_".join(["CONV", *map(str, parts)]),
    )
    return make_side([entry], [Heads(heads - held, held)], ids)


@st.composite
def sides(draw: st.DrawFn) -> PlanSide:
    pages = draw(st.integers(1, 16))
    ids = draw(st.permutations(range(1, pages + 1)) | st.just(list(range(1, pages + 1))))
    taken = np.array(ids[: draw(st.integers(1, pages))], np.int64)
    cut, held = draw(st.booleans()), draw(st.integers(1, 3))
    if draw(st.integers(0, 3)) == 0:
        heads = draw(st.integers(held, 4))
        parts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        return state_side_of(draw(st.integers(1, 3)), heads, parts, held, taken)
    return side_of(draw(SIZES), pages, cut=cut, held=held, ids=taken)


@st.composite
def extents(draw: st.DrawFn, side: PlanSide) -> tuple[int, int]:
    first = draw(st.integers(0, total_segments(side) - 1))
    return first, draw(st.integers(first + 1, total_segments(side)))


def bytes_of(side: PlanSide, first: int, stop: int) -> int:
    return int(np.repeat(side.segment_bytes, len(side.ids))[first:stop].sum())
