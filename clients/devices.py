"""Devices as an engine's process sees them: mapping what the daemon shares, registering what the engine owns."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvferry.clients.events import RingEvent
from kvferry.clients.pool import AttachedPool
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion, RegionSegment, StagingPool
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.devices.npu import NpuVendor
from kvferry.pools.devices.vendor import on_stream
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.arrays import viewed_as
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.pool_messages import PoolAttached
from kvferry.protocol.session_stream import MAX_SHARED_EVENTS, RegionFollows, SharedEvents, ShareFollows, share_frames

if TYPE_CHECKING:
    import torch

DEVICE_NAME = re.compile("(npu|cuda):[0-9]{1,3}")
RING_EVENTS = 64
"""Events of a ring on a device, unless asked for otherwise: one is used again once its work is done."""


VISIBLE: Final = "ASCEND_RT_VISIBLE_DEVICES"
"""Which of the host's NPUs a process sees, by number; it numbers them anew."""


class TablesMemory(NamedTuple):
    """Memory of this process in which the daemon writes tables.

    Attributes:
        accelerator: its device.
        tensor: ``(size_bytes,)`` uint8, zeros.
        frames: returns what shares it with the daemon, for a message.
    """

    accelerator: Accelerator
    tensor: torch.Tensor
    frames: Callable[[int], Sequence[ShareFollows]]


_opened: Final[dict[str, Accelerator]] = {}
"""This process's devices: torch has 32 streams for each, and uses the first ones again after that."""

_opening: Final = threading.Lock()
os.register_at_fork(after_in_child=_opened.clear)


