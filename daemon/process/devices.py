"""The devices of pools and tables: opened on first use, watched, and accounted for.

All methods but ``status`` and the properties may block, so they are for worker threads. A lost device ends the daemon:
see ``pools.devices.accelerator``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

import structlog

from kvferry.daemon.process.device_keeper import DeviceKeeper, DriverRefusedError, KeeperError, Kept
from kvferry.pools.devices.accelerator import REGION_ALIGNMENT, STUCK_AFTER_S, Accelerator, DeviceMemory
from kvferry.pools.devices.accelerator_region import AcceleratorRegion, RegionSegment, StagingPool
from kvferry.pools.devices.npu import OUT_OF_MEMORY
from kvferry.pools.devices.vendor import Mapped
from kvferry.pools.planning.arrays import Array, Held, check_apart
from kvferry.pools.pool_file import KeptRecord
from kvferry.protocol.config.schema import DevicesConfig
from kvferry.protocol.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    InvalidFieldError,
    KvferryError,
    OutOfMemoryError,
)
from kvferry.protocol.session_messages import DeviceStatus
from kvferry.protocol.session_stream import TorchShare, VmmShare

CHECK_S: Final = 1.0
log = structlog.get_logger(__name__)


class _Kept:
    """See ``KeptMemory``: what the keeper has."""

    def __init__(self, keeper: DeviceKeeper, key: str, size_bytes: int) -> None:
        self._keeper = keeper
        self.key = key
        self.size_bytes = size_bytes
        self.outlives = False

    def share(self, process_id: int) -> VmmShare:
        """See ``KeptMemory.share``.

        Raises:
            InvalidFieldError: the driver knows no such process.
            DeviceUnavailableError: there is no keeper any more.
        """
        try:
            found = self._keeper.share(self.key, process_id)
        except DriverRefusedError as cause:  # the process id came from the engine
            raise InvalidFieldError(
                f"the driver does not share memory with process {process_id} (error {cause.error})", field="device_pid"
            ) from cause
        except KeeperError as cause:
            raise DeviceUnavailableError(
                f"nobody can share the pool's memory any more: {cause}",
                field="pool",
                remedy="create the pool again, once the engines that have mapped it are gone",
            ) from cause
        return VmmShare(handle=found.handle, size_bytes=found.size_bytes)

    def closed(self) -> None:
        """See ``KeptMemory.closed``."""
        if not self.outlives:
            self._keeper.drop(self.key)


class _Device:
    """A device, its staging buffers, and what of its memory is in use."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.stagings = StagingPool(accelerator)
        self.memory = DeviceMemory(0, 0)
        self.pool_bytes = 0
        self.registered: list[Held] = []
        self.failed: KvferryError | None = None
        self.canary: Mapped | None = None

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
        keeper: DeviceKeeper | None = None,
    ) -> None:
        """``keeper`` owns the memory of pools, where devices allow that; else this process does."""
        self._config = config
        self._keeper = keeper
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
    def lost(self) -> frozenset[str]:
        """Return which devices are lost."""
        return frozenset(name for name, device in list(self._devices.items()) if device.accelerator.lost)

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
            kept: _Kept | None = None
            try:
                kept = self._kept(device, whole_bytes)
                if kept is None:
                    mapped = device.accelerator.allocate(size_bytes)
                else:
                    mapped = device.accelerator.zeroed(_map_kept(device.accelerator, kept))
            except BaseException as cause:
                if kept is not None:
                    kept.closed()
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
            kept=kept,
        )

    def adopt(self, record: KeptRecord, size_bytes: int, identity: int) -> AcceleratorRegion:
        """Return memory of a device that the keeper has from an earlier daemon.

        Args:
            record: where it is.
            size_bytes: of the region, at most as many as are kept.
            identity: of the region.

        Raises:
            KeeperError: the keeper has no such memory of that device and size.
            DeviceUnavailableError: there is no such device, or the memory cannot be mapped.
        """
        name, key, kept_bytes = record.device, record.key, record.size_bytes
        device = self._open(name)
        if self._keeper is None or not device.accelerator.vendor.can_be_kept:
            raise KeeperError(f"{name} has no keeper")
        if self._keeper.found.get(key) != Kept(device.accelerator.index, kept_bytes):
            raise KeeperError(f"the keeper has no {kept_bytes} bytes of {name} under the pool's key")
        kept = _Kept(self._keeper, key, kept_bytes)
        kept.outlives = True
        with device.accelerator.calling():
            mapped = _map_kept(device.accelerator, kept)
            device.memory = device.accelerator.memory()
        with self._lock:
            device.pool_bytes += kept_bytes
        return AcceleratorRegion(
            device.accelerator,
            [RegionSegment(0, mapped)],
            size_bytes,
            device.stagings,
            lambda: self._release(device, kept_bytes),
            kept=kept,
            identity=identity,
        )

    @property
    def has_strays(self) -> bool:
        """Return whether the keeper has memory from earlier daemons."""
        return self._keeper is not None and bool(self._keeper.pid and self._keeper.found)

    def drop_all_but(self, keys: Collection[str]) -> int:
        """Free what the keeper has from earlier daemons, but for these; return how many that were."""
        if self._keeper is None or not self.has_strays:
            return 0
        stray = self._keeper.found.keys() - set(keys)
        for key in stray:
            self._keeper.drop(key)
        return len(stray)

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
                shares = [segment.share for segment in registered]
                for segment in registered:
                    segments.append(RegionSegment(segment.array.start, _map(device.accelerator, segment, shares)))
                    start = int(segments[-1].mapped.tensor.data_ptr())
                    _check_mapped(device.accelerator, segment, start)
                    held.append(Held(start, start + segment.array.size_bytes, segment.array.name))
            with self._lock:
                check_apart([*device.registered, *held])
                device.registered += held
        except BaseException:
            region = AcceleratorRegion(device.accelerator, segments, size_bytes, device.stagings)
            segments.clear()  # the error may be kept elsewhere
            region.close()
            raise

        def on_close() -> None:
            with self._lock:
                device.registered = [one for one in device.registered if one not in held]

        return AcceleratorRegion(device.accelerator, segments, size_bytes, device.stagings, on_close)

    def let_go(self) -> bool:
        """Free memory of engines that is let go of as soon as no copy waits for an engine; return whether all is."""
        left = [device for device in list(self._devices.values()) if not device.accelerator.let_go()]
        return not left

    def check(self, now_s: float) -> None:
        """Detect device calls that do not return, and a keeper that has ended; to be called every ``CHECK_S`` or so."""
        for device in list(self._devices.values()):
            device.accelerator.check(now_s)
        if self._keeper is not None:
            self._keeper.check()

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
                keeper=self._keeper_of(device),
            )

    def streams(self, name: str) -> int:
        """Return how many streams were made on a device that ``status`` shows."""
        return self._devices[name].accelerator.stream_count

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
            self._watch(device)
        return device

    def _watch(self, device: _Device) -> None:
        """Let the keeper see by some memory of this process's own when the driver has taken this process apart."""
        accelerator = device.accelerator
        if self._keeper is None or not accelerator.vendor.can_be_kept or not self._keeper.open():
            return
        try:
            number = self._keeper.number(accelerator.index)
            with accelerator.calling():
                canary = device.canary = accelerator.vendor.allocate(accelerator.index, REGION_ALIGNMENT)
                share = accelerator.vendor.share(canary, number)
            assert isinstance(share, VmmShare), share
            self._keeper.watch(accelerator.index, share.handle)
        except (KeeperError, OutOfMemoryError, InvalidFieldError) as cause:
            log.warning("nobody sees when copies of this daemon have ended", device=accelerator.name, cause=str(cause))

    def _kept(self, device: _Device, size_bytes: int) -> _Kept | None:
        """Return new memory of the keeper's; None where there is no keeper, or it has no room.

        Raises:
            OutOfMemoryError: the device has too little free memory.
        """
        if self._keeper is None or not device.accelerator.vendor.can_be_kept or not self._keeper.open():
            return None
        try:
            return _Kept(self._keeper, self._keeper.make(device.accelerator.index, size_bytes), size_bytes)
        except DriverRefusedError as cause:
            if cause.error in OUT_OF_MEMORY:
                raise OutOfMemoryError(str(cause)) from cause
            log.warning("a pool does not outlive the daemon", device=device.accelerator.name, cause=str(cause))
        except KeeperError as cause:
            log.warning("a pool does not outlive the daemon", device=device.accelerator.name, cause=str(cause))
        return None

    def _keeper_of(self, device: _Device) -> str:
        if self._keeper is None or not device.accelerator.vendor.can_be_kept:
            return ""
        return f"lost: {self._keeper.lost}" if self._keeper.lost else f"process {self._keeper.pid}"

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


def _map_kept(accelerator: Accelerator, kept: _Kept) -> Mapped:
    """Map what the keeper has; within ``calling``."""
    vendor = accelerator.vendor
    return vendor.map(kept.share(vendor.process_id()), accelerator.index, kept.size_bytes)


def _map(accelerator: Accelerator, registered: RegisteredSegment, beside: Sequence[TorchShare]) -> Mapped:
    try:
        return accelerator.vendor.map(registered.share, accelerator.index, registered.array.size_bytes, beside)
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
