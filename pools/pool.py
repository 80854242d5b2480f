"""A pool: its name, its spec's manifest, its memory and its pages. Lives until it is deleted."""

from __future__ import annotations

from kvferry.pools.allocator import PageAllocator
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.manifests import Manifest


class Pool:
    """One pool of one tenant on the host device.

    Attributes:
        tenant: the user id that it belongs to.
        name: unique for the tenant.
        manifest: its entries; bases are offsets in ``region``.
        region: its memory, closed by ``close``.
        allocator: its pages.
    """

    def __init__(self, tenant: int, name: str, manifest: Manifest, region: HostRegion) -> None:
        self.tenant = tenant
        self.name = name
        self.manifest = manifest
        self.region = region
        self.allocator = PageAllocator(manifest.pages)

    def __repr__(self) -> str:
        """Show the name and the live page counts."""
        return f"<Pool {self.tenant}/{self.name} {self.allocator!r}>"

    def close(self) -> None:
        """Give the memory back; engines that mapped it keep their mapping."""
        self.region.close()
