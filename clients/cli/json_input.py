"""JSON input and output of commands that need no daemon: one object from a file, one object or error printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvferry.clients.cli.exit_codes import BAD_INPUT
from kvferry.protocol.errors import InvalidFieldError, KvferryError, invalid_field

T = TypeVar("T")


def read_json(name: str, kind: type[T]) -> T:
    """Return the object in a file, or on standard input if the name is ``-``.

    Raises:
        InvalidFieldError: no such file, not a JSON object, or a field is unknown or invalid; names the field.
    """
    try:
        return msgspec.json.decode(_read(name), type=kind)
    except msgspec.ValidationError as cause:
        raise invalid_field(cause) from cause
    except (msgspec.MsgspecError, ValueError, RecursionError) as cause:
        raise InvalidFieldError(f"the input is not a JSON object: {cause}") from cause


def print_json(value: Any) -> int:  # noqa: ANN401  whatever msgspec can encode
    """Print a value as JSON on one line; return the exit status of success."""
    print(msgspec.json.encode(value).decode())
    return 0


def shown(error: KvferryError) -> dict[str, str]:
    """Return an error's code, detail, field and remedy; empty ones are left out."""
    info = error.info()
    fields = {"code": info.code, "detail": info.detail, "field": info.field, "remedy": info.remedy}
    return {name: text for name, text in fields.items() if text}


def refuse(command: str, error: KvferryError, *, as_json: bool) -> int:
    """Print why the input was refused, as JSON or as one line on standard error; return the exit status."""
    if as_json:
        print_json({"error": shown(error)})
    else:
        print(f"kvferry {command}: {error}", file=sys.stderr)
    return BAD_INPUT


def _read(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as cause:
        raise InvalidFieldError(f"{name}: {cause.strerror}", field="FILE") from cause
