"""The registry of pools, in which every other service looks them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvferry.daemon.control.hub import EventHub, PoolRemoved
from kvferry.daemon.services.holders import in_words
from kvferry.daemon.services.lost_pools import LostPools
from kvferry.pools.devices.base import Region
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import PoolLostError, UnknownPoolError
from kvferry.protocol.session_stream import RegionRequest


class PoolRegistry:
    """The usable pools, by tenant and name.

    Attributes:
        lost: pools whose memory is gone, with the reason; kept across restarts.
    """

    def __init__(self, lost: LostPools, hub: EventHub) -> None:
        self.lost = lost
        self._hub = hub
        self._pools: dict[tuple[int, str], Pool] = {}

    def __iter__(self) -> Iterator[Pool]:
        """Yield the pools."""
        return iter(self._pools.values())

    def find(self, tenant: int, name: str) -> Pool | None:
        """Return a tenant's pool, or None."""
        return self._pools.get((tenant, name))

    def get(self, tenant: int, name: str) -> Pool:
        """Return a tenant's pool.

        Raises:
            PoolLostError: its memory is gone, and the pool has not been made again since.
            UnknownPoolError: the tenant has no pool of that name.
        """
        pool = self._pools.get((tenant, name))
        if pool is None:
            why = self.lost.why(tenant, name)
            if why is not None:
                raise PoolLostError(f"pool {name!r} of user {tenant} {why}", field="pool")
            others = in_words(repr(one.name) for one in self if one.tenant == tenant)
            raise UnknownPoolError(f"no pool {name!r} of user {tenant}, who has {others or 'no pools'}", field="pool")
        return pool

    def region_of(self, asked: RegionRequest) -> Region:
        """Return the pool memory that another daemon of this host asks to map for reading.

        Raises:
            UnknownPoolError: there is no such pool, or it was made again after its pages were sent.
        """
        region = self.get(asked.tenant, asked.pool).region
        if region.identity != asked.region:
            raise UnknownPoolError(f"pool {asked.pool!r} has been created again", field="region")
        return region

    def add(self, pool: Pool) -> None:
        """Add a pool, so that requests can name it."""
        self._pools[pool.tenant, pool.name] = pool

    def remove(self, pool: Pool) -> None:
        """Remove a pool, and publish ``PoolRemoved`` before its memory is freed."""
        del self._pools[pool.tenant, pool.name]
        self._hub.publish(PoolRemoved(pool))

    def pages_by_owner(self) -> Counter[int]:
        """Return how many pages of all pools each instance owns."""
        owned: Counter[int] = Counter()
        for pool in self:
            for allocator in pool.allocators.values():
                owned.update(allocator.pages_by_owner())
        return owned
