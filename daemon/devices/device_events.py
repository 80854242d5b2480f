"""An engine's interprocess device events, as seen by the daemon: how often each was recorded and completed.

A thread polls the events that are recorded and not completed, so the control loop never waits; it sleeps while there
are none. An event that is recorded again before its completion was seen counts for both records once the later one
completes: that waits longer than necessary, never too short.
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
POLL_S: Final = 100e-6


class DeviceEvents:
    """The events of one ring. Constructed on a thread that may block; all methods are for the loop."""

    def __init__(self, accelerator: Accelerator, handles: Sequence[bytes]) -> None:
        """Open the events.

        Raises:
            DeviceLostError: a handle does not belong to this device, or the device failed.
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
        """Show the number of completions."""
        return f"<DeviceEvents {self.device} reached={sum(self._reached)}>"

    def reached(self) -> list[int]:
        """Return how often each event was recorded and completed."""
        return list(self._reached)

    @property
    def slots(self) -> int:
        """Return the number of events."""
        return len(self._events)

    def event(self, slot: int) -> torch.Event:
        """Return an event, for a stream to wait for."""
        return self._events[slot]

    def start(self, counters: HostRegion, on_reached: Callable[[], object]) -> None:
        """Poll the events whenever ``counters`` are ahead; ``on_reached`` is called on the polling thread."""
        recorded = counters.view().view(np.int64)  # the view keeps the memory mapped
        self._thread = threading.Thread(target=self._watch, args=(recorded, on_reached), name="events", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Poll again: an event was recorded."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Stop polling."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self, recorded: np.typing.NDArray[np.int64], on_reached: Callable[[], object]) -> None:
        while not self._closed:
            values = recorded.copy()
            behind = [slot for slot, value in enumerate(values.tolist()) if value > self._reached[slot]]
            with contextlib.suppress(KvferryError):  # a lost device ends the daemon elsewhere
                if behind and self._poll(behind, values):
                    on_reached()
                    continue
            with self._changed:
                if not self._woken and not self._closed:
                    self._changed.wait(POLL_S if behind and self._accelerator.lost is None else None)
                self._woken = False

    def _poll(self, behind: Sequence[int], values: np.typing.NDArray[np.int64]) -> bool:
        """Update the completed events. ``values`` were read before, so a later record is waited for separately."""
        any_reached = False
        with self._accelerator.calling():
            for slot in behind:
                try:
                    done = self._events[slot].query()
                except RuntimeError as cause:  # the other process may have ended: says nothing about the device
                    self.close()
                    log.warning(
                        "an engine's device events are gone", device=self.device, cause=str(cause).split("\n")[0][:200]
                    )
                    break
                if done:
                    self._reached[slot] = int(values[slot])
                    any_reached = True
        return any_reached
