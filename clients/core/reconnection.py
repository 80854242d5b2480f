"""When a client that has lost its daemon tries to reach it again, and when it gives up. Without a clock or a socket."""

from __future__ import annotations

from typing import Final

from kvferry.protocol.errors import (
    AccessDeniedError,
    DaemonLostError,
    KvferryError,
    NoSessionError,
    OverloadedError,
    SessionLostError,
)

FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.25
ABSENT_PAUSE_S: Final = 0.02
"""The longest where no daemon listens: to find that out costs nobody anything, and a restart takes half a second."""


class Reconnection:
    """One loss of the daemon: attempts to resume the session, at growing intervals, for a bounded time.

    Attributes:
        ends_at_s: when it is given up.
        attempts: how many have failed.
    """

    def __init__(self, cause: KvferryError, lost_at_s: float, grace_s: float) -> None:
        """Begin; the first attempt is due at once.

        Args:
            cause: how the loss was noticed.
            lost_at_s: when.
            grace_s: for how long a daemon keeps a session that lost its socket.
        """
        self.ends_at_s = lost_at_s + grace_s
        self.attempts = 0
        self._grace_s = grace_s
        self._last = cause
        self._due_at_s = lost_at_s

    def __repr__(self) -> str:
        """Show how often it was tried."""
        return f"<Reconnection attempts={self.attempts} last={self._last.code}>"

    def pause_s(self, now_s: float) -> float:
        """Return how long the next attempt is not due yet; 0 if it is."""
        return max(0.0, self._due_at_s - now_s)

    def failed(self, error: KvferryError, now_s: float) -> KvferryError | None:
        """Take note of a failed attempt; return what ends the client, or None if it is tried again."""
        self.attempts += 1
        self._last = error
        if isinstance(error, NoSessionError) and not error.retryable:
            return SessionLostError(f"the session cannot be resumed: {error.detail}")
        if not isinstance(error, DaemonLostError | NoSessionError | OverloadedError | AccessDeniedError):
            return error
        longest_s = ABSENT_PAUSE_S if isinstance(error, DaemonLostError) else LONGEST_PAUSE_S
        self._due_at_s = now_s + min(longest_s, FIRST_PAUSE_S * 2 ** min(self.attempts - 1, 10))
        return self.overdue(now_s)

    def overdue(self, now_s: float) -> KvferryError | None:
        """Return what ends the client if the time for attempts is over."""
        if now_s < self.ends_at_s:
            return None
        return DaemonLostError(
            f"no daemon came back within {self._grace_s:g} s (limits.resume_grace_ms); at last: {self._last.detail}"
        )
