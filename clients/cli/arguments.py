"""Arguments that several commands have, and the reading of their values."""

from __future__ import annotations

import argparse

DEFAULT_TIMEOUT_S = 2.0


def add_daemon(command: argparse.ArgumentParser, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Add which daemon is meant, and how long to wait for it."""
    add_runtime_dir(command)
    command.add_argument(
        "--timeout", type=seconds, default=timeout_s, metavar="SECONDS", help=f"how long to wait ({timeout_s:g})"
    )


def add_runtime_dir(command: argparse.ArgumentParser) -> None:
    """Add which daemon is meant."""
    command.add_argument("--runtime-dir", type=_folder, metavar="DIR", help="where the daemon's sockets are")


def seconds(text: str) -> float:
    """Return a span of time.

    Raises:
        argparse.ArgumentTypeError: it is none, or longer than a day.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 86_400:  # noqa: PLR2004  a day; nan and inf are neither
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds between 0 and 86400")
    return value


def _folder(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty path names no directory")
    return text
