"""Eviction by what the past says of each block, the end of a prefix before its beginning.

Candidates are blocks without a block below them, so a block goes after all that continue it: it is worth no less than
they are. Among candidates goes the one that brings the fewest uses for the time it is kept (see ``reuse_history``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from typing import Final, Generic, NamedTuple, TypeVar

from kvferry.pools.tiers.reuse_history import AGES, CLASSES, GRAIN, RANGES, ReuseHistory, class_of, number_of
from kvferry.pools.tiers.split_dict import SplitDict

Key = TypeVar("Key", bound=Hashable)


class Place(NamedTuple):
    """Where a block is in the tree of prefixes."""

    space: Hashable
    """Blocks of different spaces have nothing to do with each other."""
    hash: bytes
    parent: bytes | None
    """The hash of the block before it; None where there is none, or it is not known."""
    depth: int
    """How many blocks are before it, as far as they are known."""


class _Space(Generic[Key]):
    """A tree of blocks, by their hashes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.nodes: SplitDict[bytes, _Node[Key]] = SplitDict()


class _Node(Generic[Key]):
    """A block, or one that is not there and has blocks below it."""

    __slots__ = ("above", "below", "bin", "depth", "hash", "key", "last_use", "space", "uses")

    def __init__(self, space: _Space[Key], block_hash: bytes) -> None:
        self.space = space
        self.hash = block_hash
        self.key: Key | None = None
        self.above: _Node[Key] | None = None
        self.below = 0  # how many blocks have this one above
        self.depth = 0
        self.last_use = 0
        self.uses = 0  # before the last one
        self.bin: tuple[int, int] | None = None  # where it is, as a candidate

    @property
    def which(self) -> int:
        """Return its class."""
        return class_of(self.uses, self.depth)


class _Bins(Generic[Key]):
    """The candidates of one class, by the time of their last use."""

    def __init__(self) -> None:
        self.nodes: dict[int, dict[_Node[Key], None]] = {}
        self.times: list[int] = []  # the keys of ``nodes``, in order


