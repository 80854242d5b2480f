"""What each tenant has in the host tier, what it may have, and whose blocks go next.

Counts what it is told; knows nothing of other tiers, and frees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvferry.pools.tiers.cached_block import CachedBlock
from kvferry.pools.tiers.policies import EvictionPolicy, make_policy


class TenantUsage(NamedTuple):
    """Bytes in the host tier."""

    cached_bytes: int
    """Of blocks whose bytes are there, those that went but are still read included."""
    writing_bytes: int
    """Of blocks whose bytes are on their way."""
    charged_bytes: int
    """Of anything else, snapshots above all."""
    evictable_bytes: int
    """Of cached blocks that nobody pins."""
    quota_bytes: int

    @property
    def used_bytes(self) -> int:
        """Return what counts against the quota."""
        return self.cached_bytes + self.writing_bytes + self.charged_bytes


class TenantAccount:
    """The live counts of one tenant, and the policy that orders its blocks in the host tier."""

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
        """Return what counts against the quota."""
        return self.cached_bytes + self.writing_bytes + self.charged_bytes

    @property
    def share(self) -> float:
        """Return how much of its quota is used; a quota of 0 counts as one byte."""
        return self.used_bytes / max(self.quota_bytes, 1)

    def usage(self) -> TenantUsage:
        """Return the counts as they are now."""
        return TenantUsage(
            self.cached_bytes, self.writing_bytes, self.charged_bytes, self.evictable_bytes, self.quota_bytes
        )


class HostAccounts:
    """The accounts of all tenants, made as they are first needed."""

    def __init__(self, *, quota_bytes: int, quotas: Mapping[int, int] | None, policy: str) -> None:
        """Start without any.

        Args:
            quota_bytes: what a tenant may have.
            quotas: the same for tenants that are named.
            policy: one of ``POLICY_NAMES``; each tenant has its own.
        """
        self._quota_bytes = quota_bytes
        self._quotas = dict(quotas or {})
        self._policy = policy
        self._accounts: dict[int, TenantAccount] = {}

    def __repr__(self) -> str:
        """Show the live counts."""
        used = sum(account.used_bytes for account in self._accounts.values())
        return f"<HostAccounts tenants={len(self._accounts)} used_bytes={used} policy={self._policy}>"

    def account(self, tenant: int) -> TenantAccount:
        """Return a tenant's account, which the index counts in."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = TenantAccount(self._quota_of(tenant), make_policy(self._policy))
        return account

    def charge(self, tenant: int, size_bytes: int) -> None:
        """Count bytes in the host tier that are no cached block's as a tenant's: a snapshot's, a promotion's."""
        self.account(tenant).charged_bytes += size_bytes

    def discharge(self, tenant: int, size_bytes: int) -> None:
        """Undo ``charge``."""
        account = self.account(tenant)
        assert size_bytes <= account.charged_bytes, f"{size_bytes} of {account.charged_bytes} charged bytes discharged"
        account.charged_bytes -= size_bytes

    def usage(self, tenant: int) -> TenantUsage:
        """Return what a tenant has; zeros and its quota where it never had any."""
        account = self._accounts.get(tenant)
        return account.usage() if account else TenantUsage(0, 0, 0, 0, self._quota_of(tenant))

    def tenants(self) -> dict[int, TenantUsage]:
        """Return what each tenant has that ever had any."""
        return {tenant: account.usage() for tenant, account in self._accounts.items()}

    @property
    def blocks(self) -> int:
        """Return how many visible blocks the host tier has, over all tenants."""
        return sum(len(account.policy) for account in self._accounts.values())

    def excess_bytes(self, tenant: int, more_bytes: int) -> int:
        """Return how many bytes of a tenant must go before ``more_bytes`` fit its quota; 0 where they do."""
        usage = self.usage(tenant)
        return max(0, usage.used_bytes + more_bytes - usage.quota_bytes)

    def victims(self, tenant: int | None) -> Iterator[CachedBlock]:
        """Yield evictable blocks as ``BlockIndex.host_victims`` says."""
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
    """Return the next victim that nobody pins; None where there is none, without a look where the counts say so."""
    while account.evictable_bytes:
        block = next(victims, None)
        if block is None or not block.pins:
            return block
    return None
