"""Plans: what is copied where, all checks done, as arrays.

A plan keeps entries and runs apart, since every entry has the same runs; ``blocks`` multiplies them out. Addresses are
offsets or absolute, as the entries' bases are.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.pools.page_checks import check_distinct, check_equal_length, check_range
from kvferry.pools.pairing import Pairing
from kvferry.pools.runs import PageIds, Runs, coalesce
from kvferry.protocol.errors import UncoveredEntryError

Blocks: TypeAlias = npt.NDArray[np.uint64]
"""``(n, 3)`` uint64: source address, destination address, bytes."""


class Plan(msgspec.Struct, frozen=True):
    """The copies of one SEND into one room.

    ``source_base``, ``destination_base``, ``page_bytes``: ``(entries,)`` uint64, in the destination's order.
    """

    source_base: npt.NDArray[np.uint64]
    destination_base: npt.NDArray[np.uint64]
    page_bytes: npt.NDArray[np.uint64]
    runs: Runs

    @property
    def pages(self) -> int:
        """Return how many pages each entry copies."""
        return int(self.runs.pages.sum())

    @property
    def total_bytes(self) -> int:
        """Return how many bytes are copied."""
        return self.pages * int(self.page_bytes.sum())

    def blocks(self) -> Blocks:
        """Return all copies, entry by entry, runs in order: ``(entries * runs, 3)`` uint64."""
        sizes = self.page_bytes[:, None]
        columns = np.empty((3, len(self.page_bytes), len(self.runs.pages)), np.uint64)  # each column in one piece
        np.multiply(sizes, self.runs.source.astype(np.uint64), out=columns[0])
        np.multiply(sizes, self.runs.destination.astype(np.uint64), out=columns[1])
        np.multiply(sizes, self.runs.pages.astype(np.uint64), out=columns[2])
        columns[0] += self.source_base[:, None]
        columns[1] += self.destination_base[:, None]
        return columns.reshape(3, -1).T


def make_plan(pairing: Pairing, source_pages: PageIds, destination_pages: PageIds) -> Plan:
    """Check the page lists against every pair and return the plan.

    A source page may be named twice (it is only read), a destination page may not.

    Raises:
        UncoveredEntryError: no entry has a partner.
        LengthMismatchError, EmptyPagesError, PageOutOfRangeError, DuplicatePageError: see ``page_checks``.
    """
    if not pairing.pairs:
        raise UncoveredEntryError("no source entry has a destination", field="source.entries")
    check_equal_length(source_pages, destination_pages, "destination_pages")
    check_range(source_pages, min(pair.source.pages for pair in pairing.pairs), "source_pages")
    check_range(destination_pages, min(pair.destination.pages for pair in pairing.pairs), "destination_pages")
    check_distinct(destination_pages, "destination_pages")
    return Plan(
        np.array([pair.source.base for pair in pairing.pairs], np.uint64),
        np.array([pair.destination.base for pair in pairing.pairs], np.uint64),
        np.array([pair.destination.page_bytes for pair in pairing.pairs], np.uint64),
        coalesce(source_pages, destination_pages),
    )
