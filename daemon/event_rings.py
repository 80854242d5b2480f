"""Event rings: memory in which an engine notes that layers are ready, and the descriptor by which it says so.

Slot i of a ring holds a counter that its engine only ever raises; a step of a SEND waits until one has reached a value.
On the host device an event is such a counter; the engine writes it and then the eventfd, which wakes the control loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable

import numpy as np

from kvferry.daemon.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.session_socket import SessionSocket
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.limits import EVENT_RING_SLOTS
from kvferry.protocol.session_messages import EventsFollow, EventsOpened, OpenEvents

COUNTER = np.dtype("<i8")
OnReached = Callable[[int, list[int]], None]


class _Ring:
    """One session's ring."""

    def __init__(self, name: str) -> None:
        self.region = HostRegion.create(name, EVENT_RING_SLOTS * COUNTER.itemsize)
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def values(self) -> list[int]:
        values: list[int] = self.region.view().view(COUNTER).tolist()
        return values

    def close(self) -> None:
        os.close(self.eventfd)
        self.region.close()


class EventRings:
    """The rings of all sessions. ``on_reached`` takes a session's number and its counters whenever they may be new."""

    def __init__(self, dispatcher: Dispatcher, session_socket: SessionSocket, on_reached: OnReached) -> None:
        self._session_socket = session_socket
        self._on_reached = on_reached
        self._loop = asyncio.get_running_loop()
        self._rings: dict[int, _Ring] = {}
        dispatcher.handle("OPEN_EVENTS", self._open)

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<EventRings {len(self._rings)}>"

    def values(self, session_id: int) -> list[int]:
        """Return a session's counters.

        Raises:
            InvalidFieldError: it has no ring.
        """
        ring = self._rings.get(session_id)
        if ring is None:
            raise InvalidFieldError("the session has no event ring: OPEN_EVENTS first", field="steps")
        return ring.values()

    def session_lost(self, session_id: int) -> None:
        """Take a last look at a session's counters, and give its ring back."""
        ring = self._rings.pop(session_id, None)
        if ring is not None:
            self._loop.remove_reader(ring.eventfd)
            self._on_reached(session_id, ring.values())
            ring.close()

    def _open(self, call: Call) -> Answer:
        expect(call, OpenEvents)
        session_id = call.session.session_id
        ring = self._rings.get(session_id)
        if ring is None:
            ring = self._rings[session_id] = _Ring(f"events-{session_id}")
            self._loop.add_reader(ring.eventfd, self._reached, session_id, ring)
        fds = (ring.region.fd, ring.eventfd)
        self._session_socket.pass_fds(call.session, EventsFollow(message_id=call.message_id), fds)
        return Answer(EventsOpened(slots=EVENT_RING_SLOTS))

    def _reached(self, session_id: int, ring: _Ring) -> None:
        _take_wake_ups(ring.eventfd)
        self._on_reached(session_id, ring.values())


def _take_wake_ups(eventfd: int) -> None:
    """Read the count, if it is there still, and never wait: the engine may have taken it, and O_NONBLOCK with it."""
    with contextlib.suppress(BlockingIOError):
        try:
            os.preadv(eventfd, [bytearray(COUNTER.itemsize)], -1, os.RWF_NOWAIT)
        except OSError as cause:
            if cause.errno != errno.EOPNOTSUPP:  # a kernel before 5.8: trust the descriptor's own flag
                raise
            os.eventfd_read(eventfd)
