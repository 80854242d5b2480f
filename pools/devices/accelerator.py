"""One device: its memory, its streams, and a watchdog for calls that may never return.

Written against torch's device-agnostic interface; vendor-specific calls are in ``Vendor``. Every call may block, so
none belongs on an event loop. A device that fails is lost for good: torch_npu can deadlock in any later call, so
nothing is retried, callers get DEVICE_LOST, and the process has to end. Independent of pools and plans.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvferry.pools.devices.cuda import CudaVendor
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.devices.npu import NpuVendor
from kvferry.pools.devices.vendor import Mapped, Vendor, on_stream
from kvferry.protocol.errors import DeviceLostError, DeviceUnavailableError, OutOfMemoryError

if TYPE_CHECKING:
    import torch

REGION_ALIGNMENT: Final = 2 << 20
FIRST_LOOK_S, LONGEST_PAUSE_S = 20e-6, 500e-6
STUCK_AFTER_S: Final = 60.0
WAITING_STREAMS: Final = 24
"""Streams besides those of the copy directions: torch has 32 in all, and reuses the first ones after that."""

OPENING_S: Final = 120.0
"""Extra time for opening: torch and its plugin are loaded from files, possibly over a network file system."""

REGISTERING_S_PER_BYTE: Final = 2e-9
"""Extra time for registering memory: its pages are allocated and locked one by one."""

VENDORS: Final[dict[str, Callable[[], Vendor]]] = {"npu": NpuVendor, "cuda": CudaVendor}


class DeviceMemory(NamedTuple):
    """A device's memory in bytes, over all processes."""

    free: int
    total: int


class Streams(NamedTuple):
    """A stream for each copy direction, separate from compute streams. Streams are scarce: they are made once."""

    device_to_host: torch.Stream
    host_to_device: torch.Stream
    device_to_device: torch.Stream


