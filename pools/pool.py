"""A pool: its name, manifest, memory, page allocators, and whose KV it holds."""

from __future__ import annotations

from functools import cached_property

from kvferry.pools.allocator import PageAllocator
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.manifest import component_of, groups_of, spaces_of
from kvferry.pools.pool_file import owners_in
from kvferry.pools.tiers.blocks import BlockLayout
from kvferry.protocol.errors import ModelMismatchError, UnknownComponentError
from kvferry.protocol.ids import COMPARED, MAY_BE_UNKNOWN, ModelIdentity
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES
from kvferry.protocol.manifests import Manifest


class Pool:
    """One pool of one tenant on one device.

    Attributes:
        tenant: user id of the owner.
        name: unique per tenant.
        manifest: its entries; bases are byte offsets in ``region``.
        region: its memory, closed by ``close``.
        allocators: one page allocator per page space.
        registered_by: the session whose process owns the memory; None if the daemon owns it.
        ends_with: the instance that a pool of the daemon ends with; None if it outlives every instance.
        model: the model whose KV the pages hold; None if unknown.
        max_payload_bytes: the largest payload of a transfer from or to it.
        file: its record and the owners of its pages, kept for the next daemon; None if it ends with this one.
        becomes_snapshot: the snapshot that its pages become, if it receives a transfer into the host tier; else "".
    """

    def __init__(
        self,
        tenant: int,
        name: str,
        manifest: Manifest,
        region: Region,
        *,
        registered_by: int | None = None,
        ends_with: int | None = None,
        model: ModelIdentity | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        becomes_snapshot: str = "",
        file: HostRegion | None = None,
    ) -> None:
        self.tenant = tenant
        self.name = name
        self.manifest = manifest
        self.region = region
        self.file = file
        owners = owners_in(file.view(), manifest) if file else {}
        self.allocators = {
            space: PageAllocator(pages, owners.get(space)) for space, pages in spaces_of(manifest).items()
        }
        self.registered_by = registered_by
        self.ends_with = ends_with
        self.model = model
        self.max_payload_bytes = max_payload_bytes
        self.becomes_snapshot = becomes_snapshot
        self._block_layouts: dict[str, BlockLayout] = {}

    def __repr__(self) -> str:
        """Show the name and the live page counts."""
        return f"<Pool {self.tenant}/{self.name} {self.allocators!r}>"

    def give_all(self, owner: int) -> None:
        """Let an instance own every page of a new pool, as it does of one that it registers."""
        for allocator in self.allocators.values():
            allocator.allocate(owner, allocator.capacity)

    @cached_property
    def region_id(self) -> int:
        """Return ``region.identity``, by which a pool that is made again under the same name is another one."""
        return self.region.identity

    @property
    def allocator(self) -> PageAllocator:
        """Return the allocator of the first page space; most pools have only one."""
        return next(iter(self.allocators.values()))

    @property
    def idle(self) -> bool:
        """Return whether no page is in use: all free; in a registered pool, whose engine owns all, none in flight."""
        if self.registered_by is not None:
            return not any(one.busy_count for one in self.allocators.values())
        return all(one.idle for one in self.allocators.values())

    def space(self, name: str) -> PageAllocator:
        """Return the allocator of a page space.

        Raises:
            UnknownComponentError: the pool has no such space.
        """
        allocator = self.allocators.get(name)
        if allocator is None:
            raise UnknownComponentError(
                f"pool {self.name!r} has no page space {name!r}; it has {', '.join(self.allocators)}", field="space"
            )
        return allocator

    def block_layout(self, group: str, field: str = "group") -> BlockLayout:
        """Return the block layout of a group: what a page of its space holds, and where its bytes lie in this pool.

        Raises:
            UnknownComponentError: the pool has no such group; names ``field``.
        """
        layout = self._block_layouts.get(group)
        if layout is None:
            groups = groups_of(self.manifest)
            if group not in groups:
                raise UnknownComponentError(
                    f"pool {self.name!r} has no group {group!r}; it has {', '.join(groups)}", field=field
                )
            layout = self._block_layouts[group] = BlockLayout(self.manifest, groups[group])
        return layout

    def allocator_of(self, component: str) -> PageAllocator:
        """Return the allocator of the page space that a component uses."""
        found = component_of(self.manifest, component)
        assert found is not None, component
        return self.allocators[found.space]

    def close(self) -> None:
        """Release the memory; engines that mapped it keep their mapping."""
        self.region.close()
        if self.file is not None:
            self.file.close()


def check_models(source: ModelIdentity | None, destination: ModelIdentity | None, sender: str, receiver: str) -> None:
    """Check that source and destination agree on model, revision and adapter.

    A side without a model identity matches any; a revision is compared only where both sides give one.

    Args:
        source: the model identity of the source pool, or None.
        destination: the model identity of the destination pool, or None.
        sender: name of the source in an error.
        receiver: name of the destination in an error.

    Raises:
        ModelMismatchError: model name, adapter, or a revision that both sides give differ.
    """
    if source is None or destination is None:
        return
    for field in COMPARED:
        ours, theirs = getattr(source, field), getattr(destination, field)
        if field in MAY_BE_UNKNOWN and not (ours and theirs):
            continue
        if ours != theirs:
            raise ModelMismatchError(
                f"{sender} holds KV of {source.label}, {receiver} of {destination.label}", field=f"model.{field}"
            )
