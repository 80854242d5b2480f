"""The journal of blocks stored in and evicted from the prefix cache, for routers that send requests to cached blocks.

A ring of changes, numbered from 1. A reader asks for the changes since its cursor, and is told if the ring has lost
some of them: it then reads the whole list of blocks again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from kvferry.pools.tiers.cached_block import Namespace, Tier

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

    def __init__(self, capacity: int) -> None:
        """Start empty.

        Args:
            capacity: number of changes to keep; at least 1.
        """
        self._capacity = capacity
        self._ring: list[Change] = []
        self._next = 1  # the number of the first change that is not in the ring
        self._listeners: list[Callable[[], None]] = []
        self._open: Change | None = None  # the change that still grows; its hashes are in ``_hashes``
        self._hashes: list[bytes] = []

    def __repr__(self) -> str:
        """Show the current counts."""
        return f"<CacheJournal changes={len(self._ring)} next={self._next + bool(self._hashes)}>"

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call this after each change."""
        self._listeners.append(listener)

    def stored(self, tier: Tier, namespace: Namespace, block_hash: bytes, parent: bytes | None) -> None:
        """Record that a block was stored in a tier."""
        self._add(ChangeKind.STORED, tier, namespace, block_hash, parent)

    def evicted(self, tier: Tier, namespace: Namespace, block_hash: bytes) -> None:
        """Record that a block was evicted from a tier."""
        self._add(ChangeKind.EVICTED, tier, namespace, block_hash, None)

    def position(self) -> int:
        """Return the cursor of the next change: everything recorded so far is before it."""
        self._seal()
        return self._next

    def since(self, cursor: int, limit: int) -> Changes:
        """Return up to ``limit`` changes from ``cursor`` on, oldest first; none if there are none yet.

        Args:
            cursor: 1 for the very first change, or a value from ``position`` or an earlier call.
            limit: at least 1.
        """
        self._seal()
        if not self._next - len(self._ring) <= cursor <= self._next:
            return Changes((), self._next, lost=True)
        end = min(self._next, cursor + limit)
        # Change n is at (n - 1) % capacity, whether the ring has wrapped or not.
        found = tuple(self._ring[(number - 1) % self._capacity] for number in range(cursor, end))
        return Changes(found, end, lost=False)

    def _add(self, kind: ChangeKind, tier: Tier, namespace: Namespace, block_hash: bytes, parent: bytes | None) -> None:
        if not self._continues(kind, tier, namespace, parent):
            self._seal()
            self._open = Change(kind, tier, namespace, (), parent)
        self._hashes.append(block_hash)
        for listener in self._listeners:
            listener()

    def _continues(self, kind: ChangeKind, tier: Tier, namespace: Namespace, parent: bytes | None) -> bool:
        change = self._open
        if change is None or change.kind is not kind or change.tier is not tier or change.namespace != namespace:
            return False
        chained = kind is ChangeKind.EVICTED or parent == self._hashes[-1]
        return chained and len(self._hashes) < MAX_HASHES

    def _seal(self) -> None:
        """Move the open change into the ring: it does not change any more."""
        if self._open is None:
            return
        change = self._open._replace(hashes=tuple(self._hashes))
        if len(self._ring) < self._capacity:
            self._ring.append(change)
        else:
            self._ring[(self._next - 1) % self._capacity] = change
        self._next += 1
        self._open, self._hashes = None, []
