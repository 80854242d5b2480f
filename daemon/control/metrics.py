"""Counters by stable names; they only grow. STATUS shows them."""

from __future__ import annotations

from collections import Counter
from typing import Final

# -- which request a log line is about: always all of its 32 digits, always under ``request_id``.
#
# So that one search finds a transfer in the logs of both its daemons, of its engines and of the router.


_PARTS: Final = ("receive_request", "event", "remote_endpoint", "announcement", "send_request", "op", "body")
"""Where messages and effects keep what they are about."""


def about(thing: object) -> dict[str, str]:
    """Return the field of a log line that names the request; none where ``thing`` is about no single request.

    Args:
        thing: a message, an effect, a side of a transfer, or whatever else has a ``request_id`` in it.
    """
    found = getattr(thing, "request_id", None)
    if isinstance(found, str):
        return {"request_id": found} if found else {}
    for part in _PARTS:
        inside = getattr(thing, part, None)
        if inside is not None and not isinstance(inside, int) and (named := about(inside)):
            return named
    return {}


class Counters:
    """What has happened since the daemon started. For the control loop's thread only."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count ``count`` more of ``name``: dotted words, the noun first (``messages.malformed``)."""
        self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return the counts so far, sorted by name."""
        return dict(sorted(self._counts.items()))
