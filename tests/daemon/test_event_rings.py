"""Event rings of the daemon: what engines write to them wakes it, and nothing that they write harms it."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import psutil
import pytest

from kvferry.daemon.control import first_step
from kvferry.daemon.control.dispatch import Answer, AsyncHandler, Call, Dispatcher
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import Peer, Session
from kvferry.daemon.process.descriptors import Descriptors
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.services import event_rings
from kvferry.daemon.services.event_rings import EventRings
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.config.schema import DevicesConfig
from kvferry.protocol.errors import InvalidFieldError, OverloadedError
from kvferry.protocol.limits import EVENT_RING_SLOTS, Limits
from kvferry.protocol.session_messages import EventsOpened, OpenEvents
from kvferry.protocol.session_stream import EventsFollow
from tests.kit.network import ManualExecutor

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]
WAIT_S = 10.0
SIZE_BYTES = EVENT_RING_SLOTS * 8


class Engine(NamedTuple):
    """An engine's end of a ring, without the client library's good manners."""

    counters: np.ndarray[Any, np.dtype[np.int64]]
    region: HostRegion
    eventfd: int

    def write(self, *values: int) -> None:
        """Let the first counters hold these values, and wake the daemon."""
        self.counters[: len(values)] = values
        os.eventfd_write(self.eventfd, 1)


class Daemon:
    """The rings, and what is around them in a daemon.

    Attributes:
        reached: what the rings told the transfer state machine.
    """

    def __init__(self) -> None:
        self.reached: list[tuple[int, list[int]]] = []
        self.passed: list[tuple[Session, EventsFollow, list[int]]] = []
        self.handlers: dict[str, AsyncHandler] = {}
        self._told = asyncio.Event()
        self.engines: list[Engine] = []
        self.devices = Devices(DevicesConfig(), lambda _name, _error: None)
        self.rings = EventRings(
            cast("Dispatcher", self),
            cast("SessionSocket", self),
            self.devices,
            ManualExecutor(),
            self._on_reached,
            Descriptors(),
        )

    def handle(self, kind: str, handler: AsyncHandler) -> None:
        self.handlers[kind] = handler

    def pass_frame(self, session: Session, frame: EventsFollow, fds: Sequence[int]) -> None:
        self.passed.append((session, frame, [os.dup(fd) for fd in fds]))

    def open(self, number: int) -> Engine:
        session = Session(number, "prefill", Peer(1, 2, 3), Limits())
        opening = self.handlers["OPEN_EVENTS"](Call(17, session, OpenEvents(), (), 1.0))
        assert isinstance(opening, Coroutine)
        answer = first_step.begin(opening).result()
        assert isinstance(answer, Answer)
        assert isinstance(answer.body, EventsOpened)
        assert answer.body.slots == EVENT_RING_SLOTS
        to, frame, (counters, eventfd) = self.passed.pop()
        assert (to, frame.message_id) == (session, 17)
        region = HostRegion(counters, SIZE_BYTES)
        self.engines.append(Engine(region.view().view(np.int64), region, eventfd))
        return self.engines[-1]

    async def told(self) -> tuple[int, list[int]]:
        while not self.reached:
            self._told.clear()
            await asyncio.wait_for(self._told.wait(), WAIT_S)
        return self.reached.pop(0)

    def _on_reached(self, session_id: int, values: list[int]) -> None:
        self.reached.append((session_id, values))
        self._told.set()

    def close(self) -> None:
        """Give back all that tests have opened."""
        for number in range(1, 10):
            self.rings.session_lost(number)
        for one in self.engines:
            one.region.close()
            os.close(one.eventfd)


@pytest.fixture
async def daemon() -> Any:  # noqa: ANN401  a generator to anyio, a daemon to tests
    one = Daemon()
    yield one
    one.close()


async def test_what_engines_write_is_told_once_they_say_so_each_of_its_own_ring(daemon: Daemon) -> None:
    engine, other = daemon.open(1), daemon.open(2)
    assert daemon.rings.values(1) == [0] * EVENT_RING_SLOTS
    engine.counters[5] = 3
    written = [0, 0, 0, 0, 0, 3, *[0] * (EVENT_RING_SLOTS - 6)]
    assert daemon.rings.values(1) == written
    for _ in range(5):  # many wake-ups are told as one
        os.eventfd_write(engine.eventfd, 1)
    assert await daemon.told() == (1, written)
    other.write(0, 0, 9)
    session_id, values = await daemon.told()
    assert (session_id, values[:6]) == (2, [0, 0, 9, 0, 0, 0])
    assert daemon.reached == []


CALL = Call(18, Session(1, "prefill", Peer(1, 2, 3), Limits()), OpenEvents(), (), 1.0)


async def test_who_waits_for_an_event_goes_on_once_it_is_reached_in_the_order_of_coming(daemon: Daemon) -> None:
    engine, said = daemon.open(1), list[int]()

    async def wait(number: int, *, event: int, value: int) -> None:
        await daemon.rings.reached(CALL, DeviceEvent(event=event, value=value))
        said.append(number)

    wishes = [(2, 1), (0, 1), (1, 2), (1, 3), (0, 0)]
    waiting = [first_step.begin(wait(number, event=event, value=value)) for number, (event, value) in enumerate(wishes)]
    assert said == [4], "what need not wait goes on at once"
    engine.write(1, 2, 1)
    await asyncio.wait_for(asyncio.gather(*waiting[:3]), WAIT_S)
    assert said == [4, 0, 1, 2]
    assert not waiting[3].done()
    engine.write(1, 3, 1)
    await asyncio.wait_for(waiting[3], WAIT_S)


async def test_requests_that_wait_for_a_sessions_events_are_bounded(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_rings, "MAX_HELD", 2)
    daemon.open(1)
    after = DeviceEvent(event=3, value=1)
    waiting = [first_step.begin(daemon.rings.reached(CALL, after)) for _ in range(2)]
    with pytest.raises(OverloadedError, match="2 requests of the session wait"):
        await daemon.rings.reached(CALL, after)
    await daemon.rings.reached(CALL, None)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert not first_step.begin(daemon.rings.reached(CALL, after)).done(), "who is given up does not count"


async def test_opening_again_gives_the_same_ring(daemon: Daemon) -> None:
    first = daemon.open(1)
    first.write(4)
    await daemon.told()
    again = daemon.open(1)
    assert again.counters[0] == 4
    again.write(5)
    assert (await daemon.told())[1][0] == 5
    assert first.counters[0] == 5


# -- an engine that means harm


async def test_hostile_values_are_read_as_they_are(daemon: Daemon) -> None:
    engine = daemon.open(1)
    wild = [-1, -(1 << 63), (1 << 63) - 1, 1 << 62, 0]
    engine.write(*wild)
    assert (await daemon.told())[1][:5] == wild
    engine.counters[:] = -1
    os.eventfd_write(engine.eventfd, (1 << 64) - 2 - 1)
    assert (await daemon.told())[1] == [-1] * EVENT_RING_SLOTS


async def test_the_ring_cannot_be_made_smaller_under_the_daemon(daemon: Daemon) -> None:
    engine = daemon.open(1)
    for size_bytes in (0, SIZE_BYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(engine.region.fd, size_bytes)


def take_wake_ups(eventfd: int) -> int:
    """Return an eventfd's count, 0 where it is none; never wait."""
    count = bytearray(8)
    try:
        os.preadv(eventfd, [count], -1, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0
    return int.from_bytes(count, sys.byteorder)


async def test_an_engine_that_takes_the_wake_up_back_does_not_stop_the_loop(daemon: Daemon) -> None:
    # The flag belongs to the open file, which both share: without care, the daemon would wait for the next wake-up.
    engine = daemon.open(1)
    flags = fcntl.fcntl(engine.eventfd, fcntl.F_GETFL)
    fcntl.fcntl(engine.eventfd, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    engine.counters[0] = 7
    taken: list[int] = []
    first = os.eventfd(0)
    asyncio.get_running_loop().add_reader(first, lambda: taken.append(take_wake_ups(engine.eventfd)))
    for _ in range(3):
        await asyncio.sleep(0)  # from now on the loop watches both
    os.eventfd_write(first, 1)  # it sees both at once, this one before
    os.eventfd_write(engine.eventfd, 1)
    assert (await daemon.told())[1][0] == 7
    asyncio.get_running_loop().remove_reader(first)
    os.close(first)
    assert taken[0] == 1
    engine.write(8)
    assert (await daemon.told())[1][0] == 8


# -- the session is gone


async def test_a_last_look_is_taken_when_the_session_is_lost(daemon: Daemon) -> None:
    daemon.rings.session_lost(1)
    engine, other = daemon.open(1), daemon.open(2)
    engine.counters[2] = 1  # it died between the store and the wake-up
    for _ in range(2):
        daemon.rings.session_lost(1)
    assert daemon.reached == [(1, [0, 0, 1, *[0] * (EVENT_RING_SLOTS - 3)])]
    with pytest.raises(InvalidFieldError, match="OPEN_EVENTS first") as caught:
        daemon.rings.values(1)
    assert caught.value.field == "steps"
    daemon.reached.clear()
    engine.write(5)
    again = daemon.open(1)
    assert not again.counters.any(), "a new session has a ring of its own"
    other.write(6)
    assert (await daemon.told())[0] == 2
    assert daemon.reached == [], "nothing is told after the session"


async def test_the_descriptors_go_back_with_the_session(daemon: Daemon) -> None:
    process = psutil.Process()
    gc.collect()  # what tests before have left
    before = process.num_fds()
    for number in range(1, 4):
        daemon.open(number)
        engine = daemon.engines.pop()
        engine.write(number)
        daemon.rings.session_lost(number)
        os.close(engine.eventfd)
        engine.region.close()
        del engine
    gc.collect()
    assert process.num_fds() == before
