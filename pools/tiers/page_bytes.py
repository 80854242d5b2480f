"""The bytes of several pages, gone through a bounded step at a time. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

_MOST_VIEWS = 1024
"""The system's bound on the buffers of one call (IOV_MAX)."""


class Piece(NamedTuple):
    """Consecutive bytes of one buffer; ``ends`` where they are its last."""

    buffer: int
    view: memoryview
    ends: bool


class Cursor:
    """A position in several buffers, as if they were one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Stand before the first byte of ``buffers``."""
        self._buffers = [buffer.cast("B") for buffer in buffers]
        self._index = 0
        self._offset = 0
        self.left_bytes = sum(buffer.nbytes for buffer in self._buffers)

    def ahead(self, max_bytes: int) -> list[Piece]:
        """Return the next ``max_bytes`` bytes in pieces; fewer at the end, or where they lie in very many buffers."""
        assert max_bytes > 0
        pieces: list[Piece] = []
        index, offset = self._index, self._offset
        while max_bytes > 0 and index < len(self._buffers) and len(pieces) < _MOST_VIEWS:
            view = self._buffers[index][offset : offset + max_bytes]
            max_bytes -= view.nbytes
            ends = offset + view.nbytes == self._buffers[index].nbytes
            pieces.append(Piece(index, view, ends))
            index, offset = index + 1, 0
        return pieces

    def advance(self, count: int) -> list[Piece]:
        """Go on by ``count`` bytes and return their pieces."""
        pieces = self.ahead(count)
        assert sum(piece.view.nbytes for piece in pieces) == count
        for index, view, ends in pieces:
            self._index, self._offset = (index + 1, 0) if ends else (index, self._offset + view.nbytes)
        self.left_bytes -= count
        return pieces

    def forget(self) -> None:
        """Let go of the buffers: memory whose views are held cannot be unmapped."""
        self._buffers = []


class PageDigests:
    """The XXH3-64 of pages whose bytes come a piece at a time; ``done`` holds those of the pages that have ended."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self._running = xxhash.xxh3_64()

    def update(self, pieces: Sequence[Piece]) -> None:
        """Go on with these bytes."""
        for piece in pieces:
            self._running.update(piece.view)
            if piece.ends:
                self.done.append(self._running.intdigest())
                self._running.reset()
