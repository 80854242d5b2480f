"""Command-line arguments that several commands share, and their parsing."""

from __future__ import annotations

import argparse

DEFAULT_TIMEOUT_S = 2.0


def add_daemon(command: argparse.ArgumentParser, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Add the arguments that select the daemon, and the timeout."""
    add_runtime_dir(command)
    command.add_argument(
        "--timeout", type=seconds, default=timeout_s, metavar="SECONDS", help=f"how long to wait ({timeout_s:g})"
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
