"""Shards: some blocks of a job, which one thread at a time takes through one phase, step by step.

A block's checksum is XXH3-64 over all its bytes in the arena, including its zero padding, so that whoever stores a
block can check it without knowing what a page is. Knows nothing of threads and scheduling.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvferry.pools.devices.base import NOTHING_PENDING, Arena, Pending, Region
from kvferry.pools.tiers.blocks import BlockPages, BlockStep, BlockSteps
from kvferry.protocol.errors import SnapshotDamagedError

Digests = npt.NDArray[np.uint64]
"""``(n,)`` uint64: the XXH3-64 of each block over its ``block_bytes``, in the order of the pages."""


class Phase(enum.Enum):
    """What is done with the blocks."""

    OFFLOAD = "offload"
    VERIFY = "verify"
    RESTORE = "restore"


class BlockSegment(NamedTuple):
    """The blocks of one page space of a pool. Errors name them by the layout's ``space``."""

    region: Region
    pages: BlockPages


class ShardStep(NamedTuple):
    """A step, with the index of its segment."""

    segment: int
    step: BlockStep


class Shard:
    """Blocks ``[first, stop)`` of each segment; steps are begun, and completed, in order."""

    def __init__(
        self,
        phase: Phase,
        segments: Sequence[BlockSegment],
        arena: Arena,
        digests: Sequence[Digests] | None,
        blocks: Iterable[tuple[int, int]],
    ) -> None:
        """Fill ``digests`` (OFFLOAD; None: not wanted) or compare with them (VERIFY)."""
        self.phase = phase
        self._segments = segments
        self._arena = arena
        self._digests = digests
        self._hash = xxhash.xxh3_64()
        self._ahead: deque[tuple[int, BlockSteps]] = deque(
            (number, BlockSteps(segments[number].pages.layout, first, stop))
            for number, (first, stop) in enumerate(blocks)
            if first < stop
        )
        self._returned: ShardStep | None = None

    @property
    def exhausted(self) -> bool:
        """Return whether all steps have been taken."""
        return self._returned is None and not self._ahead

    @property
    def device(self) -> str:
        """Return the device of the next step; not for an exhausted shard."""
        return self._segments[self._returned.segment if self._returned else self._ahead[0][0]].region.device

    def take(self, step_bytes: int) -> ShardStep:
        """Return the next step, of about ``step_bytes``; not for an exhausted shard."""
        if self._returned is not None:
            step, self._returned = self._returned, None
            return step
        segment, steps = self._ahead[0]
        taken = steps.take(step_bytes)
        assert taken is not None, self
        if steps.exhausted:
            self._ahead.popleft()
        return ShardStep(segment, taken)

    def put_back(self, step: ShardStep) -> None:
        """Undo a ``take``: the step becomes the next one."""
        self._returned = step

    def begin(self, step: ShardStep) -> Pending:
        """Begin a step; see ``Region.begin_offload``."""
        region, pages = self._segments[step.segment]
        if self.phase is Phase.VERIFY:
            return NOTHING_PENDING
        begin = region.begin_offload if self.phase is Phase.OFFLOAD else region.begin_restore
        return begin(pages, step.step, self._arena)

    def complete(self, step: ShardStep) -> None:
        """Hash or verify a step whose bytes have been copied.

        Raises:
            SnapshotDamagedError: a block's checksum is not the expected one.
        """
        if self._digests is None or self.phase is Phase.RESTORE:
            return
        segment, (first, stop, first_byte, stop_byte) = step
        pages = self._segments[segment].pages
        ends = stop_byte == pages.layout.content_bytes
        end = pages.layout.block_bytes if ends else stop_byte
        if first_byte or not ends:
            at = int(pages.offsets[first])
            self._hash.update(self._arena[at + first_byte : at + end].data)
            if ends:
                self._on_digest(segment, first, self._hash.intdigest())
                self._hash.reset()
            return
        for number, at in enumerate(pages.offsets[first:stop].tolist(), first):
            self._on_digest(segment, number, xxhash.xxh3_64_intdigest(self._arena[at : at + end].data))

    def _on_digest(self, segment: int, number: int, digest: int) -> None:
        assert self._digests is not None
        if self.phase is Phase.OFFLOAD:
            self._digests[segment][number] = digest
        elif self._digests[segment][number] != digest:
            pages = self._segments[segment].pages
            raise SnapshotDamagedError(
                f"block {number} of {len(pages.ids)} of space {pages.layout.space!r} has checksum {digest:016x}, "
                f"expected {int(self._digests[segment][number]):016x}; no page was written",
                field=f"{pages.layout.space}[{number}]",
            )


MIN_SHARD_BYTES: Final = 4 << 20
"""The minimum of a shard: less is not worth a second thread."""


def shards_of(
    phase: Phase, segments: Sequence[BlockSegment], arena: Arena, digests: Sequence[Digests] | None, max_shards: int
) -> list[Shard]:
    """Return a job's shards for a phase: at most ``max_shards``, as equal as possible, none empty."""
    total_bytes = sum(one.pages.total_bytes for one in segments)
    count = max(1, min(max_shards, total_bytes // MIN_SHARD_BYTES))
    sizes = [len(one.pages.ids) for one in segments]
    shards = []
    for number in range(count):
        blocks = [(size * number // count, size * (number + 1) // count) for size in sizes]
        shards.append(Shard(phase, segments, arena, digests, blocks))
    return [one for one in shards if not one.exhausted]
