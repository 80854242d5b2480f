"""When to fence, and doing it: watches over what is quarantined, as long as anything is.

A fence rebuilds the engine, which ends this daemon's own writes too: their homes would have to fence in turn. So while
a fence waits for live grants, no write begins, and it waits for those under way as well.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal, Protocol

import structlog

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transports.bounce_buffers import BounceBuffers
from kvferry.protocol.errors import KvferryError, TransferFailedError

LOOK_S = 0.5
log = structlog.get_logger(__name__)

State = Literal["ready", "draining", "fencing", "broken"]


class Fence(Protocol):
    """What can make sure that nothing old lands; see ``MooncakeEngine``."""

    session_name: str

    @property
    def writing(self) -> bool:
        """Return whether writes of this daemon are under way."""

    def hold(self, *, held: bool) -> None:
        """Let no write begin while ``held``."""

    async def rebuild(self) -> str:
        """Destroy and rebuild the engine; nothing old lands afterwards."""


class Grants(Protocol):
    """What has been granted to peers; see ``NetworkReceiver``."""

    @property
    def unanswered(self) -> bool:
        """Return whether grants of transfer ops that are over have not been answered."""

    def quarantine_unanswered(self, now_s: float) -> None:
        """Let those grants rest that have not been answered for too long."""

    def cut_off(self, numbers: set[int], error: KvferryError) -> None:
        """Fail the transfer ops whose bounce buffers or pages rest from now on."""

    def nothing_lands(self) -> None:
        """Note that nothing lands any more in what rested."""

    def pump(self) -> None:
        """Grant what there is."""


class FenceWatch:
    """Watches over one engine's bounce buffers. All methods belong on the loop."""

    def __init__(self, fence: Fence, bounce_buffers: BounceBuffers, grants: Grants, counters: Counters) -> None:
        self._fence = fence
        self._bounce_buffers = bounce_buffers
        self._grants = grants
        self._counters = counters
        self._watching: asyncio.Task[None] | None = None
        self._state: State = "ready"
        self._closed = False

    @property
    def state(self) -> State:
        """Return what STATUS shows; ``broken``: the engine could not be rebuilt, and nothing comes in any more."""
        return "draining" if self._state == "ready" and self._bounce_buffers.draining else self._state

    def look(self) -> None:
        """Begin to watch if there is anything to watch over."""
        if self._watching is None and not self._closed and self._wanted:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()

    @property
    def _wanted(self) -> bool:
        return self._state != "broken" and bool(self._bounce_buffers.quarantined_bytes or self._grants.unanswered)

    async def _watch(self) -> None:
        try:
            while self._wanted:
                self._grants.quarantine_unanswered(time.monotonic())
                due = self._bounce_buffers.fence_due(time.monotonic(), writing=self._fence.writing)
                self._fence.hold(held=self._bounce_buffers.draining)
                if due:
                    await self._do_fence()
                    self._fence.hold(held=self._bounce_buffers.draining)
                self._grants.pump()
                await asyncio.sleep(LOOK_S)
        finally:
            self._fence.hold(held=False)
            self._watching = None

    async def _do_fence(self) -> None:
        self._state = "fencing"
        numbers = set(self._bounce_buffers.fence_begins(time.monotonic()))
        self._grants.cut_off(numbers, TransferFailedError("its bounce buffer was fenced while it was under way"))
        try:
            await self._fence.rebuild()
        except KvferryError as error:
            self._state = "broken"
            log.exception(
                "the fence failed: no bounce buffer is freed, nothing comes in; restart this daemon", cause=str(error)
            )
            return
        self._state = "ready"
        freed = self._bounce_buffers.fenced()
        self._grants.nothing_lands()
        self._counters.add("network.fences")
        log.warning("bounce buffers fenced", freed=freed)
