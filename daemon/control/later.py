"""What can wait, like lines of the log: those of a thousand transfers that end together would hold up the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 64
"""Calls in a turn of the loop: of lines of the log some 1 ms."""


class Later:
    """Calls that are made in their order, a few in each of the next turns of the running loop."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()

    def __repr__(self) -> str:
        """Show how many are to be made."""
        return f"<Later {len(self._calls)}>"

    def add(self, call: Callable[[], None]) -> None:
        """Make a call later."""
        self._calls.append(call)
        if len(self._calls) == 1:
            asyncio.get_running_loop().call_soon(self._make_some)

    def make_all(self) -> None:
        """Make now what is left."""
        while self._calls:
            self._calls.popleft()()

    def _make_some(self) -> None:
        try:
            for _ in range(min(AT_ONCE, len(self._calls))):
                self._calls.popleft()()
        finally:  # what one raises keeps no other from being made
            if self._calls:
                asyncio.get_running_loop().call_soon(self._make_some)
