"""Sizes in human-readable form: ``"8GiB"``."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE_FORM: Final = 'bytes as a number, or as text with a unit: KiB, MiB, GiB or TiB, as "8GiB", "512 MiB" or "1.5GiB"'
"""The accepted forms of a size, for error texts."""

_SIZE: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?(KiB|MiB|GiB|TiB)\Z", re.ASCII)


def size_bytes(text: str) -> int:
    """Return the bytes of a number with a unit.

    Raises:
        ValueError: the text is not a size, or not a whole number of bytes; describes the accepted forms.
    """
    found = _SIZE.match(text)
    size = Fraction(found[1]) * UNITS[found[2]] if found else None
    if size is None or size.denominator != 1:
        raise ValueError(SIZE_FORM)
    return size.numerator


def size_text(size: int) -> str:
    """Return a size in the largest unit of which it is a multiple; plain bytes if there is none."""
    for unit, unit_bytes in reversed(UNITS.items()):
        if size and size % unit_bytes == 0:
            return f"{size // unit_bytes}{unit}"
    return str(size)


def with_sizes(table: dict[str, object]) -> dict[str, object]:
    """Return a configuration table, and the tables in it, with valid texts of ``…_bytes`` keys as numbers."""
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
