"""Coverage against a plain set of cells."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.planning.coverage import Cells, Coverage
from kvferry.pools.planning.geometry import Heads
from kvferry.protocol.errors import IncompleteError, PageOverlapError, UncoveredEntryError
from kvferry.protocol.manifests import Entry

PAGES = 4


def everything_free(coverage: Coverage, cells: Cells) -> bool:
    """Return True, or raise: cells that no other source holds are free all together or not at all."""
    found = coverage.free_extents(cells, np.zeros(len(cells.entries), np.bool_))
    return [(bool(one.rows.all()), one.start, one.stop) for one in found] == [(True, cells.start, cells.stop)]


SPLIT = [
    Entry(
        component=component, role=role, layer=0, base=0, pages=9, page_bytes=8, page_tokens=1, head_start=4,
        heads=heads, total_heads=8,
    )
    for component, role, heads in (("main", "k", 4), ("main", "index_k", 1), ("draft", "k", 2))
]  # fmt: skip


@st.composite
def send_requests(draw: st.DrawFn) -> tuple[Cells, list[bool], bool]:
    """Draw what a source could send, what of it others hold as well, and whether it arrives."""
    rows = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    heads: list[Heads | None] = []
    for entry in rows:
        start = draw(st.integers(0, (SPLIT[entry].heads or 1) - 1))
        some = Heads(start, draw(st.integers(1, (SPLIT[entry].heads or 1) - start)))
        heads.append(draw(st.sampled_from([None, some])))
    start = draw(st.integers(0, PAGES - 1))
    cells = Cells(np.array(rows), start, draw(st.integers(start + 1, PAGES)), tuple(heads))
    if not any(heads) and draw(st.booleans()):
        cells = cells._replace(heads=None)
    return cells, draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), draw(st.booleans())


def split_cells(cells: Cells, row: int) -> set[tuple[int, int, int]]:
    """Return a row's cells as (entry, head, page)."""
    entry = int(cells.entries[row])
    heads = (cells.heads and cells.heads[row]) or Heads(0, SPLIT[entry].heads or 1)
    return {(entry, head, page) for head in range(heads.start, heads.stop) for page in range(cells.start, cells.stop)}


@given(st.lists(send_requests(), max_size=8), st.sampled_from(["withdraw", "waive", "keep"]))
def test_heads_are_counted_apart(sources: list[tuple[Cells, list[bool], bool]], in_the_end: str) -> None:
    coverage = Coverage(SPLIT, PAGES, ["draft"])
    planned, arrived = set[tuple[int, int, int]](), set[tuple[int, int, int]]()
    required = {(0, head, page) for head in range(4) for page in range(PAGES)} | {(1, 0, page) for page in range(PAGES)}
    for cells, replicated, arrives in sources:
        rows = [split_cells(cells, row) for row in range(len(cells.entries))]
        if not all(may_be_sent(row, row - planned, may) for row, may in zip(rows, replicated, strict=True)):
            with pytest.raises(PageOverlapError):
                coverage.free_extents(cells, np.array(replicated))
            continue
        wanted = free_cells(coverage, cells, replicated)
        assert sum(len(one.entries) for one in wanted) == sum(bool(row - planned) for row in rows)
        fresh = {cell for one in wanted for row in range(len(one.entries)) for cell in split_cells(one, row)}
        assert fresh == set().union(*rows) - planned
        of_all(coverage.plan, wanted)
        if in_the_end == "withdraw":
            of_all(coverage.withdraw, wanted)
            assert all(everything_free(coverage, one) for one in wanted)
            continue
        planned |= fresh
        if in_the_end == "waive":
            of_all(coverage.waive, wanted)
        if arrives:
            of_all(coverage.arrive, wanted)
            arrived |= fresh
    if in_the_end == "waive":
        required -= planned
    assert coverage.complete == (planned | required <= arrived)
    pages = [{one for one in REQUIRED_SPLIT if one[2] == page} for page in range(PAGES)]
    assert coverage.arrived_pages == sum(page <= arrived for page in pages)
    check_missing(coverage, required - planned)


def free_cells(coverage: Coverage, cells: Cells, replicated: list[bool]) -> list[Cells]:
    """Return those of the cells that have no sender."""
    found = coverage.free_extents(cells, np.array(replicated))
    return [cells._replace(start=one.start, stop=one.stop).of(one.rows) for one in found]


def of_all(do: Callable[[Cells], None], some: list[Cells]) -> None:
    """Do the same with several cells."""
    for one in some:
        do(one)


def may_be_sent(row: set[tuple[int, int, int]], free: set[tuple[int, int, int]], may: bool) -> bool:  # noqa: FBT001
    """Return whether a row, of which these cells are free, may be sent; ``may``: others hold its content as well."""
    if row == free:
        return True
    pages = sorted({page for _, _, page in free})
    whole = free == {(entry, head, page) for entry, head, page in row if page in pages}
    return may and whole and pages == list(range(pages[0], pages[-1] + 1) if pages else [])


REQUIRED_SPLIT = {
    (entry, head, page) for entry, held in ((0, 4), (1, 1)) for head in range(held) for page in range(PAGES)
}


def check_missing(coverage: Coverage, missing: set[tuple[int, int, int]]) -> None:
    if not missing:
        coverage.check_planned()
        return
    with pytest.raises((UncoveredEntryError, IncompleteError)):
        coverage.check_planned()
    told_apart = [Cells(np.array([entry]), page, page + 1, (Heads(head, 1),)) for entry, head, page in sorted(missing)]
    coverage.check_planned(told_apart)
    with pytest.raises((UncoveredEntryError, IncompleteError)):
        coverage.check_planned(told_apart[1:])


def test_errors_name_the_first_cell_and_the_heads() -> None:
    coverage = Coverage(SPLIT, PAGES, ["draft"])
    with pytest.raises(UncoveredEntryError, match=r"no source entry for main/k/0 \(2 entries uncovered\)"):
        coverage.check_planned()
    some = Cells(np.array([0, 1]), 0, PAGES, (Heads(1, 2), None))
    coverage.plan(some)
    with pytest.raises(PageOverlapError, match=r"main/k/0: transfer page 2, heads 5\.\.6, has a sender already"):
        everything_free(coverage, Cells(np.array([0]), 2, 4))
    with pytest.raises(PageOverlapError, match=r"main/k/0: transfer page 2, heads 6\.\.6, has a sender already"):
        everything_free(coverage, Cells(np.array([0]), 2, 4, (Heads(2, 2),)))
    with pytest.raises(PageOverlapError, match="main/index_k/0: transfer page 0 has a sender already"):
        everything_free(coverage, Cells(np.array([1]), 0, 4))
    coverage.plan(Cells(np.array([0]), 1, PAGES, (Heads(0, 1),)))
    coverage.plan(Cells(np.array([0]), 2, PAGES, (Heads(3, 1),)))
    with pytest.raises(
        IncompleteError, match=r"main/k/0: transfer page 0, heads 4\.\.4, has no sender \(3 cells missing\)"
    ):
        coverage.check_planned()
    coverage.plan(Cells(np.array([0]), 0, 1, (Heads(0, 1),)))
    with pytest.raises(IncompleteError, match=r"transfer page 0, heads 7\.\.7, has no sender \(2 cells missing\)"):
        coverage.check_planned()