class Accelerator:
    """One device, by its name, as torch counts this process's devices. The device is not used before ``open``.

    Attributes:
        name: ``npu:0`` and the like.
        torch: the module; after ``open``.
        lost: why the device cannot be used any more, or None.
    """

    def __init__(self, name: str, *, stuck_after_s: float = STUCK_AFTER_S) -> None:
        self.name = name
        self.kind, _, index = name.partition(":")
        self.index = int(index)
        self.lost: DeviceLostError | None = None
        self._when_lost: list[Callable[[DeviceLostError], None]] = []
        self._stuck_after_s = stuck_after_s
        self._opening = threading.Lock()
        self._streams_lock = threading.Lock()
        self._losing = threading.Lock()  # the event loop takes it, so no device call may be made while holding it
        self._threads = threading.local()
        self._calls: dict[int, float] = {}
        self._vendor = VENDORS[self.kind]()
        self.torch: Any = None  # imported by ``open`` only
        self._streams: Streams | None = None
        self._reached: dict[str, bool] = {self.name: True}
        self._waiting_streams: list[tuple[torch.Stream, list[object]]] = []
        self._retired: list[Mapped] = []
        self._registered: dict[int, torch.Tensor] = {}

    def when_lost(self, handler: Callable[[DeviceLostError], None]) -> None:
        """Call this once when the device is lost, on the thread that detects it."""
        self._when_lost.append(handler)

    def __repr__(self) -> str:
        """Show name and state."""
        state = "lost" if self.lost else "open" if self.torch else "not opened"
        return f"<Accelerator {self.name} {state} calls={len(self._calls)}>"

    @property
    def vendor(self) -> Vendor:
        """Return the vendor-specific calls; only within ``calling``."""
        return self._vendor

    @property
    def streams(self) -> Streams:
        """Return the copy streams; after ``open``."""
        assert self._streams is not None, self
        return self._streams

    def open(self) -> None:
        """Import the device's backend and make its streams. Takes seconds the first time, then does nothing.

        The thread's current device is kept, also if this fails: the thread may be an engine's.

        Raises:
            DeviceUnavailableError: there is no such device, or its backend is missing.
        """
        with self._opening, self._timed(OPENING_S):
            if self.torch is not None:
                return
            self._vendor.load()
            torch = importlib.import_module("torch")
            count = torch.accelerator.device_count()
            if self.index >= count:
                raise DeviceUnavailableError(
                    f"this host has {count} devices; {self.name} is not one of them", field="device"
                )
            device = torch.device(self.kind, self.index)
            try:
                with self._as_current(torch):
                    # The vendor's own class: its interprocess events accept no other. It is a torch.Stream as well.
                    make = torch.get_device_module(device).Stream
                    self._streams = Streams(*(make(device=device) for _ in Streams._fields))
            except RuntimeError as cause:
                raise DeviceUnavailableError(f"{self.name}: {_first_line(cause)}", field="device") from cause
            self.torch = torch

    def reaches(self, other: Accelerator) -> bool:
        """Return whether this device copies from another one without host memory; both are open.

        Raises:
            DeviceLostError: the device failed.
        """
        if other.name not in self._reached:
            with self.calling():
                asked = self.torch.get_device_module(self.kind).can_device_access_peer
                self._reached[other.name] = other.kind == self.kind and bool(asked(self.index, other.index))
        return self._reached[other.name]

    @property
    def reached(self) -> tuple[str, ...]:
        """Return the other devices that it was asked for and reaches."""
        return tuple(
            sorted(name for name, is_reached in self._reached.copy().items() if is_reached and name != self.name)
        )

    def current_stream(self) -> torch.Stream:
        """Return this thread's current stream of this device, whichever device is current; after ``open``."""
        stream: torch.Stream = self.torch.get_device_module(self.kind).current_stream(self.index)
        return stream

    @property
    def stream_count(self) -> int:
        """Return how many streams were made on the device."""
        return len(self._streams or ()) + len(self._waiting_streams)

    def waiting_stream(self, user: object) -> torch.Stream:
        """Return a stream for copies that may wait for an engine, until ``release_stream``; within ``calling``.

        It is exclusive to ``user`` unless more than ``WAITING_STREAMS`` users have one.
        """
        with self._streams_lock:
            least = min(self._waiting_streams, key=lambda one: len(one[1]), default=None)
            if least is None or (least[1] and len(self._waiting_streams) < WAITING_STREAMS):
                device = self.torch.device(self.kind, self.index)
                least = (self.torch.get_device_module(device).Stream(device=device), [])
                self._waiting_streams.append(least)
            least[1].append(user)
            return least[0]

    def release_stream(self, user: object) -> None:
        """Return a user's waiting stream; everything queued on it is done."""
        with self._streams_lock:
            for _, users in self._waiting_streams:
                if user in users:
                    users.remove(user)

    @contextlib.contextmanager
    def may_wait(self) -> Iterator[None]:
        """Queue copies on a waiting stream that wait for an engine."""
        with self._streams_lock:
            yield

    def retire(self, imported: Iterable[Mapped]) -> None:
        """Take over memory that another process has shared by torch; ``let_go`` frees it.

        torch waits for all streams of the device then, and for as long holds up all threads of this process.
        """
        with self._streams_lock:
            self._retired += imported

    def let_go(self) -> bool:
        """Free what is retired, unless a stream waits for an engine; return whether there is nothing left of it."""
        with self._streams_lock:
            if self._retired and self.lost is None:
                with self.calling():
                    if all(one.query() for one, _ in self._waiting_streams):
                        self._retired.clear()
            return not self._retired

    @contextlib.contextmanager
    def calling(self, more_s: float = 0.0) -> Iterator[None]:
        """Make calls to the device on this thread, and translate what they raise. Must not be nested.

        The calls may take ``more_s`` longer than usual before the device counts as lost.

        Raises:
            OutOfMemoryError: the device has too little free memory.
            DeviceLostError: any other device error; the device is lost from then on.
        """
        if self.lost is not None:
            raise DeviceLostError(self.lost.detail)
        try:
            with self._timed(more_s), self._as_current(self.torch):
                yield
        except DeviceLostError as error:
            self.lose(error)
            raise
        except RuntimeError as cause:  # torch raises it for every device error; anything else is a bug of ours
            if isinstance(cause, self.torch.OutOfMemoryError):
                raise OutOfMemoryError(f"{self.name}: {_first_line(cause)}") from cause
            lost = DeviceLostError(f"{self.name}: {_first_line(cause)}")
            self.lose(lost)
            raise lost from cause

    @contextlib.contextmanager
    def _as_current(self, torch: Any) -> Iterator[None]:  # noqa: ANN401  where ``open`` has not finished
        """Make the device this thread's current one, and restore the previous one afterwards, which may be an engine's.

        A device that was current only by default is not opened by that: a context on it would take device memory.
        """
        with torch.accelerator.device_index(self.index):
            if not getattr(self._threads, "known", False):
                torch.accelerator.set_device_index(self.index)  # once per thread: raw driver calls have no default
                self._threads.known = True
            yield

    @contextlib.contextmanager
    def _timed(self, more_s: float = 0.0) -> Iterator[None]:
        """Register this thread with ``check`` as being in a call, which may take ``more_s`` longer than usual."""
        thread = threading.get_ident()
        self._calls[thread] = time.monotonic() + more_s
        try:
            yield
        finally:
            self._calls.pop(thread, None)

    def lose(self, error: DeviceLostError) -> None:
        """Mark the device as lost; only the first reason is kept."""
        with self._losing:
            if self.lost is not None:
                return
            self.lost = error
        for handler in self._when_lost:
            handler(error)

    def check(self, now_s: float) -> None:
        """Mark the device as lost if a call to it has taken too long: it may never return. From any thread."""
        oldest = min(self._calls.copy().values(), default=now_s)
        if now_s - oldest > self._stuck_after_s:
            self.lose(DeviceLostError(f"{self.name}: a call has not returned for {now_s - oldest:.0f} s"))

    def memory(self) -> DeviceMemory:
        """Return the device's memory; within ``calling``."""
        # The vendor module's: torch.accelerator's is new, and fails with a vendor allocator that is older.
        free, total = self.torch.get_device_module(self.kind).mem_get_info(self.index)
        return DeviceMemory(free, total)

    def allocate(self, size_bytes: int) -> Mapped:
        """Return zeroed memory, a multiple of 2 MiB; within ``calling``.

        Raises:
            OutOfMemoryError: the device has too little free memory.
        """
        return self.zeroed(self._vendor.allocate(self.index, -(-size_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT))

    def zeroed(self, mapped: Mapped) -> Mapped:
        """Zero mapped memory, and return it; within ``calling``. Where that fails it is unmapped."""
        try:
            with on_stream(self.torch, self.streams.device_to_device) as stream:
                mapped.tensor.zero_()
                self.wait(stream.record_event())
        except BaseException:
            self._vendor.unmap(mapped)
            raise
        return mapped

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``(elements,)`` zeros in pinned host memory, which the device accesses directly; within ``calling``.

        Raises:
            OutOfMemoryError: no more memory may be locked.
        """
        try:
            made: torch.Tensor = self.torch.zeros(elements, dtype=dtype, pin_memory=True)
        except RuntimeError as cause:  # says nothing about the device: if it failed, the next call shows it
            raise OutOfMemoryError(f"{elements} pinned elements: {_first_line(cause)}") from cause
        return made

    def register_host(self, region: HostRegion) -> None:
        """Let the device access a host region directly until ``unregister_host``; not within ``calling``.

        Raises:
            OutOfMemoryError: no more memory may be locked; copies then go through pinned memory.
            DeviceLostError: as ``calling``.
        """
        with self.calling(more_s=region.size_bytes * REGISTERING_S_PER_BYTE):
            tensor = self.torch.from_numpy(region.view())
            self._vendor.register_host(region.address, region.size_bytes)
            self._registered[region.address] = tensor

    def unregister_host(self, region: HostRegion) -> None:
        """Undo ``register_host`` before the region is closed; within ``calling``. No effect if it is not registered."""
        if self._registered.pop(region.address, None) is not None:
            self._vendor.unregister_host(region.address)

    def registered(self, address: int, size_bytes: int) -> torch.Tensor | None:
        """Return registered host memory as ``(size_bytes,)`` uint8; None unless all of it is registered."""
        for start, tensor in self._registered.items():
            if start <= address and address + size_bytes <= start + len(tensor):
                return tensor[address - start : address - start + size_bytes]
        return None

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """Queue a copy of contiguous bytes between the device and pinned or registered host memory on a stream."""
        host = source if source.device.type == "cpu" else destination
        if host.is_pinned():
            with on_stream(self.torch, stream):
                destination.copy_(source, non_blocking=True)
        else:  # registered with the driver but unknown to torch, whose own copy would wait for the stream
            self._vendor.copy_async(destination, source, stream)

    def wait(self, event: torch.Event) -> None:
        """Return once an event is done. It is polled, so that a device that hangs does not block this thread forever.

        Raises:
            DeviceLostError: the event is not done within the time that a call may take.
        """
        pause_s, ends_at = FIRST_LOOK_S, time.monotonic() + self._stuck_after_s
        while not event.query():
            if self.lost is not None:
                raise DeviceLostError(self.lost.detail)
            if time.monotonic() > ends_at:
                raise DeviceLostError(f"{self.name}: a copy is not done after {self._stuck_after_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _first_line(cause: Exception) -> str:
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0][:300]
