"""The offset of each graph table in its region.

A captured graph keeps the addresses that it saw, so the offsets follow from the shape alone and never change. The
region may be host memory, NPU memory, or a staging copy; only ``views`` needs memory that the CPU can access.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.table_messages import CreateTables

# -- the size of graph tables: fixed once, before the first capture, for all tables of one captured model.
#
# The width is a formula because any narrower table gets written past its end: draft tokens extend beyond the context,
# and an engine's own token map is wider than the context in practice.


MAX_TOKENS = (1 << 31) - 1  # lengths and pages are int32 in the tables


class TableShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of ``block_tables (max_batch, columns)``, of the window tables and of ``seq_lens (max_batch,)``.

    Attributes:
        max_batch: rows of every table; a row is a slot of the captured batch.
        columns: W, the number of pages of a row.
        page_size: tokens of one page.
        draft_tokens: the most tokens that an update may add to the lengths (speculation), 0 without.
        window: tokens of the sliding window, None without window layers.
        captured: the captured batch sizes, ascending; () where every batch is replayed as it is.
    """

    max_batch: int
    columns: int
    page_size: int
    draft_tokens: int = 0
    window: int | None = None
    captured: tuple[int, ...] = ()

    @property
    def row_tokens(self) -> int:
        """Return the tokens that a row's pages hold, ``columns * page_size``."""
        return self.columns * self.page_size

    def replayed_rows(self, batch: int) -> int:
        """Return the rows that a replay of ``batch`` rows reads: the smallest captured size that holds them.

        Return ``batch`` itself if no captured size does: such a batch is not replayed.
        """
        at = bisect_left(self.captured, batch)
        return self.captured[at] if at < len(self.captured) else batch


def table_shape(
    *,
    max_batch: int,
    max_context_tokens: int,
    page_size: int,
    draft_tokens: int = 0,
    request_row_tokens: int = 0,
    window: int | None = None,
    captured: Sequence[int] = (),
) -> TableShape:
    """Return the shape: ``columns = ceil(max(max_context_tokens + draft_tokens, request_row_tokens) / page_size)``.

    Args:
        max_batch: the largest batch.
        max_context_tokens: the longest request.
        page_size: tokens of one page.
        draft_tokens: the most that speculation adds to a length, 0 without.
        request_row_tokens: the width of the engine's own token map, 0 where it has none.
        window: tokens of the sliding window of hybrid models, else None.
        captured: the captured batch sizes, in any order, none above ``max_batch``.

    Raises:
        InvalidFieldError: a number out of range, or tables that int32 cannot address; the field is named.
    """
    _at_least(1, max_batch=max_batch, max_context_tokens=max_context_tokens, page_size=page_size)
    _at_least(0, draft_tokens=draft_tokens, request_row_tokens=request_row_tokens)
    if window is not None:
        _at_least(1, window=window)
    sizes = tuple(sorted(captured))
    if (sizes and not 1 <= sizes[0] <= sizes[-1] <= max_batch) or len(set(sizes)) < len(sizes):
        raise InvalidFieldError(f"{sizes}: distinct sizes of 1..{max_batch} rows are needed", field="captured")
    row_tokens = max(max_context_tokens + draft_tokens, request_row_tokens)
    columns = -(-row_tokens // page_size)
    if columns * page_size > MAX_TOKENS or max_batch * columns > MAX_TOKENS:
        raise InvalidFieldError(
            f"{max_batch} rows of {columns} pages of {page_size} tokens; tables hold int32", field="max_context_tokens"
        )
    return TableShape(
        max_batch=max_batch,
        columns=columns,
        page_size=page_size,
        draft_tokens=draft_tokens,
        window=window,
        captured=sizes,
    )


def asked_shape(body: CreateTables, manifest: Manifest) -> TableShape | None:
    """Return the shape of the tables that a request asks for; None if the pool has no such paged component.

    Raises:
        InvalidFieldError: see ``table_shape``.
    """
    tokens = next((one.page_tokens for one in manifest.entries if one.component == body.component), None)
    if tokens is None:
        return None
    return table_shape(
        max_batch=body.max_batch,
        max_context_tokens=body.max_context_tokens,
        page_size=tokens,
        draft_tokens=body.draft_tokens,
        request_row_tokens=body.request_row_tokens,
        window=body.window,
        captured=body.captured,
    )


def _at_least(least: int, **fields: int) -> None:
    for field, value in fields.items():
        if value < least:
            raise InvalidFieldError(f"{value}, but at least {least} is needed", field=field)


ALIGNMENT_BYTES = 512  # best for NPU copies and kernels, and a multiple of every cache line
ITEM_BYTES = 4
WORD_BYTES = 8
MAX_WORD = (1 << 62) - 1
"""Of an update's number, and of a replay's."""
RELEASED = (1 << 63) - 1
"""In place of a replay's number: above all of them, also where a device compares them as signed numbers (CUDA)."""

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
"""Rows, columns, lengths or flat positions, ``(n,)`` int64; ids of pages are ``PageIds``."""

Region: TypeAlias = npt.NDArray[np.uint8]
"""Memory that the CPU can access, ``(n,)`` uint8, contiguous."""


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
        block_tables: offset of ``(max_batch, columns)``.
        block_tables_swa: the same for window layers, None without a window.
        seq_lens: offset of ``(max_batch,)``.
        words: offset of ``(2,)`` uint64, on a device: ``shown``, the number of the update that the tables show, which
            the daemon's stream writes behind its copies; and ``replayed``, which the engine's stream counts up.
        size_bytes: size of the region.
    """

    block_tables: int
    block_tables_swa: int | None
    seq_lens: int
    words: int
    size_bytes: int


def table_layout(shape: TableShape) -> TableLayout:
    """Return the layout of the tables of this shape."""
    table = aligned(shape.max_batch * shape.columns * ITEM_BYTES, ALIGNMENT_BYTES)
    tables = 1 if shape.window is None else 2
    words = tables * table + aligned(shape.max_batch * ITEM_BYTES, ALIGNMENT_BYTES)
    return TableLayout(
        block_tables=0,
        block_tables_swa=None if shape.window is None else table,
        seq_lens=tables * table,
        words=words,
        size_bytes=words + ALIGNMENT_BYTES,
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
    """Return the size rounded up to the alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes
