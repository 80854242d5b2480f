"""The sides of plans: where each side's bytes lie. Each is made from its own entries alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.pools.copy_kernel import Entries
from kvferry.pools.planning.geometry import (
    HEADS_OUTERMOST,
    KEYS_IN_COLUMNS,
    TOKENS_OUTERMOST,
    Heads,
    Tokens,
    dtype_bytes,
    page_rows,
    parts_of,
)
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import GeometryMismatchError
from kvferry.protocol.manifests import Entry

Sizes: TypeAlias = npt.NDArray[np.uint64]
"""``(entries,)`` uint64, in bytes unless stated otherwise."""


class PlanSide(msgspec.Struct, frozen=True):
    """Where one side's bytes lie. A page has ``rows`` rows; one slice of each row is exchanged.

    If whole pages are exchanged, ``rows`` is 1 and the slice is the page. Otherwise a row is one token. An entry whose
    rows have parts, each with a slice, is an entry for each part here.

    Attributes:
        base: address of each entry.
        page_bytes: distance between pages.
        rows: number of rows per page.
        row_bytes: distance between rows.
        slice_offset: offset of the slice in its row.
        slice_bytes: size of the slice of one row.
        ids: ``(pages,)`` int64, the side's pages in logical order; not checked here.
    """

    base: Sizes
    page_bytes: Sizes
    rows: Sizes
    row_bytes: Sizes
    slice_offset: Sizes
    slice_bytes: Sizes
    ids: PageIds

    @property
    def segment_bytes(self) -> Sizes:
        """Return the bytes exchanged per page of each entry; equal on both sides."""
        return self.rows * self.slice_bytes

    @property
    def sliced(self) -> npt.NDArray[np.bool_]:
        """Return which entries exchange less than whole pages: ``(entries,)`` bool."""
        sliced: npt.NDArray[np.bool_] = self.slice_bytes != self.page_bytes
        return sliced

    @property
    def is_whole(self) -> bool:
        """Return whether all entries exchange whole pages."""
        return self.slice_bytes is self.page_bytes or not self.sliced.any()  # one array, as ``make_side`` has it

    def of(self, entries: npt.NDArray[np.bool_]) -> PlanSide:
        """Return the side with only the entries selected by a mask."""
        return PlanSide(
            self.base[entries],
            self.page_bytes[entries],
            self.rows[entries],
            self.row_bytes[entries],
            self.slice_offset[entries],
            self.slice_bytes[entries],
            self.ids,
        )


class Sides(NamedTuple):
    """Both sides of a plan that has no pages yet, and what ``entries_between`` returns for them."""

    source: PlanSide
    destination: PlanSide
    entries: Entries


def make_side(
    entries: Sequence[Entry],
    heads: Sequence[Heads | None] | None,
    ids: PageIds,
    tokens: Tokens | None = None,
) -> PlanSide:
    """Return one side of a plan, from that side's entries alone.

    Args:
        entries: this side's entries of the pairs, in the destination's order.
        heads: the exchanged heads of each entry, counted within the entry; None, or None in an entry's position, for
            whole pages.
        ids: this side's pages, already checked.
        tokens: of each page; None: all.

    Raises:
        GeometryMismatchError: an entry cannot be cut by these heads or tokens.
    """
    if tokens is None and (heads is None or not any(heads)):
        base = np.array([entry.base for entry in entries], np.uint64)
        page_bytes = np.array([entry.page_bytes for entry in entries], np.uint64)
        ones, zeros = np.ones(len(entries), np.uint64), np.zeros(len(entries), np.uint64)
        return PlanSide(base, page_bytes, ones, page_bytes, zeros, page_bytes, ids)
    slices = [
        (entry.base, entry.page_bytes, *one)
        for entry, its in zip(entries, heads or [None] * len(entries), strict=True)
        for one in _slices_of(entry, its, tokens)
    ]
    base, page_bytes, rows, row_bytes, slice_offset, slice_bytes = np.ascontiguousarray(np.array(slices, np.uint64).T)
    return PlanSide(base, page_bytes, rows, row_bytes, slice_offset, slice_bytes, ids)


def slice_count(entry: Entry, heads: Heads | None, tokens: Tokens | None = None) -> int:
    """Return how many entries of a plan an entry is, of which these heads and tokens are exchanged."""
    if tokens is not None:
        return len(_slices_of(entry, heads, tokens))
    return 1 if heads is None else len(parts_of(entry.format) or (1,))


_Slice: TypeAlias = tuple[int, int, int, int]
"""``rows``, ``row_bytes``, ``slice_offset``, ``slice_bytes`` of a ``PlanSide``."""


def _slices_of(entry: Entry, heads: Heads | None, tokens: Tokens | None) -> list[_Slice]:
    """Return each part of an entry that is exchanged."""
    if tokens is not None:
        return _token_slices(entry, heads or Heads(0, entry.heads or 1), tokens)
    if heads is None:
        return [(1, entry.page_bytes, 0, entry.page_bytes)]
    rows, held = page_rows(entry) or 0, entry.heads or 0
    if heads.start < 0 or heads.count < 1 or heads.stop > held or rows < 1 or entry.page_bytes % (rows * held):
        raise GeometryMismatchError(
            f"{entry.name}: pages of {entry.page_bytes} bytes, {rows} tokens and {held} heads cannot be cut into heads "
            f"{heads.start}..{heads.stop - 1}",
            field="heads",
        )
    parts = parts_of(entry.format) or (1,)
    if heads.count == held and len(parts) == 1:
        return [(1, entry.page_bytes, 0, entry.page_bytes)]
    row_bytes, slices, first = entry.page_bytes // rows, [], 0
    for part in parts:
        part_bytes = row_bytes * part // sum(parts)
        head_bytes = part_bytes // held
        slices.append((rows, row_bytes, first + heads.start * head_bytes, heads.count * head_bytes))
        first += part_bytes
    return slices


def _token_slices(entry: Entry, heads: Heads, tokens: Tokens) -> list[_Slice]:
    """Return some tokens of a page. Both sides have as many slices, each of as many rows or of adjoining ones."""
    form, held, size = entry.format or "", entry.heads or 1, entry.page_tokens or 0
    columns = KEYS_IN_COLUMNS.fullmatch(form)
    is_inside = heads.start >= 0 and heads.count >= 1 and heads.stop <= held
    is_inside &= tokens.first >= 0 and tokens.number >= 1 and tokens.stop <= size
    is_known = bool(columns or TOKENS_OUTERMOST.fullmatch(form) or HEADS_OUTERMOST.fullmatch(form))
    cell, rest = divmod(entry.page_bytes, max(1, size * held))
    if columns:
        is_known &= cell == (int(columns[1]) + int(columns[2])) * dtype_bytes(entry.dtype or "uint8")
    if rest or not (is_inside and is_known):
        raise GeometryMismatchError(
            f"{entry.name}: pages of {size} tokens, {held} heads and format {entry.format} cannot be cut into tokens "
            f"{tokens.first}..{tokens.stop - 1} of heads {heads.start}..{heads.stop - 1}",
            field="page_tokens",
        )
    if columns:
        return _slices_of_columns(entry, heads, tokens, (int(columns[1]), int(columns[2])))
    if HEADS_OUTERMOST.fullmatch(form):
        row = size * cell
        return [(heads.count, row, heads.start * row + tokens.first * cell, tokens.number * cell)]
    row = held * cell
    if heads.count == held:
        return [(1, row, tokens.first * row, tokens.number * row)]
    return [(tokens.number, row, tokens.first * row + heads.start * cell, heads.count * cell)]


def _slices_of_columns(entry: Entry, heads: Heads, tokens: Tokens, widths: tuple[int, int]) -> list[_Slice]:
    """Return K and V of each head, of tokens whose K is a column; see ``KEYS_IN_COLUMNS``."""
    size, element = entry.page_tokens or 0, dtype_bytes(entry.dtype or "uint8")
    row, (k, v) = size * element, widths
    slices = []
    for head in range(heads.start, heads.stop):
        start = head * row * (k + v)
        slices.append((k, row, start + tokens.first * element, tokens.number * element))
        slices.append((1, row * v, start + row * k + tokens.first * v * element, tokens.number * v * element))
    return slices


def entries_between(source: PlanSide, destination: PlanSide) -> Entries:
    """Return what the copies of all pages share: ``(entries, 8)`` uint64, see ``copy_kernel.list_segments``."""
    rows = np.maximum(source.rows, destination.rows)
    sizes = source.segment_bytes // rows
    strides = [np.where(side.sliced, side.row_bytes, sizes) for side in (source, destination)]
    pages = [column for side in (source, destination) for column in (side.base + side.slice_offset, side.page_bytes)]
    return np.stack((*pages, sizes, rows, *strides), axis=1)
