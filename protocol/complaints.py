"""msgspec's validation errors as typed errors: which field is wrong, and what it should be."""

from __future__ import annotations

from typing import Final

import msgspec

from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import PATTERNS

ENVELOPE: Final = ("message_id", "boot_id", "secret", "deadline_ms", "acknowledged")
"""The fields of a request's envelope by index; the body follows them."""

_ENVELOPE_FIELDS: Final = {f"[{place}]": name for place, name in enumerate(ENVELOPE)}
_BODY: Final = f"[{len(ENVELOPE)}]"


def in_words(cause: msgspec.ValidationError) -> str:
    """Return msgspec's message, with patterns replaced by descriptions of them."""
    text = str(cause)
    for pattern, words in PATTERNS.items():
        text = text.replace(f"`str` matching regex {pattern!r}", words)
    return text


def invalid_field(cause: msgspec.ValidationError) -> InvalidFieldError:
    """Return msgspec's error, like ``Expected `int` - at `$[5].count```, as an error that names the field."""
    what, _, where = in_words(cause).partition(" - at `$")
    path = where.rstrip("`")
    field = _ENVELOPE_FIELDS.get(path, path.removeprefix(_BODY).lstrip("."))
    if not field and " field `" in what:  # types are quoted in the same way
        field = what.rsplit("`", 2)[-2]
    return InvalidFieldError(what, field=field)
