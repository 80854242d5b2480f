"""Page copies on their own streams while another stream computes: both together, against the longer of the two alone.

1.0 is a perfect overlap. The copies are those of the daemon's regions on devices: gathered by a kernel an entry, and
one copy over. The last row shows what a copy costs that has to wait for the compute stream, as it would on one stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, compare
from benchmarks.on_device import Device, measured_on_device
from benchmarks.pools import MIB, noise
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion, RegionSegment, StagingPool
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.copies import copy_one_by_one
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.planning.plan import make_plan
from kvferry.protocol.manifests import Entry

PAGE_BYTES: Final = 128 << 10
LAYERS: Final = 4
MOST: Final = 1.1
ALONE: Final = "the longer of the two alone: the copy, or the kernels, of which there are as many as take as long"
# Slow enough that the simulator's own work on a shared machine hardly counts.
KERNEL_US: Final = 4000


def measure(effort: Effort) -> list[Row]:
    """Measure each direction, where there is a device or its simulator.

    Raises:
        MissingPeerError: there is neither.
    """
    return measured_on_device("device_overlap", effort, kernel_us=KERNEL_US)


def measure_on(device: Device, effort: Effort) -> list[Row]:
    """Measure each direction on this process's device."""
    rounds = effort.pick(7, 1)
    with copies(device, effort.pick(32, 8) * MIB) as one:
        rows = [
            one.row(f"device_overlap/{name}", action, rounds, Target(MOST)) for name, action in one.directions.items()
        ]
        rows.append(one.row("device_overlap/one_stream", one.to_host_in_turn, rounds, None))
        one.check()
    return rows


class Copies:
    """Two regions on a device, registered host memory, and kernels on a stream of their own."""

    def __init__(self, device: Device, accelerator: Accelerator, size_bytes: int) -> None:
        self._device = device
        self._accelerator = accelerator
        torch = self._torch = accelerator.torch
        pages = size_bytes // PAGE_BYTES // LAYERS
        entries = [
            Entry(
                component="main", role="k", layer=layer, base=0, page_bytes=PAGE_BYTES, page_tokens=128, pages=pages + 1
            )
            for layer in range(LAYERS)
        ]
        manifest = lay_out(entries)
        ids = [np.random.default_rng(seed).permutation(np.arange(1, pages + 1)) for seed in (1, 2)]
        self._plan = make_plan(pair_entries(manifest.entries, manifest.entries), *ids)
        self._segments = LAYERS * pages
        stagings = StagingPool(accelerator)
        with accelerator.calling():
            self._source, self._destination = (
                AcceleratorRegion(accelerator, [RegionSegment(0, accelerator.allocate(size))], size, stagings)
                for size in [manifest.region_bytes] * 2
            )
        self._host = HostRegion.create("bench-overlap", size_bytes)
        self._noise = noise(size_bytes)
        accelerator.register_host(self._host)
        with accelerator.calling():
            side = 64 if device.simulated else 4096
            self._matrix = torch.ones(side, side, device=accelerator.name)
            self._product = torch.empty_like(self._matrix)
            self._stream = torch.get_device_module(accelerator.kind).Stream()
        self._host.view()[:] = self._noise
        self._source.scatter(self._plan.source, 0, self._segments, self._host.address, copy_one_by_one)
        self.directions: dict[str, Callable[[], None]] = {
            "to_host": self._to_host,
            "to_device": self._to_device,
            "on_device": self._on_device,
        }

    def row(self, name: str, copy: Callable[[], None], rounds: int, target: Target | None) -> Row:
        """Return the row of one kind of copy."""
        kernels = self._kernels_for(copy)

        def alone() -> float:
            return max(self._ms(copy), self._ms(lambda: self._compute(kernels)))

        def both() -> None:
            self._compute(kernels)
            copy()

        return compare(
            name,
            MILLISECONDS,
            ours=lambda: self._ms(both),
            peer=alone,
            peer_is=ALONE,
            rounds=rounds,
            target=target,
            note=f"{kernels} kernels, {self._plan.total_bytes / MIB:.0f} MiB in random pages; {self._device.note}",
        )

    def to_host_in_turn(self) -> None:
        """Copy to the host, once the compute stream has come so far."""
        with self._accelerator.calling():
            self._accelerator.streams.device_to_host.wait_stream(self._stream)
        self._to_host()

    def check(self) -> None:
        """Compare what came back by all three ways with what was there."""
        self._host.view()[:] = 0
        self._on_device()
        self._destination.gather(self._plan.destination, 0, self._segments, self._host.address, copy_one_by_one)
        assert np.array_equal(self._host.view(), self._noise), "the pages differ"

    def close(self) -> None:
        """Give all memory back."""
        self._source.close()
        self._destination.close()
        with self._accelerator.calling():
            self._accelerator.unregister_host(self._host)
        self._host.close()

    def _to_host(self) -> None:
        self._source.gather(self._plan.source, 0, self._segments, self._host.address, copy_one_by_one)

    def _to_device(self) -> None:
        self._destination.scatter(self._plan.destination, 0, self._segments, self._host.address, copy_one_by_one)

    def _on_device(self) -> None:
        self._destination.copy_from(self._source, self._plan, 0, self._segments)

    def _compute(self, kernels: int) -> None:
        """Give kernels to the compute stream, and do not wait."""
        with self._accelerator.calling(), self._stream:
            for _ in range(kernels):
                self._torch.mm(self._matrix, self._matrix, out=self._product)

    def _kernels_for(self, copy: Callable[[], None]) -> int:
        """Return how many kernels take as long as a copy."""
        some = 5
        self._compute(1)
        kernel_ms = statistics.median(self._ms(lambda: self._compute(some)) for _ in range(3)) / some
        return max(1, round(statistics.median(self._ms(copy) for _ in range(3)) / kernel_ms))

    def _ms(self, action: Callable[[], object]) -> float:
        """Return the milliseconds from nothing to do, to nothing left to do."""
        self._synchronize()
        started = time.perf_counter()
        action()
        self._synchronize()
        return (time.perf_counter() - started) * 1e3

    def _synchronize(self) -> None:
        with self._accelerator.calling():
            self._stream.synchronize()


@contextmanager
def copies(device: Device, size_bytes: int) -> Iterator[Copies]:
    """Open the device and make what is copied."""
    accelerator = Accelerator(device.name)
    accelerator.open()
    made = Copies(device, accelerator, size_bytes)
    try:
        yield made
    finally:
        made.close()
