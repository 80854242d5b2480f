"""The host copy of the lengths, written by the daemon and read by engines in their own processes.

A captured graph's attention takes its lengths from a Python list that the engine rewrites before each replay
(``g.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])``), so the lengths are in shared host memory as well.

Two records are written alternately, so a reader always finds a complete one, also when the writer died half-way. A
record is valid only with its checksum: Python has no memory barriers, and on aarch64 another process may see stores in
any order. A reader that got a record's sequence number in a message (which is a barrier) finds that record or a later
one.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import msgspec
import numpy as np

from kvferry.attention.table_layout import ITEM_BYTES, Int32s, Int64s, Region, aligned
from kvferry.protocol.errors import InternalError, LengthMismatchError

HEADER_BYTES = 64  # a cache line: sequence, batch, replayed rows, extra tokens, checksum; int64 each
SEQUENCE, BATCH, REPLAYED, EXTRA, CHECKSUM = range(5)
ATTEMPTS = 1000  # an attempt fails if the writer writes twice while the reader copies a few hundred bytes


class HostLengths(msgspec.Struct, frozen=True, kw_only=True):
    """One update's lengths as an engine's graph update takes them: Python lists, padded with 0.

    Attributes:
        sequence: number of updates so far; 0 before the first.
        lengths: tokens of each row in use, without the extra ones.
        replayed_rows: rows that the replay reads, at least ``len(lengths)``: the captured batch size.
        extra_tokens: what the update added to the lengths in ``seq_lens``.
    """

    sequence: int
    lengths: list[int]
    replayed_rows: int
    extra_tokens: int

    def padded(self, added_tokens: int = 0) -> list[int]:
        """Return the lengths plus ``added_tokens``, padded with 0 to the captured batch size; idle rows stay 0."""
        added = [length and length + added_tokens for length in self.lengths] if added_tokens else self.lengths
        return added + [0] * (self.replayed_rows - len(added))

    def for_update(self) -> list[int]:
        """Return what ``seq_lens`` holds: the plain lengths to decode, or with the draft tokens to verify."""
        return self.padded(self.extra_tokens)

    def for_draft_step(self, step: int) -> list[int]:
        """Return the lengths of step 0, 1, ... of a multi-step draft: ``step + 1`` tokens more."""
        return self.padded(step + 1)


def host_lengths_bytes(max_batch: int) -> int:
    """Return the size of the region for ``max_batch`` rows."""
    return 2 * _record_bytes(max_batch)


class HostLengthsWriter:
    """The single writer of a region."""

    def __init__(self, region: Region, max_batch: int, sequence: int = 0) -> None:
        """Start with an empty list.

        Args:
            region: ``(host_lengths_bytes(max_batch),)`` uint8 or more, writable, 8-byte aligned.
            max_batch: rows.
            sequence: number of that list.

        Raises:
            LengthMismatchError: the region is too small.
        """
        self._records = _records(region, max_batch)
        self._sequence = sequence - 1
        self.write(np.empty(0, np.int64), 0)

    def write(self, lengths: Int64s, replayed_rows: int, extra_tokens: int = 0) -> int:
        """Publish the lengths of an update.

        Args:
            lengths: ``(batch,)`` tokens, at most ``max_batch`` rows.
            replayed_rows: see ``TableChange``.
            extra_tokens: of the update.

        Returns:
            The sequence number of the record.
        """
        self._sequence += 1
        header, values = self._records[self._sequence % 2]
        header[CHECKSUM] = -1  # never a checksum: the record is incomplete from here on
        values[: len(lengths)] = lengths
        header[SEQUENCE], header[BATCH] = self._sequence, len(lengths)
        header[REPLAYED], header[EXTRA] = replayed_rows, extra_tokens
        header[CHECKSUM] = _checksum(header, values[: len(lengths)])
        return self._sequence


class HostLengthsReader:
    """Reads a region that another process writes; any number of readers."""

    def __init__(self, region: Region, max_batch: int) -> None:
        """Attach to a region.

        Args:
            region: the writer's, ``(host_lengths_bytes(max_batch),)`` uint8 or more; read-only is enough.
            max_batch: rows.

        Raises:
            LengthMismatchError: the region is too small.
        """
        self._records = _records(region, max_batch)
        self._max_batch = max_batch

    def read(self, shown: Callable[[], int] | None = None) -> HostLengths:
        """Return the latest complete record; with ``shown``, the one of that number.

        Raises:
            InternalError: there is none, so the region has no writer.
        """
        for _ in range(ATTEMPTS):
            wanted = None if shown is None else shown()
            latest = sorted(self._records, key=lambda record: int(record[0][SEQUENCE]), reverse=True)
            for header, values in latest:
                found = self._complete(header.copy(), values)
                if found is not None and wanted in {None, found.sequence}:
                    return found
        raise InternalError("no record of the host lengths is complete", field="host_lengths")

    def _complete(self, header: Int64s, values: Int32s) -> HostLengths | None:
        sequence, batch, replayed_rows, extra_tokens, checksum = header.tolist()
        if not 0 <= batch <= self._max_batch:
            return None
        lengths = values[:batch].copy()
        if checksum != _checksum(header, lengths):
            return None
        return HostLengths(
            sequence=sequence, lengths=lengths.tolist(), replayed_rows=replayed_rows, extra_tokens=extra_tokens
        )


def _records(region: Region, max_batch: int) -> list[tuple[Int64s, Int32s]]:
    """Return the header and the lengths of both records."""
    if len(region) < host_lengths_bytes(max_batch):
        raise LengthMismatchError(
            f"{len(region)} bytes, {host_lengths_bytes(max_batch)} needed for {max_batch} rows", field="region"
        )
    size_bytes = _record_bytes(max_batch)
    halves = (region[:size_bytes], region[size_bytes : 2 * size_bytes])
    return [(half[: 8 * (CHECKSUM + 1)].view(np.int64), half[HEADER_BYTES:].view(np.int32)) for half in halves]


def _record_bytes(max_batch: int) -> int:
    return aligned(HEADER_BYTES + ITEM_BYTES * max_batch, HEADER_BYTES)


def _checksum(header: Int64s, lengths: Int32s) -> int:
    return crc32(lengths.data, crc32(header[:CHECKSUM].data))
