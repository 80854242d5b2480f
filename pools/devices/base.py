"""What every kind of memory a pool can be in has in common: regions.

A region is a stretch of memory of one device, of a fixed size, that several processes may have mapped. What moves bytes
between a region and host memory is its own business; whoever moves them knows plans and segments, not devices.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.pools.copies import CopyBlocks
from kvferry.pools.plan import PlanSide


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

    def close(self) -> None:
        """Give the memory back, here: who else has it mapped keeps it. Closing twice does nothing."""
