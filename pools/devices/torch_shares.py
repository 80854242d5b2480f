"""Sharing a storage of torch's allocator with another process, by the fields that torch itself exchanges.

The owner must outlive every process that maps it. Its allocator keeps a freed block until every holder has released it,
and forever if a holder was killed: so this is for memory that lives as long as its engine, registered with the daemon.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from kvferry.protocol.errors import DeviceUnavailableError, InvalidFieldError
from kvferry.protocol.session_stream import TorchShare

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
    try:
        fields = getattr(tensor.untyped_storage(), f"_share_{kind}_")()
    except RuntimeError as cause:  # for example a pool's memory; says nothing about the state of the device
        why = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise InvalidFieldError(
            f"the tensor's storage is not from torch's allocator, or cannot be shared: {why}", field="storage"
        ) from cause
    _, handle, size_bytes, offset_bytes, counter, counter_offset, event, sync = fields
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


def import_share(kind: str, share: TorchShare, index: int, size_bytes: int) -> torch.Tensor:
    """Return another process's bytes as a tensor, ``(size_bytes,)`` uint8, of this process's device ``index``.

    Raises:
        InvalidFieldError: the share has fewer bytes than requested, or is not one of torch's.
        DeviceUnavailableError: the memory no longer exists, or is on another device.
    """
    if share.offset_bytes + size_bytes > share.storage_bytes:
        raise InvalidFieldError(
            f"{size_bytes} bytes from byte {share.offset_bytes} of a storage of {share.storage_bytes}", field="share"
        )
    if share.ref_counter_offset >= REF_COUNTERS or (share.event_sync and len(share.event) != EVENT_HANDLE_BYTES):
        raise InvalidFieldError("not a share made by torch: its counter or its event is invalid", field="share")
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