class ReuseRate(Generic[Key]):
    """Evicts the block without successors that brings the fewest uses for the time it is kept."""

    def __init__(self) -> None:
        self._nodes: SplitDict[Key, _Node[Key]] = SplitDict()
        self._spaces: dict[Hashable, _Space[Key]] = {}
        self._bins: list[_Bins[Key]] = [_Bins() for _ in range(CLASSES)]
        self._history = ReuseHistory()
        self._first = 0
        """Places before this one have no candidate, as long as the clock's step is ``_step``."""
        self._step = 0

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<ReuseRate keys={len(self)} {self._history}>"

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self._nodes)

    def add(self, key: Key, place: Place) -> None:
        """Add a new key below its parent, which need not be there."""
        assert key not in self._nodes, "a key is added twice"
        space = self._spaces.get(place.space)
        if space is None:
            space = self._spaces[place.space] = _Space(len(self._spaces))
        node = self._node(space, place.hash)
        assert node.key is None, "a place is taken twice"
        node.key, node.depth = key, place.depth
        self._nodes[key] = node
        if place.parent is not None and node.above is None:
            self._put_below(node, self._node(space, place.parent))
        number = number_of(space.number, place.hash)
        node.uses = self._history.uses_before(number)
        self._used(node, number, new=True)

    def hit(self, key: Key) -> None:
        """Record a use of a key."""
        node = self._nodes[key]
        self._unlist(node)
        node.uses += 1
        self._used(node, number_of(node.space.number, node.hash), new=False)

    def remove(self, key: Key) -> None:
        """Remove a key; the one above may become a candidate."""
        node: _Node[Key] | None = self._nodes.pop(key)
        assert node is not None, key
        self._unlist(node)
        node.key = None
        while node is not None and node.key is None and not node.below:
            node.space.nodes.pop(node.hash)
            node = node.above
            if node is not None:
                node.below -= 1
                self._list(node)

    def victims(self) -> Iterator[Key]:
        """Yield keys, each after those below it; one that is skipped no longer holds back those above it."""
        passed: set[_Node[Key]] = set()
        skipped: dict[_Node[Key], int] = {}  # how many below each one
        freed: list[tuple[int, int, _Node[Key]]] = []  # have become candidates meanwhile
        candidates = self._candidates()
        place, candidate = next(candidates, _NO_MORE)
        while candidate is not None or freed:
            if candidate is None or (freed and freed[0][0] <= place):
                node = heappop(freed)[2]
            else:
                node = candidate
                place, candidate = next(candidates, _NO_MORE)
            if node.key is None or node in passed or node.below > skipped.get(node, 0):
                continue
            passed.add(node)
            yield node.key
            above = _freed_above(node, skipped)
            if above is not None:
                heappush(freed, (self._history.place_of(above.which, above.last_use), len(passed), above))

    def _candidates(self) -> Iterator[tuple[int, _Node[Key] | None]]:
        """Yield candidates and their places in the history's order."""
        step = self._history.clock // GRAIN
        if step != self._step:
            self._step, self._first = step, 0
        empty = True
        for place, (which, ages) in enumerate(self._history.order[self._first :], self._first):
            bins = self._bins[which]
            first = 0 if ages == RANGES - 1 else bisect_right(bins.times, step - AGES[ages] // GRAIN)
            end = bisect_right(bins.times, step - (AGES[ages - 1] // GRAIN if ages else 0))
            empty = empty and first == end
            if empty and step == self._step:
                self._first = place + 1
            for time in bins.times[first:end]:
                for node in list(bins.nodes.get(time, ())):
                    if node.bin == (which, time):
                        yield place, node

    def _put_below(self, node: _Node[Key], above: _Node[Key]) -> None:
        """Put a node below another one; not into a circle, which no prefixes make, only wrong parents."""
        up: _Node[Key] | None = above
        while up is not None and up is not node and node.below:  # mostly it ends at once: blocks are added from the end
            up = up.above
        if up is node:
            return
        node.above = above
        above.below += 1
        self._unlist(above)

    def _node(self, space: _Space[Key], block_hash: bytes) -> _Node[Key]:
        node = space.nodes.get(block_hash)
        if node is None:
            node = space.nodes[block_hash] = _Node(space, block_hash)
        return node

    def _used(self, node: _Node[Key], number: int, *, new: bool) -> None:
        self._history.used(number, node.uses, node.which, len(self), new=new)
        node.last_use = self._history.clock
        self._list(node)

    def _list(self, node: _Node[Key]) -> None:
        """Make a node a candidate, if it is one."""
        if node.key is None or node.below:
            return
        which, time = node.which, node.last_use // GRAIN
        bins = self._bins[which]
        if time not in bins.nodes:
            bins.nodes[time] = {}
            insort(bins.times, time)
        bins.nodes[time][node] = None
        node.bin = which, time
        self._first = min(self._first, self._history.place_of(which, node.last_use))

    def _unlist(self, node: _Node[Key]) -> None:
        """Make a node no candidate any more, if it was one."""
        if node.bin is None:
            return
        bins, time = self._bins[node.bin[0]], node.bin[1]
        node.bin = None
        del bins.nodes[time][node]
        if not bins.nodes[time]:
            del bins.nodes[time]
            del bins.times[bisect_left(bins.times, time)]


_NO_MORE: Final = (0, None)


def _freed_above(node: _Node[Key], skipped: dict[_Node[Key], int]) -> _Node[Key] | None:
    """Return the block above a node that is gone or skipped, if nothing else holds it back; count what was skipped."""
    holds, above = node.key is not None or node.below > 0, node.above
    while above is not None:
        if holds:
            skipped[above] = skipped.get(above, 0) + 1
        if above.below > skipped.get(above, 0):
            return None
        if above.key is not None:
            return above
        holds, above = above.below > 0, above.above
    return None
