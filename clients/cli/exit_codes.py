"""The exit status of every command: 0 success, 1 failure, 2 invalid input."""

from __future__ import annotations

from typing import Final

from kvferry.protocol.errors import KvferryError

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
