"""Much work that can wait, a little of it in each turn of the control loop: all of it at once would hold up others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

LATER_S = 2e-3
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
    """Calls, like those that write a line of the log, in their order, a few in a turn of the running loop.

    Not before LATER_S: whoever was told of something just now would wait for this processor, of which there may be no
    other. The kernel often wakes a thread on the one where it was told.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._make_rest = in_turns(self._make_some, lambda go_on: self._loop.call_later(LATER_S, go_on))

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
            self._make_one()

    def _make_some(self) -> bool:
        for _ in range(min(AT_ONCE, len(self._calls))):
            self._make_one()
        return bool(self._calls)

    def _make_one(self) -> None:
        try:
            self._calls.popleft()()
        except Exception as cause:  # noqa: BLE001  it keeps no other from being made, nor the daemon from ending
            self._loop.call_exception_handler({"message": "what was left for later failed", "exception": cause})
