"""Ascend's own: memory by CANN's virtual memory management, interprocess events, registered host memory, graph updates.

Pools are allocated as physical handles, not by torch's allocator: the driver counts who holds one, so that a pool goes
with its last holder however that one ends, and a process maps it only where it was named. Sources: the headers that
torch_npu ships (acl/acl_rt.h), CANN's reference of aclrtMallocPhysical, aclrtMemExportToShareableHandle and
aclrtMemSetPidToShareableHandle.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvferry.pools.devices.torch_shares import borrow, lend, open_event
from kvferry.pools.devices.vendor import Mapped
from kvferry.protocol.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    InvalidFieldError,
    OutOfMemoryError,
)
from kvferry.protocol.shares import Share, TorchShare, VmmShare

if TYPE_CHECKING:
    import torch

_HBM_HUGE_PAGES: Final = 4
_ON_DEVICE: Final = 1
_HOST_REGISTER_PINNED: Final = 0x10000000
_OUT_OF_MEMORY: Final = frozenset({200000, 207001, 207018, 300000})
_PLAIN_FORMATS: Final = frozenset({0, 1, 2, 27, 30, 35, 47})
"""NCHW, NHWC, ND, NDHWC, NCDHW, NC, NCL: row after row. All others are laid out in fractals."""

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2


class _Location(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int))


class _PhysicalMemory(ctypes.Structure):
    """aclrtPhysicalMemProp."""

    _fields_ = (
        ("handle_type", ctypes.c_int),
        ("allocation_type", ctypes.c_int),
        ("attribute", ctypes.c_int),
        ("location", _Location),
        ("reserved", ctypes.c_uint64),
    )


class _Physical(NamedTuple):
    """A physical handle, where it is mapped, and the handle that others import."""

    handle: int
    address: int
    shareable: int | None


class NpuVendor:
    """See ``Vendor``."""

    kind = "npu"

    def __init__(self) -> None:
        self._torch: Any = None
        self._acl = ctypes.CDLL(None)

    def load(self) -> None:
        """See ``Vendor.load``."""
        if self._torch is not None:
            return
        try:
            torch = importlib.import_module("torch")
            importlib.import_module("torch_npu")
            self._acl = _typed(ctypes.CDLL("libascendcl.so"))
        except Exception as cause:
            raise DeviceUnavailableError(_explained(cause), field="device") from cause
        if not torch.npu.is_available():
            raise DeviceUnavailableError(
                "torch_npu loads, but sees no NPU: the driver, or the access to /dev/davinci*, is missing",
                field="device",
            )
        self._torch = torch

    def allocate(self, index: int, size_bytes: int) -> Mapped:
        """See ``Vendor.allocate``."""
        handle = ctypes.c_void_p()
        wanted = _PhysicalMemory(0, 0, _HBM_HUGE_PAGES, _Location(index, _ON_DEVICE), 0)
        self._call("aclrtMallocPhysical", ctypes.byref(handle), size_bytes, ctypes.byref(wanted), 0)
        assert handle.value is not None
        try:
            address = self._map(handle.value, size_bytes)
        except BaseException:
            self._acl.aclrtFreePhysical(handle)
            raise
        shareable = ctypes.c_uint64()
        self._call("aclrtMemExportToShareableHandle", handle, 0, 0, ctypes.byref(shareable))
        return Mapped(self._tensor(address, index, size_bytes), _Physical(handle.value, address, shareable.value))

    def share(self, mapped: Mapped, process_id: int) -> Share:
        """See ``Vendor.share``."""
        physical: _Physical = mapped.keep
        assert physical.shareable is not None, "shared by whoever only mapped it"
        process = (ctypes.c_int32 * 1)(process_id)
        self._call("aclrtMemSetPidToShareableHandle", physical.shareable, process, 1)
        return VmmShare(handle=physical.shareable, size_bytes=len(mapped.tensor))

    def map(self, share: Share, index: int, size_bytes: int) -> Mapped:
        """See ``Vendor.map``."""
        if isinstance(share, TorchShare):
            return Mapped(borrow(self.kind, share, index, size_bytes), None)
        if share.size_bytes < size_bytes:
            raise InvalidFieldError(f"{share.size_bytes} bytes are shared, {size_bytes} are needed", field="share")
        handle = ctypes.c_void_p()
        failed = self._acl.aclrtMemImportFromShareableHandle(share.handle, index, ctypes.byref(handle))
        if failed or handle.value is None:
            raise DeviceUnavailableError(
                f"the shared memory cannot be imported (error {failed}): its owner has ended, or it is shared with "
                "another process (in a container, both need the same view of process numbers)",
                field="share",
            )
        try:
            address = self._map(handle.value, share.size_bytes)  # as it was allocated: whole pages
        except BaseException:
            self._acl.aclrtFreePhysical(handle)
            raise
        return Mapped(self._tensor(address, index, size_bytes), _Physical(handle.value, address, None))

    def unmap(self, mapped: Mapped) -> None:
        """See ``Vendor.unmap``."""
        if isinstance(mapped.keep, _Physical):
            self._acl.aclrtUnmapMem(mapped.keep.address)
            self._acl.aclrtReleaseMemAddress(mapped.keep.address)
            self._acl.aclrtFreePhysical(mapped.keep.handle)

    def lend(self, tensor: torch.Tensor) -> TorchShare:
        """See ``Vendor.lend``; only of tensors whose bytes lie as their shape says."""
        form = int(importlib.import_module("torch_npu").get_npu_format(tensor))
        if form not in _PLAIN_FORMATS:
            raise InvalidFieldError(f"the tensor has the private format {form}: cast it to ND (2)", field="tensor")
        return lend(self.kind, tensor)

    def process_id(self) -> int:
        """See ``Vendor.process_id``."""
        found = ctypes.c_int32()
        self._call("aclrtDeviceGetBareTgid", ctypes.byref(found))
        return found.value

    def shared_event(self) -> tuple[torch.Event, bytes]:
        """See ``Vendor.shared_event``."""
        event = self._torch.npu.Event(interprocess=True)
        event.record()  # it gets its handle with its first record
        return event, bytes(event.ipc_handle())

    def open_event(self, handle: bytes, index: int) -> torch.Event:
        """See ``Vendor.open_event``."""
        return open_event(self._torch, self.kind, handle, index)

    def register_host(self, address: int, size_bytes: int) -> None:
        """See ``Vendor.register_host``."""
        failed = self._torch.npu.npurt().npuHostRegister(address, size_bytes, _HOST_REGISTER_PINNED)
        if failed:
            raise OutOfMemoryError(f"{size_bytes} bytes of host memory cannot be registered (error {failed})")

    def unregister_host(self, address: int) -> None:
        """See ``Vendor.unregister_host``."""
        self._torch.npu.npurt().npuHostUnregister(address)

    def copy_async(self, destination: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """See ``Vendor.copy_async``. Operators given to the stream before have been launched when this goes."""
        own: Any = stream  # torch_npu's class: it launches what is queued before it gives its handle
        raw = own.npu_stream
        kind = _DEVICE_TO_HOST if destination.device.type == "cpu" else _HOST_TO_DEVICE
        size = source.nbytes
        self._call("aclrtMemcpyAsync", destination.data_ptr(), size, source.data_ptr(), size, kind, raw)

    def update_graph(self, graph: Any, inputs: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401
        """See ``Vendor.update_graph``."""
        graph.update(cpu_update_input=[dict(one) for one in inputs])

    def _map(self, handle: int, size_bytes: int) -> int:
        address = ctypes.c_void_p()
        self._call("aclrtReserveMemAddress", ctypes.byref(address), size_bytes, 0, None, 0)
        try:
            self._call("aclrtMapMem", address, size_bytes, 0, handle, 0)
        except BaseException:
            self._acl.aclrtReleaseMemAddress(address)
            raise
        assert address.value is not None
        return address.value

    def _tensor(self, address: int, index: int, size_bytes: int) -> torch.Tensor:
        backend = self._torch
        device = backend.device("npu", index)
        storage = backend._C._construct_storage_from_data_pointer(address, device, size_bytes)  # noqa: SLF001  the only way
        empty = backend.empty(0, dtype=backend.uint8, device=device)
        tensor: torch.Tensor = empty.set_(storage, 0, (size_bytes,), (1,))
        return tensor

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401  ctypes
        error = getattr(self._acl, name)(*arguments)
        if error in _OUT_OF_MEMORY:
            raise OutOfMemoryError(f"{name} failed with error {error}: the card has not enough free memory")
        if error:
            raise DeviceLostError(f"{name} failed with error {error}")


def _typed(acl: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library with the parameters of what is called; each returns an aclError."""
    pointer, size, uint64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
    acl.aclrtMallocPhysical.argtypes = (pointer, size, pointer, uint64)
    acl.aclrtFreePhysical.argtypes = (pointer,)
    acl.aclrtReserveMemAddress.argtypes = (pointer, size, size, pointer, uint64)
    acl.aclrtReleaseMemAddress.argtypes = (pointer,)
    acl.aclrtMapMem.argtypes = (pointer, size, size, pointer, uint64)
    acl.aclrtUnmapMem.argtypes = (pointer,)
    acl.aclrtMemExportToShareableHandle.argtypes = (pointer, ctypes.c_int, uint64, pointer)
    acl.aclrtMemImportFromShareableHandle.argtypes = (uint64, ctypes.c_int32, pointer)
    acl.aclrtMemSetPidToShareableHandle.argtypes = (uint64, pointer, size)
    acl.aclrtDeviceGetBareTgid.argtypes = (pointer,)
    acl.aclrtMemcpyAsync.argtypes = (pointer, size, pointer, size, ctypes.c_int, pointer)
    return acl


def _explained(cause: Exception) -> str:
    """Return why torch_npu cannot be used, in an operator's words."""
    text = f"{type(cause).__name__}: {cause}".splitlines()[0]
    if isinstance(cause, ModuleNotFoundError):
        return f"this Python has no {cause.name}: install torch-npu of torch's own version, as kvferry[npu] does"
    if "cannot open shared object file" in text:
        library = str(cause).partition(":")[0].split()[-1]
        return f"torch_npu is installed, but CANN's {library} is not found: source the toolkit's set_env.sh ({text})"
    return f"torch_npu does not load: {text}"
