"""When a fence comes, what it waits for, and what a fence that fails leaves."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transports import fence_watch
from kvferry.daemon.transports.bounce_buffers import BounceBuffers, FenceBounds
from kvferry.daemon.transports.fence_watch import FenceWatch
from kvferry.protocol.errors import KvferryError, TransferFailedError
from kvferry.protocol.ids import BootId

pytestmark = pytest.mark.anyio
PEER = BootId("a" * 32)
AT_ONCE = FenceBounds(quarantined_bytes=0, quarantined_s=1e9, drain_timeout_s=1e9)
IMPATIENT = FenceBounds(quarantined_bytes=0, quarantined_s=1e9, drain_timeout_s=0.0)


class Harness:
    """A watch, and all that it deals with: it is the engine and the grants."""

    def __init__(self, bounds: FenceBounds) -> None:
        self.bounce_buffers = BounceBuffers(4096, 4096, 4, bounds)
        self.counters = Counters()
        self.watch = FenceWatch(self, self.bounce_buffers, self, self.counters)
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

    def quarantine_unanswered(self, now_s: float) -> None:
        """See ``Grants``."""
        if self.unanswered:
            self.unanswered = False
            self.rest(now_s)

    def fail_ops(self, numbers: set[int], error: KvferryError) -> None:
        """See ``Grants``."""
        self.said.append(f"cut off {sorted(numbers)} {error.code}")

    def on_fenced(self) -> None:
        """See ``Grants``."""
        self.said.append("nothing lands")

    def pump(self) -> None:
        """See ``Grants``."""

    def rest(self, now_s: float = 0.0) -> None:
        """Let a bounce buffer rest."""
        bounce_buffer = self.bounce_buffers.take(PEER, 1)
        assert bounce_buffer is not None
        self.bounce_buffers.quarantine(bounce_buffer.number, PEER, 1, now_s)

    async def turns(self) -> None:
        """Let the watch check some times."""
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _looks_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence_watch, "CHECK_INTERVAL_S", 0.0)


async def test_nothing_is_watched_where_nothing_rests() -> None:
    harness = Harness(AT_ONCE)
    harness.watch.start_if_needed()
    await harness.turns()
    assert (harness.said, harness.watch.state) == ([], "ready")


async def test_what_rests_is_free_after_a_fence() -> None:
    harness = Harness(AT_ONCE)
    harness.rest()
    with capture_logs() as logs:
        harness.watch.start_if_needed()
        await harness.turns()
    assert harness.said == ["cut off [] TRANSFER_FAILED", "rebuild, held True", "nothing lands"]
    assert (harness.bounce_buffers.free, harness.held, harness.watch.state) == (4, False, "ready")
    assert harness.counters.snapshot() == {"network.fences": 1}
    assert [(one["event"], one["freed"]) for one in logs] == [("bounce buffers fenced", 1)]


@pytest.mark.parametrize("of_peers", [True, False])
async def test_a_fence_waits_for_grants_and_for_own_writes(*, of_peers: bool) -> None:
    harness = Harness(AT_ONCE)
    harness.rest()
    live = harness.bounce_buffers.take(PEER, 2) if of_peers else None
    harness.writing = not of_peers
    harness.watch.start_if_needed()
    await harness.turns()
    assert (harness.said, harness.held, harness.watch.state) == ([], True, "draining")
    if live is not None:
        harness.bounce_buffers.give_back(live.number, PEER, 2)
    harness.writing = False
    with capture_logs():
        await harness.turns()
    assert (harness.bounce_buffers.free, harness.held, harness.watch.state) == (4, False, "ready")


async def test_a_fence_does_not_wait_for_ever() -> None:
    harness = Harness(IMPATIENT)
    harness.rest()
    harness.bounce_buffers.take(PEER, 2)
    harness.writing = True
    with capture_logs():
        harness.watch.start_if_needed()
        await harness.turns()
    assert harness.said[0] == "cut off [1] TRANSFER_FAILED"
    assert harness.bounce_buffers.free == 4


async def test_grants_that_nobody_answers_are_watched_too() -> None:
    harness = Harness(AT_ONCE)
    harness.unanswered = True
    with capture_logs():
        harness.watch.start_if_needed()
        await harness.turns()
    assert harness.counters.snapshot() == {"network.fences": 1}


async def test_after_a_fence_that_failed_nothing_is_granted_and_nothing_tried_again() -> None:
    harness = Harness(AT_ONCE)
    harness.rest()
    harness.error = TransferFailedError("no engine")
    with capture_logs() as logs:
        harness.watch.start_if_needed()
        await harness.turns()
        harness.watch.start_if_needed()
        await harness.turns()
    assert harness.said == ["cut off [] TRANSFER_FAILED", "rebuild, held True"]
    assert [one["log_level"] for one in logs] == ["error"]
    assert harness.watch.state == "broken"
    assert harness.bounce_buffers.take(PEER, 9) is None


async def test_nothing_is_watched_after_the_end() -> None:
    harness = Harness(AT_ONCE)
    harness.rest()
    harness.watch.close()
    harness.watch.start_if_needed()
    await harness.turns()
    assert harness.said == []
