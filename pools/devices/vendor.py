"""The vendor-specific calls: sharing memory and events between processes, and registering host memory.

Everything else uses torch's device-agnostic interface, in ``accelerator``. All calls must be made on a thread whose
current device is set; torch is not imported before ``load``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kvferry.protocol.errors import DeviceUnavailableError, InvalidFieldError
from kvferry.protocol.session_stream import MAX_STORAGE_HANDLE_BYTES, Share, TorchShare

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
    """One vendor's devices.

    Attributes:
        kind: the first part of their names.
        can_be_kept: whether a process of its own, which maps nothing, can own memory that this one maps by a share.
    """

    kind: str
    can_be_kept: bool

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

    def map(self, share: Share, index: int, size_bytes: int, beside: Sequence[Share] = ()) -> Mapped:
        """Map memory that another process shares or registers.

        Args:
            share: of the memory.
            index: of the device.
            size_bytes: of the memory.
            beside: what else the process registers with it, which may lie on the same physical memory.

        Raises:
            InvalidFieldError: the share is not what it announces, or contradicts those beside it.
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

    def write_value(self, address: int, value: int, stream: torch.Stream) -> None:
        """Write a uint64 to device memory behind all that is queued on a stream; when this returns, the driver has it.

        ``address`` is a multiple of 8.
        """

    def wait_value(self, address: int, value: int, stream: torch.Stream) -> None:
        """Let a stream wait, behind all that is queued on it, until a uint64 of device memory is at least ``value``."""

    def update_graph(self, graph: Any, inputs: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401  each maker's own
        """Rewrite the host lists that a captured graph has baked in, one mapping per updatable operator."""


# -- sharing a storage of torch's allocator with another process, by the fields that torch itself exchanges.
#
# The owner must outlive every process that maps it. Its allocator keeps a freed block until every holder has released
# it, and forever if a holder was killed: so this is for memory that lives as long as its engine, registered with the
# daemon.


if TYPE_CHECKING:
    import torch

EVENT_HANDLE_BYTES: Final = 64
REF_COUNTERS: Final = 10_000
"""Counters in one of torch's files (CUDA_IPC_REF_COUNTER_FILE_SIZE): torch decrements at any offset unchecked."""


def export(kind: str, tensor: torch.Tensor) -> TorchShare:
    """Return what another process needs to map a tensor.

    Raises:
        InvalidFieldError: it is on another kind of device, not contiguous, or torch cannot share its storage.
    """
    if tensor.device.type != kind:
        raise InvalidFieldError(f"the tensor is on {tensor.device}, not on {kind}", field="device")
    if not tensor.is_contiguous():
        raise InvalidFieldError("only a contiguous tensor can be registered", field="strides")
    if not tensor.untyped_storage().nbytes():
        raise InvalidFieldError("the tensor's storage is empty: its memory was given up", field="storage")
    try:
        fields = getattr(tensor.untyped_storage(), f"_share_{kind}_")()
    except RuntimeError as cause:  # for example a pool's memory; says nothing about the state of the device
        why = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise InvalidFieldError(
            f"the tensor's storage is not from torch's allocator, or cannot be shared: {why}", field="storage"
        ) from cause
    _, handle, size_bytes, offset_bytes, counter, counter_offset, event, sync = fields
    if len(handle) > MAX_STORAGE_HANDLE_BYTES:
        raise InvalidFieldError(
            f"the tensor's {size_bytes >> 30} GiB are more than can be shared in pieces: allocate it with "
            "expandable_segments:False, or layer by layer",
            field="storage",
        )
    return TorchShare(
        handle=bytes(handle),
        storage_bytes=size_bytes,
        storage_offset_bytes=offset_bytes,
        ref_counter=bytes(counter),
        ref_counter_offset=counter_offset,
        event=bytes(event),
        event_sync=bool(sync),
        offset_bytes=int(tensor.storage_offset()) * tensor.element_size(),
    )


def check_share(share: TorchShare, size_bytes: int) -> None:
    """Check that a share has so many bytes, and what torch does not check itself.

    Raises:
        InvalidFieldError: it has fewer, or is not one of torch's.
    """
    if share.offset_bytes + size_bytes > share.storage_bytes:
        raise InvalidFieldError(
            f"{size_bytes} bytes from byte {share.offset_bytes} of a storage of {share.storage_bytes}", field="share"
        )
    if share.ref_counter_offset >= REF_COUNTERS or (share.event_sync and len(share.event) != EVENT_HANDLE_BYTES):
        raise InvalidFieldError("not a share made by torch: its counter or its event is invalid", field="share")


def import_share(kind: str, share: TorchShare, index: int, size_bytes: int) -> torch.Tensor:
    """Return another process's bytes as a tensor, ``(size_bytes,)`` uint8, of this process's device ``index``.

    Raises:
        InvalidFieldError: the share has fewer bytes than requested, or is not one of torch's.
        DeviceUnavailableError: the memory no longer exists, or is on another device.
    """
    check_share(share, size_bytes)
    backend: Any = importlib.import_module("torch")
    try:
        storage = getattr(backend.UntypedStorage, f"_new_shared_{kind}")(
            index,
            share.handle,
            share.storage_bytes,
            share.storage_offset_bytes,
            share.ref_counter,
            share.ref_counter_offset,
            share.event,
            share.event_sync,
        )
    except RuntimeError as cause:
        why = str(cause).splitlines()[0].replace(repr(share.handle), "its handle")
        raise DeviceUnavailableError(f"the registered memory cannot be mapped: {why}", field="share") from None
    empty = backend.empty(0, dtype=backend.uint8, device=backend.device(kind, index))
    tensor: torch.Tensor = empty.set_(storage, share.offset_bytes, (size_bytes,), (1,))
    return tensor


def open_event(backend: Any, kind: str, handle: bytes, index: int) -> torch.Event:  # noqa: ANN401  torch itself
    """Return another process's interprocess event, to be waited for on this process's device ``index``.

    Raises:
        InvalidFieldError: the handle is not an event's, or its process has ended.
    """
    if len(handle) != EVENT_HANDLE_BYTES:
        raise InvalidFieldError(f"a handle of {len(handle)} bytes; {EVENT_HANDLE_BYTES} are needed", field="events")
    device = backend.device(kind, index)
    try:
        event: torch.Event = backend.get_device_module(device).Event.from_ipc_handle(device, handle)
    except RuntimeError:
        raise InvalidFieldError(
            "no such event: its process has ended, or it is on another device", field="events"
        ) from None
    return event
