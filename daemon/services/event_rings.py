"""Event rings: shared memory of counters by which an engine signals progress, with an eventfd that wakes the daemon.

Slot i of a ring holds a counter that its engine only increases; a request waits until a counter has reached a value. On
the host, an event is such a counter. On a device, the counter says how often the slot's interprocess event was
recorded: a value is reached once the event itself is done, which ``DeviceEvents`` sees without blocking. The engine
writes the counter and then the eventfd, which wakes the control loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, Final, NamedTuple

import numpy as np
import structlog

from kvferry.daemon.control.dispatch import Answer, AsyncHandler, Call, Dispatcher, expect
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.process.descriptors import PER_RING, Descriptors
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.process.threads import MORE_THREADS, on_thread
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import (
    CancelledError,
    InvalidFieldError,
    KvferryError,
    OutOfDescriptorsError,
    OutOfMemoryError,
    OverloadedError,
)
from kvferry.protocol.ids import HOST, new_number
from kvferry.protocol.limits import EVENT_RING_SLOTS
from kvferry.protocol.session_messages import EventsOpened, OpenEvents
from kvferry.protocol.session_stream import EventsFollow
from kvferry.protocol.transfer_messages import LayerStep

COUNTER = np.dtype("<i8")
MAX_HELD = 1024
POLL_S: Final = 100e-6

log = structlog.get_logger(__name__)


class _Waiting(NamedTuple):
    """A request and the device event it waits for."""

    call: Call
    device_event: DeviceEvent


class _Ring:
    """One session's ring; ``events`` are a device's, None on the host."""

    def __init__(self, name: str, slots: int, events: DeviceEvents | None) -> None:
        self.region = HostRegion.create(name, slots * COUNTER.itemsize)
        try:
            self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as cause:
            self.region.close()
            raise OutOfDescriptorsError(f"no event ring: {cause.strerror}") from cause
        self.number = new_number()
        self.slots = slots
        self.events = events
        self.waiting: dict[asyncio.Future[None], _Waiting] = {}

    def check(self, one: DeviceEvent | LayerStep, field: str) -> None:
        """Check that an event or a step is of this ring.

        Raises:
            InvalidFieldError: it is not: what it waits for is not what the engine means.
        """
        if one.ring not in {0, self.number}:
            raise InvalidFieldError("it is of another event ring than the session's own", field=field)
        if one.event >= self.slots:
            raise InvalidFieldError(f"event {one.event}; the session's ring has {self.slots}", field=field)

    def release(self) -> None:
        """Let the requests go on whose events are reached, in the order in which they came."""
        if not self.waiting:
            return
        done = self.values()
        for future, (_, device_event) in self.waiting.items():
            if done[device_event.event] >= device_event.value and not future.done():
                future.set_result(None)

    def values(self) -> list[int]:
        if self.events is not None:
            return self.events.reached()
        values: list[int] = self.region.view().view(COUNTER).tolist()
        return values

    def close(self) -> None:
        os.close(self.eventfd)
        if self.events is not None:
            self.events.close()
        self.region.close()


class EventRings:
    """The rings of all sessions. Publishes ``DeviceEventsReached`` whenever a session's values may have changed."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        session_socket: SessionSocket,
        devices: Devices,
        executor: Executor,
        reached: Callable[[int, list[int]], None],
        descriptors: Descriptors,
    ) -> None:
        """Have ``executor`` open the events of devices, which may block.

        ``reached`` is called with a session and the values of its ring, by slot, where they may have changed.
        """
        self._descriptors = descriptors
        self._dispatcher = dispatcher
        self._session_socket = session_socket
        self._devices = devices
        self._executor = executor
        self._reached = reached
        self._loop = asyncio.get_running_loop()
        self._rings: dict[int, _Ring] = {}
        dispatcher.handle("OPEN_EVENTS", self._open)

    def __repr__(self) -> str:
        """Show how many rings there are."""
        return f"<EventRings {len(self._rings)}>"

    def values(self, session_id: int, steps: Sequence[LayerStep] = ()) -> list[int]:
        """Return the values that a session's events have reached, for which these steps wait.

        Raises:
            InvalidFieldError: it has no ring, or a step is of another one.
        """
        ring = self._ring(session_id, "steps")
        for one in steps:
            ring.check(one, "steps")
        return ring.values()

    def after(self, handle: AsyncHandler) -> AsyncHandler:
        """Return a handler that waits for a request's device event, its ``after``, before it handles it."""

        async def handle_then(call: Call, device_event: DeviceEvent) -> Answer | None:
            await self.reached(call, device_event)
            answer = handle(call)
            return answer if answer is None or isinstance(answer, Answer) else await answer

        def handle_after(call: Call) -> Coroutine[Any, Any, Answer | None] | Answer | None:
            device_event = getattr(call.body, "after", None)
            return handle(call) if device_event is None else handle_then(call, device_event)

        return handle_after

    async def reached(self, call: Call, device_event: DeviceEvent | None) -> None:
        """Wait for a device event of the session of a request, if one is given.

        Raises:
            InvalidFieldError: the session has no such event.
            OverloadedError: the session has too many requests that wait.
        """
        if device_event is None:
            return
        ring = self._ring(call.session.session_id, "after")
        ring.check(device_event, "after.event")
        if ring.values()[device_event.event] >= device_event.value:
            return
        if len(ring.waiting) >= MAX_HELD:
            raise OverloadedError(f"{MAX_HELD} requests of the session wait for its events")
        future = self._loop.create_future()
        ring.waiting[future] = _Waiting(call, device_event)
        try:
            await future
        finally:
            del ring.waiting[future]

    def give_up(self, session_id: int, is_wanted: Callable[[Call], bool]) -> bool:
        """Answer a session's waiting requests that ``is_wanted`` picks with CANCELLED; return whether there was one."""
        ring = self._rings.get(session_id)
        waiting = [one.call for one in ring.waiting.values()] if ring is not None else []
        found = [call for call in waiting if call.session.is_pending(call.message_id) and is_wanted(call)]
        for call in found:
            error = CancelledError("cancelled before its event was reached")
            self._dispatcher.answer_error(call.session, call.message_id, error)
        return bool(found)

    def session_lost(self, session_id: int) -> None:
        """Read a session's counters a last time, and close its ring."""
        ring = self._rings.pop(session_id, None)
        if ring is not None:
            self._loop.remove_reader(ring.eventfd)
            self._reached(session_id, ring.values())
            ring.close()

    def _ring(self, session_id: int, field: str) -> _Ring:
        ring = self._rings.get(session_id)
        if ring is None:
            raise InvalidFieldError("the session has no event ring: OPEN_EVENTS first", field=field)
        return ring

    async def _open(self, call: Call) -> Answer:
        body = expect(call, OpenEvents)
        ring = self._rings.get(call.session.session_id)
        if ring is None and body.device != HOST:
            return await self._open_on_device(call, body.device)
        if ring is None:
            ring = self._start(call, EVENT_RING_SLOTS, None)
        elif ring.events is not None or body.device != HOST:
            self._session_socket.take_share(call.session, call.message_id)  # drop the events that came with it
            where = HOST if ring.events is None else ring.events.device
            raise InvalidFieldError(f"the session has a ring on {where} already: use that one", field="device")
        return self._pass_ring(call, ring)

    async def _open_on_device(self, call: Call, device: str) -> Answer:
        shared = self._session_socket.take_share(call.session, call.message_id).events
        if shared is None or not shared.handles:
            raise InvalidFieldError("no events came over the session socket before OPEN_EVENTS", field="events")
        handles = shared.handles
        try:
            events = await on_thread(
                self._executor, lambda: DeviceEvents(self._devices.open(device), handles), DeviceEvents.close
            )
            try:
                return self._opened(call, events)
            except BaseException:
                events.close()  # a retry brings new ones
                raise
        except OSError as cause:
            raise OutOfMemoryError(f"no event ring: {cause}") from cause

    def _opened(self, call: Call, events: DeviceEvents) -> Answer:
        session_id = call.session.session_id
        if not self._session_socket.is_connected(call.session) or session_id in self._rings:
            raise InvalidFieldError("the session has a ring, or has ended", field="device")
        try:
            return self._pass_ring(call, self._start(call, events.slots, events))
        except (KvferryError, OSError):
            self.session_lost(session_id)
            raise

    def _start(self, call: Call, slots: int, events: DeviceEvents | None) -> _Ring:
        session_id = call.session.session_id
        ring = _Ring(f"events-{session_id}", slots, events)
        try:
            self._descriptors.take(ring.region, call.session.tenant, "sessions", PER_RING)
        except KvferryError:
            ring.close()
            raise
        self._rings[session_id] = ring
        if events is not None:
            events.start(ring.region, functools.partial(self._loop.call_soon_threadsafe, self._check, session_id, ring))
        self._loop.add_reader(ring.eventfd, self._woken, session_id, ring)
        return ring

    def _pass_ring(self, call: Call, ring: _Ring) -> Answer:
        fds = (ring.region.fd, ring.eventfd)
        self._session_socket.pass_frame(call.session, EventsFollow(message_id=call.message_id), fds)
        return Answer(EventsOpened(slots=ring.slots, ring=ring.number))

    def _woken(self, session_id: int, ring: _Ring) -> None:
        _clear_eventfd(ring.eventfd)
        if ring.events is None:
            self._check(session_id, ring)
        else:
            ring.events.wake()

    def _check(self, session_id: int, ring: _Ring) -> None:
        if self._rings.get(session_id) is ring:
            self._reached(session_id, ring.values())
            ring.release()


