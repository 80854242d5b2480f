"""Coverage against a plain set of cells."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.coverage import Cells, Coverage
from kvferry.protocol.errors import IncompleteError, PageOverlapError, UncoveredEntryError
from kvferry.protocol.manifests import Entry

PAGES = 4
ENTRIES = [
    Entry(component=component, role="k", layer=layer, base=0, pages=9, page_bytes=1)
    for component, layer in (("main", 0), ("main", 1), ("draft", 0))
]
CELLS = st.tuples(st.sets(st.integers(0, 2), min_size=1), st.integers(0, PAGES - 1), st.integers(1, PAGES)).map(
    lambda drawn: Cells(np.array(sorted(drawn[0]), np.intp), drawn[1], max(drawn[1] + 1, drawn[2]))
)
EVERYTHING = Cells(np.arange(3), 0, PAGES)


def cells_in(cells: Cells) -> set[tuple[int, int]]:
    return {(int(entry), page) for entry in cells.entries for page in range(cells.start, cells.stop)}


REQUIRED = {(entry, page) for entry in (0, 1) for page in range(PAGES)}


@given(st.lists(CELLS, max_size=6), st.booleans())
def test_every_cell_is_counted_once(offers: list[Cells], arrive: bool) -> None:  # noqa: FBT001  drawn
    coverage, promised = Coverage(ENTRIES, PAGES, ["draft"]), set[tuple[int, int]]()
    arrived = set[tuple[int, int]]()
    for offer in offers:
        if cells_in(offer) & promised:
            with pytest.raises(PageOverlapError):
                coverage.check_free(offer)
            continue
        coverage.check_free(offer)
        coverage.promise(offer)
        promised |= cells_in(offer)
        if arrive:
            coverage.arrive(offer)
            arrived |= cells_in(offer)
    assert coverage.complete == (promised | REQUIRED <= arrived)
    assert coverage.arrived_pages == sum({(0, page), (1, page)} <= arrived for page in range(PAGES))
    missing = REQUIRED - promised
    if not missing:
        coverage.check_promised()
        return
    bare = any({(entry, page) for page in range(PAGES)} <= missing for entry in (0, 1))
    with pytest.raises(UncoveredEntryError if bare else IncompleteError):
        coverage.check_promised()


@given(CELLS)
def test_what_is_withdrawn_may_be_promised_again(cells: Cells) -> None:
    coverage = Coverage(ENTRIES, PAGES, ["draft"])
    coverage.promise(cells)
    coverage.withdraw(cells)
    coverage.check_free(EVERYTHING)


def test_errors_name_the_first_cell() -> None:
    coverage = Coverage(ENTRIES, PAGES, ["draft"])
    coverage.promise(Cells(np.array([0, 2]), 0, 2))
    with pytest.raises(PageOverlapError, match="draft/k/0: room page 1 has a sender already"):
        coverage.check_free(Cells(np.array([1, 2]), 1, 3))
    with pytest.raises(UncoveredEntryError, match=r"no source entry for main/k/1 \(1 entries uncovered\)"):
        coverage.check_promised()
    coverage.promise(Cells(np.array([1]), 0, PAGES))
    with pytest.raises(IncompleteError, match=r"main/k/0: room page 2 has no sender \(2 cells missing\)"):
        coverage.check_promised()


def test_a_promised_optional_cell_must_arrive() -> None:
    coverage = Coverage(ENTRIES, PAGES, ["draft"])
    coverage.promise(EVERYTHING)
    coverage.arrive(Cells(np.array([0, 1]), 0, PAGES))
    assert coverage.arrived_pages == PAGES
    assert not coverage.complete
    coverage.arrive(EVERYTHING)
    assert coverage.complete
