"""Element sizes and the bytes of a page, derived twice so that the two must agree."""

from __future__ import annotations

import math

from kvferry.protocol.errors import GeometryMismatchError, InvalidFieldError
from kvferry.protocol.manifests import Entry

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of one element, by torch's name of the dtype."""

PAGE_HEADS = "PAGE_HEADS"
"""The format of arrays ``(pages, heads)``: a number a head in each page, and no token axis."""

MAX_PAGES = (1 << 31) - 1
"""Page numbers are int32 in graph tables."""


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of ``dtype``.

    Raises:
        InvalidFieldError: no dtype of that name.
    """
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise InvalidFieldError(f"no dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}", field="dtype")
    return size


def page_rows(entry: Entry) -> int | None:
    """Return of how many rows a page is, each with all heads one after another: its tokens; None where nobody says."""
    return 1 if entry.format == PAGE_HEADS else entry.page_tokens


def page_count(tokens: int, page_size: int, field: str = "tokens") -> int:
    """Return the pages of a pool that holds ``tokens`` tokens, the padding page 0 included.

    ``tokens // page_size + 1``, as SGLang's pools have it, which rounds a pool's tokens to whole pages long before:
    here a part of a page is refused, since whoever asks for so many tokens would have fewer without a word.

    Raises:
        InvalidFieldError: no whole number of pages, or more than a table can number; names ``field``.
    """
    whole, rest = divmod(tokens, page_size)
    if rest:
        below = f"{whole * page_size} or " if whole else ""
        raise InvalidFieldError(
            f"{tokens} tokens are no whole number of pages of {page_size}: {below}{(whole + 1) * page_size} are",
            field=field,
        )
    pages = whole + 1
    if pages > MAX_PAGES:
        raise InvalidFieldError(f"{pages} pages; at most {MAX_PAGES}", field=field)
    return pages


def page_bytes_of(shape: tuple[int, ...], dtype: str, pages: int, expected: int, name: str) -> int:
    """Return the bytes of one page of an entry, from its whole array; it must be what the layout's formula gives.

    The two ways differ where a row of the array is taken for a page: in the FIA view one row is one *token*, and a
    page that is computed as ``array[0].nbytes`` would send 1 / page_size of the data.

    Args:
        shape: the entry's array, as engines see it.
        dtype: its element type.
        pages: the pages it holds.
        expected: bytes of a page by the layout's formula.
        name: how to name the entry in an error.

    Raises:
        GeometryMismatchError: the two disagree, or the array does not divide into pages.
    """
    entry_bytes = math.prod(shape) * dtype_bytes(dtype)
    derived, rest = divmod(entry_bytes, pages)
    if rest or derived != expected:
        raise GeometryMismatchError(
            f"{name}: shape and dtype give {entry_bytes / pages:g} bytes a page, page_bytes is {expected}",
            field="page_bytes",
        )
    return derived
