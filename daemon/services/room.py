"""Requests that need more of the host tier than is free: set aside while blocks are evicted for them, a few at a time.

To evict a block takes some 15 us, and a long prompt has thousands of them: all other engines would wait for that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import structlog

from kvferry.daemon.control.dispatch import Call, Dispatcher, Handler
from kvferry.daemon.tiers.host_tier import AGAIN_MS, HostTier, Want
from kvferry.protocol.errors import CancelledError, OverloadedError

MAX_AWAITING_ROOM: Final = 1024

log = structlog.get_logger(__name__)


class _Held(NamedTuple):
    call: Call
    steps: Iterator[None]
    handle: Handler


class Room:
    """Room in the host tier for one request after another, in the order in which they came. For the control loop."""

    def __init__(self, dispatcher: Dispatcher, host: HostTier) -> None:
        self._dispatcher = dispatcher
        self._host = host
        self._held: deque[_Held] = deque()
        self._handled: Call | None = None

    def __repr__(self) -> str:
        """Show how many requests wait."""
        return f"<Room waiting={len(self._held)}>"

    def is_awaited(self, call: Call, tenant: int, wants: Sequence[Want], handle: Handler) -> bool:
        """Return whether a request waits for room: ``handle`` gets it again once there is some, or there can be none.

        Args:
            call: the request, of which nothing is done yet.
            tenant: whose blocks they will be.
            wants: what it is about to reserve.
            handle: handles the request; what is missing when it is called again, it evicts itself.

        Raises:
            OverloadedError: too many requests wait.
        """
        if call is self._handled:
            return False
        steps = self._host.making_room(tenant, wants)
        if not self._held and next(steps, self) is self:
            return False
        if len(self._held) >= MAX_AWAITING_ROOM:
            raise OverloadedError(f"{MAX_AWAITING_ROOM} requests wait for room in the host tier").after(AGAIN_MS)
        self._held.append(_Held(call, steps, handle))
        if len(self._held) == 1:
            asyncio.get_running_loop().call_soon(self._step)
        return True

    def give_up(self, session_id: int, is_wanted: Callable[[Call], bool]) -> bool:
        """Answer a session's waiting requests that ``is_wanted`` picks with CANCELLED; return whether there was one."""
        calls = [one.call for one in self._held if one.call.session.session_id == session_id]
        found = [one for one in calls if one.session.is_pending(one.message_id) and is_wanted(one)]
        for call in found:  # once answered, it is not pending any more
            error = CancelledError("cancelled while it waited for room in the host tier")
            self._dispatcher.answer_error(call.session, call.message_id, error)
        return bool(found)

    def _step(self) -> None:
        """Evict a few more blocks for the oldest request, or handle it."""
        first = self._held[0]
        is_unanswered = not first.call.session.ended and first.call.session.is_pending(first.call.message_id)
        try:
            is_ready = not is_unanswered or next(first.steps, self) is self
        except Exception as cause:  # a bug must not hold up those behind it
            log.exception("making room in the host tier failed", cause=str(cause))
            is_ready = True
        if is_ready:
            self._held.popleft()
        if self._held:
            asyncio.get_running_loop().call_soon(self._step)
        if is_ready and is_unanswered:
            self._handled = first.call
            try:
                self._dispatcher.run_held(first.call, first.handle)
            finally:
                self._handled = None
