"""The longest prefix that is cached in several groups of layers, of which some need its last blocks alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def longest_prefix(limit: int, last: Sequence[int], there: Sequence[npt.NDArray[np.bool_]]) -> int:
    """Return the largest number of leading blocks, at most ``limit``, before whose end each group has its last blocks.

    Args:
        limit: at most the length of each array in ``there``.
        last: per group, how many blocks before the prefix's end it needs, at least 1; of a shorter prefix all.
        there: per group, which blocks of the prompt are cached.
    """
    ends = np.arange(limit + 1)
    holds = np.ones(limit + 1, np.bool_)
    for count, has in zip(last, there, strict=True):
        missing = np.concatenate(([0], np.cumsum(~has[:limit])))  # before each end
        holds &= missing == missing[np.maximum(ends - count, 0)]
    return int(np.flatnonzero(holds)[-1])
