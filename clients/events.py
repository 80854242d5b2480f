"""An engine's side of its event ring: it signals which layers of a SEND are ready by a memory write, not a message.

``ring.step(first_layer, layers)`` makes a step for ``send(steps=…)``; ``ring.record(step)`` signals that its bytes are
in the pages. Steps become ready in the order in which the SEND lists them. ``ring.record_event()`` makes an event that
RECEIVE and FREE wait for, because kernels queued on the stream before it still use the pages.

On a device an event is an interprocess event recorded on the compute stream: nobody waits on the host.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvferry.clients.arguments import whole, wrong_kind
from kvferry.clients.exclusive_use import OfOneProcess
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import ClientClosedError, InvalidFieldError, StaleBootError
from kvferry.protocol.transfer_messages import LayerStep

if TYPE_CHECKING:
    import torch

    from kvferry.pools.devices.accelerator import Accelerator

COUNTER_BYTES = 8


class RingEvent(NamedTuple):
    """An interprocess event of a ring, and its device."""

    accelerator: Accelerator
    event: torch.Event


class RingPlan:
    """Which events were made from a session's ring: it may be opened several times, and no two events are the same.

    Attributes:
        number: by which the daemon knows the ring; 0: it has none.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._made: list[int] = []
        self._next = 0
        self._making = threading.Lock()

    def begin(self, counters: Sequence[int]) -> None:
        """Take note of what the ring's counters are where nothing was made yet: another process may have used it."""
        self._made = self._made or list(counters)

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        return len(self._made)

    @property
    def made(self) -> int:
        """Return how many events were made."""
        return sum(self._made)

    def event(self, counters: npt.NDArray[np.int64]) -> DeviceEvent:
        """Return a new event, if possible in a slot without one that was not recorded: it may never be."""
        with self._making:
            slots = len(self._made)
            later = ((self._next + one) % slots for one in range(slots))
            slot = next((one for one in later if self._made[one] == counters[one]), self._next)
            self._next = (slot + 1) % slots
            self._made[slot] += 1
            return DeviceEvent(event=slot, value=self._made[slot], ring=self.number)


class EventRing(OfOneProcess):
    """One session's ring; made by ``open_events``. Any thread may use it, also while another one uses the client."""

    def __init__(
        self, region: HostRegion, eventfd: int, events: Sequence[RingEvent] = (), plan: RingPlan | None = None
    ) -> None:
        """Take ownership of the mapped counters and the eventfd.

        ``events``: one per slot, for a ring on a device; ``plan``: that of the session, if it may open it again.
        """
        self._region = region
        self._events = events
        self._eventfd = eventfd
        self._counters = region.view().view(np.int64)
        self._plan = plan or RingPlan()
        self._plan.begin(self._counters.tolist())
        self._stale = False

    def __repr__(self) -> str:
        """Show how many steps were made and recorded."""
        if self._eventfd < 0 or not self._region.is_ours:
            return "<EventRing closed>"
        return f"<EventRing steps={self._plan.made} recorded={int(self._counters.sum())}>"

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the ring."""
        self.close()

    @property
    def counters(self) -> npt.NDArray[np.int64]:
        """Return the ring's memory, ``(slots,)`` int64, for engines that record from native code by incrementing it."""
        return self._counters

    def outlive(self) -> None:
        """Note that the ring ended with its daemon: nobody sees what is recorded, and it gives no new event."""
        self._stale = True

    def fileno(self) -> int:
        """Return the eventfd that wakes the daemon: add 1 to it after changing counters."""
        return self._eventfd

    def step(self, first_layer: int, layers: int) -> LayerStep:
        """Return a step for these layers, numbered as in the model, with a new event."""
        event = self.event()
        return LayerStep(first_layer=first_layer, layers=layers, event=event.event, value=event.value, ring=event.ring)

    def event(self) -> DeviceEvent:
        """Return a new event, to be recorded later.

        Raises:
            ClientClosedError: the ring is closed.
            ForkedError: a forked child has no ring.
            StaleBootError: the ring went with a daemon that was restarted: open a new one.
        """
        self._check_open()
        if self._stale:
            raise StaleBootError("the event ring went with the daemon before this one", remedy="call open_events again")
        return self._plan.event(self._counters)

    def record_event(self, stream: torch.Stream | None = None) -> DeviceEvent:
        """Make an event and record it, for ``receive(after=…)`` and ``free(after=…)``; see ``record``."""
        event = self.event()
        self.record(event, stream)
        return event

    def record(self, step: LayerStep | DeviceEvent, stream: torch.Stream | None = None) -> None:
        """Signal that the step's layers are in the pages. Cheap: one store and one system call.

        On a device this covers everything queued so far on the stream, by default the device's current one.

        Raises:
            InvalidFieldError: not a step or event of this ring, or recorded already, or an earlier one in the same slot
                was not recorded.
            ClientClosedError: the ring is closed.
            ForkedError: a forked child has no ring.
        """
        self._check_open()
        if not isinstance(step, LayerStep | DeviceEvent):
            raise wrong_kind(step, "step or event, as the ring makes them", "step")
        slot = whole(step.event, "step.event", least=-math.inf)
        value = whole(step.value, "step.value", least=-math.inf)
        if step.ring not in {0, self._plan.number} or not 0 <= slot < self._plan.slots:
            raise InvalidFieldError(
                f"this ring has no event {slot}: the step is of another ring, or was made by hand", field="step"
            )
        if int(self._counters[slot]) != value - 1:
            raise InvalidFieldError(
                f"event {slot} is at {self._counters[slot]}, the step's value is {value}: record each step once, in "
                "the order in which they were made",
                field="step",
            )
        if self._events:
            device, event = self._events[slot]
            # Before the daemon is woken, which would otherwise see the event's previous record.
            device.vendor.record(event, stream or device.current_stream())
        self._counters[slot] = value
        os.eventfd_write(self._eventfd, 1)

    def _check_open(self) -> None:
        self._region.check_process()
        if self._eventfd < 0:
            raise ClientClosedError("the event ring was closed")

    def close(self) -> None:
        """Close the descriptors, and let the device's events go. Closing twice does nothing."""
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1
            self._region.close()
            self._events = ()
