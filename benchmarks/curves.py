"""A figure at several sizes, each time beside the same figure at the smallest one: a curve and its slope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Contender, Effort, Row, Target, Unit, interleave, row_of

BYTES = Unit("bytes", "lower")
FLAT = Target(1.5)
"""What must not depend on the size: from one end of the curve to the other."""

SMALLEST = "the same at the smallest size, in turns"


class Point(NamedTuple):
    """The rounds at one size, and as many at the smallest one."""

    size: int
    ours: Sequence[float]
    peer: Sequence[float]

    @property
    def ratio(self) -> float:
        """Return how much more it is than at the smallest size."""
        return median(self.ours) / median(self.peer)


def slope(points: Sequence[Point]) -> float:
    """Return the exponent of the size that fits the curve best: 0 where it is flat, 1 where it is linear."""
    if len(points) == 1:
        return 0.0
    sizes = np.log([max(point.size, 1) for point in points])
    ratios = np.log([point.ratio for point in points])
    return float(np.polyfit(sizes, ratios, 1)[0])


def row_of_curve(
    name: str, unit: Unit, points: Sequence[Point], *, of: str, target: Target | None = FLAT, note: str = ""
) -> Row:
    """Return the row of a curve, its largest size against its smallest; the note has all of it.

    ``of`` says what the sizes count.
    """
    shown = ", ".join(f"{median(point.ours):.4g} at {point.size:g}" for point in points)
    curve = f"{of}: {shown}; slope {slope(points):+.2f}"
    ours, peer = points[-1].ours, points[-1].peer
    return row_of(name, unit, ours, peer, peer_is=SMALLEST, target=target, note=f"{curve}; {note}" if note else curve)


def rounds_of(rounds: int, *contenders: Contender) -> list[list[float]]:
    """Return what ``interleave`` does; a single round, which means nothing, without its preparations."""
    return interleave(rounds, *contenders) if rounds > 1 else [[one()] for one in contenders]


class Curves:
    """The curves of several figures, size by size."""

    def __init__(self, what: str, of: str, effort: Effort) -> None:
        """``what`` begins the rows' names; ``of`` says what the sizes count."""
        self._what = what
        self._of = of
        self._rounds = effort.pick(5, 1)
        self._points: dict[str, list[Point]] = {}

    def add(self, size: int, figures: Mapping[str, tuple[Contender, Contender]]) -> None:
        """Measure figures at a size, each in turns with the same one at the smallest."""
        for name, pair in figures.items():
            self._points.setdefault(name, []).append(Point(size, *rounds_of(self._rounds, *pair)))

    def rows(self, unit: Unit, targets: Mapping[str, Target | None]) -> list[Row]:
        """Return a row for each figure that ``targets`` names."""
        return [self.row(name, unit, target) for name, target in targets.items()]

    def row(self, name: str, unit: Unit, target: Target | None, note: str = "") -> Row:
        """Return the row of one figure."""
        return row_of_curve(f"{self._what}/{name}", unit, self._points[name], of=self._of, target=target, note=note)
