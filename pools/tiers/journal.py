"""What became visible in the prefix cache and what went, in order: for routers that send requests to where blocks are.

A ring of changes, numbered from 1. A reader asks for those since its cursor, and hears when the ring has lost some of
them: then it reads the whole list of blocks again. Knows nothing of blocks but their names, of readers but cursors.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from kvferry.pools.tiers.namespaces import Namespace

MAX_HASHES: Final = 256
"""Of one change."""


class Tier(StrEnum):
    """Where a cached block is."""

    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class ChangeKind(StrEnum):
    """What happened to blocks in a tier."""

    STORED = "stored"
    EVICTED = "evicted"


class Change(NamedTuple):
    """Something that happened to blocks of one namespace in one tier."""

    kind: ChangeKind
    tier: Tier
    namespace: Namespace
    hashes: tuple[bytes, ...]
    """At least one. Of stored blocks, each is the parent of the next one."""
    parent: bytes | None
    """Of the first stored block, where it is known; None of evicted ones."""


class Changes(NamedTuple):
    """What a reader gets."""

    changes: tuple[Change, ...]
    next_cursor: int
    """What to ask for next."""
    lost: bool
    """Changes are gone: read the list of blocks from its beginning, then the changes since ``next_cursor``."""


class CacheJournal:
    """The last changes. Those of one kind grow together into one until somebody looks.

    Attributes:
        on_change: called after each change, where somebody waits for it.
    """

    def __init__(self, capacity: int) -> None:
        """Start empty.

        Args:
            capacity: how many changes to keep; at least 1.
        """
        self._capacity = capacity
        self._ring: list[Change] = []
        self._next = 1  # the number of the first change that is not in the ring
        self.on_change: Callable[[], None] | None = None
        self._open: Change | None = None  # its hashes are in the list
        self._hashes: list[bytes] = []

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<CacheJournal changes={len(self._ring)} next={self._next + bool(self._hashes)}>"

    def stored(self, tier: Tier, namespace: Namespace, block_hash: bytes, parent: bytes | None) -> None:
        """Note that a block is in a tier from now on."""
        self._add(ChangeKind.STORED, tier, namespace, block_hash, parent)

    def evicted(self, tier: Tier, namespace: Namespace, block_hash: bytes) -> None:
        """Note that a block is in a tier no more."""
        self._add(ChangeKind.EVICTED, tier, namespace, block_hash, None)

    def position(self) -> int:
        """Return the cursor of what comes next: nothing that was noted so far is after it."""
        self._seal()
        return self._next

    def since(self, cursor: int, limit: int) -> Changes:
        """Return changes from ``cursor`` on: the oldest ``limit`` of them, none where there are none yet.

        Args:
            cursor: from 1, which is the very first; else what ``position`` or an earlier call gave.
            limit: at least 1.
        """
        self._seal()
        if not self._next - len(self._ring) <= cursor <= self._next:
            return Changes((), self._next, lost=True)
        end = min(self._next, cursor + limit)
        # Change n is at (n - 1) % capacity, whether the ring has gone round or not.
        found = tuple(self._ring[(number - 1) % self._capacity] for number in range(cursor, end))
        return Changes(found, end, lost=False)

    def _add(self, kind: ChangeKind, tier: Tier, namespace: Namespace, block_hash: bytes, parent: bytes | None) -> None:
        if not self._continues(kind, tier, namespace, parent):
            self._seal()
            self._open = Change(kind, tier, namespace, (), parent)
        self._hashes.append(block_hash)
        if self.on_change is not None:
            self.on_change()

    def _continues(self, kind: ChangeKind, tier: Tier, namespace: Namespace, parent: bytes | None) -> bool:
        change = self._open
        if change is None or change.kind is not kind or change.tier is not tier or change.namespace != namespace:
            return False
        chained = kind is ChangeKind.EVICTED or parent == self._hashes[-1]
        return chained and len(self._hashes) < MAX_HASHES

    def _seal(self) -> None:
        """Put the change that grows into the ring: from now on it stays as it is."""
        if self._open is None:
            return
        change = self._open._replace(hashes=tuple(self._hashes))
        if len(self._ring) < self._capacity:
            self._ring.append(change)
        else:
            self._ring[(self._next - 1) % self._capacity] = change
        self._next += 1
        self._open, self._hashes = None, []
