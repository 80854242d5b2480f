"""What a cache's past says of a block: how soon blocks with so many uses and of such an age are used again.

A *spell* begins with a use of a block and ends with the next one. A ring of spells, some of which have not ended yet,
gives for each number of uses the chance of a use at each age (Kaplan and Meier's estimate), and that the block's
*rank*: the most uses a block can bring for the time that it is kept from now on, whenever one would stop keeping it
(Gittins' index). Blocks that are no longer cached are followed too, so that what was evicted too early is seen. Time is
counted in uses of any block.
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

_USES: Final = 3
"""Blocks used 0, 1, … times before are told apart; the last class has all others."""

_DEPTHS: Final = (3, 15, 63)
"""So many blocks before a block, and more, are told apart."""

CLASSES: Final = _USES * (len(_DEPTHS) + 1)

GRAIN: Final = 16
"""Ages are told apart in steps of so many uses: few against the blocks of a cache that holds a few prompts."""

AGES: Final = tuple(GRAIN << power for power in range(24))
"""Where one range of ages ends and the next one begins."""

RANGES: Final = len(AGES) + 1
SPELLS: Final = 32768
"""How many spells the ring has."""

WINDOW: Final = 8
"""How many times the cache's blocks the ring reaches back: of more blocks, only some are followed."""

LEARN_EVERY: Final = 64 * GRAIN
"""Uses between two estimates."""

_PRIOR_SPELLS: Final = 4
_PRIOR_CHANCE: Final = 0.3
"""As long as little was seen: this chance of a use in each range of ages, as if seen in so many spells."""

_WIDTHS: Final = np.diff(np.array((0, *AGES, 2 * AGES[-1]), np.float64))
_MIXED: Final = 0x9E3779B97F4A7C15
_PRIME: Final = (1 << 61) - 1
_WAYS: Final = 4
_FEWEST: Final = 1 << 14
_MOST_USES: Final = 255

Counts = npt.NDArray[np.float64]


class UseCounts:
    """How often each block was used, by number: bounded, and those seen longest ago are forgotten first."""

    def __init__(self) -> None:
        self._now, self._before = _Generation(_FEWEST), _Generation(_FEWEST)

    def __repr__(self) -> str:
        """Show how many are remembered at least."""
        return f"<UseCounts remembered={self._now.filled} slots={self._now.slots}>"

    def get(self, number: int) -> int:
        """Return how often a block was used, up to 255; 0 where it is not known."""
        return self._now.get(number) or self._before.get(number)

    def put(self, number: int, uses: int, blocks: int) -> None:
        """Remember it; ``blocks`` are in the cache: several times as many are remembered."""
        self._now.put(number, min(uses, _MOST_USES))
        if 2 * self._now.filled > self._now.slots:
            slots = min(2 * self._now.slots, max(1 << 17, 1 << (8 * blocks).bit_length()))
            self._now, self._before = _Generation(slots), self._now


