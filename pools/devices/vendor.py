"""The vendor-specific calls: sharing memory and events between processes, and registering host memory.

Everything else uses torch's device-agnostic interface, in ``accelerator``. All calls must be made on a thread whose
current device is set; torch is not imported before ``load``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvferry.protocol.session_stream import Share, TorchShare

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def on_stream(backend: Any, stream: torch.Stream) -> Iterator[torch.Stream]:  # noqa: ANN401  torch, where it is imported
    """Make a stream this thread's current one. ``with stream`` is not safe when threads share a stream.

    torch keeps the stream to restore in the stream object itself, so one thread's exit would restore another's.
    """
    before = backend.accelerator.current_stream(stream.device)
    backend.accelerator.set_stream(stream)
    try:
        yield stream
    finally:
        backend.accelerator.set_stream(before)


class Mapped(NamedTuple):
    """Memory mapped in this process, as bytes, and what its vendor needs to unmap it.

    Attributes:
        tensor: ``(size_bytes,)`` uint8. Valid until ``unmap``, even if views of it exist.
        keep: private to the vendor.
    """

    tensor: torch.Tensor
    keep: Any


class MemoryAt(NamedTuple):
    """What a driver reports for an address: which device's memory is there, and how much of the requested range.

    Attributes:
        device: the device whose memory it is, as torch counts; None if it is no device's.
        size_bytes: contiguously mapped bytes from the address on.
    """

    device: int | None
    size_bytes: int


class Vendor(Protocol):
    """One vendor's devices."""

    kind: str

    def load(self) -> None:
        """Import the devices' backend.

        Raises:
            DeviceUnavailableError: it is missing or does not work; says what, and what to do.
        """

    def allocate(self, index: int, size_bytes: int) -> Mapped:
        """Allocate memory that can be shared, ``size_bytes`` a multiple of 2 MiB; its contents are undefined.

        Raises:
            OutOfMemoryError: the device has too little free memory.
        """

    def share(self, mapped: Mapped, process_id: int) -> Share:
        """Return what the process needs to map memory that ``allocate`` returned."""

    def map(self, share: Share, index: int, size_bytes: int) -> Mapped:
        """Map memory that another process shares or registers.

        Raises:
            DeviceUnavailableError: the share is not for this process, or the memory no longer exists.
        """

    def unmap(self, mapped: Mapped) -> None:
        """Unmap what ``allocate`` or ``map`` returned."""

    def memory_at(self, address: int, size_bytes: int) -> MemoryAt:
        """Return what the driver has at an address, up to ``size_bytes``: a sharing process could claim anything."""

    def export(self, tensor: torch.Tensor) -> TorchShare:
        """Return what another process needs to map a tensor of torch's own allocator, whose owner must outlive it.

        Raises:
            InvalidFieldError: the tensor is on another kind of device, not contiguous, not row-major, or its storage
                cannot be shared; the field is ``device``, ``strides``, ``format`` or ``storage``.
        """

    def process_id(self) -> int:
        """Return this process's id as the driver knows it; in a container it may differ from the kernel's."""

    def shared_event(self) -> tuple[torch.Event, bytes]:
        """Return a new interprocess event, to be recorded in this process, and its handle."""

    def record(self, event: torch.Event, stream: torch.Stream | None = None) -> None:
        """Record an interprocess event on a stream, by default the current one.

        When this returns, the driver has the record: any process that is told of it may wait for the event.
        """

    def open_event(self, handle: bytes, index: int) -> torch.Event:
        """Return another process's event, to be waited for in this process."""

    def register_host(self, address: int, size_bytes: int) -> None:
        """Let the device access host memory directly, without the driver's own pinned buffers; 4 KiB aligned.

        Raises:
            OutOfMemoryError: no more memory may be locked.
        """

    def unregister_host(self, address: int) -> None:
        """Undo ``register_host``."""

    def copy_async(self, destination: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """Copy contiguous bytes between a device and registered host memory that torch does not see as pinned."""

    def update_graph(self, graph: Any, inputs: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401  each maker's own
        """Rewrite the host lists that a captured graph has baked in, one mapping per updatable operator."""
