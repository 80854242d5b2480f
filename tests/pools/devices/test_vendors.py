"""What vendors refuse before they ask a device; with one, the tests for any device try them."""

from __future__ import annotations

import sys

import pytest

from kvferry.pools.devices.cuda import CudaVendor
from kvferry.pools.devices.npu import NpuVendor
from kvferry.pools.devices.vendor import open_event
from kvferry.protocol.errors import DeviceUnavailableError, InvalidFieldError
from kvferry.protocol.session_stream import TorchShare, VmmShare


def test_a_device_without_torch_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # what an import of it finds
    with pytest.raises(DeviceUnavailableError, match="need torch"):
        CudaVendor().load()


def test_a_share_of_less_than_is_needed() -> None:
    with pytest.raises(InvalidFieldError, match="1 bytes are shared, 2 are needed"):
        NpuVendor().map(VmmShare(handle=1, size_bytes=1), 0, 2)
    registered = TorchShare(
        handle=b"", storage_bytes=8, storage_offset_bytes=0, ref_counter=b"", ref_counter_offset=0, event=b"",
        event_sync=False, offset_bytes=4,
    )  # fmt: skip
    with pytest.raises(InvalidFieldError, match="5 bytes from byte 4 of a storage of 8"):
        NpuVendor().map(registered, 0, 5)


@pytest.mark.parametrize("size", [0, 63, 65])
def test_a_handle_that_is_no_events(size: int) -> None:
    with pytest.raises(InvalidFieldError, match=f"of {size} bytes; 64 are needed"):
        open_event(None, "npu", bytes(size), 0)
