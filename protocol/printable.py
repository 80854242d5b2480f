"""Text that others said, as it may be printed: without what a terminal or a reader of lines would obey."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

_BEYOND_16_BITS: Final = 0x10000
_NOT_ASCII: Final = re.compile(r"[^ -~]")


def printable(text: str) -> str:
    r"""Return the text with every character escaped (``\x1b``, ``\n``, ``\u202e``) that is not printable.

    That is what Unicode calls other or a separator, but for spaces: control characters, line ends, marks that change
    the direction of writing, and such that take no place.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def json_line(value: Any) -> str:  # noqa: ANN401  whatever msgspec can encode
    """Return a value as JSON on one line, in which what is not printable is escaped as JSON does it."""
    text = msgspec.json.encode(value).decode()
    if text.isprintable():
        return text
    return _NOT_ASCII.sub(lambda found: found[0] if found[0].isprintable() else _escaped(found[0]), text)


def _escaped(one: str) -> str:
    code = ord(one)
    if code < _BEYOND_16_BITS:
        return f"\\u{code:04x}"
    code -= _BEYOND_16_BITS
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
