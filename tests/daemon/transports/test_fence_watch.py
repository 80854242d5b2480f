"""When a fence comes, what it waits for, and what a fence that fails leaves."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.landing import FenceBounds, LandingSlots
from kvferry.daemon.metrics import Counters
from kvferry.daemon.transports import fence_watch
from kvferry.daemon.transports.fence_watch import FenceWatch
from kvferry.protocol.errors import KvferryError, TransferFailedError
from kvferry.protocol.ids import BootId

pytestmark = pytest.mark.anyio
PEER = BootId("a" * 32)
AT_ONCE = FenceBounds(quarantined_bytes=0, quarantined_s=1e9, drain_timeout_s=1e9)
IMPATIENT = FenceBounds(quarantined_bytes=0, quarantined_s=1e9, drain_timeout_s=0.0)


class World:
    """A watch, and all that it deals with: it is the engine and the grants."""

    def __init__(self, bounds: FenceBounds) -> None:
        self.slots = LandingSlots(4096, 4096, 4, bounds)
        self.counters = Counters()
        self.watch = FenceWatch(self, self.slots, self, self.counters)
        self.session_name = "session"
        self.writing = False
        self.held = False
        self.unanswered = False
        self.error: KvferryError | None = None
        self.said: list[str] = []
        self.rebuilt = asyncio.Event()

    def hold(self, *, held: bool) -> None:
        """See ``Fence``."""
        self.held = held

    async def rebuild(self) -> str:
        """See ``Fence``."""
        self.said.append(f"rebuild, held {self.held}")
        self.rebuilt.set()
        if self.error is not None:
            raise self.error
        return self.session_name

    def rest_unanswered(self, now_s: float) -> None:
        """See ``Grants``."""
        if self.unanswered:
            self.unanswered = False
            self.rest(now_s)

    def cut_off(self, numbers: set[int], error: KvferryError) -> None:
        """See ``Grants``."""
        self.said.append(f"cut off {sorted(numbers)} {error.code}")

    def nothing_lands(self) -> None:
        """See ``Grants``."""
        self.said.append("nothing lands")

    def pump(self) -> None:
        """See ``Grants``."""

    def rest(self, now_s: float = 0.0) -> None:
        """Let a slot rest."""
        slot = self.slots.take(PEER, 1)
        assert slot is not None
        self.slots.quarantine(slot.number, PEER, 1, now_s)

    async def turns(self) -> None:
        """Let the watch look some times."""
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _looks_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence_watch, "LOOK_S", 0.0)


async def test_nothing_is_watched_where_nothing_rests() -> None:
    world = World(AT_ONCE)
    world.watch.look()
    await world.turns()
    assert (world.said, world.watch.state) == ([], "ready")


async def test_what_rests_is_free_after_a_fence() -> None:
    world = World(AT_ONCE)
    world.rest()
    with capture_logs() as logs:
        world.watch.look()
        await world.turns()
    assert world.said == ["cut off [] TRANSFER_FAILED", "rebuild, held True", "nothing lands"]
    assert (world.slots.free, world.held, world.watch.state) == (4, False, "ready")
    assert world.counters.snapshot() == {"landing.fences": 1}
    assert [(one["event"], one["freed"]) for one in logs] == [("landing slots fenced", 1)]


@pytest.mark.parametrize("of_peers", [True, False])
async def test_a_fence_waits_for_grants_and_for_own_writes(*, of_peers: bool) -> None:
    world = World(AT_ONCE)
    world.rest()
    live = world.slots.take(PEER, 2) if of_peers else None
    world.writing = not of_peers
    world.watch.look()
    await world.turns()
    assert (world.said, world.held, world.watch.state) == ([], True, "draining")
    if live is not None:
        world.slots.give_back(live.number, PEER, 2)
    world.writing = False
    with capture_logs():
        await world.turns()
    assert (world.slots.free, world.held, world.watch.state) == (4, False, "ready")


async def test_a_fence_does_not_wait_for_ever() -> None:
    world = World(IMPATIENT)
    world.rest()
    world.slots.take(PEER, 2)
    world.writing = True
    with capture_logs():
        world.watch.look()
        await world.turns()
    assert world.said[0] == "cut off [1] TRANSFER_FAILED"
    assert world.slots.free == 4


async def test_grants_that_nobody_answers_are_watched_too() -> None:
    world = World(AT_ONCE)
    world.unanswered = True
    with capture_logs():
        world.watch.look()
        await world.turns()
    assert world.counters.snapshot() == {"landing.fences": 1}


async def test_after_a_fence_that_failed_nothing_is_granted_and_nothing_tried_again() -> None:
    world = World(AT_ONCE)
    world.rest()
    world.error = TransferFailedError("no engine")
    with capture_logs() as logs:
        world.watch.look()
        await world.turns()
        world.watch.look()
        await world.turns()
    assert world.said == ["cut off [] TRANSFER_FAILED", "rebuild, held True"]
    assert [one["log_level"] for one in logs] == ["error"]
    assert world.watch.state == "broken"
    assert world.slots.take(PEER, 9) is None


async def test_nothing_is_watched_after_the_end() -> None:
    world = World(AT_ONCE)
    world.rest()
    world.watch.close()
    world.watch.look()
    await world.turns()
    assert world.said == []
