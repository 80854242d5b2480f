"""Scales of keys and values in 8 bits: what an element has to be multiplied with to be what it was.

Fixed scales are values of the spec: one for all, one a layer, or one a head of each layer; they stand on the entries
that they are of. Scales that a kernel makes page by page travel with the pages, as roles of their own. Engines hold
scales as float32, so here too two are equal where they are as float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.pools.planning.heads import Heads
from kvferry.protocol.errors import InvalidFieldError, ScaleMismatchError
from kvferry.protocol.manifests import Entry, Scales

EIGHT_BIT_DTYPES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
PAGE = "page"
"""A scale a page: a rank's own, over all the heads that it holds."""

PAGE_HEAD = "page_head"
"""A scale a page and head."""


class KeyValueScales(msgspec.Struct, frozen=True):
    """The scales of one component's keys and values, and how their fields are called in errors."""

    k: Scales | None = None
    v: Scales | None = None
    prefix: str = ""

    def of(self, role: str) -> Scales | None:
        """Return those of ``k`` or ``v``."""
        return self.k if role == "k" else self.v

    def field(self, role: str) -> str:
        """Return the spec's field that has them."""
        return f"{self.prefix}{role}_scale"


def fixed_scales(
    scales: Scales | None, layers: int, heads: int, dtype: str, field: str
) -> list[tuple[float, ...] | None]:
    """Return what stands on the entry of each layer: one scale, or one a head; None where none is fixed.

    Args:
        scales: as the spec has them.
        layers: how many layers the pool has of these.
        heads: how many heads it holds.
        dtype: of the keys or values.
        field: the spec's, for errors.

    Raises:
        InvalidFieldError: not of 8 bits, not as many as layers or heads, or a scale that is none.
    """
    if scales is None:
        return [None] * layers
    if dtype not in EIGHT_BIT_DTYPES:
        raise InvalidFieldError(f"{dtype} has no scales; {', '.join(EIGHT_BIT_DTYPES)} have", field=field)
    if isinstance(scales, str):
        return [None] * layers
    if not isinstance(scales, tuple):
        return [(_checked(scales, field),)] * layers
    if len(scales) != layers:
        raise InvalidFieldError(f"{len(scales)} scales for {layers} layers", field=field)
    found: list[tuple[float, ...] | None] = []
    for number, one in enumerate(scales):
        own = one if isinstance(one, tuple) else (one,)
        if isinstance(one, tuple) and len(one) != heads:
            raise InvalidFieldError(f"{len(one)} scales for {heads} heads", field=f"{field}[{number}]")
        found.append(tuple(_checked(value, f"{field}[{number}]") for value in own))
    return found


def inherited(own: Scales | None, main: Scales | None, field: str) -> Scales | None:
    """Return the scales of a part that may leave them out: then they are the main part's.

    Raises:
        InvalidFieldError: those are a layer's each, and so of the main part's layers only.
    """
    if own is None and isinstance(main, tuple):
        raise InvalidFieldError("scales a layer are of main's layers: these layers need their own", field=field)
    return main if own is None else own


def check_scales(entry: Entry, field: str) -> None:
    """Check the scales of an entry from outside.

    Raises:
        InvalidFieldError: not of 8 bits, neither one nor one a head, or a scale that is none.
    """
    if entry.scales is None:
        return
    if entry.dtype not in EIGHT_BIT_DTYPES:
        raise InvalidFieldError(f"{entry.name}: {entry.dtype} has no scales", field=f"{field}.scales")
    if len(entry.scales) not in {1, entry.heads}:
        raise InvalidFieldError(
            f"{entry.name} has {len(entry.scales)} scales: one, or one for each of its heads ({entry.heads})",
            field=f"{field}.scales",
        )
    for one in entry.scales:
        _checked(one, f"{field}.scales")


def canonical(scales: Sequence[float]) -> tuple[float, ...]:
    """Return the scales by which equal ones are told: as float32, and one where all heads have the same."""
    rounded = tuple(map(_float32, scales))
    return rounded[:1] if len(set(rounded)) == 1 else rounded


def check_same_scales(source: Entry, destination: Entry, ours: Heads | None, theirs: Heads | None, field: str) -> None:
    """Check that what two sides exchange has the same scales on both.

    Args:
        source: the sending side's entry.
        destination: the receiving side's.
        ours: which of the source's heads are exchanged, by its own numbers; None for all.
        theirs: which of the destination's.
        field: for the error.

    Raises:
        ScaleMismatchError: only one side has any, or a head's differ; names the entry and the head.
    """
    if source.scales is None and destination.scales is None:
        return
    if source.scales is None or destination.scales is None:
        bare, other = ("source", "destination") if source.scales is None else ("destination", "source")
        raise ScaleMismatchError(
            f"{destination.name}{_heads_text(destination, theirs)} has scales at the {other}, none at the {bare}",
            field=field,
        )
    sent, wanted = _part(source.scales, ours), _part(destination.scales, theirs)
    for head in range(max(len(sent), len(wanted))):
        ours_is, theirs_is = sent[min(head, len(sent) - 1)], wanted[min(head, len(wanted) - 1)]
        if _float32(ours_is) != _float32(theirs_is):
            first = (destination.head_start or 0) + (theirs.start if theirs else 0)
            which = f"head {first + head}" if max(len(sent), len(wanted)) > 1 else "each head"
            raise ScaleMismatchError(
                f"{destination.name}{_heads_text(destination, theirs)}: the scale of {which} is {ours_is:.9g} at "
                f"the source, {theirs_is:.9g} at the destination",
                field=field,
            )


def _part(scales: tuple[float, ...], heads: Heads | None) -> tuple[float, ...]:
    return scales if len(scales) == 1 or heads is None else scales[heads.start : heads.stop]


def _heads_text(entry: Entry, heads: Heads | None) -> str:
    if entry.heads is None:
        return ""
    start = (entry.head_start or 0) + (heads.start if heads else 0)
    return f", heads {start}..{start + (heads.count if heads else entry.heads) - 1}"


def _checked(scale: float, field: str) -> float:
    rounded = _float32(scale)
    if not math.isfinite(rounded) or rounded <= 0:
        raise InvalidFieldError(f"a scale is above 0 and finite as float32, not {scale}", field=field)
    return rounded


def _float32(scale: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(scale))
