"""One block table as a captured graph sees it: a range of columns of each row, zeros elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self

import numpy as np

from kvferry.attention.table_layout import Int32s, TableShape
from kvferry.attention.table_step import TouchedEntries
from kvferry.protocol.errors import DuplicatePageError

# -- rollback, for changes that must be made completely or not at all.
#
# Like ``contextlib.ExitStack``, which takes several times as long as the few changes that are undone here.


Arguments = ParamSpec("Arguments")


class Undo:
    """A context that runs its rollback steps, the last one first, if it ends with an exception."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def by(self, step: Callable[Arguments, object], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        """Add a call that reverts what was just done; it must not fail."""
        self._steps.append(partial(step, *args, **kwargs))

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Run the rollback steps if there is an error."""
        if kind is not None:
            while self._steps:
                self._steps.pop()()


class VisibleTable:
    """``entries (max_batch, columns)`` int32, all zeros at first; the array is never replaced."""

    def __init__(self, shape: TableShape) -> None:
        self.entries: Int32s = np.zeros((shape.max_batch, shape.columns), np.int32)
        self._flat = self.entries.reshape(-1)
        self._columns = shape.columns

    def contents(self, entries: TouchedEntries) -> Int32s:
        """Return the pages in these entries, ``(n,)`` int32, a copy."""
        return self._flat[entries.positions]

    def check_distinct(self, entries: TouchedEntries, contents: Int32s) -> None:
        """Check that no row has a page twice once these entries have these contents; page 0, padding, may repeat.

        Raises:
            DuplicatePageError: a row has; row and page are named.
        """
        if not contents.any():
            return
        rows = entries.positions // self._columns
        touched = np.bincount(rows) > 0
        changed = np.flatnonzero(touched)
        after = self.entries[changed]
        skipped = np.cumsum(~touched) * self._columns  # entries of skipped rows before each row
        after.reshape(-1)[entries.positions - skipped[rows]] = contents
        after.sort(axis=1)
        again = (after[:, 1:] == after[:, :-1]) & (after[:, 1:] > 0)
        if again.any():
            at, place = np.argwhere(again)[0]
            raise DuplicatePageError(
                f"row {changed[at]} has page {after[at, place]} in more than one column", field="rows"
            )

    def show(self, entries: TouchedEntries, contents: Int32s) -> None:
        """Write these contents to the entries."""
        self._flat[entries.positions] = contents
