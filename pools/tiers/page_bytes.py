"""The bytes of several pages, processed in bounded steps. Independent of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

_MOST_VIEWS = 1024
"""The system's bound on the buffers of one call (IOV_MAX)."""


class BufferSlice(NamedTuple):
    """Consecutive bytes of one buffer; ``ends``: they are its last."""

    buffer: int
    view: memoryview
    ends: bool


class Cursor:
    """A position in several buffers, treated as one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Start at the first byte of ``buffers``."""
        self._buffers = [buffer.cast("B") for buffer in buffers]
        self._index = 0
        self._offset = 0
        self.left_bytes = sum(buffer.nbytes for buffer in self._buffers)

    def peek(self, max_bytes: int) -> list[BufferSlice]:
        """Return the next ``max_bytes`` bytes; fewer at the end, or if they span more buffers than a call takes."""
        assert max_bytes > 0
        slices: list[BufferSlice] = []
        index, offset = self._index, self._offset
        while max_bytes > 0 and index < len(self._buffers) and len(slices) < _MOST_VIEWS:
            view = self._buffers[index][offset : offset + max_bytes]
            max_bytes -= view.nbytes
            ends = offset + view.nbytes == self._buffers[index].nbytes
            slices.append(BufferSlice(index, view, ends))
            index, offset = index + 1, 0
        return slices

    def advance(self, count: int) -> list[BufferSlice]:
        """Advance by ``count`` bytes and return them."""
        slices = self.peek(count)
        assert sum(one.view.nbytes for one in slices) == count
        for index, view, ends in slices:
            self._index, self._offset = (index + 1, 0) if ends else (index, self._offset + view.nbytes)
        self.left_bytes -= count
        return slices

    def release(self) -> None:
        """Drop the buffers: memory cannot be unmapped while views of it exist."""
        self._buffers = []


class PageDigests:
    """The XXH3-64 of pages whose bytes arrive incrementally; ``done`` holds those of complete pages, in order."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self._running = xxhash.xxh3_64()

    def update(self, slices: Sequence[BufferSlice]) -> None:
        """Add the next bytes."""
        for one in slices:
            self._running.update(one.view)
            if one.ends:
                self.done.append(self._running.intdigest())
                self._running.reset()
