"""Per-tenant accounting of the host tier: usage, quota, and whose blocks are evicted next.

Only counts what it is told; frees nothing, and covers no other tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvferry.pools.tiers.cached_block import CachedBlock
from kvferry.pools.tiers.policies import EvictionPolicy, make_policy


class TenantUsage(NamedTuple):
    """Bytes in the host tier."""

    cached_bytes: int
    """Blocks in the tier, including removed ones that are still being read."""
    writing_bytes: int
    """Blocks that are being written."""
    charged_bytes: int
    """Anything else, mainly snapshots."""
    evictable_bytes: int
    """Cached blocks without a pin."""
    quota_bytes: int

    @property
    def used_bytes(self) -> int:
        """Return the bytes that count against the quota."""
        return self.cached_bytes + self.writing_bytes + self.charged_bytes


class TenantAccount:
    """The current counts of one tenant, and the eviction policy of its blocks in the host tier."""

    __slots__ = ("cached_bytes", "charged_bytes", "evictable_bytes", "policy", "quota_bytes", "writing_bytes")

    def __init__(self, quota_bytes: int, policy: EvictionPolicy[CachedBlock]) -> None:
        self.quota_bytes = quota_bytes
        self.policy = policy
        self.cached_bytes = 0
        self.writing_bytes = 0
        self.charged_bytes = 0
        self.evictable_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Return the bytes that count against the quota."""
        return self.cached_bytes + self.writing_bytes + self.charged_bytes

    @property
    def share(self) -> float:
        """Return the used fraction of the quota; a quota of 0 counts as one byte."""
        return self.used_bytes / max(self.quota_bytes, 1)

    def usage(self) -> TenantUsage:
        """Return the current counts."""
        return TenantUsage(
            self.cached_bytes, self.writing_bytes, self.charged_bytes, self.evictable_bytes, self.quota_bytes
        )


class HostAccounts:
    """The accounts of all tenants, created on first use."""

    def __init__(self, *, quota_bytes: int, quotas: Mapping[int, int] | None, policy: str) -> None:
        """Start without any account.

        Args:
            quota_bytes: quota of a tenant.
            quotas: quotas of individual tenants, by tenant.
            policy: one of ``POLICY_NAMES``; each tenant has its own instance.
        """
        self._quota_bytes = quota_bytes
        self._quotas = dict(quotas or {})
        self._policy = policy
        self._accounts: dict[int, TenantAccount] = {}

    def __repr__(self) -> str:
        """Show the current counts."""
        used = sum(account.used_bytes for account in self._accounts.values())
        return f"<HostAccounts tenants={len(self._accounts)} used_bytes={used} policy={self._policy}>"

    def account(self, tenant: int) -> TenantAccount:
        """Return a tenant's account, which the index updates."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = TenantAccount(self._quota_of(tenant), make_policy(self._policy))
        return account

    def charge(self, tenant: int, size_bytes: int) -> None:
        """Charge a tenant for bytes in the host tier that belong to no cached block: of a snapshot or a promotion."""
        self.account(tenant).charged_bytes += size_bytes

    def discharge(self, tenant: int, size_bytes: int) -> None:
        """Undo ``charge``."""
        account = self.account(tenant)
        assert size_bytes <= account.charged_bytes, f"{size_bytes} of {account.charged_bytes} charged bytes discharged"
        account.charged_bytes -= size_bytes

    def usage(self, tenant: int) -> TenantUsage:
        """Return a tenant's usage; zeros and its quota if it never had any."""
        account = self._accounts.get(tenant)
        return account.usage() if account else TenantUsage(0, 0, 0, 0, self._quota_of(tenant))

    def tenants(self) -> dict[int, TenantUsage]:
        """Return the usage of each tenant that ever had any."""
        return {tenant: account.usage() for tenant, account in self._accounts.items()}

    @property
    def blocks(self) -> int:
        """Return the number of visible blocks in the host tier, over all tenants."""
        return sum(len(account.policy) for account in self._accounts.values())

    def excess_bytes(self, tenant: int, more_bytes: int) -> int:
        """Return how many bytes of a tenant must be evicted before ``more_bytes`` fit its quota; 0 if they fit now."""
        usage = self.usage(tenant)
        return max(0, usage.used_bytes + more_bytes - usage.quota_bytes)

    def victims(self, tenant: int | None) -> Iterator[CachedBlock]:
        """Yield evictable blocks; see ``BlockIndex.host_victims``."""
        accounts = list(self._accounts.values()) if tenant is None else [self.account(tenant)]
        turns = [(account, account.policy.victims()) for account in accounts]
        while turns:
            turn = max(turns, key=lambda one: one[0].share)
            block = _next_evictable(*turn)
            if block is None:
                turns.remove(turn)
            else:
                yield block

    def _quota_of(self, tenant: int) -> int:
        return self._quotas.get(tenant, self._quota_bytes)


def _next_evictable(account: TenantAccount, victims: Iterator[CachedBlock]) -> CachedBlock | None:
    """Return the next victim without a pin, or None; does not search if the counts say that there is none."""
    while account.evictable_bytes:
        block = next(victims, None)
        if block is None or not block.pins:
            return block
    return None
