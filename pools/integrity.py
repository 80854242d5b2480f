"""How a structure checks itself: by walks that yield what is wrong, and that may be paused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

SHOWN = 8
"""How many places a problem names; the others are counted."""

RESTART: Final = "restart the daemon when its engines can bear it, and report this with its log and its version"
"""The remedy where nothing but a new life of the daemon helps."""

WALKED = 512
"""Things that a walk looks at, one by one, before it may be paused."""


class Problem(NamedTuple):
    """Something that must not be so.

    Attributes:
        what: the rule that is broken, in words.
        at: the first ``SHOWN`` places, ascending: page ids, or offsets in bytes.
        total: how many places there are; 0 where it is about none in particular.
        holder: what holds, or should hold, them; empty where nothing is known to.
    """

    what: str
    at: tuple[int, ...] = ()
    total: int = 0
    holder: str = ""


Walk: TypeAlias = Iterator[Problem | None]
"""Yields problems, and None where it may be paused; one that was paused while its structure changed is started anew."""


def problem_at(what: str, places: Sequence[int] | npt.NDArray[np.signedinteger[Any]], holder: str = "") -> Problem:
    """Return a problem of these places."""
    return Problem(what, tuple(int(one) for one in places[:SHOWN]), len(places), holder)


def check(walk: Walk) -> None:
    """Take a walk without a pause.

    Raises:
        AssertionError: names the first problem.
    """
    for problem in walk:
        assert problem is None, problem


class Check(NamedTuple):
    """One part of a check of everything.

    Attributes:
        where: what is looked at, in words.
        walk: begins a walk.
        version: what is the same as long as the walk may go on after a pause.
        remedy: what to do about its problems.
    """

    where: str
    walk: Callable[[], Walk]
    version: Callable[[], object]
    remedy: str
