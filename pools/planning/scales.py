"""Dequantization scales of 8-bit keys and values: the factor that an element is multiplied with.

Fixed scales are given in the spec: one for all layers, one per layer, or one per head of each layer; they are stored on
the entries. Scales that a kernel computes per page travel with the pages, as separate roles. Engines hold scales as
float32, so two scales are equal if they are equal as float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.pools.planning.geometry import Heads
from kvferry.protocol.errors import InvalidFieldError, ScaleMismatchError
from kvferry.protocol.manifests import Entry, Scales

EIGHT_BIT_DTYPES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
PAGE = "page"
"""One scale per page, over all heads that the rank holds; else it is one per page and head."""


class KeyValueScales(msgspec.Struct, frozen=True):
    """The scales of one component's keys and values; ``prefix`` is put before their field names in errors."""

    k: Scales | None = None
    v: Scales | None = None
    prefix: str = ""

    def of(self, role: str) -> Scales | None:
        """Return the scales of role ``k`` or ``v``."""
        return self.k if role == "k" else self.v

    def field(self, role: str) -> str:
        """Return the name of the spec's field with the scales of ``role``."""
        return f"{self.prefix}{role}_scale"


def fixed_scales(
    scales: Scales | None, layers: int, heads: int, dtype: str, field: str
) -> list[tuple[float, ...] | None]:
    """Return the fixed scales of each layer's entry: one, or one per head; None without fixed scales.

    Args:
        scales: the spec's scales.
        layers: number of layers.
        heads: number of heads held.
        dtype: dtype of the keys or values.
        field: the spec's field, for errors.

    Raises:
        InvalidFieldError: the dtype does not have 8 bits, the number of scales is not that of layers or heads, or a
            scale is not above 0 and finite.
    """
    if scales is None:
        return [None] * layers
    if dtype not in EIGHT_BIT_DTYPES:
        raise InvalidFieldError(f"{dtype} has no scales; only {', '.join(EIGHT_BIT_DTYPES)} have", field=field)
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
    """Return a component's scales, which default to those of ``main``.

    Raises:
        InvalidFieldError: there is no default, because the scales of ``main`` are given per layer of ``main``.
    """
    if own is None and isinstance(main, tuple):
        raise InvalidFieldError("main has one scale per layer: give these layers their own scales", field=field)
    return main if own is None else own


def check_scales(entry: Entry, field: str) -> None:
    """Check the scales of an untrusted entry.

    Raises:
        InvalidFieldError: the dtype does not have 8 bits, there is neither one scale nor one per head, or a scale is
            not above 0 and finite.
    """
    if entry.scales is None:
        return
    if entry.dtype not in EIGHT_BIT_DTYPES:
        raise InvalidFieldError(f"{entry.name}: {entry.dtype} has no scales", field=f"{field}.scales")
    if len(entry.scales) not in {1, entry.heads}:
        raise InvalidFieldError(
            f"{entry.name} has {len(entry.scales)} scales: give one, or one for each of its heads ({entry.heads})",
            field=f"{field}.scales",
        )
    for one in entry.scales:
        _checked(one, f"{field}.scales")


def canonical(scales: Sequence[float]) -> tuple[float, ...]:
    """Return the scales in canonical form for comparison: as float32, and a single one if all heads have the same."""
    rounded = tuple(map(_float32, scales))
    return rounded[:1] if len(set(rounded)) == 1 else rounded


def check_same_scales(source: Entry, destination: Entry, ours: Heads | None, theirs: Heads | None, field: str) -> None:
    """Check that the exchanged heads have the same scales on both sides.

    Args:
        source: the source's entry.
        destination: the destination's entry.
        ours: the exchanged heads, counted within the source entry; None for all.
        theirs: the exchanged heads, counted within the destination entry; None for all.
        field: the field to name in the error.

    Raises:
        ScaleMismatchError: only one side has scales, or those of a head differ; names the entry and the head.
    """
    if source.scales is None and destination.scales is None:
        return
    if source.scales is None or destination.scales is None:
        bare, other = ("source", "destination") if source.scales is None else ("destination", "source")
        raise ScaleMismatchError(
            f"{destination.name}{_heads_text(destination, theirs)} has scales at the {other}, but none at the {bare}",
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
        raise InvalidFieldError(f"a scale must be above 0 and finite as float32, not {scale}", field=field)
    return rounded


def _float32(scale: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(scale))
