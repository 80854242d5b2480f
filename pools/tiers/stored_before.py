"""Which blocks were stored lately, evicted or not: what a cache without bounds would still have.

A table of fixed size: a newer block may take the place of an older one. Of two billion blocks one is taken for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvferry.pools.tiers.cached_block import Namespace

SLOTS: Final = 1 << 20
"""Of 4 bytes each. A power of two."""

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)
_MASK: Final = (1 << 64) - 1


class StoredBefore:
    """The prints of the blocks that were stored last, by namespace and hash."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._prints = np.zeros(slots, np.uint32)

    def __repr__(self) -> str:
        """Show the size of the table."""
        return f"<StoredBefore {len(self._prints)} slots>"

    def add(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        """Note that blocks were stored; hashes of 16 bytes each."""
        slots, prints = self._places(namespace, hashes)
        self._prints[slots] = prints

    def reach(self, namespace: Namespace, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt were stored: those up to the last one that is known.

        What is stored of a prompt begins at its first block, so one that is not known was stored, too.
        """
        slots, prints = self._places(namespace, hashes)
        known = np.flatnonzero(self._prints[slots] == prints)
        return int(known[-1]) + 1 if len(known) else 0

    def _places(
        self, namespace: Namespace, hashes: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Return the slot and the print, not 0, of each block."""
        halves = np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 2)
        mixed = _mixed(_mixed(halves[:, 0] ^ np.uint64(hash(namespace) & _MASK)) + halves[:, 1])
        return mixed & np.uint64(len(self._prints) - 1), (mixed >> _HALF).astype(np.uint32) | np.uint32(1)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return numbers of which each bit depends on each bit of the given ones."""
    for _ in range(2):
        numbers = (numbers ^ (numbers >> _HALF)) * _ODD
    mixed: npt.NDArray[np.uint64] = numbers ^ (numbers >> _HALF)
    return mixed
