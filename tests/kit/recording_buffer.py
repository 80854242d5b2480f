"""Memory that remembers what was written into it, and what it was after each of these writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, overload


class Write(NamedTuple):
    """Bytes that were written at a place."""

    at: int
    data: bytes


class Recording:
    """A buffer that remembers what was written into it, in order."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.writes: list[Write] = []

    def __len__(self) -> int:
        return len(self.data)

    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> bytes: ...
    def __getitem__(self, key: int | slice, /) -> int | bytes:
        return bytes(self.data[key]) if isinstance(key, slice) else self.data[key]

    def __setitem__(self, key: slice, value: bytes, /) -> None:
        assert key.stop is None or key.stop - (key.start or 0) == len(value), "a write that moves what follows"
        assert (key.start or 0) + len(value) <= len(self.data)
        self.writes.append(Write(key.start or 0, bytes(value)))
        self.data[key] = value


def cut_at_every_write(before: bytes, writes: list[Write]) -> Iterator[bytearray]:
    """Yield the memory after each prefix of the writes, and where a long write had come half of its way."""
    data = bytearray(before)
    yield bytearray(data)
    for at, one in writes:
        for length in {len(one) // 2, len(one)} if len(one) > 8 else {len(one)}:
            data[at : at + length] = one[:length]
            yield bytearray(data)


def copied(data: bytearray) -> Recording:
    copy = Recording(len(data))
    copy.data[:] = data
    return copy
