"""What every kind of memory a pool can be in has in common: regions.

A region is an extent of memory of one device, of a fixed size, that several processes may have mapped. What moves bytes
between a region and host memory is its own business; whoever moves them knows plans and segments, not devices.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.pools.planning.copies import CopyBlocks
from kvferry.pools.planning.plan import PlanSide
from kvferry.pools.tiers.blocks import BlockPages, BlockStep

Arena = npt.NDArray[np.uint8]
"""Host memory in which blocks lie, ``(size_bytes,)`` uint8."""


class Pending(Protocol):
    """A step that has begun. ``wait`` is called once, by any thread: until then the memory of both sides is in use."""

    @property
    def done(self) -> bool:
        """Return whether nothing moves any more, as far as that is known without a look."""

    def wait(self) -> None:
        """Return once nothing moves any more; what an offload brought is then in the arena.

        Raises:
            DeviceLostError: the device failed.
        """


class NothingPending:
    """A step that was over when it had begun."""

    done = True

    def wait(self) -> None:
        """See ``Pending.wait``."""


NOTHING_PENDING: Final = NothingPending()


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
        """Return a number that no other region of this host has while this one lives."""

    def gather(self, side: PlanSide, first: int, stop: int, out_address: int, copy: CopyBlocks) -> None:
        """Copy segments ``[first, stop)`` of a plan's side into contiguous host memory; see ``pools.gather``.

        Returns when the bytes are there: call it on a thread that may wait. ``copy`` is for what is host memory.

        Raises:
            TransferFailedError: an address is not mapped.
            DeviceLostError: the device failed.
        """

    def scatter(self, side: PlanSide, first: int, stop: int, in_address: int, copy: CopyBlocks) -> None:
        """Copy contiguous host memory to where segments ``[first, stop)`` belong: the reverse of ``gather``."""

    def begin_offload(self, pages: BlockPages, step: BlockStep, arena: Arena) -> Pending:
        """Begin to copy a step from pages to their blocks; on the host this copies it.

        Blocks that the step ends get zeros for padding, by the time ``wait`` returns. Steps that have begun may be
        under way at the same time, in whatever order: whoever begins them sees to it that they do not overlap.

        Raises:
            DeviceLostError: the device failed; the memory stays in use.
        """

    def begin_restore(self, pages: BlockPages, step: BlockStep, arena: Arena) -> Pending:
        """Begin to copy a step from blocks to their pages: the reverse of ``begin_offload``."""

    def close(self) -> None:
        """Give the memory back, here: who else has it mapped keeps it. Closing twice does nothing."""
