"""A pool: its name, its spec's manifest, its memory and its pages. Lives until it is deleted."""

from __future__ import annotations

from kvferry.pools.allocator import PageAllocator
from kvferry.pools.devices.base import Region
from kvferry.pools.planning.manifest import component_of, spaces_of
from kvferry.pools.tiers.blocks import BlockLayout
from kvferry.protocol.errors import UnknownComponentError
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.model_identity import ModelIdentity


class Pool:
    """One pool of one tenant on one device.

    Attributes:
        tenant: the user id that it belongs to.
        name: unique for the tenant.
        manifest: its entries; bases are offsets in ``region``.
        region: its memory, closed by ``close``.
        allocators: the pages of each page space.
        registered_by: the session whose engine owns the memory, and with it every page; None: the daemon owns it.
        model: whose KV its pages hold; None: nobody said so.
        max_payload_bytes: the largest payload of a transfer from or to it.
        lands_as: the snapshot that its pages become: where a transfer lands in the host tier.
    """

    def __init__(
        self,
        tenant: int,
        name: str,
        manifest: Manifest,
        region: Region,
        *,
        registered_by: int | None = None,
        model: ModelIdentity | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self.tenant = tenant
        self.name = name
        self.manifest = manifest
        self.region = region
        self.allocators = {space: PageAllocator(pages) for space, pages in spaces_of(manifest).items()}
        self.registered_by = registered_by
        self.model = model
        self.max_payload_bytes = max_payload_bytes
        self.lands_as = ""
        self._block_layouts: dict[str, BlockLayout] = {}
        if registered_by is not None:
            for allocator in self.allocators.values():
                allocator.allocate(registered_by, allocator.capacity)

    def __repr__(self) -> str:
        """Show the name and the live page counts."""
        return f"<Pool {self.tenant}/{self.name} {self.allocators!r}>"

    @property
    def allocator(self) -> PageAllocator:
        """Return the first space's pages; most pools have one space only."""
        return next(iter(self.allocators.values()))

    @property
    def idle(self) -> bool:
        """Return whether nobody uses a page: all are free, or none is in flight where an engine owns them all."""
        if self.registered_by is not None:
            return not any(one.busy_count for one in self.allocators.values())
        return all(one.idle for one in self.allocators.values())

    def space(self, name: str) -> PageAllocator:
        """Return the pages of a space.

        Raises:
            UnknownComponentError: the pool has no such space.
        """
        allocator = self.allocators.get(name)
        if allocator is None:
            raise UnknownComponentError(
                f"pool {self.name!r} has no page space {name!r}, but {', '.join(self.allocators)}", field="space"
            )
        return allocator

    def block_layout(self, space: str) -> BlockLayout:
        """Return what a block of a page space is, and where its bytes lie in this very pool.

        Raises:
            UnknownComponentError: the pool has no such space.
        """
        layout = self._block_layouts.get(space)
        if layout is None:
            self.space(space)
            layout = self._block_layouts[space] = BlockLayout(self.manifest, space)
        return layout

    def allocator_of(self, component: str) -> PageAllocator:
        """Return the pages that a component of this pool uses."""
        found = component_of(self.manifest, component)
        assert found is not None, component
        return self.allocators[found.space]

    def close(self) -> None:
        """Give the memory back; engines that mapped it keep their mapping."""
        self.region.close()
