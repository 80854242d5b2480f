"""The devices of pools and tables: opened on first use, watched, and accounted for.

All methods but ``status`` and the properties may block, so they are for worker threads. A lost device ends the daemon:
see ``pools.devices.accelerator``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import structlog

from kvferry.pools.devices.accelerator import REGION_ALIGNMENT, STUCK_AFTER_S, Accelerator, DeviceMemory
from kvferry.pools.devices.accelerator_region import AcceleratorRegion, RegionSegment, StagingPool
from kvferry.pools.devices.vendor import Mapped
from kvferry.pools.planning.arrays import Array, Held, check_apart
from kvferry.protocol.config.schema import DevicesConfig
from kvferry.protocol.errors import DeviceLostError, InvalidFieldError, KvferryError, OutOfMemoryError
from kvferry.protocol.session_messages import DeviceStatus
from kvferry.protocol.session_stream import TorchShare

CHECK_S: Final = 1.0
log = structlog.get_logger(__name__)


class _Device:
    """A device, its staging buffers, and what of its memory is in use."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.stagings = StagingPool(accelerator)
        self.memory = DeviceMemory(0, 0)
        self.pool_bytes = 0
        self.registered: list[Held] = []
        self.failed: KvferryError | None = None

    @property
    def state(self) -> str:
        lost = self.accelerator.lost
        return f"lost: {lost.detail}" if lost else f"unavailable: {self.failed.detail}" if self.failed else "ready"


class RegisteredSegment(NamedTuple):
    """An array of a pool that an engine registers, and the share of its memory."""

    array: Array
    share: TorchShare


