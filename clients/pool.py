"""A pool as an engine sees it: its manifest and its memory, as torch tensors or numpy arrays without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from kvferry.clients.arguments import text, wrong_kind
from kvferry.clients.elements import array_dtype, import_torch, torch_dtype
from kvferry.clients.exclusive_use import OfOneProcess
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.arrays import Array, EngineLists, array_of, engine_lists
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.manifests import Entry, Manifest

if TYPE_CHECKING:
    import torch


class AttachedPool(OfOneProcess):
    """A mapped pool. On the host, its tensors and arrays stay valid while referenced, even after the pool's deletion.

    On a device they are valid until ``close``: graphs captured over them need the mapping as long as they exist.

    Attributes:
        name: the pool's name.
        manifest: its entries; ``manifest.layout_digest`` identifies the layout.
        region: the mapped memory.
        model: the model whose KV it holds, without the salt; None if not given.
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
        """Return the tokens of a page of a component; None for a state, whose page is one request's slot.

        Raises:
            InvalidFieldError: the pool has no such component.
        """
        text(component, "component")
        for entry in self.manifest.entries:
            if entry.component == component:
                return entry.page_tokens
        raise InvalidFieldError(f"pool {self.name!r} has no component {component!r}", field="component")

    def space_of(self, component: str) -> str:
        """Return the page space that a component's pages are allocated from.

        Raises:
            InvalidFieldError: the pool has no such component.
        """
        text(component, "component")
        for one in self.manifest.components:
            if one.name == component:
                return one.space
        raise InvalidFieldError(f"pool {self.name!r} has no component {component!r}", field="component")

    def layers(self, component: str, role: str) -> tuple[int, ...]:
        """Return the model's layer numbers that ``tensor`` has for a role, in its order; () if there are none."""
        wanted = text(component, "component"), text(role, "role")
        return tuple(e.layer for e in self.manifest.entries if (e.component, e.role) == wanted)

    @property
    def device(self) -> str:
        """Return where its memory is: ``host``, ``npu:0`` and the like."""
        return self.region.device

    @property
    def is_open(self) -> bool:
        """Return whether it was not closed."""
        return not isinstance(self.region, HostRegion) or self.region.fd >= 0

    @property
    def address(self) -> int:
        """Return where its memory begins in this process; on a device, that of the device."""
        region = self.region
        return region.address if isinstance(region, HostRegion) else int(_on_device(region).tensor.data_ptr())

    def engine_lists(self) -> EngineLists:
        """Return the pointer lists that an engine registers, with addresses in this process."""
        return engine_lists(self.manifest, self.address)

    def entry_tensor(self, entry: Entry) -> torch.Tensor:
        """Return one entry as a tensor of ``entry.shape`` and ``entry.dtype``, sharing the pool's memory."""
        return self._tensor(self._entry(entry))

    def tensor(self, component: str, role: str) -> torch.Tensor:
        """Return all layers of a role as one tensor, sharing the pool's memory.

        Paged: ``(layers, pages, page_size, heads, dim)``; FIA: ``(layers, pages * page_size, 1, heads, dim)``; FIA-NZ:
        ``(layers, pages, heads, dim / n, page_size, n)``, n elements in 32 bytes; MLA: as paged with one head,
        ``main``'s index_scale without a dim; transferred scales: ``(layers, pages, heads)``; a state: ``(layers, slots,
        window, channels)`` for conv, ``(layers, slots, heads, ...)`` for ssm. Layers are local: the first one that has
        the role is 0, see ``layers``.

        Raises:
            InvalidFieldError: the pool has no such entries.
            TorchMissingError: torch is not installed, or lacks the pool's dtype; on the host, ``array`` needs no torch.
        """
        return self._tensor(self._layers(component, role))

    def entry_array(self, entry: Entry) -> npt.NDArray[Any]:
        """Return one entry as an array of ``entry.shape``, sharing the pool's memory; see ``array``."""
        return self._array(self._entry(entry))

    def array(self, component: str, role: str) -> npt.NDArray[Any]:
        """Return all layers of a role as one numpy array of ``tensor``'s shape, sharing the pool's memory.

        Needs no torch. numpy has no bfloat16 and no float8: those are returned as their bits, in uint16 and uint8.

        Raises:
            InvalidFieldError: the pool has no such entries, or is on a device.
        """
        return self._array(self._layers(component, role))

    def close(self) -> None:
        """Close the descriptor; host memory stays mapped while tensors use it, device memory is unmapped at once."""
        self.region.close()

    def _entry(self, entry: Entry) -> Array:
        if not isinstance(entry, Entry):
            raise wrong_kind(entry, "entry, as manifest.entries has them", "entry")
        return array_of(self.manifest, entry.component, entry.role, entry.layer)

    def _layers(self, component: str, role: str) -> Array:
        return array_of(self.manifest, text(component, "component"), text(role, "role"))

    def _tensor(self, array: Array) -> torch.Tensor:
        backend = import_torch()
        here = slice(array.start, array.start + array.size_bytes)
        if isinstance(self.region, HostRegion):
            # Through numpy, whose view keeps the mapping from being closed; torch.frombuffer's would not.
            raw = backend.from_numpy(self.region.view()[here])
        else:
            raw = _on_device(self.region).tensor[here]
        elements: torch.Tensor = raw.view(torch_dtype(array.dtype)).view(array.shape)
        return elements

    def _array(self, array: Array) -> npt.NDArray[Any]:
        if not isinstance(self.region, HostRegion):
            raise InvalidFieldError(
                f"pool {self.name!r} is on {self.device}, and numpy sees host memory only: use tensor()", field="device"
            )
        here = slice(array.start, array.start + array.size_bytes)
        return self.region.view()[here].view(array_dtype(array.dtype)).reshape(array.shape)


def _on_device(region: Region) -> AcceleratorRegion:
    assert isinstance(region, AcceleratorRegion), region
    return region
