"""Positions in a flat array that have to be copied, and the extents that they make.

Pure arithmetic; knows neither tables nor bytes. Written for few positions, the ordinary case: each call into numpy
costs more than the positions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Positions: TypeAlias = npt.NDArray[np.int64]
"""Flat positions in an array, or other numbers, ``(n,)`` int64."""

FEW = 16  # up to so many numbers, plain Python is faster than calls into numpy
NONE: Positions = np.empty(0, np.int64)
NONE.flags.writeable = False


class Spans(NamedTuple):
    """The extents ``[starts[i], ends[i])``, ascending, none empty, none touching another.

    Attributes:
        starts: ``(n,)`` int64; n may be 0.
        ends: ``(n,)`` int64.
    """

    starts: Positions
    ends: Positions

    def pairs(self) -> list[tuple[int, int]]:
        """Return ``(start, end)`` of each, as plain ints."""
        return list(zip(self.starts.tolist(), self.ends.tolist(), strict=True))


def expanded(starts: Positions, ends: Positions) -> Positions:
    """Return the positions of the extents ``[starts[i], ends[i])`` one after the other; some may be empty."""
    lengths = ends - starts
    reached = lengths.cumsum()
    return np.repeat(starts - reached + lengths, lengths) + np.arange(reached[-1] if len(reached) else 0)


def distinct(parts: Sequence[Positions]) -> Positions:
    """Return the positions that are in any part, ascending, each once. A single part must be so already."""
    if len(parts) <= 1:
        return parts[0] if parts else NONE
    ordered = np.concatenate(parts)
    ordered.sort()
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def spans_of(positions: Positions) -> Spans:
    """Return the extents of distinct, ascending positions."""
    if not len(positions):
        return Spans(NONE, NONE)
    cuts = np.flatnonzero(positions[1:] != positions[:-1] + 1)
    return Spans(positions[np.concatenate(([0], cuts + 1))], positions[np.concatenate((cuts, [-1]))] + 1)
