"""An engine's interprocess events on a device, seen from here: which are done, and as often as they were recorded.

A thread looks at the events that are recorded and not done, so the control loop never waits; it rests while there is
none. An event that was recorded again before it was seen done counts for both records once the later one is done: that
waits longer than it must, never too short.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import KvferryError

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)
LOOK_EVERY_S: Final = 100e-6


class DeviceEvents:
    """One ring's events. Made on a thread that may wait; ``start`` and the rest belong on the loop."""

    def __init__(self, accelerator: Accelerator, handles: Sequence[bytes]) -> None:
        """Open the events.

        Raises:
            DeviceLostError: a handle is none of this device's, or the device failed.
        """
        self.device = accelerator.name
        self._accelerator = accelerator
        with accelerator.calling():
            self._events = [accelerator.vendor.open_event(handle, accelerator.index) for handle in handles]
        self._reached = [0] * len(handles)
        self._changed = threading.Condition()
        self._woken = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        """Show how often they were done."""
        return f"<DeviceEvents {self.device} reached={sum(self._reached)}>"

    def reached(self) -> list[int]:
        """Return how often each was recorded and is done."""
        return list(self._reached)

    @property
    def slots(self) -> int:
        """Return how many events there are."""
        return len(self._events)

    def event(self, slot: int) -> torch.Event:
        """Return an event, for a stream to wait for."""
        return self._events[slot]

    def start(self, counters: HostRegion, on_reached: Callable[[], object]) -> None:
        """Look at the events whenever ``counters`` are ahead; ``on_reached`` is called on the thread that looks."""
        recorded = counters.view().view(np.int64)  # the view keeps the memory mapped
        self._thread = threading.Thread(target=self._watch, args=(recorded, on_reached), name="events", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look again: an event was recorded."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Stop looking."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self, recorded: np.typing.NDArray[np.int64], on_reached: Callable[[], object]) -> None:
        while not self._closed:
            values = recorded.copy()
            behind = [slot for slot, value in enumerate(values.tolist()) if value > self._reached[slot]]
            with contextlib.suppress(KvferryError):  # a device that is lost ends the daemon elsewhere
                if behind and self._look(behind, values):
                    on_reached()
                    continue
            with self._changed:
                if not self._woken and not self._closed:
                    self._changed.wait(LOOK_EVERY_S if behind and self._accelerator.lost is None else None)
                self._woken = False

    def _look(self, behind: Sequence[int], values: np.typing.NDArray[np.int64]) -> bool:
        """Take note of the events that are done; the values were read before, so a later record waits for itself."""
        found = False
        with self._accelerator.calling():
            for slot in behind:
                try:
                    done = self._events[slot].query()
                except RuntimeError as cause:  # of another process, which may have ended: no word on the device
                    self.close()
                    log.warning(
                        "an engine's events are gone", device=self.device, cause=str(cause).split("\n")[0][:200]
                    )
                    break
                if done:
                    self._reached[slot] = int(values[slot])
                    found = True
        return found
