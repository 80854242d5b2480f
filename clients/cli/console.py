"""JSON input and output of commands that need no daemon: one object from a file, one object or error printed."""

from __future__ import annotations

import argparse
import itertools
import os
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


# -- plain text: lines, and tables with a title, a header, and columns as wide as their widest cell.

INDENT: Final = 2
FURTHER: Final = 6
"""Spaces before a row, and before what of it does not fit into its first line."""


def show(lines: Iterable[str]) -> int:
    """Print lines, but empty ones at the beginning; return the exit status of success. A terminal gets them wrapped."""
    room = terminal_columns()
    for line in map(printable, itertools.dropwhile(lambda line: not line, lines)):
        for part in _wrapped(line, room) if room and len(line) > room else (line,):
            print(part)
    return WORKED


def _wrapped(line: str, room: int) -> Sequence[str]:
    import textwrap  # noqa: PLC0415  few lines need it

    indent = " " * (FURTHER if line.startswith(" ") else INDENT)
    return textwrap.wrap(line, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]], room: int | None = None) -> Iterable[str]:
    """Yield a table's lines, beginning with an empty one; a table without rows is one line that says so.

    Where ``room``, by default the terminal's columns, does not suffice, each row is on several lines, like the header;
    0: any width will do.
    """
    yield ""
    if not rows:
        yield f"no {title}"
        return
    cells = [list(head), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    yield title
    lines = list(_lines_of(widths, terminal_columns() if room is None else room))
    for row in cells:
        indent = INDENT
        for columns in lines:
            yield " " * indent + "  ".join(row[column].ljust(widths[column]) for column in columns).rstrip()
            indent = FURTHER


def terminal_columns() -> int:
    """Return how wide the terminal is to which standard output goes; 0: it is none."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
    except OSError:
        return 0


def _lines_of(widths: Sequence[int], room: int) -> Iterable[list[int]]:
    """Yield the columns of each line of a row: as many as fit, at least one."""
    line: list[int] = []
    used = INDENT
    for column, width in enumerate(widths):
        if line and room and used + width > room:
            yield line
            line, used = [], FURTHER
        line.append(column)
        used += width + 2
    yield line
