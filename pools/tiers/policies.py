"""In which order blocks are given up: SIEVE, and LRU beside it, behind one interface.

A policy orders keys. Whether a key may go, how large it is and when enough have gone is its caller's business.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Final, Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class EvictionPolicy(Protocol[Key]):
    """Keys in the order in which they should go; a call raises only for a key that is missing, or there already."""

    def add(self, key: Key) -> None:
        """Take a new key in.

        Raises:
            AssertionError: it is there already.
        """

    def hit(self, key: Key) -> None:
        """Note that a key was used.

        Raises:
            KeyError: it is not there.
        """

    def remove(self, key: Key) -> None:
        """Forget a key, a victim or any other, also while ``victims`` runs.

        Raises:
            KeyError: it is not there.
        """

    def victims(self) -> Iterator[Key]:
        """Yield keys as they should go, each at most once; all of them if nothing else happens meanwhile.

        The caller removes a victim before it asks for the next one, or skips it: a skipped one keeps its place. The
        last one asked for, neither removed nor passed, comes first in the next call. Keys may be added and hit
        meanwhile; they may or may not come.
        """

    def __len__(self) -> int:
        """Return how many keys there are."""


class _Node(Generic[Key]):
    """A key in a ring from the oldest to the newest, which an end without a key closes."""

    __slots__ = ("key", "mark", "newer", "older")

    def __init__(self, key: Key | None) -> None:
        self.key: Final = key
        self.mark = 0
        self.older: _Node[Key] = self
        self.newer: _Node[Key] = self

    def link_before(self, end: _Node[Key]) -> None:
        """Become the newest of the ring that ``end`` closes."""
        last = end.older
        self.older, self.newer = last, end
        last.newer = end.older = self

    def unlink(self) -> None:
        """Leave the ring; keep what the neighbours were."""
        self.older.newer, self.newer.older = self.newer, self.older


class Sieve(Generic[Key]):
    """SIEVE (Zhang et al., NSDI '24): a queue that a hand sweeps from the oldest to the newest, over and over.

    A hit only marks its key. The hand takes the mark from a marked key and goes on, and stops at one without: the
    victim. What stays keeps its place. So keys that are never asked for again go soon, and a hit costs next to nothing.
    """

    def __init__(self) -> None:
        self._nodes: dict[Key, _Node[Key]] = {}
        self._end: _Node[Key] = _Node(None)
        self._hand = self._end  # which means that a sweep begins

    def __repr__(self) -> str:
        """Show the live counts."""
        marked = sum(node.mark for node in self._nodes.values())
        return f"<Sieve keys={len(self)} marked={marked}>"

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self._nodes)

    def add(self, key: Key) -> None:
        """Take a new key in as the newest, without a mark."""
        assert key not in self._nodes, "a key is added twice"
        node = self._nodes[key] = _Node(key)
        node.link_before(self._end)

    def hit(self, key: Key) -> None:
        """Mark a key."""
        self._nodes[key].mark = 1

    def remove(self, key: Key) -> None:
        """Forget a key; a hand that is there moves on."""
        node = self._nodes.pop(key)
        if self._hand is node:
            self._hand = node.newer
        node.unlink()

    def victims(self) -> Iterator[Key]:
        """Yield keys without a mark as the hand comes by; a skipped one is passed as a marked one is.

        Two sweeps are enough: the first takes the marks.
        """
        passed: set[_Node[Key]] = set()
        for _ in range(2 * len(self._nodes)):
            node = self._hand if self._hand is not self._end else self._end.newer
            if node.key is None:
                return
            self._hand = node
            if node.mark:
                node.mark = 0
            elif node not in passed:
                yield node.key
                passed.add(node)
            if self._hand is node:
                self._hand = node.newer


class Lru(Generic[Key]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._nodes: dict[Key, _Node[Key]] = {}
        self._end: _Node[Key] = _Node(None)
        self._clock = 0  # a node's mark is when it was last used; the ring is in that order

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<Lru keys={len(self)}>"

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self._nodes)

    def add(self, key: Key) -> None:
        """Take a new key in as the one used last."""
        assert key not in self._nodes, "a key is added twice"
        node = self._nodes[key] = _Node(key)
        self._use(node)

    def hit(self, key: Key) -> None:
        """Make a key the one used last."""
        node = self._nodes[key]
        node.unlink()
        self._use(node)

    def remove(self, key: Key) -> None:
        """Forget a key."""
        node = self._nodes.pop(key)
        node.unlink()
        node.mark = -1

    def victims(self) -> Iterator[Key]:
        """Yield keys from the one used longest ago; those used or added after the call began do not come."""
        begun, passed = self._clock, 0
        skipped, skipped_mark = self._end, 0  # the last one, to go on from while its mark says that it is still there
        while True:
            node = skipped.newer if skipped.mark == skipped_mark else self._end.newer
            while node.key is not None and node.mark <= passed:
                node = node.newer
            if node.key is None or node.mark > begun:
                return
            passed = node.mark
            yield node.key
            if node.mark == passed:
                skipped, skipped_mark = node, passed

    def _use(self, node: _Node[Key]) -> None:
        self._clock += 1
        node.mark = self._clock
        node.link_before(self._end)


_POLICIES: Final[dict[str, type[Sieve[Any] | Lru[Any]]]] = {"sieve": Sieve, "lru": Lru}
POLICY_NAMES: Final = tuple(_POLICIES)


def make_policy(name: str) -> EvictionPolicy[Key]:
    """Return an empty policy by name: ``sieve`` or ``lru``.

    Raises:
        KeyError: no policy of that name; ``POLICY_NAMES`` has them.
    """
    return _POLICIES[name]()
