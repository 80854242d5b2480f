"""Shares: how much of something that all users share one of them may have.

A user may have nearly all of it, but not what the next one needs to begin: of what the other users leave, a part always
stays. Root and the daemon's own user may have that, too, so that who looks after the daemon is always served. Does not
count: its caller knows which user has how much.
"""

from __future__ import annotations

from typing import Final

from kvferry.daemon.process.access import may_see_all

PART: Final = 16
"""Of what others leave, a 16th stays, rounded up."""
ROOT_PART: Final = 256
"""Of the whole, a 256th stays for root and the daemon's own user, however many users there are."""


def share(user: int, size: int, of_others: int) -> int:
    """Return how much of ``size`` a user may have in all, where the other users have ``of_others`` of it."""
    left = max(0, size - of_others)
    return left if may_see_all(user) else max(0, left - max(-(-left // PART), size // ROOT_PART))
