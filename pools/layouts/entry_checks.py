"""Consistency checks of untrusted entries: whether all fields of an entry can be true of one array.

kvferry's own layouts derive every field from a spec. Entries that an operator writes for ``kvferry plan`` or that
another daemon sends are untrusted, and addresses and head slices are computed from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvferry.pools.layouts.mla import is_one_row
from kvferry.pools.layouts.parts import FIA_NZ, ND, is_joined
from kvferry.pools.planning.geometry import (
    HND,
    PAGE_HEADS,
    dtype_bytes,
    is_channels_first,
    page_bytes_of,
    page_rows,
    parts_of,
)
from kvferry.pools.planning.scales import check_scales
from kvferry.protocol.errors import GeometryMismatchError, InvalidFieldError, KvferryError
from kvferry.protocol.manifests import Entry

MAX_ADDRESS = (1 << 63) - 1
STATE_ROLES = ("conv", "ssm")
"""Roles of arrays ``(slots, window, channels)`` or channels first, and ``(slots, heads, ...)``, without tokens."""

_TOKENS = {"page_tokens": 1, "heads": 2}
"""Axes of ``(pages, page_size, heads, dim)``: keys, values, packed rows, and (without dim) the indexer's scales."""

_HEADS_FIRST = {"page_tokens": 2, "heads": 1}
"""Axes of ``(pages, heads, page_size, dim)``."""

_FRACTALS = {"page_tokens": 3, "heads": 1}
"""Axes of ``(pages, heads, dim / n, page_size, n)``."""


def check_entry(entry: Entry, field: str) -> None:
    """Check that the fields of an entry are consistent; omitted fields are not checked.

    Raises:
        InvalidFieldError: the entry ends beyond the address range, or its heads, dtype or scales are invalid.
        GeometryMismatchError: ``page_bytes``, ``page_tokens``, ``heads``, ``dtype`` and ``shape`` contradict each
            other.
    """
    if entry.base + entry.pages * entry.page_bytes > MAX_ADDRESS:
        raise InvalidFieldError(f"{entry.name} ends beyond address {MAX_ADDRESS}", field=f"{field}.base")
    heads = (entry.head_start or 0) + (entry.heads or 0)
    if entry.total_heads is not None and heads > entry.total_heads:
        raise InvalidFieldError(f"{entry.name} has heads up to {heads} of {entry.total_heads}", field=f"{field}.heads")
    check_scales(entry, field)
    _check_parts(entry, field)
    try:
        _check_page(entry)
        _check_shape(entry)
    except KvferryError as cause:
        raise type(cause)(cause.detail, field=f"{field}.{cause.field}") from cause


def _check_page(entry: Entry) -> None:
    """Check that a page divides into elements, and into heads of tokens."""
    element_bytes = 1 if entry.dtype is None else dtype_bytes(entry.dtype)
    if entry.shape is not None:
        _check_elements(entry, entry.shape)
    rows = page_rows(entry)
    cells = 1 if rows is None or _is_of_pages(entry) else rows * (entry.heads or 1)
    if entry.page_bytes % (cells * element_bytes):
        dtype = f" of {entry.dtype}" if entry.dtype else ""
        parts = f"{rows} tokens x {entry.heads or 1} heads" if cells > 1 else "elements"
        raise GeometryMismatchError(
            f"{entry.name}: {entry.page_bytes} bytes do not divide into {parts}{dtype}", field="page_bytes"
        )


def _check_parts(entry: Entry, field: str) -> None:
    """Check that the parts are all channels of a convolution's state, and divide into its heads."""
    parts = parts_of(entry.format)
    if not parts:
        return
    axis = 1 if is_channels_first(entry) else 2
    is_conv = entry.role == "conv" and entry.page_tokens is None
    if not is_conv or entry.heads is None or entry.shape is None or len(entry.shape) != 3:  # noqa: PLR2004  see above
        raise InvalidFieldError(
            f"{entry.name} has format {entry.format}: that is of states conv of three axes, with heads",
            field=f"{field}.format",
        )
    if sum(parts) * entry.heads != entry.shape[axis]:
        raise InvalidFieldError(
            f"{entry.name}: {entry.heads} heads of format {entry.format} are not {entry.shape[axis]} channels",
            field=f"{field}.format",
        )


