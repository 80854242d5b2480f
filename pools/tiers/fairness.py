"""Whose blocks go first when a tier is full: those of the tenant that has most by its share.

A tenant alone may have all. Where several store, each that has less than its share takes from those that have more: so
they come to have what their shares say, or all the same where none has one. Knows neither blocks nor tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

T = TypeVar("T")
V = TypeVar("V")
NO_PARTS: Final[Mapping[int, float]] = MappingProxyType({})
_NEARLY_NOTHING: Final = 1e-6
"""What is left for those without a share where all is given away."""


def fairest(
    tenants: Mapping[int, T],
    parts: Mapping[int, float],
    size_bytes: Callable[[T], int],
    next_of: Callable[[T], Callable[[], V | None]],
) -> Iterator[V]:
    """Yield what is to go, one after another, each from the tenant that has most by its share at that moment.

    The rest that no share names is that of all others together, each the same part of it.

    Args:
        tenants: by their numbers.
        parts: the shares, of 1.
        size_bytes: returns what one has, as it is asked.
        next_of: returns what returns one's next victim, or None where it has no more.
    """
    others = sum([number not in parts and size_bytes(one) > 0 for number, one in tenants.items()])
    rest = max(_NEARLY_NOTHING, 1 - sum(parts.values())) / max(1, others)
    turns = [(one, parts.get(number, rest), next_of(one)) for number, one in tenants.items()]
    while turns:
        turn = max(turns, key=lambda one: size_bytes(one[0]) / one[1])
        victim = turn[2]()
        if victim is None:
            turns.remove(turn)
        else:
            yield victim
