"""Coverage: which cells (entry, logical page) of a room are required, promised by a SEND, and there.

Each cell is counted exactly once: a second promise is an overlap. Heads become part of a cell with unequal tensor
parallelism.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.protocol.errors import IncompleteError, PageOverlapError, UncoveredEntryError
from kvferry.protocol.manifests import Entry


class Cells(NamedTuple):
    """Every combination of some entries (``(n,)`` indices) and a range of a room's pages, counted from its first."""

    entries: npt.NDArray[np.intp]
    start: int
    stop: int


class Coverage:
    """The cells of one component of one room."""

    def __init__(self, entries: Sequence[Entry], pages: int, optional_components: Collection[str]) -> None:
        """Require every entry of a component that is not optional.

        Args:
            entries: the destination's entries of this component, in their order.
            pages: how many logical pages the room has.
            optional_components: components that no source has to cover.
        """
        self._names = [entry.name for entry in entries]
        self._required = np.array([entry.component not in optional_components for entry in entries])
        self._promised = np.zeros((len(entries), pages), np.bool_)
        self._arrived = np.zeros((len(entries), pages), np.bool_)

    def check_free(self, cells: Cells) -> None:
        """Check that none of the cells is promised yet.

        Raises:
            PageOverlapError: names the first one that is.
        """
        taken = np.argwhere(self._promised[cells.entries, cells.start : cells.stop])
        if len(taken):
            entry, page = taken[0]
            name = self._names[cells.entries[entry]]
            raise PageOverlapError(f"{name}: room page {cells.start + page} has a sender already", field="lists")

    def promise(self, cells: Cells) -> None:
        """Count the cells as promised; ``check_free`` has been called."""
        self._promised[cells.entries, cells.start : cells.stop] = True

    def withdraw(self, cells: Cells) -> None:
        """Undo ``promise``."""
        self._promised[cells.entries, cells.start : cells.stop] = False

    def arrive(self, cells: Cells) -> None:
        """Count the cells as there."""
        self._arrived[cells.entries, cells.start : cells.stop] = True

    def check_promised(self) -> None:
        """Check that every required cell has a sender.

        Raises:
            UncoveredEntryError: names the first entry of which no page has one.
            IncompleteError: names the first cell without one and counts them.
        """
        bare = np.flatnonzero(self._required & ~self._promised.any(axis=1))
        if len(bare):
            raise UncoveredEntryError(
                f"no source entry for {self._names[bare[0]]} ({len(bare)} entries uncovered)", field="lists"
            )
        missing = np.argwhere(~self._promised & self._required[:, None])
        if len(missing):
            entry, page = missing[0]
            raise IncompleteError(
                f"{self._names[entry]}: room page {page} has no sender ({len(missing)} cells missing)", field="lists"
            )

    @property
    def complete(self) -> bool:
        """Return whether every required and every promised cell is there."""
        return not ((self._promised | self._required[:, None]) & ~self._arrived).any()

    @property
    def arrived_pages(self) -> int:
        """Return how many pages are there in every required entry."""
        return int((self._arrived | ~self._required[:, None]).all(axis=0).sum())
