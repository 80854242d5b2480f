"""Memory that an engine has shared by torch is freed when no copy waits for an engine: torch waits for all streams."""

from __future__ import annotations

import torch

from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.vendor import Mapped
from tests.kit.devices import DEVICE


def test_memory_stays_while_a_stream_waits_for_an_engine() -> None:
    one = Accelerator(DEVICE.name)
    one.open()
    word = torch.zeros(8, dtype=torch.uint8, device=DEVICE.name)
    torch.accelerator.synchronize()
    with one.calling():
        stream = one.waiting_stream(one)
    with one.calling(), one.may_wait():
        one.vendor.wait_value(word.data_ptr(), 1, stream)
    one.retire([Mapped(torch.zeros(8, dtype=torch.uint8), None)])
    assert not one.let_go()
    with one.calling():
        one.vendor.write_value(word.data_ptr(), 1, one.streams.host_to_device)
        one.wait(stream.record_event())
    assert one.let_go()
