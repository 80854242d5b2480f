"""Element sizes, page counts, the bytes of a page (derived in two ways that must agree), and heads of ranks."""

from __future__ import annotations

import functools
import math
import re
from typing import Final, NamedTuple

import msgspec

from kvferry.protocol.errors import GeometryMismatchError, HeadsIndivisibleError, InvalidFieldError
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
"""Bytes per element, by torch's name of the dtype."""

PAGE_HEADS = "PAGE_HEADS"
"""Format of arrays ``(pages, heads)``: one number per page and head, no token axis."""

HND = "HND"
"""Begins the formats whose pages are ``(heads, page_size, dim)``: a head of a page is contiguous."""

CONV = "CONV"
"""Begins the formats of a convolution's states ``(slots, window, channels)`` that name the channels of a head in each
part of a row: ``CONV_4_4_8``.
"""

CHANNELS_FIRST = "CHANNELS_FIRST"
"""Begins the formats of such states as ``(slots, channels, window)``; the parts follow in the same way, if given."""

TOKENS_OUTERMOST: Final = re.compile(r"ND|(KV|LATENT_ROPE)_\d+_\d+|FP8_(DS|ASCEND)_MLA(_\d+_\d+)?")
HEADS_OUTERMOST: Final = re.compile(rf"{HND}(_KV_\d+_\d+)?")
KEYS_IN_COLUMNS: Final = re.compile(rf"{HND}_KV_(\d+)_(\d+)_CPU_VEC(16)?")
"""Formats whose pages can be cut by tokens. The last one is that of vLLM's vector kernels on CPUs: in each head first
K, with a row for each element of a token, then V, with a row for each token."""

MOST_PARTS: Final = 64
"""Into how many kinds of parts pages of two sizes are cut."""

_PARTS: Final = re.compile(f"(?:{CONV}|{CHANNELS_FIRST})((?:_[1-9][0-9]{{0,8}}){{1,16}})")

MAX_PAGES = (1 << 31) - 1
"""Page numbers are int32 in graph tables."""


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of ``dtype``.

    Raises:
        InvalidFieldError: the dtype is unknown.
    """
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise InvalidFieldError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}", field="dtype")
    return size


@functools.lru_cache
def parts_of(form: str | None) -> tuple[int, ...]:
    """Return the channels of a head in each part that a format names; () if it names none."""
    found = _PARTS.fullmatch(form or "")
    return tuple(int(one) for one in found[1].split("_")[1:]) if found else ()


def page_rows(entry: Entry) -> int | None:
    """Return the rows of a page, each with all heads: its tokens, or 1 where the heads come first; None if unknown.

    A row of a convolution's state has all channels; which are of which head is known only from its parts.
    """
    if entry.role == "conv" and entry.page_tokens is None:
        if not parts_of(entry.format) or entry.shape is None:
            return None
        return 1 if is_channels_first(entry) else entry.shape[1]
    heads_first = entry.format is not None and entry.format.startswith((PAGE_HEADS, HND))
    return 1 if heads_first or (entry.role == "ssm" and entry.page_tokens is None) else entry.page_tokens


def is_channels_first(entry: Entry) -> bool:
    """Return whether a state's window is the last axis."""
    return entry.format is not None and entry.format.startswith(CHANNELS_FIRST)


def page_count(tokens: int, page_size: int, field: str = "tokens") -> int:
    """Return the pages of a pool for ``tokens`` tokens, including padding page 0: ``tokens // page_size + 1``.

    SGLang's pools use the same formula after rounding the tokens to whole pages. A partial page is refused here, since
    rounding down would silently give the caller fewer tokens.

    Raises:
        InvalidFieldError: not a whole number of pages, or more than a table can number; names ``field``.
    """
    whole, rest = divmod(tokens, page_size)
    if rest:
        below = f"{whole * page_size} or " if whole else ""
        raise InvalidFieldError(
            f"{tokens} tokens are not a multiple of page_size {page_size}: use {below}{(whole + 1) * page_size}",
            field=field,
        )
    pages = whole + 1
    if pages > MAX_PAGES:
        raise InvalidFieldError(f"{pages} pages; at most {MAX_PAGES}", field=field)
    return pages


