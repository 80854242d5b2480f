"""What requests that are not over keep in memory, in bytes: bounded for each session, and for all together.

A request that waits keeps its message; a transfer and an operation keep their lists until they have settled, or their
event is acknowledged. Does not know what it counts.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from kvferry.protocol.errors import OverloadedError
from kvferry.protocol.limits import Limits

SMALL_BYTES = 16 << 10
"""A message of up to this size is always taken: the number of requests bounds those, and one may end what waits."""


TRANSFER: Final = "transfer"
OPERATION: Final = "operation"
"""The first part of the keys of what outlives its request."""


class KeptBytes:
    """Counts by session and key. Keys are chosen by who keeps something."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sizes: dict[int, dict[Hashable, int]] = {}
        self._of_session: dict[int, int] = {}
        self.total = 0

    def __repr__(self) -> str:
        """Show how many bytes are kept."""
        return f"<KeptBytes {self.total} of {self._limits.max_kept_request_bytes}>"

    def of(self, session_id: int) -> int:
        """Return how many bytes are kept for a session."""
        return self._of_session.get(session_id, 0)

    def check(self, session_id: int, size_bytes: int) -> None:
        """Check that so many bytes more may be kept for a session.

        Raises:
            OverloadedError: they exceed a bound; the error says which.
        """
        if size_bytes <= SMALL_BYTES:
            return
        limits = self._limits
        for kept, most, whose, name in (
            (self.of(session_id), limits.max_kept_session_request_bytes, "the session", "session_request"),
            (self.total, limits.max_kept_request_bytes, "all sessions", "request"),
        ):
            if kept + size_bytes > most:
                raise OverloadedError(
                    f"{kept} bytes of requests of {whose} are kept, in requests that wait, transfers and operations "
                    f"that are not over, or events that are not acknowledged; {size_bytes} more exceed {most} "
                    f"(limits.max_kept_{name}_bytes)"
                )

    def fits(self, session_id: int, size_bytes: int) -> bool:
        """Return whether ``check`` would pass."""
        try:
            self.check(session_id, size_bytes)
        except OverloadedError:
            return False
        return True

    def keep(self, session_id: int, key: Hashable, size_bytes: int) -> None:
        """Count bytes, beside those that the key has already."""
        if size_bytes:
            sizes = self._sizes.setdefault(session_id, {})
            sizes[key] = sizes.get(key, 0) + size_bytes
            self._of_session[session_id] = self.of(session_id) + size_bytes
            self.total += size_bytes

    def session_lost(self, session_id: int) -> None:
        """Stop counting what a session kept that has ended; its transfers settle by themselves."""
        for key in [one for one in self._sizes.get(session_id, ()) if not _is_transfer(one)]:
            self.drop(session_id, key)

    def drop(self, session_id: int, key: Hashable) -> None:
        """Stop counting what was counted for a key, if anything was."""
        sizes = self._sizes.get(session_id)
        size_bytes = sizes.pop(key, 0) if sizes else 0
        if not size_bytes:
            return
        self.total -= size_bytes
        self._of_session[session_id] -= size_bytes
        if not sizes:
            del self._sizes[session_id], self._of_session[session_id]


def _is_transfer(key: Hashable) -> bool:
    return isinstance(key, tuple) and key[0] == TRANSFER
