"""Where each graph table lies in its region.

A captured graph keeps the addresses that it saw, so the places follow from the shape alone and never move. Knows no
device: the region may be host memory, an NPU's, or the staging copy of one; only ``views`` is for memory that the CPU
can touch.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.attention.table_shape import TableShape

ALIGNMENT_BYTES = 512  # what NPU copies and kernels like best, and a multiple of every cache line
ITEM_BYTES = 4

Int32s: TypeAlias = npt.NDArray[np.int32]
Region: TypeAlias = npt.NDArray[np.uint8]
"""Memory that the CPU can touch, ``(n,)`` uint8, contiguous."""


class TableViews(NamedTuple):
    """The tables as arrays over one region.

    Attributes:
        block_tables: ``(max_batch, columns)`` int32; 0 is the padding page.
        block_tables_swa: the same for window layers, None without a window.
        seq_lens: ``(max_batch,)`` int32, tokens; 0 in rows that are not in use.
    """

    block_tables: Int32s
    block_tables_swa: Int32s | None
    seq_lens: Int32s


class TableLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Byte offsets in the region, each a multiple of ``ALIGNMENT_BYTES``; all tables are C-contiguous int32.

    Attributes:
        block_tables: of ``(max_batch, columns)``.
        block_tables_swa: of the same for window layers, None without a window.
        seq_lens: of ``(max_batch,)``.
        size_bytes: of the region.
    """

    block_tables: int
    block_tables_swa: int | None
    seq_lens: int
    size_bytes: int


def table_layout(shape: TableShape) -> TableLayout:
    """Return where the tables of this shape lie."""
    table = aligned(shape.max_batch * shape.columns * ITEM_BYTES, ALIGNMENT_BYTES)
    tables = 1 if shape.window is None else 2
    return TableLayout(
        block_tables=0,
        block_tables_swa=None if shape.window is None else table,
        seq_lens=tables * table,
        size_bytes=tables * table + aligned(shape.max_batch * ITEM_BYTES, ALIGNMENT_BYTES),
    )


def views(shape: TableShape, region: Region) -> TableViews:
    """Return the tables over a region in host memory, without a copy; writable if the region is.

    Args:
        shape: of the tables.
        region: at least ``table_layout(shape).size_bytes`` bytes.
    """
    layout = table_layout(shape)

    def table(offset: int) -> Int32s:
        end = offset + shape.max_batch * shape.columns * ITEM_BYTES
        return region[offset:end].view(np.int32).reshape(shape.max_batch, shape.columns)

    lengths_end = layout.seq_lens + shape.max_batch * ITEM_BYTES
    return TableViews(
        block_tables=table(layout.block_tables),
        block_tables_swa=None if layout.block_tables_swa is None else table(layout.block_tables_swa),
        seq_lens=region[layout.seq_lens : lengths_end].view(np.int32),
    )


def aligned(size_bytes: int, alignment_bytes: int) -> int:
    """Return the size, rounded up to the alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes
