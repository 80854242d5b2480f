"""Bounds of payloads: for one pool, and for the bytes that are kept.

A send request keeps its payload until it has settled; a receive request, until its events are acknowledged.
"""

from __future__ import annotations

from collections import Counter

from kvferry.daemon.transfer.endpoints import EndpointKey
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import OverloadedError, TooLargeError
from kvferry.protocol.limits import Limits

_DEFAULTS = Limits()


def check_payload(payload: bytes, pool: Pool) -> None:
    """Check a payload against ``max_payload_bytes`` of the sender's or a receiver's pool.

    Raises:
        TooLargeError: it is larger; the error names the pool and its bound.
    """
    if len(payload) > pool.max_payload_bytes:
        raise TooLargeError(
            f"{len(payload)} bytes; pool {pool.name!r} takes {pool.max_payload_bytes}: create it with a larger "
            "max_payload_bytes",
            field="payload",
        )


class KeptPayloads:
    """The bytes of payloads by session and endpoint. A payload counts for each endpoint that keeps it."""

    def __init__(
        self,
        session_bytes: int = _DEFAULTS.max_kept_session_payload_bytes,
        all_bytes: int = _DEFAULTS.max_kept_payload_bytes,
    ) -> None:
        """Keep at most ``session_bytes`` for each session and ``all_bytes`` for all sessions."""
        self._session_bytes = session_bytes
        self._all_bytes = all_bytes
        self._sizes: dict[tuple[int, EndpointKey], int] = {}
        self._of_session: Counter[int] = Counter()

    def __repr__(self) -> str:
        """Show how many bytes are kept."""
        return f"<KeptPayloads {self.kept_bytes} of {self._all_bytes}>"

    @property
    def kept_bytes(self) -> int:
        """Return how many bytes are kept."""
        return self._of_session.total()

    def check(self, session_id: int, size_bytes: int) -> None:
        """Check that a session may keep ``size_bytes`` more.

        Raises:
            OverloadedError: that exceeds a bound; the error says which.
        """
        if not size_bytes:
            return
        for kept, most, whose in (
            (self._of_session[session_id], self._session_bytes, f"session {session_id}"),
            (self.kept_bytes, self._all_bytes, "all sessions"),
        ):
            if kept + size_bytes > most:
                raise OverloadedError(
                    f"{kept} payload bytes of {whose} are in transfers that have not settled or in events that are "
                    f"not acknowledged; {size_bytes} more exceed {most}",
                    field="payload",
                )

    def keep(self, session_id: int, key: EndpointKey, size_bytes: int) -> None:
        """Count an endpoint's payload."""
        if size_bytes:
            self._sizes[session_id, key] = self._sizes.get((session_id, key), 0) + size_bytes
            self._of_session[session_id] += size_bytes

    def drop(self, session_id: int, key: EndpointKey) -> None:
        """Stop counting an endpoint's payload, if it was counted."""
        size_bytes = self._sizes.pop((session_id, key), 0)
        self._of_session[session_id] -= size_bytes
        if not self._of_session[session_id]:
            del self._of_session[session_id]
