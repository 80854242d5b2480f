"""The interface of regions, which all kinds of pool memory implement.

A region is memory of one device, of a fixed size, that several processes may have mapped. The region itself copies
bytes to and from host memory; its callers work with plans and segments, not with devices.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.pools.copy_kernel import Digests
from kvferry.pools.planning.copies import CopyBlocks
from kvferry.pools.planning.sides import PlanSide
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages, BlockStep

Arena = npt.NDArray[np.uint8]
"""Host memory that holds blocks, ``(size_bytes,)`` uint8."""


class Pending(Protocol):
    """A step that has begun. ``wait`` is called once, by any thread; until then the memory of both sides is in use."""

    @property
    def done(self) -> bool:
        """Return whether the step is known to be complete, without asking the device."""

    def wait(self) -> None:
        """Return once the step is complete; an offload's bytes are then in the arena.

        Raises:
            DeviceLostError: the device failed.
        """


class NothingPending:
    """A step that was complete when it had begun."""

    done = True

    def wait(self) -> None:
        """See ``Pending.wait``."""


NOTHING_PENDING: Final = NothingPending()


class Hashed(NothingPending):
    """A step that was copied and hashed in one pass.

    Attributes:
        digests: ``(n,)`` uint64, of the blocks that end in it.
    """

    def __init__(self, digests: Digests) -> None:
        self.digests = digests


class Region(Protocol):
    """Memory of one device.

    Attributes:
        device: its name, ``host`` or ``npu:0`` and the like.
        size_bytes: above 0.
    """

    device: str
    size_bytes: int

    @property
    def identity(self) -> int:
        """Return a number that no other region of this host has while this one exists."""

    def gather(self, side: PlanSide, first: int, stop: int, out_address: int, copy: CopyBlocks) -> None:
        """Copy segments ``[first, stop)`` of a plan's side into contiguous host memory; see ``pools.gather``.

        Returns when the bytes are there: call it on a thread that may block. ``copy`` is used between host memory.

        Raises:
            TransferFailedError: an address is not mapped.
            DeviceLostError: the device failed.
        """

    def scatter(self, side: PlanSide, first: int, stop: int, in_address: int, copy: CopyBlocks) -> None:
        """Copy contiguous host memory to where segments ``[first, stop)`` belong: the reverse of ``gather``."""

    def most_blocks(self, layout: BlockLayout) -> int:
        """Return how many blocks a step may have, at least 1: it takes its time for each copy, however small."""

    def begin_offload(self, pages: BlockPages, step: BlockStep, arena: Arena) -> Pending:
        """Begin to copy a step from pages to their blocks; a host region completes it at once.

        The padding of blocks whose end is in the step is zeroed by the time ``wait`` returns. Steps may be in flight
        at the same time and complete in any order: the caller ensures that they do not overlap.

        Raises:
            DeviceLostError: the device failed; the memory stays in use.
        """

    def begin_restore(self, pages: BlockPages, step: BlockStep, arena: Arena) -> Pending:
        """Begin to copy a step from blocks to their pages: the reverse of ``begin_offload``."""

    def close(self) -> None:
        """Unmap the memory in this process; other processes keep their mapping. Closing twice does nothing."""
