"""What a device's driver says of an address, which an engine that registers memory may say otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from kvferry.pools.devices.vendor import MemoryAt
from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Simulator
from tests.kit.devices import DEVICE

MIB: Final = 1 << 20

OLD_CANN: Final = """
from kvferry.pools.devices.npu import NpuVendor
vendor = NpuVendor()
vendor.load()
block = torch.zeros(30 << 20, dtype=torch.uint8, device="npu:0")
address = block.data_ptr()
result = [list(vendor.memory_at(*one)) for one in ((address, 8), (address, 30 << 20), (address, 1 << 40), (64, 8))]
"""


def test_the_driver_knows_device_and_size() -> None:
    device = DEVICE.accelerator
    with device.calling():
        mapped = device.vendor.allocate(device.index, 4 * MIB)
        address = mapped.tensor.data_ptr()
        assert device.vendor.memory_at(address, 4 * MIB) == MemoryAt(device.index, 4 * MIB)
        assert device.vendor.memory_at(address + MIB, MIB) == MemoryAt(device.index, MIB)
        assert device.vendor.memory_at(address + MIB, 4 * MIB) == MemoryAt(device.index, 3 * MIB)
        device.vendor.unmap(mapped)
        assert device.vendor.memory_at(address, MIB) == MemoryAt(None, 0)
        host = torch.zeros(MIB, dtype=torch.uint8)
        assert device.vendor.memory_at(host.data_ptr(), MIB) == MemoryAt(None, 0)


def test_an_old_cann_knows_the_device_of_the_first_and_the_last_byte(tmp_path: Path) -> None:
    with Child(Simulator(tmp_path, cann="8.5.0")) as process:
        assert process.do(OLD_CANN) == [[0, 8], [0, 30 * MIB], [0, 0], [None, 0]]
