"""An engine's end of its event ring: which layers of a SEND are ready is said by writing memory, not by a message.

``ring.step(first_layer, layers)`` makes a step for ``send(steps=…)``; ``ring.record(step)`` says that its bytes are in
the pages. Steps become ready in the order in which the SEND names them.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

import numpy as np

from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.limits import EVENT_RING_SLOTS
from kvferry.protocol.room_messages import LayerStep

COUNTER_BYTES = 8


class EventRing:
    """One session's ring; made by ``open_events``. Not for several threads at once."""

    def __init__(self, region: HostRegion, eventfd: int) -> None:
        """Own the mapped counters and the descriptor from now on."""
        self._region = region
        self._eventfd = eventfd
        self._counters = region.view().view(np.int64)
        self._promised: list[int] = self._counters.tolist()  # not 0 where the session opened its ring before
        self._next = 0

    def __repr__(self) -> str:
        """Show how many steps were made and recorded."""
        return f"<EventRing steps={sum(self._promised)} recorded={int(self._counters.sum())}>"

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the ring."""
        self.close()

    def step(self, first_layer: int, layers: int) -> LayerStep:
        """Return a step for these layers, by the model's own numbers, with an event that was not used before."""
        slot = self._next
        self._next = (slot + 1) % EVENT_RING_SLOTS
        self._promised[slot] += 1
        return LayerStep(first_layer=first_layer, layers=layers, event=slot, value=self._promised[slot])

    def record(self, step: LayerStep) -> None:
        """Say that the step's layers are in the pages. Cheap: one store and one system call.

        Raises:
            ValueError: it was recorded before, or one that had the same slot before it was not; or the ring is closed.
        """
        if self._eventfd < 0:
            raise ValueError("the ring is closed")
        if int(self._counters[step.event]) != step.value - 1:
            raise ValueError(f"event {step.event} stands at {self._counters[step.event]}, the step's is {step.value}")
        self._counters[step.event] = step.value
        os.eventfd_write(self._eventfd, 1)

    def close(self) -> None:
        """Give the descriptors back. Closing twice does nothing."""
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1
            self._region.close()
