"""Much work that can wait, a little of it in each turn of the control loop: all of it at once would hold up others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 64
"""Calls in a turn of the loop: of lines of the log some 1 ms."""


def in_turns(step: Callable[[], bool], call_soon: Callable[[Callable[[], None]], object]) -> Callable[[], None]:
    """Return what has ``step`` called in each of the next turns of the loop, until it returns False, or raises.

    ``call_soon`` is the loop's.
    """
    under_way = False

    def begin() -> None:
        nonlocal under_way
        if not under_way:
            under_way = True
            call_soon(go_on)

    def go_on() -> None:
        nonlocal under_way
        under_way = False
        if step():
            begin()

    return begin


class Later:
    """Calls, like those that write a line of the log, in their order, a few in a turn of the running loop."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._make_rest = in_turns(self._make_some, asyncio.get_running_loop().call_soon)

    def __repr__(self) -> str:
        """Show how many are to be made."""
        return f"<Later {len(self._calls)}>"

    def add(self, call: Callable[[], None]) -> None:
        """Make a call later."""
        self._calls.append(call)
        self._make_rest()

    def make_all(self) -> None:
        """Make now what is left."""
        while self._calls:
            self._calls.popleft()()

    def _make_some(self) -> bool:
        try:
            for _ in range(min(AT_ONCE, len(self._calls))):
                self._calls.popleft()()
        except Exception:
            self._make_rest()  # it keeps no other from being made
            raise
        return bool(self._calls)
