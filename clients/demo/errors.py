"""How the demo fails: with one line for people."""

from __future__ import annotations


class DemoError(Exception):
    """The demo did not succeed. Its text says why in one line; ``details`` are further lines, such as a log's end."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.details = details
