"""Sizes as people write them: ``"8GiB"``. Knows nothing of what they are sizes of."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE_FORM: Final = 'bytes as a number, or as text with a unit: KiB, MiB, GiB or TiB, as "8GiB", "512 MiB" or "1.5GiB"'
"""What a size may look like, for those who got it wrong."""

_SIZE: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?(KiB|MiB|GiB|TiB)\Z", re.ASCII)


def size_bytes(text: str) -> int:
    """Return the bytes that a number with a unit means.

    Raises:
        ValueError: it is none, or no whole number of bytes; says what it may look like.
    """
    found = _SIZE.match(text)
    size = Fraction(found[1]) * UNITS[found[2]] if found else None
    if size is None or size.denominator != 1:
        raise ValueError(SIZE_FORM)
    return size.numerator


def size_text(size: int) -> str:
    """Return a size with the largest unit of which it is a whole number: the inverse of ``size_bytes``."""
    for unit, unit_bytes in reversed(UNITS.items()):
        if size and size % unit_bytes == 0:
            return f"{size // unit_bytes}{unit}"
    return str(size)


def with_sizes(table: dict[str, object]) -> dict[str, object]:
    """Return a table of a configuration, and those in it, with each right text of a ``…_bytes`` as a number."""
    return {key: _as_number(key, value) for key, value in table.items()}


def _as_number(key: str, value: object) -> object:
    if isinstance(value, dict):
        return with_sizes(value)
    if not isinstance(value, str) or not key.endswith("_bytes"):
        return value
    try:
        return size_bytes(value)
    except ValueError:
        return value
