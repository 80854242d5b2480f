"""A quota: bytes that sessions make the daemon keep, counted by who keeps them, with a bound for each and for all.

A tenant has its share of the whole. What does not fit is refused; where something older can go instead, ``worst`` says
whose. A quota may be part of another one, which counts its bytes as well. Does not know what it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from kvferry.daemon.process.shares import Shares
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import OverloadedError


class _Kept:
    """What one session keeps: ``own_bytes`` by key, and ``size_bytes`` with those of the quotas that are a part."""

    def __init__(self, tenant: int) -> None:
        self.tenant = tenant  # remembered: the session may end before what it keeps
        self.sizes: dict[Hashable, int] = {}
        self.own_bytes = 0
        self.size_bytes = 0


class Quota:
    """Counts by session and key. Keys are chosen by who keeps something.

    Attributes:
        each: what a session may keep, in bytes.
        most: what all may.
        total: what all keep, with the quotas that are a part of it.
    """

    def __init__(
        self,
        name: str,
        each: int,
        most: int,
        tenant_of: Callable[[int], int] = lambda _session_id: 0,
        *,
        small: int = 0,
        field: str = "",
        part_of: Quota | None = None,
        shares: Shares | None = None,
    ) -> None:
        """Count nothing yet.

        Args:
            name: as in ``Limits``: request, payload or reply.
            each: the bound of a session.
            most: the bound of all, of which a tenant has its share.
            tenant_of: the tenant of a live session.
            small: what is up to this size has a quarter more, and no bound of the session: it may end what waits.
            field: of a request, which an error names.
            part_of: what counts these bytes as well, but for a session's bound.
            shares: of the tenants.
        """
        self.each = each
        self.most = most
        self.total = 0
        self._name = name
        self._tenant_of = tenant_of
        self._shares = shares or Shares()
        self._small = small
        self._field = field
        self._whole = part_of
        self._sessions: dict[int, _Kept] = {}
        self._of_tenant: Counter[int] = Counter()

    def __repr__(self) -> str:
        """Show how many bytes are kept."""
        return f"<Quota {self._name} {self.total} of {self.most}>"

    def of(self, session_id: int) -> int:
        """Return how many bytes are kept for a session."""
        kept = self._sessions.get(session_id)
        return kept.own_bytes if kept is not None else 0

    def by_tenant(self) -> Counter[int]:
        """Return how many bytes are kept for each tenant, with the quotas that are a part."""
        return Counter(self._of_tenant)

    def worst(self) -> int:
        """Return the session with most bytes, of the tenant who keeps most of all."""
        return max(
            self._sessions, key=lambda one: (self._of_tenant[self._sessions[one].tenant], self._sessions[one].own_bytes)
        )

    def oldest(self, session_id: int) -> Any:  # noqa: ANN401  a key, of a type that its caller knows
        """Return the oldest key of a session that keeps something."""
        return next(iter(self._sessions[session_id].sizes))

    def check(self, session_id: int, size_bytes: int, beside: int = 0) -> None:
        """Check that so many bytes more may be kept for a session, ``beside`` those of others that come with them.

        Raises:
            OverloadedError: they exceed a bound; the error says which.
        """
        if not size_bytes:
            return
        if size_bytes <= self._small:
            self.check_whole(session_id, size_bytes, beside, self.most + self.most // 4)
            return
        kept = self.of(session_id)
        if kept + size_bytes > self.each:
            where = f"limits.max_kept_session_{self._name}_bytes"
            raise self._overloaded(kept, size_bytes, self.each, f"session {session_id}", where)
        self.check_whole(session_id, size_bytes, beside)

    def check_whole(self, session_id: int, size_bytes: int, beside: int = 0, most: int | None = None) -> None:
        """Check that so many bytes more may be kept, whatever for: by the share of the session's tenant in all.

        Raises:
            OverloadedError: they exceed it.
        """
        most = self.most if most is None else most
        if self._shares.parts or 2 * (self.total + size_bytes + beside) > most:  # else it is within every share
            kept = self._sessions.get(session_id)
            tenant = self._tenant_of(session_id) if kept is None else kept.tenant
            its = self._of_tenant[tenant]
            if its + size_bytes > self._shares.most(tenant, most, self._of_tenant, beside):
                where = f"limits.max_kept_{self._name}_bytes, or the share of {whose(tenant)}, who has {its}"
                raise self._overloaded(self.total, size_bytes + beside, most, "all sessions", where)
        if self._whole is not None:
            self._whole.check_whole(session_id, size_bytes, beside)

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
            kept = self._count(session_id, size_bytes)
            kept.sizes[key] = kept.sizes.get(key, 0) + size_bytes
            kept.own_bytes += size_bytes

    def drop(self, session_id: int, key: Hashable) -> None:
        """Stop counting what was counted for a key, if anything was."""
        kept = self._sessions.get(session_id)
        size_bytes = kept.sizes.pop(key, 0) if kept is not None else 0
        if kept is not None and size_bytes:
            kept.own_bytes -= size_bytes
            self._count(session_id, -size_bytes)

    def drop_all(self, session_id: int, which: Callable[[Any], bool] = lambda _key: True) -> None:
        """Stop counting what a session keeps for these keys."""
        kept = self._sessions.get(session_id)
        for key in [one for one in kept.sizes if which(one)] if kept is not None else ():
            self.drop(session_id, key)

    def _count(self, session_id: int, size_bytes: int) -> _Kept:
        kept = self._sessions.get(session_id)
        if kept is None:
            kept = self._sessions[session_id] = _Kept(self._tenant_of(session_id))
        kept.size_bytes += size_bytes
        self._of_tenant[kept.tenant] += size_bytes
        self.total += size_bytes
        if not kept.size_bytes:
            del self._sessions[session_id]
        if not self._of_tenant[kept.tenant]:
            del self._of_tenant[kept.tenant]
        if self._whole is not None:
            self._whole._count(session_id, size_bytes)  # noqa: SLF001  of this class
        return kept

    def _overloaded(self, kept: int, more: int, most: int, whose: str, where: str) -> OverloadedError:
        return OverloadedError(
            f"{kept} {self._name} bytes of {whose} are kept, in requests that wait, transfers and operations that are "
            f"not over, or events that are not acknowledged; {more} more exceed {most} ({where})",
            field=self._field,
        )
