"""A pool as an engine sees it: its manifest and its memory, as torch tensors without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.engine_lists import EngineLists, engine_lists
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import Entry, Manifest
from kvferry.protocol.model_identity import ModelIdentity

if TYPE_CHECKING:
    import torch


class AttachedPool:
    """A mapped pool. On the host, tensors stay valid as long as they are referenced, also after the pool is deleted.

    On a card they are valid until ``close``: graphs that were captured over them need it mapped as long as they live.

    Attributes:
        name: the pool's name.
        manifest: its entries; ``manifest.layout_digest`` names the layout.
        region: the mapped memory.
        model: whose KV it holds, without the salt; None: nobody said so.
    """

    def __init__(self, name: str, manifest: Manifest, region: Region, model: ModelIdentity | None = None) -> None:
        self.name = name
        self.manifest = manifest
        self.region = region
        self.model = model

    def __repr__(self) -> str:
        """Show name, size and layout."""
        return f"<AttachedPool {self.name!r} pages={self.manifest.pages} layout={self.manifest.layout_digest[:8]}>"

    @property
    def page_size(self) -> int:
        """Return the tokens of a page of the first component; 0 for a pool of states only."""
        return self.manifest.entries[0].page_tokens or 0

    def page_tokens(self, component: str) -> int | None:
        """Return the tokens of a page of a component; None for a state, whose page is the slot of a request.

        Raises:
            InvalidFieldError: the pool has no such component.
        """
        for entry in self.manifest.entries:
            if entry.component == component:
                return entry.page_tokens
        raise InvalidFieldError(f"pool {self.name!r} has no component {component!r}", field="component")

    def space_of(self, component: str) -> str:
        """Return the page space that a component's pages are allocated from.

        Raises:
            InvalidFieldError: the pool has no such component.
        """
        for one in self.manifest.components:
            if one.name == component:
                return one.space
        raise InvalidFieldError(f"pool {self.name!r} has no component {component!r}", field="component")

    def layers(self, component: str, role: str) -> tuple[int, ...]:
        """Return the model's numbers of the layers that ``tensor`` has for a role, in its order; () without any."""
        return tuple(e.layer for e in self.manifest.entries if (e.component, e.role) == (component, role))

    @property
    def device(self) -> str:
        """Return where its memory is: ``host``, ``npu:0`` and the like."""
        return self.region.device

    def engine_lists(self) -> EngineLists:
        """Return the pointer lists that an engine registers, with addresses of this process's mapping."""
        region = self.region
        address = region.address if isinstance(region, HostRegion) else int(_on_card(region).tensor.data_ptr())
        return engine_lists(self.manifest, address)

    def entry_tensor(self, entry: Entry) -> torch.Tensor:
        """Return one entry as a tensor of ``entry.shape`` and ``entry.dtype``, sharing the pool's memory."""
        if entry.dtype is None or entry.shape is None:
            raise InvalidFieldError(f"{entry.name} has no dtype or shape", field="entry")
        return self._elements(entry, 1).view(entry.shape)

    def tensor(self, component: str, role: str) -> torch.Tensor:
        """Return all layers of a role as one tensor, sharing the pool's memory.

        Paged: ``(layers, pages, page_size, heads, dim)``; FIA: ``(layers, pages * page_size, 1, heads, dim)``; FIA-NZ:
        ``(layers, pages, heads, dim / n, page_size, n)``, n elements in 32 bytes; MLA: as paged with one head,
        ``main``'s index_scale without a dim; scales that travel: ``(layers, pages, heads)``; a state: ``(layers, slots,
        window, channels)`` for conv, ``(layers, slots, heads, ...)`` for ssm. Layers are local, the first one that has
        the role is 0: see ``layers``.

        Raises:
            InvalidFieldError: the pool has no such entries.
        """
        entries = [e for e in self.manifest.entries if (e.component, e.role) == (component, role)]
        if not entries:
            raise InvalidFieldError(f"pool {self.name!r} has no {component}/{role}", field="role")
        first = self.entry_tensor(entries[0])
        step = entries[0].pages * entries[0].page_bytes
        if any(entry.base != entries[0].base + number * step for number, entry in enumerate(entries)):
            raise InvalidFieldError(f"the layers of {component}/{role} are not evenly apart", field="role")
        return self._elements(entries[0], len(entries)).view(len(entries), *first.shape)

    def close(self) -> None:
        """Give the descriptor back; host memory stays mapped while tensors use it, a card's is unmapped at once."""
        self.region.close()

    def _elements(self, entry: Entry, count: int) -> torch.Tensor:
        """Return the elements of ``count`` entries that begin with this one, one after another."""
        import torch  # noqa: PLC0415  an engine chooses its backend before torch is first imported

        size = entry.pages * entry.page_bytes * count
        if not isinstance(self.region, HostRegion):
            on_card = _on_card(self.region).tensor[entry.base : entry.base + size]
            return on_card.view(getattr(torch, entry.dtype or ""))
        # By way of numpy, whose view keeps the mapping from being closed; torch.frombuffer's would not.
        raw = torch.from_numpy(self.region.view()[entry.base : entry.base + size])
        elements: torch.Tensor = raw.view(getattr(torch, entry.dtype or ""))
        return elements


def _on_card(region: Region) -> AcceleratorRegion:
    assert isinstance(region, AcceleratorRegion), region
    return region
