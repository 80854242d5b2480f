"""A dict that grows in parts: a single one of ten million keys stands still for a second when it needs more room."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

PARTS: Final = 256
SPLIT_AT: Final = 1 << 13
"""Up to so many keys there is one part: they take a few milliseconds to move."""


class SplitDict(Generic[K, V]):
    """Values by key, in no order. Its keys may change while nobody iterates."""

    __slots__ = ("_count", "_mask", "_parts")

    def __init__(self) -> None:
        """Start empty."""
        self._parts: list[dict[K, V]] = [{}]
        self._mask = 0
        self._count = 0

    def __repr__(self) -> str:
        """Show how many keys there are."""
        return f"<SplitDict {self._count}>"

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._count

    def __contains__(self, key: K) -> bool:
        """Return whether a key is there."""
        return key in self._parts[hash(key) & self._mask]

    def __getitem__(self, key: K) -> V:
        """Return a key's value, or raise KeyError."""
        return self._parts[hash(key) & self._mask][key]

    def get(self, key: K) -> V | None:
        """Return a key's value, or None."""
        return self._parts[hash(key) & self._mask].get(key)

    def leading(self, keys: Iterable[K]) -> list[V]:
        """Return the values of the keys before the first one that is not there."""
        parts, mask, found = self._parts, self._mask, []
        for key in keys:
            value = parts[hash(key) & mask].get(key)
            if value is None:
                break
            found.append(value)
        return found

    def __setitem__(self, key: K, value: V) -> None:
        """Set a key's value, which is not None."""
        part = self._parts[hash(key) & self._mask]
        before = len(part)
        part[key] = value
        self._count += len(part) - before
        if not self._mask and self._count > SPLIT_AT:
            self._split()

    def pop(self, key: K) -> V:
        """Remove a key and return its value, or raise KeyError."""
        value = self._parts[hash(key) & self._mask].pop(key)
        self._count -= 1
        return value

    def values(self) -> Iterator[V]:
        """Yield the values."""
        return chain.from_iterable(part.values() for part in self._parts)

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield the keys with their values."""
        return chain.from_iterable(part.items() for part in self._parts)

    def _split(self) -> None:
        parts: list[dict[K, V]] = [{} for _ in range(PARTS)]
        for key, value in self.items():
            parts[hash(key) & (PARTS - 1)][key] = value
        self._parts, self._mask = parts, PARTS - 1
