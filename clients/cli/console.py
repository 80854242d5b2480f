"""JSON input and output of commands that need no daemon: one object from a file, one object or error printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvferry.protocol.errors import InvalidFieldError, KvferryError, invalid_field
from kvferry.protocol.printable import json_line, printable

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
    print(json_line(value))
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
        print(printable(f"kvferry {command}: {error}"), file=sys.stderr)
    return BAD_INPUT


def _read(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as cause:
        raise InvalidFieldError(f"{name}: {cause.strerror}", field="FILE") from cause


# -- command-line arguments that several commands share, and their parsing.


DEFAULT_TIMEOUT_S = 2.0


def add_daemon(command: argparse.ArgumentParser, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Add the arguments that select the daemon, and the timeout."""
    add_runtime_dir(command)
    command.add_argument(
        "--timeout", type=seconds, default=timeout_s, metavar="SECONDS", help=f"how long to wait ({timeout_s:g})"
    )


def add_wait(command: argparse.ArgumentParser) -> None:
    """Add the argument that waits for a daemon."""
    command.add_argument(
        "--wait", type=seconds, default=0.0, metavar="SECONDS", help="how long to wait for a daemon to start (0)"
    )


def add_runtime_dir(command: argparse.ArgumentParser) -> None:
    """Add the argument that selects the daemon."""
    command.add_argument("--runtime-dir", type=_folder, metavar="DIR", help="where the daemon's sockets are")


def seconds(text: str) -> float:
    """Return a duration in seconds.

    Raises:
        argparse.ArgumentTypeError: the text is no number, or not between 0 and a day.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 86_400:  # noqa: PLR2004  a day; false for nan and inf
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0 and 86400")
    return value


def _folder(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


# -- the exit status of every command: 0 success, 1 failure, 2 invalid input.


WORKED: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
"""As in shells: 128 + SIGINT."""

_INPUT_ERRORS: Final = frozenset({"INVALID_FIELD", "UNKNOWN_TYPE", "CONFIG"})
"""Errors that do not depend on the daemon's state."""


def status_of(error: KvferryError) -> int:
    """Return the exit status of a command that ends with this error."""
    return BAD_INPUT if error.code in _INPUT_ERRORS else FAILED


# -- plain text tables: a title, a header, and columns as wide as their widest cell.


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterable[str]:
    """Yield a table's lines, beginning with an empty one; a table without rows is one line that says so."""
    yield ""
    if not rows:
        yield f"no {title}"
        return
    cells = [list(head), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    yield title
    for row in cells:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