class Devices:
    """All devices, by name. ``on_lost`` is called once per lost device, on the thread that noticed."""

    def __init__(
        self,
        config: DevicesConfig,
        on_lost: Callable[[str, DeviceLostError], None],
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        self._config = config
        self._stuck_after_s = stuck_after_s
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._devices: dict[str, _Device] = {}

    def __repr__(self) -> str:
        """Show the devices."""
        return f"<Devices {', '.join(f'{name} {device.state}' for name, device in self._devices.items())}>"

    @property
    def in_use(self) -> bool:
        """Return whether any device was requested."""
        return bool(self._devices)

    @property
    def lost(self) -> bool:
        """Return whether any device is lost."""
        return any(device.accelerator.lost for device in list(self._devices.values()))

    def open(self, name: str) -> Accelerator:
        """Return a device, ready to use.

        Raises:
            DeviceUnavailableError: there is no such device, or its driver is missing.
        """
        return self._open(name).accelerator

    def allocate(self, name: str, size_bytes: int) -> AcceleratorRegion:
        """Return zeroed memory of a device.

        Raises:
            DeviceUnavailableError: there is no such device, or its driver is missing.
            OutOfMemoryError: the device has too little free memory, or pools would exceed ``devices.max_fraction``.
        """
        device = self._open(name)
        whole_bytes = -(-size_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT  # as the device allocates it
        with device.accelerator.calling():
            memory = device.memory = device.accelerator.memory()
            allowed = int(memory.total * self._config.max_fraction)
            with self._lock:
                if device.pool_bytes + whole_bytes > allowed:
                    raise OutOfMemoryError(
                        f"the pool needs {whole_bytes} bytes of {name}; pools may take {allowed} of its {memory.total} "
                        f"(devices.max_fraction) and have {device.pool_bytes}",
                        field="spec",
                    )
                device.pool_bytes += whole_bytes
            try:
                mapped = device.accelerator.allocate(size_bytes)
            except BaseException as cause:
                self._release(device, whole_bytes)
                if isinstance(cause, OutOfMemoryError):
                    cause.detail += f"; {name} has {memory.free} of {memory.total} bytes free, {size_bytes} are needed"
                    cause.field = "spec"
                raise
            device.memory = device.accelerator.memory()
        return AcceleratorRegion(
            device.accelerator,
            [RegionSegment(0, mapped)],
            size_bytes,
            device.stagings,
            lambda: self._release(device, whole_bytes),
        )

    def register(self, name: str, registered: Sequence[RegisteredSegment], size_bytes: int) -> AcceleratorRegion:
        """Return device memory that an engine registers, after asking the driver about it.

        Raises:
            DeviceUnavailableError: there is no such device, or a share cannot be mapped.
            InvalidFieldError: it is another device's, smaller than stated, or registered already; names the array.
        """
        device = self._open(name)
        segments: list[RegionSegment] = []
        held: list[Held] = []
        try:
            with device.accelerator.calling():
                for segment in registered:
                    segments.append(RegionSegment(segment.array.start, _map(device.accelerator, segment)))
                    start = int(segments[-1].mapped.tensor.data_ptr())
                    _check_mapped(device.accelerator, segment, start)
                    held.append(Held(start, start + segment.array.size_bytes, segment.array.name))
            check_apart([*device.registered, *held])
        except BaseException:
            AcceleratorRegion(device.accelerator, segments, size_bytes, device.stagings).close()
            segments.clear()  # the error may be kept elsewhere; unmap now, on this thread
            raise
        device.registered += held

        def on_close() -> None:
            device.registered = [one for one in device.registered if one not in held]

        return AcceleratorRegion(device.accelerator, segments, size_bytes, device.stagings, on_close)

    def check(self, now_s: float) -> None:
        """Detect device calls that do not return; to be called every ``CHECK_S`` or so."""
        for device in list(self._devices.values()):
            device.accelerator.check(now_s)

    def status(self) -> Iterable[DeviceStatus]:
        """Yield the devices as STATUS shows them, with their memory as last queried."""
        for name, device in sorted(self._devices.items()):
            yield DeviceStatus(
                device=name,
                state=device.state,
                total_bytes=device.memory.total,
                free_bytes=device.memory.free,
                pool_bytes=device.pool_bytes,
                reaches=device.accelerator.reached,
            )

    def _open(self, name: str) -> _Device:
        with self._lock:
            device = self._devices.get(name)
            if device is None:
                device = self._devices[name] = _Device(Accelerator(name, stuck_after_s=self._stuck_after_s))
                device.accelerator.when_lost(lambda error: self._on_lost(name, error))
        is_new = device.accelerator.torch is None
        try:
            device.accelerator.open()
        except KvferryError as error:
            device.failed = error
            raise
        device.failed = None
        if is_new:
            self._note_paths(device)
        return device

    def _note_paths(self, opened: _Device) -> None:
        """Note whether copies between the opened device and each of the others go through host memory."""
        with self._lock:
            others = [one.accelerator for one in self._devices.values() if one is not opened]
        for one in [one for one in others if one.torch is not None and not one.lost]:
            for to, of in ((opened.accelerator, one), (one, opened.accelerator)):
                path = "direct" if to.reaches(of) else "through host memory"
                log.info("copies between devices", of=of.name, to=to.name, path=path)

    def _release(self, device: _Device, size_bytes: int) -> None:
        with self._lock:
            device.pool_bytes -= size_bytes


def _map(accelerator: Accelerator, registered: RegisteredSegment) -> Mapped:
    try:
        return accelerator.vendor.map(registered.share, accelerator.index, registered.array.size_bytes)
    except KvferryError as error:
        error.field = f"{registered.array.name}.storage"
        raise


def _check_mapped(accelerator: Accelerator, registered: RegisteredSegment, start: int) -> None:
    """Check with the driver that an array's whole storage is mapped, on this device.

    Raises:
        InvalidFieldError: it is not.
    """
    array, share = registered
    device, found_bytes = accelerator.vendor.memory_at(start - share.offset_bytes, share.storage_bytes)
    if device != accelerator.index:
        where = "not on any device" if device is None else f"on {accelerator.kind}:{device}"
        raise InvalidFieldError(
            f"{array.name} is {where} according to the driver, not on {accelerator.name}", field=f"{array.name}.device"
        )
    if found_bytes < share.storage_bytes:
        raise InvalidFieldError(
            f"{array.name} claims a storage of {share.storage_bytes} bytes, of which the driver has mapped "
            f"{found_bytes}",
            field=f"{array.name}.storage",
        )