def _check_elements(entry: Entry, shape: tuple[int, ...]) -> None:
    """Check that ``page_bytes`` fits the elements per page; without a dtype any integer element size may fit."""
    if entry.dtype is not None:
        page_bytes_of(shape, entry.dtype, entry.pages, entry.page_bytes, entry.name)
        return
    elements, rest = divmod(math.prod(shape), entry.pages)
    if rest or entry.page_bytes % elements:
        raise GeometryMismatchError(
            f"{entry.name}: page_bytes {entry.page_bytes} is not a multiple of the elements per page, "
            f"{math.prod(shape) / entry.pages:g} by its shape",
            field="page_bytes",
        )


def _check_shape(entry: Entry) -> None:
    """Check that the shape agrees with the entry's pages, tokens and heads, where its axes are known."""
    if entry.shape is None:
        return
    axes = _axes(entry, entry.shape)
    for field, axis in axes.items():
        given = getattr(entry, field)
        if given is not None and entry.shape[axis] != given:
            raise GeometryMismatchError(
                f"{entry.name}: by its shape {list(entry.shape)} {field} is {entry.shape[axis]}, but {given} is given",
                field="shape",
            )


def _axes(entry: Entry, shape: tuple[int, ...]) -> Mapping[str, int]:
    """Return the axis of the shape that each field gives; empty for formats that no layout here makes."""
    known = entry.format in {None, ND, PAGE_HEADS} or is_channels_first(entry) or _is_nz(entry) or _is_hnd(entry)
    if not shape or not (known or is_one_row(entry.format or "") or is_joined(entry.format or "")):
        return {}
    if _is_of_tokens(entry, shape):
        return {"heads": 2} if entry.page_tokens else {}
    return {"pages": 0, **_page_axes(entry, len(shape))}


def _page_axes(entry: Entry, axes: int) -> Mapping[str, int]:
    """Return the same for the axes after the page axis; without tokens they depend on the role."""
    if _is_nz(entry):
        return _FRACTALS if axes == 5 else {}  # noqa: PLR2004  see _FRACTALS
    if _is_hnd(entry):
        return _HEADS_FIRST if axes == 4 else {}  # noqa: PLR2004  see _HEADS_FIRST
    if entry.format == PAGE_HEADS:
        return {"heads": 1} if axes == 2 else {}  # noqa: PLR2004  (pages, heads)
    if entry.role in STATE_ROLES:
        return {"heads": 1} if entry.role == "ssm" and axes > 1 else {}
    return _TOKENS if entry.page_tokens and axes == (3 if entry.role == "index_scale" else 4) else {}


def _is_nz(entry: Entry) -> bool:
    return entry.format is not None and entry.format.startswith(FIA_NZ)


def _is_hnd(entry: Entry) -> bool:
    return entry.format is not None and entry.format.startswith(HND)


def _is_of_tokens(entry: Entry, shape: tuple[int, ...]) -> bool:
    """Return whether the shape may be the FIA view (fused infer attention), in which a row is a token, not a page."""
    if len(shape) != 4 or shape[1] != 1:  # noqa: PLR2004  (tokens, 1, heads, dim)
        return False
    if not (entry.format in {None, ND} or is_joined(entry.format or "")) or entry.role in STATE_ROLES:
        return False
    if entry.page_tokens is None:
        return shape[0] % entry.pages == 0
    return shape[0] == entry.pages * entry.page_tokens


def _is_of_pages(entry: Entry) -> bool:
    """Return whether the array has one row per page and no token axis, like scales of whole pages."""
    return entry.shape is not None and len(entry.shape) <= 2  # noqa: PLR2004  (pages, something)
