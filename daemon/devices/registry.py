"""The devices that pools and tables were asked for on: opened when they are first needed, watched, and counted.

All but ``status`` and the budget belongs on a thread that may wait. A device that is lost ends the daemon: see
``pools.devices.accelerator``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import structlog

from kvferry.daemon.config.schema import DevicesConfig
from kvferry.pools.devices.accelerator import REGION_ALIGNMENT, Accelerator, DeviceMemory
from kvferry.pools.devices.accelerator_region import AcceleratorRegion, RegionSegment
from kvferry.pools.devices.staging import StagingPool
from kvferry.pools.devices.vendor import Mapped
from kvferry.pools.planning.arrays import Array, Held, check_apart
from kvferry.protocol.errors import DeviceLostError, InvalidFieldError, KvferryError, OutOfMemoryError
from kvferry.protocol.session_messages import DeviceStatus
from kvferry.protocol.shares import TorchShare

CHECK_S: Final = 1.0
log = structlog.get_logger(__name__)


class _Device:
    """A device, its staging, and what of its memory is ours."""

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
    """What an engine registers of a pool: which array, and by which share."""

    array: Array
    share: TorchShare


class Devices:
    """All devices, by name. ``on_lost`` is called once for each that is lost, on the thread that saw it."""

    def __init__(self, config: DevicesConfig, on_lost: Callable[[str, DeviceLostError], None]) -> None:
        self._config = config
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._devices: dict[str, _Device] = {}

    def __repr__(self) -> str:
        """Show the devices."""
        return f"<Devices {', '.join(f'{name} {device.state}' for name, device in self._devices.items())}>"

    @property
    def in_use(self) -> bool:
        """Return whether a device was asked for."""
        return bool(self._devices)

    @property
    def lost(self) -> bool:
        """Return whether a device is lost."""
        return any(device.accelerator.lost for device in list(self._devices.values()))

    def open(self, name: str) -> Accelerator:
        """Return a device, ready to be used.

        Raises:
            DeviceUnavailableError: no such device, or what drives it is missing.
        """
        return self._open(name).accelerator

    def allocate(self, name: str, size_bytes: int) -> AcceleratorRegion:
        """Return zeroed memory of a device.

        Raises:
            DeviceUnavailableError: no such device, or what drives it is missing.
            OutOfMemoryError: the device has not enough, or pools would take more of it than they may.
        """
        device = self._open(name)
        whole_bytes = -(-size_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT  # what it takes of the device
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
                self._give_back(device, whole_bytes)
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
            lambda: self._give_back(device, whole_bytes),
        )

    def register(self, name: str, registered: Sequence[RegisteredSegment], size_bytes: int) -> AcceleratorRegion:
        """Return memory of a device that an engine registers, once the driver has said that it is there.

        Raises:
            DeviceUnavailableError: no such device, or a share cannot be mapped.
            InvalidFieldError: it is another device's, or less than was said, or registered already; names the array.
        """
        device = self._open(name)
        parts: list[RegionSegment] = []
        held: list[Held] = []
        try:
            with device.accelerator.calling():
                for one in registered:
                    parts.append(RegionSegment(one.array.start, _mapped(device.accelerator, one)))
                    start = int(parts[-1].mapped.tensor.data_ptr())
                    _check_mapped(device.accelerator, one, start)
                    held.append(Held(start, start + one.array.size_bytes, one.array.name))
            check_apart([*device.registered, *held])
        except BaseException:
            AcceleratorRegion(device.accelerator, parts, size_bytes, device.stagings).close()
            parts.clear()  # the error may be held elsewhere; the memory goes now, on this thread
            raise
        device.registered += held

        def returned() -> None:
            device.registered = [one for one in device.registered if one not in held]

        return AcceleratorRegion(device.accelerator, parts, size_bytes, device.stagings, returned)

    def check(self, now_s: float) -> None:
        """Look for calls that do not come back; every ``CHECK_S`` or so."""
        for device in list(self._devices.values()):
            device.accelerator.check(now_s)

    def status(self) -> Iterable[DeviceStatus]:
        """Yield the devices as STATUS shows them; their memory as it was when it was last asked for."""
        for name, device in sorted(self._devices.items()):
            yield DeviceStatus(
                device=name,
                state=device.state,
                total_bytes=device.memory.total,
                free_bytes=device.memory.free,
                pool_bytes=device.pool_bytes,
            )

    def _open(self, name: str) -> _Device:
        with self._lock:
            device = self._devices.get(name)
            if device is None:
                device = self._devices[name] = _Device(Accelerator(name, stuck_after_s=self._config.stuck_after_s))
                device.accelerator.on_lost = lambda error: self._on_lost(name, error)
        try:
            device.accelerator.open()
        except KvferryError as error:
            device.failed = error
            raise
        device.failed = None
        return device

    def _give_back(self, device: _Device, size_bytes: int) -> None:
        with self._lock:
            device.pool_bytes -= size_bytes


def _mapped(accelerator: Accelerator, registered: RegisteredSegment) -> Mapped:
    try:
        return accelerator.vendor.map(registered.share, accelerator.index, registered.array.size_bytes)
    except KvferryError as error:
        error.field = f"{registered.array.name}.storage"
        raise


def _check_mapped(accelerator: Accelerator, registered: RegisteredSegment, start: int) -> None:
    """Check what is mapped for an array by the driver's word: all of its storage, on this device.

    Raises:
        InvalidFieldError: it is not.
    """
    array, share = registered
    device, found_bytes = accelerator.vendor.memory_at(start - share.offset_bytes, share.storage_bytes)
    if device != accelerator.index:
        where = "memory of no device" if device is None else f"on {accelerator.kind}:{device}"
        raise InvalidFieldError(
            f"{array.name} is {where} by the driver's word, not on {accelerator.name}", field=f"{array.name}.device"
        )
    if found_bytes < share.storage_bytes:
        raise InvalidFieldError(
            f"{array.name} is said to be in a storage of {share.storage_bytes} bytes, of which the driver has mapped "
            f"{found_bytes}",
            field=f"{array.name}.storage",
        )