def daemons_device(ours: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what the daemon calls an NPU of this process, which may see some of the host's only.

    Raises:
        InvalidFieldError: it does not see this one.
    """
    visible = environment.get(VISIBLE, "")
    if not visible:
        return ours
    numbers, index = [one.strip() for one in visible.split(",")], int(ours.removeprefix("npu:"))
    if index >= len(numbers) or not numbers[index].isdecimal():
        raise InvalidFieldError(f"{VISIBLE} is {visible!r}, and this process uses {ours}", field=VISIBLE)
    return f"npu:{int(numbers[index])}"


def current_npu() -> tuple[str, str]:
    """Return the NPU that this process has set: as it calls it, and as the daemon does.

    Raises:
        InvalidFieldError: as ``daemons_device``.
    """
    import torch  # noqa: PLC0415  of the engine

    ours = f"npu:{torch.accelerator.current_device_index()}"
    return ours, daemons_device(ours)


class EngineDevices:
    """The devices as one client names them, opened when they are first needed."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """Use devices by the daemon's names; ``names`` says what this process calls them, where that differs."""
        self._names = dict(names)

    def __repr__(self) -> str:
        """Show which."""
        return f"<EngineDevices {list(_opened)}>"

    def open(self, name: str) -> Accelerator:
        """Return a device, ready to be used.

        Args:
            name: the daemon's.

        Raises:
            InvalidFieldError: that is no device's name.
            DeviceUnavailableError: this process cannot use it.
        """
        ours = self._names.get(name, name)
        if not DEVICE_NAME.fullmatch(ours):
            raise InvalidFieldError(f"{ours!r} is no device: npu:N or cuda:N", field="device")
        with _opening:
            accelerator = _opened.get(ours)
            if accelerator is None or accelerator.lost is not None:
                accelerator = _opened[ours] = Accelerator(ours)
        accelerator.open()
        return accelerator

    def map(self, name: str, said: ShareFollows, size_bytes: int) -> AcceleratorRegion:
        """Map memory that the daemon shares; the mapping stays until it is closed.

        Raises:
            DeviceUnavailableError: this process cannot use the device, or the share is not for it.
        """
        accelerator = self.open(name)
        [share] = said.shares
        with accelerator.calling():
            mapped = accelerator.vendor.map(share, accelerator.index, size_bytes)
        return AcceleratorRegion(accelerator, [RegionSegment(0, mapped)], size_bytes, StagingPool(accelerator))

    def export(self, name: str, tensors: Mapping[str, torch.Tensor], message_id: int) -> list[ShareFollows]:
        """Return the frames by which tensors of this process, by their arrays' names, are registered to the daemon.

        Raises:
            InvalidFieldError: a tensor is on another device, its bytes do not lie as its shape says, or torch cannot
                share its memory.
        """
        accelerator = self.open(name)
        for array, tensor in tensors.items():
            if (tensor.device.type, tensor.device.index) != (accelerator.kind, accelerator.index):
                raise InvalidFieldError(f"{array} is on {tensor.device}, not on {name}", field=f"{array}.device")
        shares = []
        with accelerator.calling():
            for array, tensor in tensors.items():
                try:
                    shares.append(accelerator.vendor.export(tensor))
                except InvalidFieldError as error:
                    error.field = f"{array}.{error.field}"
                    raise
        return share_frames(message_id, shares)

    def tables_memory(self, name: str, size_bytes: int) -> TablesMemory:
        """Return new memory for tables.

        Raises:
            OutOfMemoryError: the device has too little free memory.
        """
        accelerator = self.open(name)
        with accelerator.calling():
            backend = accelerator.torch
            device = backend.device(accelerator.kind, accelerator.index)
            with (
                backend.inference_mode(mode=False),
                on_stream(backend, accelerator.streams.device_to_device) as stream,
            ):
                tensor = backend.zeros(size_bytes, dtype=backend.uint8, device=device)
                accelerator.wait(stream.record_event())
        return TablesMemory(accelerator, tensor, lambda number: self.export(name, {"tables": tensor}, number))

    def events(self, name: str, count: int, message_id: int) -> tuple[list[RingEvent], ShareFollows]:
        """Return new interprocess events, recorded here, and the frame by which the daemon can wait for them."""
        if not 1 <= count <= MAX_SHARED_EVENTS:
            raise InvalidFieldError(f"{count} events; from 1 to {MAX_SHARED_EVENTS}", field="events")
        accelerator = self.open(name)
        with accelerator.calling():
            made = [accelerator.vendor.shared_event() for _ in range(count)]
        shared = SharedEvents(handles=tuple(handle for _, handle in made))
        ring = [RingEvent(accelerator, event) for event, _ in made]
        return ring, ShareFollows(message_id=message_id, events=shared)

    def process_id(self) -> int | None:
        """Return by which number NPUs' driver knows this process; None where it uses none, or that is not known."""
        if "torch_npu" not in sys.modules:
            return None
        vendor = NpuVendor()
        try:
            vendor.load()
            return vendor.process_id()
        except KvferryError:  # the kernel's number will do, but in a container
            return None


def attached_pool(
    name: str,
    attached: PoolAttached,
    follows: RegionFollows | ShareFollows,
    fds: list[int],
    devices: EngineDevices,
) -> AttachedPool:
    """Return the pool that ATTACH_POOL's reply speaks of, mapped by what came over the session socket.

    It takes its descriptor out of ``fds``. On a device this may take seconds the first time.
    """
    size_bytes = attached.manifest.region_bytes
    if isinstance(follows, RegionFollows):
        return AttachedPool(name, attached.manifest, HostRegion(fds.pop(), size_bytes), attached.model)
    region = devices.map(attached.device, follows, size_bytes)
    return AttachedPool(name, attached.manifest, region, attached.model)


def seen_as(pool: AttachedPool, spec: PoolSpec) -> AttachedPool:
    """Return a pool in the view that this engine asks for: whoever made it may have asked for another one.

    Raises:
        PoolExistsError: it is another pool by now; it is closed.
    """
    try:
        pool.manifest = viewed_as(pool.manifest, manifest_of(spec), pool.name)
    except KvferryError:
        pool.close()
        raise
    return pool
