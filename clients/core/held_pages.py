"""The pages that a session was given and has not given back, as far as its client has heard. Without I/O.

After a restart the daemon's books may differ: what a request has taken whose reply was lost is known there only.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.manifests import Manifest

LEAST_PAGES: Final = 64

MOST_MOVES: Final = 64
MOST_MOVED_PAGES: Final = 4096
"""What is noted before it is added up: a step's few pages cost less with those of the next ones."""

_Mask = npt.NDArray[np.bool_]


class Differences(NamedTuple):
    """How the daemon's books of a page space differ.

    Attributes:
        unknown: pages that are ours by its word, and of which nobody here has heard.
        missing: pages that were given to us, and are not ours by its word.
    """

    unknown: PageIds
    missing: PageIds


class _Move(NamedTuple):
    """Pages that were given to us, or have gone back."""

    taken: bool
    pool: str
    space: str
    ids: PageIds


class HeldPages:
    """Pages by pool and page space. Ids that it was told of are not changed any more: they may be looked at later."""

    def __init__(self) -> None:
        self._moves: list[_Move] = []
        self._moved_pages = 0
        self._masks: dict[tuple[str, str], _Mask] = {}
        self._spaces: dict[str, dict[str, str]] = {}
        self._unsure: set[str] = set()
        self._asked: set[str] = set()

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<HeldPages {sum(int(one.sum()) for one in self._up_to_date().values())}>"

    @property
    def pools(self) -> set[str]:
        """Return the pools of which there may be pages."""
        return {pool for pool, _ in self._up_to_date()} | self._unsure | self._asked

    def spaces_of(self, pool: str) -> tuple[str, ...]:
        """Return the page spaces of a pool of which there may be pages, as far as they are known."""
        return tuple(space for its, space in self._up_to_date() if its == pool)

    def asked(self, pool: str) -> None:
        """Take note of a pool of which pages may be ours by a request whose reply nobody has heard."""
        self._asked.add(pool)

    def learn(self, pool: str, manifest: Manifest) -> None:
        """Take note of which component of a pool is in which page space."""
        self._spaces[pool] = {one.name: one.space for one in manifest.components}

    def took(self, pool: str, space: str, ids: PageIds) -> None:
        """Take note of pages that were given to us."""
        self._note(_Move(True, pool, space, ids))  # noqa: FBT003  by name it costs twice as much

    def gave(self, pool: str, space: str, ids: PageIds) -> None:
        """Take note of pages that went back."""
        self._note(_Move(False, pool, space, ids))  # noqa: FBT003

    def _note(self, move: _Move) -> None:
        """Keep a move until there are many, or the pages are asked for."""
        count = len(move.ids)
        if not count:
            return
        self._moved_pages += count
        self._moves.append(move)
        if len(self._moves) > MOST_MOVES or self._moved_pages > MOST_MOVED_PAGES:
            self._up_to_date()

    def _up_to_date(self) -> dict[tuple[str, str], _Mask]:
        """Return which pages are held, after all moves so far; a pool for which memory is short is unsure then."""
        moves, self._moves, self._moved_pages = self._moves, [], 0
        for (taken, pool, space), alike in itertools.groupby(moves, operator.itemgetter(0, 1, 2)):
            lists = [one.ids for one in alike]
            try:
                ids = lists[0] if len(lists) == 1 else np.concatenate(lists)
                (self._take if taken else self._give)(pool, space, ids)
            except MemoryError:
                self._unsure.add(pool)
        return self._masks

    def _take(self, pool: str, space: str, ids: PageIds) -> None:
        mask = self._masks.get((pool, space))
        most = int(ids.max())
        if mask is None or most >= len(mask):
            grown = np.zeros(max(LEAST_PAGES, 2 * most), np.bool_)
            if mask is not None:
                grown[: len(mask)] = mask
            mask = self._masks[pool, space] = grown
        mask[ids] = True

    def _give(self, pool: str, space: str, ids: PageIds) -> None:
        mask = self._masks.get((pool, space))
        if mask is not None:
            mask[ids if ids.max() < len(mask) else ids[ids < len(mask)]] = False

    def took_lists(self, pool: str, heads: Sequence[PageList], ids: Sequence[PageIds]) -> None:
        """Take note of pages of components that were given to us."""
        for head, its in zip(heads, ids, strict=True):
            if (space := self._space_of(pool, head.component)) is not None:
                self.took(pool, space, its)

    def gave_lists(self, pool: str, heads: Sequence[PageList], ids: Sequence[PageIds]) -> None:
        """Take note of pages of components that went back."""
        for head, its in zip(heads, ids, strict=True):
            if (space := self._space_of(pool, head.component)) is not None:
                self.gave(pool, space, its)

    def compare(self, pool: str, space: str, owned: PageIds) -> Differences:
        """Return how the daemon's books differ, which then hold.

        Of a pool that is unsure, as its components' spaces are not known here, say, none is said to be unknown.
        """
        ours = self._up_to_date().pop((pool, space), np.zeros(0, np.bool_))
        size = max(len(ours), int(owned.max(initial=0)) + 1)
        known, theirs = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        known[: len(ours)], theirs[owned] = ours, True
        unsure = pool in self._unsure
        self.took(pool, space, owned if unsure else np.flatnonzero(known & theirs))
        unknown = np.zeros(0, np.int64) if unsure else np.flatnonzero(theirs & ~known)
        return Differences(unknown, np.flatnonzero(known & ~theirs))

    def _space_of(self, pool: str, component: str) -> str | None:
        space = self._spaces.get(pool, {}).get(component)
        if space is None:
            self._unsure.add(pool)
        return space