def page_bytes_of(shape: tuple[int, ...], dtype: str, pages: int, expected: int, name: str) -> int:
    """Return the bytes of one page of an entry, from its whole array, and check them against the layout's formula.

    The two differ where a row of the array is mistaken for a page: in the FIA view a row is one *token*, and
    ``array[0].nbytes`` would send 1 / page_size of the data. See docs/architecture.md, "Formulas".

    Args:
        shape: shape of the entry's array, as engines see it.
        dtype: its element type.
        pages: number of pages in the array.
        expected: bytes of a page by the layout's formula.
        name: the entry's name in an error.

    Raises:
        GeometryMismatchError: the two disagree, or the array does not divide into pages.
    """
    entry_bytes = math.prod(shape) * dtype_bytes(dtype)
    derived, rest = divmod(entry_bytes, pages)
    if rest or derived != expected:
        raise GeometryMismatchError(
            f"{name}: shape and dtype give {entry_bytes / pages:g} bytes per page, page_bytes is {expected}",
            field="page_bytes",
        )
    return derived


class Heads(msgspec.Struct, frozen=True):
    """Consecutive KV heads, numbered in the model or within an entry, as each user states."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        """Return the head after the last one."""
        return self.start + self.count


class RankHeads(Heads, frozen=True):
    """The model's KV heads that one rank holds, of how many, and how many ranks hold the same ones (1: only this)."""

    total: int
    replicas: int = 1


def rank_heads(total_heads: int, tp_size: int, rank: int) -> RankHeads:
    """Return the heads of rank ``rank`` of ``tp_size``, by the formula in docs/architecture.md, "Formulas".

    Raises:
        InvalidFieldError: a count is below 1, or the rank does not exist.
        HeadsIndivisibleError: neither of ``total_heads`` and ``tp_size`` divides the other.
    """
    if total_heads < 1 or tp_size < 1:
        field = "total_heads" if total_heads < 1 else "tp_size"
        raise InvalidFieldError(f"{total_heads} KV heads over {tp_size} ranks", field=field)
    if not 0 <= rank < tp_size:
        raise InvalidFieldError(f"rank {rank} of {tp_size}", field="rank")
    if total_heads % tp_size == 0:
        count = total_heads // tp_size
        return RankHeads(rank * count, count, total_heads)
    if tp_size % total_heads == 0:
        replicas = tp_size // total_heads
        return RankHeads(rank // replicas, 1, total_heads, replicas)
    raise HeadsIndivisibleError(
        f"{total_heads} KV heads over {tp_size} ranks: neither is a multiple of the other", field="tp_size"
    )


def ranks_with_heads(rank: int, size: int, prefill_size: int) -> tuple[range, int]:
    """Return which of prefill's tensor-parallel ranks have a decode rank's heads, and how many of decode each fills.

    Both sides split the heads evenly and in order; where there are fewer heads than ranks, or one latent for all,
    neighbours have the same.
    """
    if prefill_size % size == 0:
        each = prefill_size // size
        return range(rank * each, (rank + 1) * each), 1
    if size % prefill_size == 0:
        each = size // prefill_size
        return range(rank // each, rank // each + 1), each
    return range(prefill_size), size


class Tokens(NamedTuple):
    """Consecutive tokens of a page."""

    first: int
    number: int

    @property
    def stop(self) -> int:
        """Return the token after the last one."""
        return self.first + self.number


class Units(NamedTuple):
    """Into what pages of two sizes are cut to be exchanged: of so many ``tokens``, so many in a page of each side."""

    tokens: int
    source: int
    destination: int

    @property
    def phases(self) -> int:
        """Return after how many units both sides are at the beginning of a page again."""
        return math.lcm(self.source, self.destination)


def units_between(source: Entry, destination: Entry) -> Units | None:
    """Return how pages of entries are cut that hold different numbers of tokens; None: they hold as many."""
    ours, theirs = source.page_tokens, destination.page_tokens
    if ours is None or theirs is None or ours == theirs:
        return None
    tokens = math.gcd(ours, theirs)
    return Units(tokens, ours // tokens, theirs // tokens)


def has_pages_of_tokens(entry: Entry) -> bool:
    """Return whether it is known where each token of a page lies."""
    form = entry.format or ""
    return any(known.fullmatch(form) for known in (TOKENS_OUTERMOST, HEADS_OUTERMOST, KEYS_IN_COLUMNS))


def intersect(one: Heads, other: Heads) -> Heads | None:
    """Return the heads in both, or None if there are none."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return Heads(start, stop - start) if start < stop else None
