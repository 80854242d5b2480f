"""Runs: maximal sequences of pages that are consecutive both at the source and at the destination."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

PageIds: TypeAlias = npt.NDArray[np.int64]
"""Page ids, ``(n,)`` int64."""


class Runs(NamedTuple):
    """First source page, first destination page and number of pages of each run: three ``(runs,)`` int64 arrays."""

    source: PageIds
    destination: PageIds
    pages: PageIds


def coalesce(source: PageIds, destination: PageIds) -> Runs:
    """Return the runs of two page lists of equal length, in list order; see docs/architecture.md, "Formulas"."""
    count = len(source)
    if count == 0:
        return Runs(source, destination, np.empty(0, np.int64))
    cut = np.empty(count, np.bool_)
    cut[0] = True
    step = source[1:] - source[:-1]
    np.not_equal(step, 1, out=cut[1:])
    np.subtract(destination[1:], destination[:-1], out=step)
    cut[1:] |= step != 1
    starts = np.flatnonzero(cut)
    pages = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=pages[:-1])
    pages[-1] = count - starts[-1]
    return Runs(source.take(starts, mode="clip"), destination.take(starts, mode="clip"), pages)
