"""What each maker's devices have of their own: sharing memory and events between processes, registering host memory.

Everything else goes by torch's device-agnostic interface, in ``accelerator``. All calls belong on a thread whose
current device is set; torch is imported by ``load`` and not before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvferry.protocol.shares import Share, TorchShare

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def on_stream(backend: Any, stream: torch.Stream) -> Iterator[torch.Stream]:  # noqa: ANN401  torch, where it is imported
    """Give work to a stream on this thread. ``with stream`` does not do: threads that share a stream would undo it.

    torch keeps what to go back to in the stream's own object, so that one thread's exit takes another's.
    """
    before = backend.accelerator.current_stream(stream.device)
    backend.accelerator.set_stream(stream)
    try:
        yield stream
    finally:
        backend.accelerator.set_stream(before)


class Mapped(NamedTuple):
    """Memory that is mapped here, as bytes, and what its vendor has to know to let it go.

    Attributes:
        tensor: ``(size_bytes,)`` uint8. Valid until ``unmap``, whoever holds views of it.
        keep: the vendor's own.
    """

    tensor: torch.Tensor
    keep: Any


class MemoryAt(NamedTuple):
    """What a driver knows of an address: whose memory is there, and how much of what was asked for.

    Attributes:
        device: the one that has the memory, as torch counts; None: no device has.
        size_bytes: from the address on, without a hole.
    """

    device: int | None
    size_bytes: int


class Vendor(Protocol):
    """One maker's devices."""

    kind: str

    def load(self) -> None:
        """Import what drives the devices.

        Raises:
            DeviceUnavailableError: it is missing or does not work; says what, and what to do.
        """

    def allocate(self, index: int, size_bytes: int) -> Mapped:
        """Allocate memory that can be shared, ``size_bytes`` a multiple of 2 MiB; its contents are undefined.

        Raises:
            OutOfMemoryError: the device has not enough.
        """

    def share(self, mapped: Mapped, process_id: int) -> Share:
        """Return what that process needs to map memory that ``allocate`` gave."""

    def map(self, share: Share, index: int, size_bytes: int) -> Mapped:
        """Map what another process shares or registers.

        Raises:
            DeviceUnavailableError: the share is not for this process, or nobody has the memory any more.
        """

    def unmap(self, mapped: Mapped) -> None:
        """Give up what ``allocate`` or ``map`` gave."""

    def memory_at(self, address: int, size_bytes: int) -> MemoryAt:
        """Return what the driver has at an address, up to ``size_bytes``: whoever shared it may say otherwise."""

    def export(self, tensor: torch.Tensor) -> TorchShare:
        """Return what another process needs to map a tensor of torch's own allocator; its owner has to outlive it.

        Raises:
            InvalidFieldError: it is elsewhere, not contiguous, its bytes do not lie as its shape says, or its storage
                cannot be shared; the field is ``device``, ``strides``, ``format`` or ``storage``.
        """

    def process_id(self) -> int:
        """Return by which number the driver knows this process; containers may see another one than the kernel's."""

    def shared_event(self) -> tuple[torch.Event, bytes]:
        """Return a new interprocess event, which is recorded here, and its handle."""

    def record(self, event: torch.Event, stream: torch.Stream | None = None) -> None:
        """Record an interprocess event on a stream, by default the current one.

        When this returns the driver knows of it: whoever is told so may wait for it, in whatever process.
        """

    def open_event(self, handle: bytes, index: int) -> torch.Event:
        """Return another process's event, to be waited for here."""

    def register_host(self, address: int, size_bytes: int) -> None:
        """Let the device copy to and from host memory without going by its driver's own; 4 KiB aligned.

        Raises:
            OutOfMemoryError: more than may be locked.
        """

    def unregister_host(self, address: int) -> None:
        """Undo ``register_host``."""

    def copy_async(self, destination: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """Copy contiguous bytes between a device and registered host memory that torch does not know as pinned."""

    def update_graph(self, graph: Any, inputs: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401  each maker's own
        """Rewrite the host lists that a captured graph has baked in, one mapping for each updatable operator."""
