"""CUDA's vendor where there is no CUDA; with a device, the tests for any device try it."""

from __future__ import annotations

import sys

import pytest

from kvferry.pools.devices.cuda import CudaVendor
from kvferry.protocol.errors import DeviceUnavailableError


def test_a_device_without_torch_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # what an import of it finds
    with pytest.raises(DeviceUnavailableError, match="need torch"):
        CudaVendor().load()
