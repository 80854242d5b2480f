"""Stagings of a device: a buffer on it into which scattered bytes are gathered, and pinned host memory for the copy.

The caller that takes a staging ensures that nothing uses it any more when it gives it back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.planning.copies import Cells

if TYPE_CHECKING:
    import torch

STAGING_BYTES: Final = 8 << 20


class Staging:
    """Buffers for one copy at a time: bytes on the device, as many in pinned memory, and space for cell numbers."""

    def __init__(self, accelerator: Accelerator, size_bytes: int) -> None:
        self._accelerator = accelerator
        backend = self._torch = accelerator.torch
        self._device = backend.device(accelerator.kind, accelerator.index)
        self.size_bytes = size_bytes
        self.on_device = backend.empty(size_bytes, dtype=backend.uint8, device=self._device)
        self._pinned: torch.Tensor | None = None
        self.done = backend.Event(device=self._device)
        self._numbers_pinned = backend.empty(0, dtype=backend.int64)
        self._numbers_on_device = backend.empty(0, dtype=backend.int64, device=self._device)
        self._used = 0
        self._known: dict[int, tuple[Any, torch.Tensor]] = {}

    @property
    def pinned(self) -> torch.Tensor:
        """Return the pinned memory; within ``calling``. Allocated on first use: registered memory does not need it."""
        if self._pinned is None:
            self._pinned = self._accelerator.pinned(self.size_bytes, self._torch.uint8)
        return self._pinned

    def begin(self, parts: Sequence[Cells]) -> None:
        """Discard the cell numbers of the previous copy, which is done; reserve space for those of the next one."""
        self._used, self._known = 0, {}
        needed = sum({id(one.numbers): len(one.numbers) for one in parts}.values())
        if needed > len(self._numbers_pinned):
            size = 1 << (needed - 1).bit_length()
            self._numbers_pinned = self._accelerator.pinned(size, self._torch.int64)
            self._numbers_on_device = self._torch.empty(size, dtype=self._torch.int64, device=self._device)

    def numbers(self, numbers: np.typing.NDArray[np.int64]) -> torch.Tensor:
        """Return cell numbers on the device, copied on the current stream; the same array is copied only once."""
        known = self._known.get(id(numbers))
        if known is not None:
            return known[1]
        there: torch.Tensor
        here = slice(self._used, self._used + len(numbers))
        self._used = here.stop
        self._numbers_pinned[here].numpy()[:] = numbers
        there = self._numbers_on_device[here]
        there.copy_(self._numbers_pinned[here], non_blocking=True)
        self._known[id(numbers)] = (numbers, there)
        return there


class StagingPool:
    """The stagings of one device: one for each concurrent copy, kept for reuse.

    Attributes:
        staging_bytes: size of a staging; larger if one segment alone is larger.
    """

    def __init__(self, accelerator: Accelerator, staging_bytes: int = STAGING_BYTES) -> None:
        self.staging_bytes = staging_bytes
        self._accelerator = accelerator
        self._free: list[Staging] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of free stagings."""
        return len(self._free)

    @contextmanager
    def take(self, size_bytes: int, parts: Sequence[Cells]) -> Iterator[Staging]:
        """Take a staging for a copy of these cells; the copy ends inside this context."""
        staging = self.take_buffer(size_bytes, parts)
        yield staging  # not given back if the device failed: a copy may still use it
        self.give_back(staging)

    def take_buffer(self, size_bytes: int, parts: Sequence[Cells]) -> Staging:
        """Return a staging of at least this size for a copy of these cells; within ``calling``."""
        with self._lock:
            staging = self._free.pop() if self._free else None
        if staging is None or staging.size_bytes < size_bytes:
            staging = Staging(self._accelerator, max(size_bytes, self.staging_bytes))
        staging.begin(parts)
        return staging

    def give_back(self, staging: Staging) -> None:
        """Return a staging to the pool; its copy is done."""
        with self._lock:
            self._free.append(staging)
