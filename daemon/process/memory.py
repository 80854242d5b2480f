"""Host memory: how much more of it regions may take, and their allocation in steps that can be stopped.

The kernel ends a process that takes more than its control group or the machine allows; so what does not fit is refused
before it is taken. Knows regions, but not what they are for.
"""

from __future__ import annotations

import threading
import weakref
from typing import Final

from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.config.memory import Read, narrowest_limit, read_file
from kvferry.protocol.errors import OutOfMemoryError

_LESS: Final = "make it smaller, give other memory back, or allow the daemon more"


class HostMemory:
    """What the daemon takes of its host's memory. ``fill`` is for threads, the rest for the control loop."""

    def __init__(self, read: Read = read_file) -> None:
        """``read`` returns the texts of files about the host's memory."""
        self._read = read
        self._counted: weakref.WeakKeyDictionary[HostRegion, int] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        """Show how much is counted on."""
        return f"<HostMemory promised={self.promised_bytes}>"

    @property
    def promised_bytes(self) -> int:
        """Return what regions will still take, beyond the memory that they have."""
        live = [(one, up_to) for one, up_to in self._counted.items() if one.fd >= 0]
        return sum(max(0, up_to - one.allocated_bytes) for one, up_to in live)

    def count_on(self, region: HostRegion, up_to: int) -> None:
        """Count on a region to take memory for its first ``up_to`` bytes, until it is closed.

        Raises:
            OutOfMemoryError: there is not so much left; what was counted on before still is.
        """
        before = self._counted.pop(region, None)
        try:
            self._check(max(0, up_to - region.allocated_bytes), self.promised_bytes)
        except OutOfMemoryError:
            if before is not None:
                self._counted[region] = before
            raise
        self._counted[region] = up_to

    def fill(self, region: HostRegion, stopped: threading.Event, start: int = 0, stop: int | None = None) -> None:
        """Allocate a region's memory step by step, as long as there is enough and until ``stopped`` is set.

        Raises:
            OutOfMemoryError: there is too little by now.
        """

        def go_on(step_bytes: int) -> bool:
            if stopped.is_set():
                return False
            self._check(step_bytes, 0)
            return True

        region.populate(go_on, start, stop)

    def _check(self, wanted_bytes: int, promised_bytes: int) -> None:
        if not wanted_bytes:
            return
        limit = narrowest_limit(self._read)
        if promised_bytes + wanted_bytes > limit.room_bytes:
            promised = f", {promised_bytes} of which pools and tiers will still take" if promised_bytes else ""
            raise OutOfMemoryError(
                f"{wanted_bytes} bytes of host memory are needed; {limit.whose} has {limit.room_bytes} left of "
                f"{limit.size_bytes}{promised}",
                remedy=_LESS,
            )
