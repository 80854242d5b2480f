"""Measuring: two contenders in turns, medians of their rounds, and one row for each comparison."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

Better = Literal["lower", "higher"]
Contender = Callable[[], float]
"""Does its work once and returns the figure, in the row's unit."""


class MissingPeerError(RuntimeError):
    """What a benchmark compares with, or runs on, is not there."""


class Effort(NamedTuple):
    """How much to measure: all of it, or as little as shows that a benchmark works; and on which device, if on one."""

    quick: bool = False
    device: str = "npu:0"

    def pick(self, full: int, quick: int) -> int:
        """Return the number that goes with this effort."""
        return quick if self.quick else full


class Target(NamedTuple):
    """A bound on ``ratio`` or on ``ours``: from above where lower is better, else from below."""

    bound: float
    on: Literal["ratio", "ours"] = "ratio"


class Limit(NamedTuple):
    """Bare copies or messages, measured in turns with the rest; of several ways to make them the best one counts."""

    ways: tuple[Contender, ...]
    limit_is: str


class Unit(NamedTuple):
    """What a figure counts, and in which direction it is better."""

    name: str
    better: Better


MICROSECONDS = Unit("us", "lower")
MILLISECONDS = Unit("ms", "lower")
GIGABYTES_A_SECOND = Unit("GB/s", "higher")
THOUSANDS_A_SECOND = Unit("k/s", "higher")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison.

    Attributes:
        name: what was measured.
        ours: the median of our rounds, in ``unit``.
        peer: the median of the peer's rounds, in ``unit``.
        unit: of both.
        better: whether lower or higher figures (and ratios) are better.
        ratio: ``ours / peer``.
        target: the bound on ``target_on``, or None: then the row is there to explain another one.
        target_on: what the target bounds.
        met: whether the target is met, or None without one.
        limit: of bare copies or messages, in ``unit``: what the best quarter of the best way's rounds reaches, as what
            disturbs them only makes them worse; None where that was not measured.
        limit_meets: whether the limit itself meets the target; None without a limit, or a target. Where it does not,
            the target was out of reach.
        limit_is: what the limit is.
        rounds: how many rounds each side had, in turns.
        peer_is: what the peer is.
        note: what else a reader must know.
    """

    name: str
    ours: float
    peer: float
    unit: str
    better: Better
    ratio: float
    target: float | None
    target_on: Literal["ratio", "ours"]
    met: bool | None
    rounds: int
    peer_is: str
    note: str = ""
    limit: float | None = None
    limit_meets: bool | None = None
    limit_is: str = ""


def compare(
    name: str,
    unit: Unit,
    *,
    ours: Contender,
    peer: Contender,
    peer_is: str,
    rounds: int,
    target: Target | None = None,
    note: str = "",
    settle: int = 1,
    limit: Limit | None = None,
) -> Row:
    """Run all in turns (ours, peer, ours, peer, …) after some rounds that do not count, and return the row."""
    ways, limit_is = limit or Limit((), "")
    figures, peers, *limits = interleave(rounds, ours, peer, *ways, settle=settle)
    about = {"peer_is": peer_is, "note": note, "limit_is": limit_is}
    return row_of(name, unit, figures, peers, target=target, limits=limits, **about)


def row_of(
    name: str,
    unit: Unit,
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    peer_is: str,
    target: Target | None = None,
    note: str = "",
    limits: Sequence[Sequence[float]] = (),
    limit_is: str = "",
) -> Row:
    """Return the row of figures that were measured before, as many on either side."""
    our_median, peer_median = statistics.median(ours), statistics.median(peer)
    best, percent = (min, 25) if unit.better == "lower" else (max, 75)
    limit = best(float(np.percentile(one, percent)) for one in limits) if limits else None

    def meets(figure: float | None) -> bool | None:
        if target is None or figure is None:
            return None
        measured = figure / peer_median if target.on == "ratio" else figure
        return measured <= target.bound if unit.better == "lower" else measured >= target.bound

    return Row(
        name=name,
        ours=our_median,
        peer=peer_median,
        unit=unit.name,
        better=unit.better,
        ratio=our_median / peer_median,
        target=target.bound if target else None,
        target_on=target.on if target else "ratio",
        met=meets(our_median),
        limit=limit,
        limit_meets=meets(limit),
        limit_is=limit_is,
        rounds=len(ours),
        peer_is=peer_is,
        note=note,
    )


SETTLE: Final = 24
"""Rounds after which a daemon has found out how this machine copies: with 1, 2, 4 and 8 threads, six times each."""


def interleave(rounds: int, *contenders: Contender, settle: int = 1) -> list[list[float]]:
    """Return each contender's figures; they take turns, without the garbage collector, after rounds to settle."""
    figures: list[list[float]] = [[] for _ in contenders]
    gc.collect()
    gc.disable()
    try:
        for number in range(settle + rounds):
            for mine, contender in zip(figures, contenders, strict=True):
                figure = contender()
                if number >= settle:
                    mine.append(figure)
    finally:
        gc.enable()
    return figures


def seconds(action: Callable[[], object], repeats: int = 1) -> float:
    """Return how long one call takes, from ``repeats`` calls in a row."""
    started = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - started) / repeats


def microseconds(action: Callable[[], object], repeats: int = 1) -> Contender:
    """Return a contender that reports the time of one call."""
    return lambda: seconds(action, repeats) * 1e6


def milliseconds(action: Callable[[], object], repeats: int = 1) -> Contender:
    """Return a contender that reports the time of one call."""
    return lambda: seconds(action, repeats) * 1e3


def gigabytes_a_second(action: Callable[[], object], size_bytes: int) -> Contender:
    """Return a contender that reports how fast a call moves its bytes."""
    return lambda: size_bytes / seconds(action) / 1e9


def after(prepare: Callable[[], object], contender: Contender) -> Contender:
    """Return a contender that first does something which does not count."""

    def prepared() -> float:
        prepare()
        return contender()

    return prepared


def memcpy(size_bytes: int) -> Callable[[], object]:
    """Return one memcpy of so many contiguous bytes, between memory that is there already."""
    return partial(np.copyto, np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8))
