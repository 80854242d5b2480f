"""Transfers from and to a device through a real daemon, against one big copy of as many bytes the same way.

One copy needs no gathering, no message and no plan, so a ratio says what those cost. On the simulator copies are held
to one speed and kernels cost what they cost the CPU: there, only how the ratios change is worth a look.
"""

from __future__ import annotations

import torch

from benchmarks.measure import MILLISECONDS, Effort, Row, compare, milliseconds
from benchmarks.on_device import Device, measured_on_device
from benchmarks.pools import PAGE_SIZE, Pair
from benchmarks.processes import running_daemon
from kvferry.clients import Client, MhaSpec
from kvferry.protocol.ids import HOST


def measure(effort: Effort) -> list[Row]:
    """Measure each direction, where there is a device or its simulator.

    Raises:
        MissingPeerError: there is neither.
    """
    return measured_on_device("npu_transfer", effort, kernel_us=0)


def measure_on(device: Device, effort: Effort) -> list[Row]:
    """Measure device to device, device to host and host to device."""
    spec = MhaSpec(
        layers=effort.pick(8, 2),
        tokens=effort.pick(16, 4) * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=4,
        head_dim=128,
        dtype="float16",
    )
    name, rows = device.name, []
    with running_daemon() as runtime_dir, Client.connect(runtime_dir, name="bench") as client:
        for way, devices in {"to_device": (name, name), "to_host": (name, HOST), "from_host": (HOST, name)}.items():
            with Pair((client, client), spec, devices=devices) as pair:
                torch.accelerator.synchronize()  # the noise is there
                rows.append(_row(way, pair, devices, device.note, effort))
    return rows


def _row(way: str, pair: Pair, devices: tuple[str, str], note: str, effort: Effort) -> Row:
    flat = torch.zeros(pair.size_bytes, dtype=torch.uint8)
    source, target = (flat.pin_memory() if one == HOST else flat.to(one) for one in devices)

    def one_copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()

    row = compare(
        f"npu_transfer/{way}",
        MILLISECONDS,
        ours=lambda: pair.transfer_s() * 1e3,
        peer=milliseconds(one_copy),
        peer_is="one copy of as many bytes the same way, between pinned memory and the device",
        rounds=effort.pick(9, 1),
        note=f"{pair.size_bytes / 1e6:.1f} MB in {pair.count} random pages; {note}",
    )
    pair.check()
    return row