class _Generation:
    """A table without growth, 8 bytes an entry: sets of four, the latest first."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.filled = 0
        # Small pages: blocks that are used at once are all over the table, and the system takes milliseconds for each
        # large page that is touched first.
        memory = mmap.mmap(-1, 8 * slots, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # of a system without large pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._entries = memoryview(memory).cast("Q")  # number without its last 8 bits, uses

    def get(self, number: int) -> int:
        at = number & (self.slots - _WAYS)
        for entry in self._entries[at : at + _WAYS].tolist():
            if entry >> 8 == number >> 8:
                return int(entry & _MOST_USES)
        return 0

    def put(self, number: int, uses: int) -> None:
        at = number & (self.slots - _WAYS)
        entries = self._entries[at : at + _WAYS].tolist()
        same = next((way for way, entry in enumerate(entries) if entry >> 8 == number >> 8), _WAYS - 1)
        self.filled += not entries[same]
        self._entries[at] = number >> 8 << 8 | uses
        for way in range(same):
            self._entries[at + way + 1] = entries[way]


class ReuseHistory:
    """Counts uses, and ranks classes of blocks by what was seen. The same uses give the same ranks, in any process.

    Attributes:
        clock: how many uses there were.
        order: classes and ranges of ages, ``(class, range)``, the least worth keeping first.
        places: by class and range, its place in ``order``.
    """

    def __init__(self) -> None:
        self.clock = 0
        self.order: list[tuple[int, int]] = []
        self.places: list[list[int]] = []
        self._uses = UseCounts()
        self._starts = np.zeros(SPELLS, np.int64)
        self._ends = np.zeros(SPELLS, np.int64)  # 0: not yet
        self._classes = np.full(SPELLS, -1, np.int8)  # -1: no spell yet
        self._followed: dict[int, int] = {}  # the spell of each block whose last one has not ended
        self._blocks = [-1] * SPELLS  # the other way round
        self._spell = 0
        self._unfollowed = 0  # new blocks that are not followed until the next one that is
        self._learn()

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<ReuseHistory uses={self.clock} followed={len(self._followed)}>"

    def place_of(self, which: int, last_use: int) -> int:
        """Return the place in ``order`` of a block of a class, whose last use was at ``last_use``."""
        steps = self.clock // GRAIN - last_use // GRAIN
        return self.places[which][bisect_right(AGES, steps * GRAIN)]

    def uses_before(self, number: int) -> int:
        """Return how often a block was used, as far as that is remembered."""
        return self._uses.get(number)

    def used(self, number: int, uses: int, which: int, blocks: int, *, new: bool) -> None:
        """Record a use.

        Args:
            number: of the block: see ``number_of``.
            uses: how often it was used before.
            which: its class from now on.
            blocks: how many are in the cache.
            new: the block has just come into the cache.
        """
        self.clock += 1
        self._uses.put(number, uses + 1, blocks)
        spell = self._followed.pop(number, None)
        if spell is not None:
            self._ends[spell] = self.clock
            self._blocks[spell] = -1
            self._begin(number, which)
        elif new:
            self._unfollowed -= 1
            if self._unfollowed <= 0:
                self._unfollowed = WINDOW * blocks // SPELLS
                self._begin(number, which)
        if self.clock % LEARN_EVERY == 0:
            self._learn()

    def _begin(self, number: int, which: int) -> None:
        """Begin a spell in place of the oldest one."""
        spell, self._spell = self._spell, (self._spell + 1) % SPELLS
        if self._blocks[spell] >= 0:
            del self._followed[self._blocks[spell]]
        self._blocks[spell] = number
        self._followed[number] = spell
        self._starts[spell], self._ends[spell], self._classes[spell] = self.clock, 0, which

    def _learn(self) -> None:
        ranks = _ranks(*self._ages())
        cells = np.lexsort((-np.tile(np.arange(RANGES), CLASSES), ranks.ravel()))  # of equal ones, the older first
        places = np.empty(cells.size, np.int64)
        places[cells] = np.arange(cells.size)
        self.places = places.reshape(CLASSES, RANGES).tolist()
        self.order = [divmod(cell, RANGES) for cell in cells.tolist()]

    def _ages(self) -> tuple[Counts, Counts]:
        """Return how many spells ended, and how many have come without an end, in each class and range of ages."""
        ended = self._ends > 0
        ages = (np.where(ended, self._ends, self.clock) // GRAIN - self._starts // GRAIN) * GRAIN  # as in ``place_of``
        cells = self._classes.astype(np.int64) * RANGES + np.searchsorted(AGES, ages, "right")
        begun = self._classes >= 0
        uses, others = (
            np.bincount(cells[which], minlength=CLASSES * RANGES) for which in (begun & ended, begun & ~ended)
        )
        return uses.reshape(CLASSES, RANGES).astype(float), others.reshape(CLASSES, RANGES).astype(float)


def class_of(uses: int, depth: int) -> int:
    """Return the class of a block that was used so often before, with so many blocks before it."""
    return min(uses, _USES - 1) * (len(_DEPTHS) + 1) + bisect_right(_DEPTHS, depth)


def _ranks(uses: Counts, others: Counts) -> Counts:
    """Return the most uses for the time kept, by class and range of ages."""
    pooled = _chances(uses.sum(0), others.sum(0), np.full(RANGES, _PRIOR_CHANCE))
    unused = np.cumprod(1 - _chances(uses, others, pooled), 1)
    unused = np.concatenate((np.ones((CLASSES, 1)), unused), 1)  # at the beginning of each range, and at the end
    kept = np.cumsum(_WIDTHS * (unused[:, :-1] + unused[:, 1:]) / 2, 1)
    kept = np.concatenate((np.zeros((CLASSES, 1)), kept), 1)  # for how long, up to there
    later = np.triu(np.ones((RANGES, RANGES + 1), bool), 1)
    brought = unused[:, :-1, None] - unused[:, None, :]
    took = np.where(later, kept[:, None, :] - kept[:, :-1, None], np.inf)
    best: Counts = np.max(brought / np.maximum(took, 1e-9), 2)
    return best


def _chances(uses: Counts, others: Counts, prior: Counts) -> Counts:
    """Return the chance of a use in each range of ages, for a block that was not used before."""
    at_risk = np.cumsum((uses + others)[..., ::-1], -1)[..., ::-1] - others / 2
    return (uses + _PRIOR_SPELLS * prior) / (at_risk + _PRIOR_SPELLS)


def number_of(space: int, block_hash: bytes) -> int:
    """Return the number of a block, below 2**61: of its hash, and of the number of its space."""
    return (int.from_bytes(block_hash, "little") * _MIXED + space) % _PRIME
