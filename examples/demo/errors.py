"""The demo's error."""

from __future__ import annotations


class DemoError(Exception):
    """The demo failed. The text says why in one line; ``details`` are further lines, such as the end of a log."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.details = details
