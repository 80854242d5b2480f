"""Transfers from and to a device through a real daemon, against one big copy of as many bytes the same way.

One copy needs no gathering, no message and no plan, so a ratio says what those cost. On the simulator copies are held
to one speed and kernels cost what they cost the CPU: there, only how the ratios change is worth a look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch

from benchmarks.measure import MILLISECONDS, Effort, Row, compare
from benchmarks.on_device import Device, measured_on_device
from benchmarks.processes import running_daemon
from benchmarks.transfer import Side, moved_bytes, transfer_s
from kvferry.clients import AttachedPool, Client, MhaSpec
from kvferry.protocol.ids import HOST

PAGE_SIZE: Final = 128
COMPONENT, ROLES = "main", ("k", "v")


class Place(NamedTuple):
    """One pool, pages of it in random order, and memory of its device for the peer's one copy."""

    side: Side
    pool: AttachedPool
    flat: torch.Tensor


def measure(effort: Effort) -> list[Row]:
    """Measure each direction, where there is a device or its simulator.

    Raises:
        MissingPeerError: there is neither.
    """
    return measured_on_device("npu_transfer", effort, kernel_us=0)


def measure_on(device: Device, effort: Effort) -> list[Row]:
    """Measure device to device, device to host and host to device."""
    spec = MhaSpec(
        layers=effort.pick(8, 2), tokens=32 * PAGE_SIZE, page_size=PAGE_SIZE, kv_heads=4, head_dim=128, dtype="float16"
    )
    rounds, pages = effort.pick(9, 1), effort.pick(16, 4)
    with running_daemon() as runtime_dir, Client.connect(runtime_dir, name="bench") as client:
        source = place(client, "source", spec, device.device, pages)
        on_device = place(client, "on-device", spec, device.device, pages)
        on_host = place(client, "on-host", spec, HOST, pages)
        fill(source)
        return [
            row(device, "to_device", source, on_device, rounds),
            row(device, "to_host", on_device, on_host, rounds),
            row(device, "from_host", on_host, source, rounds),
        ]


def place(client: Client, name: str, spec: MhaSpec, device: str, pages: int) -> Place:
    """Make a pool and take pages of it."""
    pool = client.create_pool(name, spec, device=device)
    taken = np.random.default_rng(len(name)).permutation(client.allocate(name, spec.tokens // PAGE_SIZE))[:pages]
    size_bytes = pages * sum(entry.page_bytes for entry in pool.manifest.entries)
    flat = torch.zeros(size_bytes, dtype=torch.uint8)
    return Place(Side(client, name, taken), pool, flat.pin_memory() if device == HOST else flat.to(device))


def fill(one: Place) -> None:
    """Write noise to every page of a pool."""
    torch.manual_seed(0)
    for role in ROLES:
        tensor = one.pool.tensor(COMPONENT, role)
        tensor.copy_(torch.randn(tensor.shape))
    torch.accelerator.synchronize()


def row(device: Device, name: str, source: Place, destination: Place, rounds: int) -> Row:
    """Return the row of one direction, whose bytes are compared once."""
    size_bytes = moved_bytes(source.side, destination.side)
    assert size_bytes == len(source.flat), (size_bytes, len(source.flat))
    found = compare(
        f"npu_transfer/{name}",
        MILLISECONDS,
        ours=lambda: transfer_s(source.side, destination.side) * 1e3,
        peer=one_copy_ms(source.flat, destination.flat),
        peer_is="one copy of as many bytes the same way, between pinned memory and the device",
        rounds=rounds,
        note=f"{size_bytes / 1e6:.1f} MB in {len(source.side.ids)} random pages; {device.note}",
    )
    for role in ROLES:
        sent, came = (one.pool.tensor(COMPONENT, role).cpu()[:, one.side.ids] for one in (source, destination))
        assert torch.equal(sent, came), f"{role} differs"
    return found


def one_copy_ms(source: torch.Tensor, destination: torch.Tensor) -> Callable[[], float]:
    """Return a contender that reports the milliseconds of one copy."""

    def measured() -> float:
        started = time.perf_counter()
        destination.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        return (time.perf_counter() - started) * 1e3

    return measured
