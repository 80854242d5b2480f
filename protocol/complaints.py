"""msgspec's complaints in our words: which field is wrong, and what it should be."""

from __future__ import annotations

from typing import Final

import msgspec

from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import PATTERNS

ENVELOPE: Final = ("message_id", "boot_id", "secret", "deadline_ms", "acknowledged")
"""The fields of a request's envelope, as their places in it; the body is the one after them."""

_ENVELOPE_FIELDS: Final = {f"[{place}]": name for place, name in enumerate(ENVELOPE)}
_BODY: Final = f"[{len(ENVELOPE)}]"


def in_words(cause: msgspec.ValidationError) -> str:
    """Return msgspec's complaint, with what a pattern asks for in place of the pattern."""
    text = str(cause)
    for pattern, words in PATTERNS.items():
        text = text.replace(f"`str` matching regex {pattern!r}", words)
    return text


def invalid_field(cause: msgspec.ValidationError) -> InvalidFieldError:
    """Return msgspec's complaint as an error that names the field: ``Expected `int` - at `$[5].count```."""
    what, _, where = in_words(cause).partition(" - at `$")
    path = where.rstrip("`")
    field = _ENVELOPE_FIELDS.get(path, path.removeprefix(_BODY).lstrip("."))
    if not field and " field `" in what:  # a type is quoted as a field is
        field = what.rsplit("`", 2)[-2]
    return InvalidFieldError(what, field=field)
