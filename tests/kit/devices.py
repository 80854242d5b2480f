"""The device that a run of the tests is for, ``--device``, and regions on it.

Regions on a device are given back once nobody has them: by the next one that is asked for, or by ``Devices.tidy`` after
each test. So harnesses that hypothesis makes by the hundred need not close theirs.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any, Final

import hypothesis

from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion, RegionSegment, StagingPool
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.devices.vendor import Mapped
from kvferry.protocol.ids import HOST

FRACTION: Final = 4
DEVICE_FRACTION: Final = 10  # on a device every example costs more

MANY_BYTES: Final = 1 << 30
"""With so much of the device in use, what cannot be reached any more is looked for."""


class TestDevice:
    """The device of this run; ``name`` is set once, before any test.

    Attributes:
        name: ``host``, ``npu:0`` or ``cuda:0``.
        full: whether property tests try all the examples that they ask for.
    """

    __test__ = False

    def __init__(self) -> None:
        self.name = HOST
        self.full = False
        self._accelerator: Accelerator | None = None
        self._stagings: StagingPool | None = None
        self._unreachable: collections.deque[Mapped] = collections.deque()
        self._used_bytes = 0

    def __repr__(self) -> str:
        """Show the device and what of it is in use."""
        return f"<TestDevice {self.name} {self._used_bytes} bytes>"

    @property
    def accelerator(self) -> Accelerator:
        """Return the device, open; not on the host."""
        assert self.name != HOST, "the host has no device"
        if self._accelerator is None:
            self._accelerator = Accelerator(self.name)
            self._accelerator.open()
        return self._accelerator

    @contextlib.contextmanager
    def expandable_segments(self) -> Iterator[None]:
        """Have this process's allocator on the NPU take new memory in expandable segments meanwhile."""
        memory = self.accelerator.torch.get_device_module(self.name).memory
        with self.accelerator.calling():
            memory.empty_cache()
            memory._set_allocator_settings("expandable_segments:True")  # noqa: SLF001  torch_npu says it no other way
        try:
            yield
        finally:
            with self.accelerator.calling():
                memory._set_allocator_settings("expandable_segments:False")  # noqa: SLF001  the same

    @property
    def stagings(self) -> StagingPool:
        """Return the stagings that all regions on the device share."""
        if self._stagings is None:
            self._stagings = StagingPool(self.accelerator)
        return self._stagings

    def new_region(self, size_bytes: int, name: str = "test") -> Region:
        """Return zeroed memory of the device."""
        if self.name == HOST:
            return HostRegion.create(name, size_bytes)
        if self._used_bytes > MANY_BYTES:
            gc.collect()
        self.tidy()
        device = self.accelerator
        with device.calling():
            mapped = device.allocate(size_bytes)
        self._used_bytes += len(mapped.tensor)
        released: list[weakref.finalize] = []  # type: ignore[type-arg]
        region = AcceleratorRegion(
            device, [RegionSegment(0, mapped)], size_bytes, self.stagings, lambda: self._closed(mapped, released)
        )
        released.append(weakref.finalize(region, self._unreachable.append, mapped))
        return region

    def examples(self, count: int, **others: Any) -> hypothesis.settings:  # noqa: ANN401  hypothesis's own
        """Return settings for a property test: so many examples in a full run, a quarter else; on a device a tenth."""
        part = (1 if self.full else FRACTION) * (1 if self.name == HOST else DEVICE_FRACTION)
        return hypothesis.settings(max_examples=max(2, count // part), **others)

    def synchronize(self) -> None:
        """Wait for what torch was told to do on the device; nothing on the host."""
        if self.name != HOST:
            with self.accelerator.calling():
                self.accelerator.torch.accelerator.synchronize()

    def tidy(self) -> None:
        """Give back the memory of regions that nobody has any more."""
        while self._unreachable:  # filled by whatever thread drops the last reference: so it is only noted there
            mapped = self._unreachable.popleft()
            self._used_bytes -= len(mapped.tensor)
            with self.accelerator.calling():
                self.accelerator.vendor.unmap(mapped)

    def _closed(self, mapped: Mapped, released: list[weakref.finalize]) -> None:  # type: ignore[type-arg]
        released.pop().detach()
        self._used_bytes -= len(mapped.tensor)


DEVICE: Final = TestDevice()
new_region = DEVICE.new_region
