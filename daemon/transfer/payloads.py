"""Bounds of payloads: for one pool, and for the bytes that are kept.

A send request keeps its payload until it has settled; a receive request, until its events are acknowledged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

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
    """The bytes of payloads by session, endpoint and generation. A payload counts for each endpoint that keeps it."""

    def __init__(
        self,
        session_bytes: int = _DEFAULTS.max_kept_session_payload_bytes,
        all_bytes: int = _DEFAULTS.max_kept_payload_bytes,
    ) -> None:
        """Keep at most ``session_bytes`` for each session and ``all_bytes`` for all sessions."""
        self._session_bytes = session_bytes
        self._all_bytes = all_bytes
        self._sizes: dict[tuple[int, EndpointKey, int], int] = {}
        self._of_session: Counter[int] = Counter()

    def __repr__(self) -> str:
        """Show how many bytes are kept."""
        return f"<KeptPayloads {self.kept_bytes} of {self._all_bytes}>"

    @property
    def kept_bytes(self) -> int:
        """Return how many bytes are kept."""
        return self._of_session.total()

    def check(self, more: Mapping[int, int]) -> None:
        """Check that sessions may keep that many bytes more, together.

        Args:
            more: bytes by session number: all that one message adds.

        Raises:
            OverloadedError: that exceeds a bound; the error says which.
        """
        bounds = [
            (self._of_session[session_id], size_bytes, self._session_bytes, f"session {session_id}")
            for session_id, size_bytes in more.items()
        ]
        bounds.append((self.kept_bytes, sum(more.values()), self._all_bytes, "all sessions"))
        for kept, size_bytes, most, whose in bounds:
            if size_bytes and kept + size_bytes > most:
                raise OverloadedError(
                    f"{kept} payload bytes of {whose} are in transfers that have not settled or in events that are "
                    f"not acknowledged; {size_bytes} more exceed {most}",
                    field="payload",
                )

    def keep(self, session_id: int, key: EndpointKey, generation: int, size_bytes: int) -> None:
        """Count an endpoint's payload."""
        if size_bytes:
            counted = (session_id, key, generation)
            self._sizes[counted] = self._sizes.get(counted, 0) + size_bytes
            self._of_session[session_id] += size_bytes

    def drop_receives(self, session_id: int) -> None:
        """Stop counting the payloads of a session's receive requests: the session has ended."""
        for _, key, generation in [
            one for one in self._sizes if one[0] == session_id and one[1].direction == "receive"
        ]:
            self.drop(session_id, key, generation)

    def drop(self, session_id: int, key: EndpointKey, generation: int) -> None:
        """Stop counting an endpoint's payload, if it was counted."""
        size_bytes = self._sizes.pop((session_id, key, generation), 0)
        self._of_session[session_id] -= size_bytes
        if not self._of_session[session_id]:
            del self._of_session[session_id]
