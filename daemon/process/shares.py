"""Shares: how much of something that all tenants share one of them may have.

What is kept for a tenant (``tenants.NAME.share``) nobody else gets. Of the rest a tenant may have nearly all, but not
what the next one needs to begin: of what the others leave, a part always stays. Root and the daemon's own user may have
that, too, so that who looks after the daemon is always served. Does not count: its caller knows who has how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvferry.daemon.process.access import may_see_all

PART: Final = 16
"""Of what others leave, a 16th stays, rounded up."""
ROOT_PART: Final = 256
"""Of the whole, a 256th stays for root and the daemon's own user, however many tenants there are."""
_NONE: Final[Mapping[int, float]] = MappingProxyType({})


def share(tenant: int, size: int, of_others: int) -> int:
    """Return how much of ``size`` a tenant may have in all, where the others have, or keep, ``of_others`` of it."""
    left = max(0, size - of_others)
    return left if may_see_all(tenant) else max(0, left - max(-(-left // PART), size // ROOT_PART))


class Shares:
    """What is kept for whom.

    Attributes:
        parts: of everything, by tenant.
    """

    def __init__(self, parts: Mapping[int, float] = _NONE) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        """Show for how many something is kept."""
        return f"<Shares of {len(self.parts)}>"

    def kept_for(self, tenant: int, size: int) -> int:
        """Return how much of ``size`` is kept for a tenant."""
        return int(self.parts.get(tenant, 0) * (size - size // ROOT_PART))

    def most(self, tenant: int, size: int, used: Mapping[int, int], beside: int = 0) -> int:
        """Return how much of ``size`` a tenant may have in all.

        Args:
            tenant: whose share it is.
            size: what there is.
            used: what each has.
            beside: what others get at the same time.
        """
        others = {*used, *self.parts} - {tenant}
        of_others = beside + sum([max(used.get(one, 0), self.kept_for(one, size)) for one in others])
        its_own = min(max(0, size - of_others), self.kept_for(tenant, size))
        return max(share(tenant, size, of_others), its_own)
