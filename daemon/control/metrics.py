"""Counters with stable names, shown by STATUS, and the request id field of log lines."""

from __future__ import annotations

from collections import Counter
from typing import Final

# -- the request id of log lines: always all 32 digits, always in the field ``request_id``.
#
# One search then finds a transfer in the logs of both its daemons, its engines and the router.


_PARTS: Final = ("receive_request", "event", "remote_endpoint", "announcement", "send_request", "op", "body")
"""Fields of messages and effects in which the request id is looked for."""


def about(thing: object) -> dict[str, str]:
    """Return the log field ``request_id`` of a thing; an empty dict if it does not concern a single request.

    Args:
        thing: a message, an effect, an endpoint, or anything else that has a ``request_id`` in it.
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
    """Counts since the daemon started; they only grow. For the control loop's thread only."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Add ``count`` to ``name``: dotted words, the noun first (``messages.malformed``)."""
        self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return the counts so far, sorted by name."""
        return dict(sorted(self._counts.items()))
