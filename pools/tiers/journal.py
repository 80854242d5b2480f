"""The journal of blocks stored in and evicted from the prefix cache, for routers that send requests to cached blocks.

A ring of changes, numbered one after another. A reader asks for the changes since its cursor, and is told if the ring
has lost some of them: it then reads the whole list of blocks again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from kvferry.pools.tiers.cached_block import Namespace, Tier

BEGINNING: Final = 1
"""The cursor of the first change, whatever its number is."""

MAX_HASHES: Final = 256
"""Most hashes of one change."""


class ChangeKind(StrEnum):
    """What happened to blocks in a tier."""

    STORED = "stored"
    EVICTED = "evicted"


class Change(NamedTuple):
    """A change of blocks of one namespace in one tier."""

    kind: ChangeKind
    tier: Tier
    namespace: Namespace
    hashes: tuple[bytes, ...]
    """At least one. If stored, each is the parent of the next one."""
    parent: bytes | None
    """The parent of the first stored block, if known; None for evicted ones."""


class Changes(NamedTuple):
    """The answer to a reader."""

    changes: tuple[Change, ...]
    next_cursor: int
    """The cursor for the next call."""
    lost: bool
    """Changes were lost: read the list of blocks from its beginning, then the changes since ``next_cursor``."""


class CacheJournal:
    """The latest changes. Consecutive changes of one kind are merged into one until they are read."""

    def __init__(self, capacity: int, first: int = BEGINNING, max_hashes: int = 1 << 24) -> None:
        """Start empty.

        Args:
            capacity: number of changes to keep; at least 1.
            first: the number of the first change: a cursor of another daemon is none of this one's.
            max_hashes: number of their hashes to keep, beside those of the latest change.
        """
        self._capacity = capacity
        self._max_hashes = max_hashes
        self._kept_hashes = 0
        self._ring: list[Change] = []
        self._start = first
        self._first = first  # the number of the first change that is still there
        self._next = first  # the number of the first change that is not in the ring
        self._listeners: list[Callable[[], None]] = []
        self._open: Change | None = None  # the change that still grows; its hashes are in ``_hashes``
        self._hashes: list[bytes] = []

    def __repr__(self) -> str:
        """Show the current counts."""
        return f"<CacheJournal changes={self._next - self._first} next={self._next + bool(self._hashes)}>"

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call this after each change."""
        self._listeners.append(listener)

    def stored(
        self, tier: Tier, namespace: Namespace, hashes: Sequence[bytes], parents: Sequence[bytes | None]
    ) -> None:
        """Record that blocks were stored in a tier, at least one.

        ``parents``: the hash before each of them, None where it is not known.
        """
        self._begin(ChangeKind.STORED, tier, namespace, parents[0])
        for block_hash, parent in zip(hashes, parents, strict=True):
            if len(self._hashes) >= MAX_HASHES or (self._hashes and parent != self._hashes[-1]):
                self._begin_next(parent)
            self._hashes.append(block_hash)
        self._tell()

    def evicted(self, tier: Tier, namespace: Namespace, block_hash: bytes) -> None:
        """Record that a block was evicted from a tier."""
        self._begin(ChangeKind.EVICTED, tier, namespace, None)
        if len(self._hashes) >= MAX_HASHES:
            self._begin_next(None)
        self._hashes.append(block_hash)
        self._tell()

    def position(self) -> int:
        """Return the cursor of the next change: everything recorded so far is before it."""
        self._seal()
        return self._next

    def since(self, cursor: int, limit: int) -> Changes:
        """Return up to ``limit`` changes from ``cursor`` on, oldest first; none if there are none yet.

        Args:
            cursor: ``BEGINNING`` for the very first change, or a value from ``position`` or an earlier call.
            limit: at least 1.
        """
        self._seal()
        if cursor == BEGINNING:
            cursor = self._start
        if not self._first <= cursor <= self._next:
            return Changes((), self._next, lost=True)
        end = min(self._next, cursor + limit)
        # Change n is at (n - start) % capacity, whether the ring has wrapped or not.
        found = tuple(self._ring[(number - self._start) % self._capacity] for number in range(cursor, end))
        return Changes(found, end, lost=False)

    def _begin(self, kind: ChangeKind, tier: Tier, namespace: Namespace, parent: bytes | None) -> None:
        """Go on with the open change if it is of that kind; else begin one."""
        change = self._open
        if change is None or change.kind is not kind or change.tier is not tier or change.namespace != namespace:
            self._seal()
            self._open = Change(kind, tier, namespace, (), parent)

    def _begin_next(self, parent: bytes | None) -> None:
        """Begin another change of the open one's kind."""
        change = self._open
        assert change is not None
        self._seal()
        self._open = change._replace(parent=parent)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def _forget_first(self) -> None:
        """Forget the oldest change."""
        at = (self._first - self._start) % self._capacity
        self._kept_hashes -= len(self._ring[at].hashes)
        self._ring[at] = self._ring[at]._replace(hashes=())
        self._first += 1

    def _seal(self) -> None:
        """Move the open change into the ring: it does not change any more."""
        if self._open is None:
            return
        change = self._open._replace(hashes=tuple(self._hashes))
        if self._next - self._first == self._capacity:
            self._forget_first()
        if len(self._ring) < self._capacity:
            self._ring.append(change)
        else:
            self._ring[(self._next - self._start) % self._capacity] = change
        self._next += 1
        self._kept_hashes += len(change.hashes)
        while self._kept_hashes > self._max_hashes and self._next - self._first > 1:
            self._forget_first()
        self._open, self._hashes = None, []