def _clear_eventfd(eventfd: int) -> None:
    """Reset the eventfd without ever blocking: the engine may have read it first, or have cleared O_NONBLOCK."""
    with contextlib.suppress(BlockingIOError):
        try:
            os.preadv(eventfd, [bytearray(COUNTER.itemsize)], -1, os.RWF_NOWAIT)
        except OSError as cause:
            if cause.errno != errno.EOPNOTSUPP:  # a kernel before 5.8: trust the descriptor's own flag
                raise
            os.eventfd_read(eventfd)


class DeviceEvents:
    """An engine's interprocess device events: how often each was recorded and completed.

    A thread polls the events that are recorded and not completed, so the control loop never waits; it sleeps while
    there are none. An event that is recorded again before its completion was seen counts for both records once the
    later one completes: that waits longer than necessary, never too short.

    Constructed on a thread that may block; all methods are for the loop.
    """

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

    def start(self, counters: HostRegion, on_reached: Callable[[], object]) -> None:
        """Poll the events whenever ``counters`` are ahead; ``on_reached`` is called on the polling thread.

        Raises:
            OutOfMemoryError: the system gives no more threads.
        """
        recorded = counters.view().view(np.int64)  # the view keeps the memory mapped
        self._thread = threading.Thread(target=self._watch, args=(recorded, on_reached), name="events", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as cause:
            raise OutOfMemoryError(f"no thread for the events: {cause}", remedy=MORE_THREADS) from cause

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
