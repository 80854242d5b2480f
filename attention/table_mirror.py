"""The mirror of tables on a device: host memory that the daemon writes before the device, and the engine maps, too.

A daemon that is killed may leave an update half copied, or not begun. It writes an update's bytes here, then its
number, ``mirrored``, and only then copies them; the device's word ``shown`` gets the number behind the copies, and the
next update begins after that. So if ``shown`` of a dead daemon is below ``mirrored``, the mirror is what the device is
to show; else the device shows that already, and a later update may be half in here. The number is read once the
daemon's process has ended, or after a message of it: both are barriers.
"""

from __future__ import annotations

from typing import Final

from kvferry.attention.host_lengths import host_lengths_bytes
from kvferry.attention.table_layout import (
    ALIGNMENT_BYTES,
    Region,
    TableShape,
    TableViews,
    aligned,
    table_layout,
    views,
)
from kvferry.protocol.errors import LengthMismatchError

MIRRORED, AFTER = range(2)
HEADER_ITEMS: Final = 2


def shared_bytes(shape: TableShape, *, mirrored: bool) -> int:
    """Return the size of the host memory that goes with tables: the host lengths, then, on a device, the mirror."""
    lengths = host_lengths_bytes(shape.max_batch)
    return _header_at(shape) + ALIGNMENT_BYTES + table_layout(shape).size_bytes if mirrored else lengths


def _header_at(shape: TableShape) -> int:
    return aligned(host_lengths_bytes(shape.max_batch), ALIGNMENT_BYTES)


class TableMirror:
    """The mirror in a region of ``shared_bytes``; its writer is the daemon alone.

    Attributes:
        bytes: the tables, as they lie in the device's region, without the words.
        views: the tables.
    """

    def __init__(self, region: Region, shape: TableShape) -> None:
        """Use a region, of zeros at first.

        Raises:
            LengthMismatchError: it is too small.
        """
        needed = shared_bytes(shape, mirrored=True)
        if len(region) < needed:
            raise LengthMismatchError(f"{len(region)} bytes, {needed} needed", field="region")
        at = _header_at(shape)
        self._numbers = region[at : at + 8 * HEADER_ITEMS].view("int64")
        whole = region[at + ALIGNMENT_BYTES : needed]
        self.bytes: Region = whole[: table_layout(shape).words]
        self.views: TableViews = views(shape, whole)

    def __repr__(self) -> str:
        """Show the number."""
        return f"<TableMirror {self.mirrored}>"

    @property
    def mirrored(self) -> int:
        """Return the number of the last update that is whole here: the device shows it, or is about to."""
        return int(self._numbers[MIRRORED])

    @property
    def after(self) -> int:
        """Return which replay the copies of that update wait for; 0: none."""
        return int(self._numbers[AFTER])

    def end(self, sequence: int, after: int) -> None:
        """Note that an update's bytes are whole, and which replay their copies wait for."""
        self._numbers[AFTER] = after
        self._numbers[MIRRORED] = sequence
