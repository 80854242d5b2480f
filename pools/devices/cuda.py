"""NVIDIA: torch's shares, interprocess events, registered host memory. Besides Ascend, for tests on a GPU.

Memory comes from torch's allocator, so processes that map a pool need the daemon to stay alive, and a pool that a
killed engine had mapped is freed only when the daemon ends.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvferry.pools.devices.vendor import Mapped, MemoryAt, export, import_share, on_stream, open_event
from kvferry.protocol.errors import DeviceLostError, DeviceUnavailableError, InvalidFieldError, OutOfMemoryError
from kvferry.protocol.session_stream import Share, TorchShare

if TYPE_CHECKING:
    import torch


_DEVICE_ORDINAL: Final = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL."""
_DEFAULT: Final = 0
"""CU_STREAM_WRITE_VALUE_DEFAULT; of a wait, CU_STREAM_WAIT_VALUE_GEQ."""


class CudaVendor:
    """See ``Vendor``."""

    kind = "cuda"
    can_be_kept = False

    def __init__(self) -> None:
        self._torch: Any = None

    def load(self) -> None:
        """See ``Vendor.load``."""
        try:
            torch = importlib.import_module("torch")
        except ImportError as cause:
            raise DeviceUnavailableError(f"pools on a device need torch: {cause}", field="device") from cause
        if not torch.cuda.is_available():
            raise DeviceUnavailableError("torch sees no CUDA device: a CPU build, or no driver", field="device")
        torch.cuda.init()
        self._torch = torch

    def allocate(self, index: int, size_bytes: int) -> Mapped:
        """See ``Vendor.allocate``."""
        tensor = self._torch.empty(size_bytes, dtype=self._torch.uint8, device=self._torch.device("cuda", index))
        return Mapped(tensor, None)

    def share(self, mapped: Mapped, process_id: int) -> Share:
        """See ``Vendor.share``; any process that has the share can map it."""
        del process_id
        return export(self.kind, mapped.tensor)

    def map(self, share: Share, index: int, size_bytes: int, beside: Sequence[Share] = ()) -> Mapped:
        """See ``Vendor.map``."""
        del beside
        if not isinstance(share, TorchShare):
            raise InvalidFieldError(f"CUDA has no {share!r}", field="share")
        return Mapped(import_share(self.kind, share, index, size_bytes), None)

    def unmap(self, mapped: Mapped) -> None:
        """See ``Vendor.unmap``: the memory is unmapped with the last tensor."""

    def memory_at(self, address: int, size_bytes: int) -> MemoryAt:
        """See ``Vendor.memory_at``: asks the driver's own library, as torch does not expose this."""
        driver = ctypes.CDLL("libcuda.so.1")
        at, base, length = ctypes.c_uint64(address), ctypes.c_uint64(), ctypes.c_size_t()
        device = ctypes.c_int(-1)
        if driver.cuPointerGetAttribute(ctypes.byref(device), _DEVICE_ORDINAL, at):
            return MemoryAt(None, 0)
        while at.value < address + size_bytes:  # it may consist of several mappings
            failed = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(length), at)
            if failed or base.value + length.value <= at.value:
                break
            at.value = base.value + length.value
        return MemoryAt(device.value, min(at.value - address, size_bytes))

    def export(self, tensor: torch.Tensor) -> TorchShare:
        """See ``Vendor.export``."""
        return export(self.kind, tensor)

    def process_id(self) -> int:
        """See ``Vendor.process_id``; not used."""
        return 1

    def shared_event(self) -> tuple[torch.Event, bytes]:
        """See ``Vendor.shared_event``."""
        event = self._torch.cuda.Event(interprocess=True)
        self.record(event, None)
        return event, bytes(event.ipc_handle())

    def record(self, event: torch.Event, stream: torch.Stream | None = None) -> None:
        """See ``Vendor.record``: CUDA has no queue in front of the driver's."""
        event.record(stream)

    def open_event(self, handle: bytes, index: int) -> torch.Event:
        """See ``Vendor.open_event``."""
        return open_event(self._torch, self.kind, handle, index)

    def register_host(self, address: int, size_bytes: int) -> None:
        """See ``Vendor.register_host``."""
        failed = int(self._torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
        if failed:
            raise OutOfMemoryError(f"{size_bytes} bytes of host memory cannot be registered (error {failed})")

    def unregister_host(self, address: int) -> None:
        """See ``Vendor.unregister_host``."""
        self._torch.cuda.cudart().cudaHostUnregister(address)

    def copy_async(self, destination: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """See ``Vendor.copy_async``: CUDA recognises registered memory."""
        with on_stream(self._torch, stream):
            destination.copy_(source, non_blocking=True)

    def write_value(self, address: int, value: int, stream: torch.Stream) -> None:
        """See ``Vendor.write_value``."""
        self._of_value("cuStreamWriteValue64_v2", address, value, stream)

    def wait_value(self, address: int, value: int, stream: torch.Stream) -> None:
        """See ``Vendor.wait_value``: CUDA compares as signed numbers, so values stay below 2**63."""
        self._of_value("cuStreamWaitValue64_v2", address, value, stream)

    def _of_value(self, name: str, address: int, value: int, stream: torch.Stream) -> None:
        driver, own = ctypes.CDLL("libcuda.so.1"), self._torch.cuda.Stream
        on = own(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
        raw = ctypes.c_void_p(on.cuda_stream)
        error = getattr(driver, name)(raw, ctypes.c_uint64(address), ctypes.c_uint64(value), _DEFAULT)
        if error:
            raise DeviceLostError(f"{name} failed with error {error}")

    def update_graph(self, graph: Any, inputs: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401
        """See ``Vendor.update_graph``: does nothing, as CUDA graphs read lengths from tensors."""
