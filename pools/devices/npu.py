"""Ascend: memory by CANN's virtual memory management, interprocess events, registered host memory, graph updates.

Pools are allocated as physical handles, not by torch's allocator: the driver counts the holders, so that a pool is
freed with its last holder however that one ends, and only processes that were named can map it. Sources: the headers
that torch_npu ships (acl/acl_rt.h), CANN's reference of aclrtMallocPhysical, aclrtMemExportToShareableHandle and
aclrtMemSetPidToShareableHandle.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvferry.pools.devices.npu_segments import Units, joined, units_of
from kvferry.pools.devices.vendor import Mapped, MemoryAt, check_share, export, import_share, open_event
from kvferry.protocol.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    InvalidFieldError,
    OutOfMemoryError,
)
from kvferry.protocol.session_stream import Share, TorchShare, VmmShare

if TYPE_CHECKING:
    import torch

_HBM_HUGE_PAGES: Final = 4
_ON_DEVICE: Final = 1
_HOST_REGISTER_PINNED: Final = 0x10000000
OUT_OF_MEMORY: Final = frozenset({200000, 207001, 207018, 300000})
"""What calls that allocate return where the device has too little free memory."""

_PLAIN_FORMATS: Final = frozenset({0, 1, 2, 27, 30, 35, 47})
"""NCHW, NHWC, ND, NDHWC, NCDHW, NC, NCL: row-major. All others are laid out in fractals."""

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_AT_LEAST: Final = 0
"""aclrtValueWait's flag: until the word is >= the value."""
_NOT_SUPPORTED: Final = 207000
"""ACL_ERROR_RT_FEATURE_NOT_SUPPORT."""


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


class _Attributes(ctypes.Structure):
    """aclrtPtrAttributes."""

    _fields_ = (("location", _Location), ("page_bytes", ctypes.c_uint32), ("reserved", ctypes.c_uint32 * 4))


class _Physical(NamedTuple):
    """A physical handle, the address it is mapped at, the handle that others import, and the one it was imported by."""

    handle: int
    address: int
    shareable: int | None
    imported_by: int | None = None


class _Imported(NamedTuple):
    """An imported mapping and its users in this process: CANN allows a process one import per handle."""

    mapped: Mapped
    users: int


class _Run:
    """Units of an engine's memory, imported and mapped side by side, and how many registered tensors use them."""

    def __init__(self, units: Units, address: int, physical: Sequence[ctypes.c_void_p], tensor: torch.Tensor) -> None:
        self.units = units
        self.address = address
        self.physical = physical
        self.tensor = tensor
        self.users = 0


class _InRun(NamedTuple):
    """A tensor's bytes within a run, and the share that its owner counts."""

    run: _Run
    share: TorchShare


_imported: Final[dict[int, _Imported]] = {}
_runs: Final[dict[int, _Run]] = {}
"""By the handle of each unit."""
_imported_lock: Final = threading.Lock()


