"""Who may have written into a page: each engine notes here what it puts where, before it does.

So a page of a lost session is no excuse for any bytes: they must be its last owner's, or those of whoever got it since.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tests.torture import oracle

ANY_PAGE: Final = 0
"""Where the daemon chooses the pages: a restore."""

BEFORE_BYTES: Final = 1 << 16
"""Restores noted so long before may still be under way."""


class Claims:
    """A daemon's file of rows ``(page, seed of the name, logical page)`` uint32, which all its engines append to."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, ids: npt.NDArray[np.int64], name: str) -> int:
        """Note that a name's bytes go into pages, in order, or that nobody writes them; return where that stands."""
        rows = np.empty((len(ids), 3), np.uint32)
        rows[:, 0], rows[:, 1], rows[:, 2] = ids, oracle.seed(name), np.arange(len(ids))
        os.write(self._fd, rows.tobytes())
        return os.lseek(self._fd, 0, os.SEEK_CUR)

    def unexplained(self, memory: oracle.Memory, ids: npt.NDArray[np.int64], since: int) -> str:
        """Return which values none of those wrote who noted the pages from ``since`` on; empty: there are none."""
        begin = max(0, since - len(ids) * 12 - BEFORE_BYTES // 12 * 12)
        size = os.fstat(self._fd).st_size - begin
        rows = np.frombuffer(os.pread(self._fd, size, begin), np.uint32).reshape(-1, 3)
        own = (since - begin) // 12 - len(ids)
        for page in ids:
            noted = rows[own:][rows[own:, 0] == page]
            patterns = {(int(seed), int(logical)) for _, seed, logical in [*noted, *rows[rows[:, 0] == ANY_PAGE]]}
            patterns |= {(oracle.seed(oracle.LATE), int(logical)) for _, _, logical in noted}
            for number, role in enumerate(oracle.ROLES):
                found = oracle.read(memory[role], page[None])
                bad = np.ones(found.shape, np.bool_)
                for seed, logical in patterns:
                    bad &= found != oracle.pattern(seed, [logical], found.shape, number)
                if bad.any():
                    return f"{int(bad.sum())} values in {role} of page {page} that none of {len(patterns)} patterns has"
        return ""
