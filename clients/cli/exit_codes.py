"""The exit status of every command: 0 it worked, 1 it did not, 2 the input is wrong."""

from __future__ import annotations

from typing import Final

from kvferry.protocol.error_base import KvferryError

WORKED: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
"""As shells have it: 128 and SIGINT."""

_INPUT_ERRORS: Final = frozenset({"INVALID_FIELD", "UNKNOWN_TYPE", "CONFIG"})
"""The errors that no daemon's state can mend."""


def status_of(error: KvferryError) -> int:
    """Return with which status a command ends that such an error ends."""
    return BAD_INPUT if error.code in _INPUT_ERRORS else FAILED