class NpuVendor:
    """See ``Vendor``."""

    kind = "npu"
    can_be_kept = True

    def __init__(self) -> None:
        self._torch: Any = None
        self._native: Any = None
        self._acl = ctypes.CDLL(None)

    def load(self) -> None:
        """See ``Vendor.load``."""
        if self._torch is not None:
            return
        if importlib.util.find_spec("torch_npu") is None:  # fail early: importing torch alone takes seconds
            raise DeviceUnavailableError(_explained(ModuleNotFoundError(name="torch_npu")), field="device")
        try:
            torch = importlib.import_module("torch")
            self._native = importlib.import_module("torch_npu")._C  # noqa: SLF001  nothing else makes such tensors
            self._acl = _typed(ctypes.CDLL("libascendcl.so"))
        except Exception as cause:
            raise DeviceUnavailableError(_explained(cause), field="device") from cause
        if not torch.npu.is_available():
            raise DeviceUnavailableError(
                "torch_npu loads, but sees no NPU: the driver, or access to /dev/davinci*, is missing",
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
        assert physical.shareable is not None, "only the process that allocated the memory can share it"
        process = (ctypes.c_int32 * 1)(process_id)
        failed = self._acl.aclrtMemSetPidToShareableHandle(physical.shareable, process, 1)
        if failed:  # the process id came from the engine
            raise InvalidFieldError(
                f"the driver does not share memory with process {process_id} (error {failed})", field="device_pid"
            )
        return VmmShare(handle=physical.shareable, size_bytes=len(mapped.tensor))

    def map(self, share: Share, index: int, size_bytes: int, beside: Sequence[Share] = ()) -> Mapped:
        """See ``Vendor.map``."""
        if isinstance(share, TorchShare):
            units = units_of(share.handle)
            if units is None:
                return Mapped(import_share(self.kind, share, index, size_bytes), None)
            others = (units_of(one.handle) for one in beside if isinstance(one, TorchShare))
            return self._map_units(share, units, [one for one in others if one is not None], index, size_bytes)
        if share.size_bytes < size_bytes:
            raise InvalidFieldError(f"{share.size_bytes} bytes are shared, {size_bytes} are needed", field="share")
        with _imported_lock:
            known = _imported.get(share.handle)
            mapped = known.mapped if known else self._import(share, index)
            _imported[share.handle] = _Imported(mapped, known.users + 1 if known else 1)
        return Mapped(mapped.tensor[:size_bytes], mapped.keep)

    def _import(self, share: VmmShare, index: int) -> Mapped:
        handle = ctypes.c_void_p()
        failed = self._acl.aclrtMemImportFromShareableHandle(share.handle, index, ctypes.byref(handle))
        if failed or handle.value is None:
            raise DeviceUnavailableError(
                f"the shared memory cannot be imported (error {failed}): its owner has ended, or it is shared with "
                "another process (in a container, both need the same view of process numbers)",
                field="share",
            )
        try:
            address = self._map(handle.value, share.size_bytes)  # the size as allocated: whole pages
        except BaseException:
            self._acl.aclrtFreePhysical(handle)
            raise
        physical = _Physical(handle.value, address, None, share.handle)
        return Mapped(self._tensor(address, index, share.size_bytes), physical)

    def _map_units(
        self, share: TorchShare, units: Units, others: Sequence[Units], index: int, size_bytes: int
    ) -> Mapped:
        """Map a tensor of an expandable segment, within the run that it and those beside it are."""
        check_share(share, size_bytes)
        at = share.storage_offset_bytes + share.offset_bytes
        if at + size_bytes > units.size_bytes:
            raise InvalidFieldError(
                f"{size_bytes} bytes from byte {at} of {units.size_bytes} that are shared", field="share"
            )
        with _imported_lock:
            run = _runs.get(units.handles[0]) or self._import_run(joined(units, others), index)
            first = run.units.handles.index(units.handles[0])
            if run.units.handles[first : first + len(units.handles)] != units.handles:
                raise InvalidFieldError(
                    "the memory is beside memory that was registered before, without it: register both at once, or "
                    "allocate one of them with expandable_segments:False",
                    field="share",
                )
            run.users += 1
        start = first * units.unit_bytes + at
        return Mapped(run.tensor[start : start + size_bytes], _InRun(run, share))

    def _import_run(self, units: Units, index: int) -> _Run:
        """Import and map units side by side. What they are, the engine says: no error of the driver's ends the device.

        Raises:
            DeviceUnavailableError: they are not there any more, or are imported already.
        """
        address, physical, mapped = ctypes.c_void_p(), [], 0
        failed = self._acl.aclrtReserveMemAddress(ctypes.byref(address), units.size_bytes, 0, None, 0)
        if failed:
            raise DeviceUnavailableError(
                f"{units.size_bytes} bytes of addresses cannot be reserved (error {failed})", field="share"
            )
        for number, handle in enumerate(units.handles):
            imported = ctypes.c_void_p()
            failed = self._acl.aclrtMemImportFromShareableHandle(handle, index, ctypes.byref(imported))
            if failed:
                break
            physical.append(imported)
            there = (address.value or 0) + number * units.unit_bytes
            failed = self._acl.aclrtMapMem(there, units.unit_bytes, 0, imported, 0)
            if failed:
                break
            mapped += 1
        run = _Run(units, address.value or 0, physical, self._tensor(address.value or 0, index, units.size_bytes))
        if failed:
            self._unmap_run(run, mapped)
            raise DeviceUnavailableError(
                f"the registered memory cannot be mapped (error {failed}): its owner has ended, or it is registered "
                "already",
                field="share",
            )
        _runs.update(dict.fromkeys(units.handles, run))
        return run

    def _unmap_run(self, run: _Run, mapped: int) -> None:
        for number in range(mapped):
            self._acl.aclrtUnmapMem(run.address + number * run.units.unit_bytes)
        self._acl.aclrtReleaseMemAddress(run.address)
        for one in run.physical:
            self._acl.aclrtFreePhysical(one)

    def _unmap_units(self, one: _InRun) -> None:
        """Take note that a tensor is not used any more; its owner's allocator counts it, too."""
        with _imported_lock:
            one.run.users -= 1
            if not one.run.users:
                for handle in one.run.units.handles:
                    del _runs[handle]
                self._unmap_run(one.run, len(one.run.units.handles))
        with contextlib.suppress(RuntimeError):  # its owner may have ended
            self._native._release_ipc_counter_npu(  # noqa: SLF001  as torch's own reader does
                one.share.ref_counter, one.share.ref_counter_offset
            )

    def unmap(self, mapped: Mapped) -> None:
        """See ``Vendor.unmap``."""
        if isinstance(mapped.keep, _InRun):
            self._unmap_units(mapped.keep)
            return
        physical = mapped.keep
        if not isinstance(physical, _Physical):
            return
        with _imported_lock:  # held until it is freed, so that nobody imports it again before
            if physical.imported_by is not None:
                known = _imported.pop(physical.imported_by)
                if known.users > 1:
                    _imported[physical.imported_by] = known._replace(users=known.users - 1)
                    return
            self._acl.aclrtUnmapMem(physical.address)
            self._acl.aclrtReleaseMemAddress(physical.address)
            self._acl.aclrtFreePhysical(physical.handle)

    def memory_at(self, address: int, size_bytes: int) -> MemoryAt:
        """See ``Vendor.memory_at``. If CANN reports no address ranges, checks only the first and the last byte."""
        device, stop = self._device_of(address), address + size_bytes
        at, base, length = address, ctypes.c_void_p(), ctypes.c_size_t()
        while device is not None and at < stop and self._device_of(at) == device:  # it may consist of several mappings
            failed = self._range_of(at, ctypes.byref(base), ctypes.byref(length))
            if failed == _NOT_SUPPORTED:
                return MemoryAt(device, size_bytes if self._device_of(stop - 1) == device else 0)
            if failed or (base.value or 0) + length.value <= at:
                break
            at = (base.value or 0) + length.value
        return MemoryAt(device, min(at, stop) - address)

    def _device_of(self, address: int) -> int | None:
        found = _Attributes()
        failed = self._acl.aclrtPointerGetAttributes(address, ctypes.byref(found))
        return None if failed or found.location.type != _ON_DEVICE else int(found.location.id)

    def _range_of(self, address: int, base: Any, length: Any) -> int:  # noqa: ANN401  ctypes
        if not hasattr(self._acl, "aclrtMemGetAddressRange"):  # an older CANN
            return _NOT_SUPPORTED
        return int(self._acl.aclrtMemGetAddressRange(address, base, length))

    def export(self, tensor: torch.Tensor) -> TorchShare:
        """See ``Vendor.export``; only for tensors in a row-major format."""
        npu_format = int(importlib.import_module("torch_npu").get_npu_format(tensor))
        if npu_format not in _PLAIN_FORMATS:
            raise InvalidFieldError(
                f"the tensor has the private format {npu_format}: cast it to ND (2)", field="format"
            )
        return export(self.kind, tensor)

    def process_id(self) -> int:
        """See ``Vendor.process_id``."""
        found = ctypes.c_int32()
        self._call("aclrtDeviceGetBareTgid", ctypes.byref(found))
        return found.value

    def shared_event(self) -> tuple[torch.Event, bytes]:
        """See ``Vendor.shared_event``."""
        event = self._torch.npu.Event(interprocess=True)
        self.record(event, None)  # the first record creates its handle
        return event, bytes(event.ipc_handle())

    def record(self, event: torch.Event, stream: torch.Stream | None = None) -> None:
        """See ``Vendor.record``: flushes torch_npu's queue, whose thread would otherwise record some time later."""
        on = self._own(stream or self._torch.npu.current_stream())
        event.record(on)
        on.npu_stream  # noqa: B018  launches what is queued before it returns the handle

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
        """See ``Vendor.copy_async``. Operators queued on the stream before are launched before the copy."""
        raw = self._own(stream).npu_stream  # launches what is queued before it returns the handle
        kind = _DEVICE_TO_HOST if destination.device.type == "cpu" else _HOST_TO_DEVICE
        size = source.nbytes
        self._call("aclrtMemcpyAsync", destination.data_ptr(), size, source.data_ptr(), size, kind, raw)

    def write_value(self, address: int, value: int, stream: torch.Stream) -> None:
        """See ``Vendor.write_value``. Operators queued on the stream before are launched before it."""
        self._call("aclrtValueWrite", address, value, 0, self._own(stream).npu_stream)

    def wait_value(self, address: int, value: int, stream: torch.Stream) -> None:
        """See ``Vendor.wait_value``; what torch_npu queues later is launched later."""
        self._call("aclrtValueWait", address, value, _AT_LEAST, self._own(stream).npu_stream)

    def _own(self, stream: torch.Stream) -> Any:  # noqa: ANN401  torch_npu's class
        """Return a stream as torch_npu's class: what torch.accelerator returns is torch's own."""
        own = self._torch.npu.Stream
        if isinstance(stream, own):
            return stream
        return own(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    def update_graph(self, graph: Any, inputs: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401
        """See ``Vendor.update_graph``.

        The graph waits for its update by an event that the replay resets. An update that overtakes the reset by the
        previous replay would be lost, and the next replay would wait forever; torch_npu's own graph trees use the same
        order.
        """
        graph.graph_dispatch_mode.update_stream.wait_stream(self._torch.npu.current_stream())
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
        # With torch_npu's own functions: it treats every storage on a device as its own struct, which is larger than
        # torch's.
        native, device = self._native, self._torch.device("npu", index)
        storage = native._construct_storage_from_data_pointer(address, device, size_bytes)  # noqa: SLF001  the only way
        described = {
            "size": (size_bytes,),
            "stride": (1,),
            "storage_offset": 0,
            "dtype": self._torch.uint8,
            "device": device,
        }
        tensor: torch.Tensor = native._construct_NPU_Tensor_From_Storage_And_Metadata(described, storage)  # noqa: SLF001
        return tensor

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401  ctypes
        error = getattr(self._acl, name)(*arguments)
        if error in OUT_OF_MEMORY:
            raise OutOfMemoryError(f"{name} failed with error {error}: the device has too little free memory")
        if error:
            raise DeviceLostError(f"{name} failed with error {error}")


def _typed(acl: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the parameter types of the functions that are called; each returns an aclError."""
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
    acl.aclrtPointerGetAttributes.argtypes = (pointer, pointer)
    if hasattr(acl, "aclrtMemGetAddressRange"):
        acl.aclrtMemGetAddressRange.argtypes = (pointer, pointer, pointer)
    acl.aclrtDeviceGetBareTgid.argtypes = (pointer,)
    acl.aclrtMemcpyAsync.argtypes = (pointer, size, pointer, size, ctypes.c_int, pointer)
    acl.aclrtValueWrite.argtypes = (pointer, uint64, ctypes.c_uint32, pointer)
    acl.aclrtValueWait.argtypes = (pointer, uint64, ctypes.c_uint32, pointer)
    return acl


def _explained(cause: BaseException) -> str:
    """Return why torch_npu cannot be used, for operators."""
    if isinstance(cause.__cause__, ImportError):  # torch wraps the error if it loads torch_npu itself
        cause = cause.__cause__
    text = f"{type(cause).__name__}: {cause}".splitlines()[0]
    if isinstance(cause, ModuleNotFoundError):
        return f"this Python has no {cause.name}: install torch-npu in torch's version, as kvferry[npu] does"
    if "cannot open shared object file" in text:
        library = str(cause).partition(":")[0].split()[-1]
        return f"torch_npu is installed, but CANN's {library} is not found: source the toolkit's set_env.sh ({text})"
    return f"torch_npu does not load: {text}"
