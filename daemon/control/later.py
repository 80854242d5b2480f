"""Much work that can wait, a little of it in each turn of the control loop: all of it at once would hold up others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

LATER_S = 10e-3
AT_ONCE = 16
"""Calls in a turn of the loop: of lines of the log some 0.3 ms."""


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

    They wait for LATER_S: whoever was told of something just now might wait for this processor otherwise, on which the
    kernel often wakes a thread that is told there. And of what comes together only the first takes long, as its code
    was not used of late.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._make_rest = in_turns(self._make_some, self._loop.call_soon)
        self._wait: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """Show how many are to be made."""
        return f"<Later {len(self._calls)}>"

    def add(self, call: Callable[[], None]) -> None:
        """Make a call later."""
        self._calls.append(call)
        if self._wait is None:
            self._wait = self._loop.call_later(LATER_S, self._begin)

    def make_all(self) -> None:
        """Make now what is left."""
        while self._calls:
            self._make_one()

    def _begin(self) -> None:
        self._wait = None
        self._make_rest()

    def _make_some(self) -> bool:
        for _ in range(min(AT_ONCE, len(self._calls))):
            self._make_one()
        return bool(self._calls)

    def _make_one(self) -> None:
        try:
            self._calls.popleft()()
        except Exception as cause:  # noqa: BLE001  it keeps no other from being made, nor the daemon from ending
            self._loop.call_exception_handler({"message": "what was left for later failed", "exception": cause})
