"""Eviction policies behind one interface: by expected reuse (see ``reuse_policy``), LRU, and either told later.

A policy orders keys. The caller decides whether a key may be evicted, how large it is, and when enough were evicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from kvferry.pools.tiers.reuse_policy import Place, ReuseRate
from kvferry.pools.tiers.split_dict import SplitDict

Key = TypeVar("Key", bound=Hashable)


class EvictionPolicy(Protocol[Key]):
    """Keys in eviction order; a call raises only for a key that is missing, or already present."""

    def add(self, key: Key, place: Place) -> None:
        """Add a new key, the one block at its place.

        Raises:
            AssertionError: the key is already present.
        """

    def hit(self, key: Key) -> None:
        """Record a use of a key.

        Raises:
            KeyError: there is no such key.
        """

    def remove(self, key: Key) -> None:
        """Remove a key, a victim or any other, also while ``victims`` runs.

        Raises:
            KeyError: there is no such key.
        """

    def victims(self) -> Iterator[Key]:
        """Yield keys in eviction order, each at most once; all of them if nothing else changes meanwhile.

        The caller removes a victim before it asks for the next one, or skips it: a skipped key keeps its place. The
        last key yielded, if it was neither removed nor followed by another, comes first in the next call, unless keys
        were added or hit. Keys may be added and hit meanwhile; whether those are yielded is undefined.
        """

    def __len__(self) -> int:
        """Return the number of keys."""


class _Node(Generic[Key]):
    """A key in a ring from the oldest to the newest, which is closed by a sentinel without a key."""

    __slots__ = ("key", "newer", "older", "used_at")

    def __init__(self, key: Key | None) -> None:
        self.key: Final = key
        self.used_at = 0  # by Lru's clock; -1 once it has left
        self.older: _Node[Key] = self
        self.newer: _Node[Key] = self

    def link_before(self, end: _Node[Key]) -> None:
        """Insert as the newest of the ring whose sentinel is ``end``."""
        last = end.older
        self.older, self.newer = last, end
        last.newer = end.older = self

    def unlink(self) -> None:
        """Leave the ring; keep the links to the former neighbours."""
        self.older.newer, self.newer.older = self.newer, self.older


class Lru(Generic[Key]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._nodes: SplitDict[Key, _Node[Key]] = SplitDict()
        self._end: _Node[Key] = _Node(None)
        self._clock = 0  # counts uses; the ring is in the order of the last ones

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<Lru keys={len(self)}>"

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self._nodes)

    def add(self, key: Key, place: Place) -> None:  # noqa: ARG002  LRU knows no prefixes
        """Add a new key as the one used last."""
        assert key not in self._nodes, "a key is added twice"
        node = self._nodes[key] = _Node(key)
        self._use(node)

    def hit(self, key: Key) -> None:
        """Make a key the one used last."""
        node = self._nodes[key]
        node.unlink()
        self._use(node)

    def remove(self, key: Key) -> None:
        """Remove a key."""
        node = self._nodes.pop(key)
        node.unlink()
        node.used_at = -1

    def victims(self) -> Iterator[Key]:
        """Yield keys from the least recently used on; those used or added after the call began are left out."""
        begun, passed = self._clock, 0
        skipped, skipped_at = self._end, 0  # where to continue, as long as that key is there and not used again
        while True:
            node = skipped.newer if skipped.used_at == skipped_at else self._end.newer
            while node.key is not None and node.used_at <= passed:
                node = node.newer
            if node.key is None or node.used_at > begun:
                return
            passed = node.used_at
            yield node.key
            if node.used_at == passed:
                skipped, skipped_at = node, passed

    def _use(self, node: _Node[Key]) -> None:
        self._clock += 1
        node.used_at = self._clock
        node.link_before(self._end)


MOST_BEHIND: Final = 1 << 17
"""Uses that a policy has not been told of yet: as many as two of the longest requests have."""


class _Run(NamedTuple, Generic[Key]):
    """Keys that were added, used or removed together."""

    what: Literal["add", "hit", "remove"]
    keys: Sequence[Key]


class Deferred(Generic[Key]):
    """A policy that is told later. What it decides is the same: it is told of all before it is asked for a victim.

    A use costs it some 10 us, and one request names thousands of blocks.

    Attributes:
        behind: how many uses, and keys that were removed, the policy has not been told of.
    """

    def __init__(
        self, policy: EvictionPolicy[Key], place_of: Callable[[Key], Place], fell_behind: Callable[[], None]
    ) -> None:
        """Begin with an empty policy.

        Args:
            policy: which is used by this alone.
            place_of: returns a key's place.
            fell_behind: called whenever there is more that ``policy`` has not been told of: ``catch_up`` soon.
        """
        self._policy = policy
        self._place_of = place_of
        self._fell_behind = fell_behind
        self._runs: deque[_Run[Key]] = deque()
        self._told = 0  # of the first run
        self._count = 0
        self.behind = 0

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<Deferred {self._policy!r} behind={self.behind}>"

    def __len__(self) -> int:
        """Return how many keys there are."""
        return self._count

    def add(self, keys: Sequence[Key]) -> None:
        """Add new keys, in this order."""
        self._count += len(keys)
        self._note(_Run("add", keys))

    def hit(self, keys: Sequence[Key]) -> None:
        """Record a use of each of these keys, in this order."""
        self._note(_Run("hit", keys))

    def remove(self, key: Key) -> None:
        """Remove a key."""
        self._count -= 1
        self._note(_Run("remove", (key,)))

    def victims(self) -> Iterator[Key]:
        """Yield keys in eviction order, by all uses up to then."""
        self.catch_up(self.behind)
        victims = self._policy.victims()
        while (key := next(victims, None)) is not None:
            yield key
            self.catch_up(self.behind)

    def catch_up(self, count: int) -> None:
        """Tell the policy of the next ``count``, the oldest first."""
        for _ in range(min(count, self.behind)):
            what, keys = self._runs[0]
            key = keys[self._told]
            self._told += 1
            self.behind -= 1
            if self._told == len(keys):
                self._runs.popleft()
                self._told = 0
            if what == "add":
                self._policy.add(key, self._place_of(key))
            elif what == "hit":
                self._policy.hit(key)
            else:
                self._policy.remove(key)

    def _note(self, run: _Run[Key]) -> None:
        if not run.keys:
            return
        self._runs.append(run)
        self.behind += len(run.keys)
        self.catch_up(min(self.behind - MOST_BEHIND, len(run.keys)))
        self._fell_behind()


_POLICIES: Final[dict[str, type[ReuseRate[Any] | Lru[Any]]]] = {
    "reuse": ReuseRate,
    "lru": Lru,
}
POLICY_NAMES: Final = tuple(_POLICIES)


def make_policy(name: str) -> EvictionPolicy[Key]:
    """Return a new policy by name: ``reuse`` or ``lru``.

    Raises:
        KeyError: the name is not in ``POLICY_NAMES``.
    """
    return _POLICIES[name]()
