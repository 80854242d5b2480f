"""Decides when to fence, and fences: runs while anything is quarantined.

A fence rebuilds the network engine, which also aborts this daemon's own writes, so that their homes would have to fence
in turn. So while a fence waits for live grants, no write begins, and it waits for the writes in flight as well.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal, Protocol

import structlog

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transports.bounce_buffers import BounceBuffers
from kvferry.protocol.errors import KvferryError, TransferFailedError

CHECK_INTERVAL_S = 0.5
log = structlog.get_logger(__name__)

State = Literal["ready", "draining", "fencing", "broken"]


class Fence(Protocol):
    """Makes sure that no old write lands; see ``MooncakeEngine``."""

    session_name: str

    @property
    def writing(self) -> bool:
        """Return whether this daemon has writes in flight."""

    def hold(self, *, held: bool) -> None:
        """Begin no write while ``held``."""

    async def rebuild(self) -> str:
        """Destroy and rebuild the network engine; no old write lands afterwards."""


class Grants(Protocol):
    """The grants to peers; see ``NetworkReceiver``."""

    @property
    def unanswered(self) -> bool:
        """Return whether grants of failed transfer ops are unanswered."""

    def quarantine_unanswered(self, now_s: float) -> None:
        """Quarantine the memory of those that have been unanswered for too long."""

    def fail_ops(self, numbers: set[int], error: KvferryError) -> None:
        """Fail the transfer ops whose bounce buffers or pages were quarantined by a fence or a lost peer."""

    def on_fenced(self) -> None:
        """Release what was quarantined: no old write can land any more."""

    def pump(self) -> None:
        """Grant what is free."""


class FenceWatch:
    """Watches one engine's bounce buffers. For the control loop."""

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
        """Return the state for STATUS; ``broken``: the engine could not be rebuilt, and nothing can be received."""
        return "draining" if self._state == "ready" and self._bounce_buffers.draining else self._state

    def start_if_needed(self) -> None:
        """Start watching if anything is quarantined or unanswered."""
        if self._watching is None and not self._closed and self._needed:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()

    @property
    def _needed(self) -> bool:
        return self._state != "broken" and bool(self._bounce_buffers.quarantined_bytes or self._grants.unanswered)

    async def _watch(self) -> None:
        try:
            while self._needed:
                self._grants.quarantine_unanswered(time.monotonic())
                due = self._bounce_buffers.fence_due(time.monotonic(), writing=self._fence.writing)
                self._fence.hold(held=self._bounce_buffers.draining)
                if due:
                    await self._do_fence()
                    self._fence.hold(held=self._bounce_buffers.draining)
                self._grants.pump()
                await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            self._fence.hold(held=False)
            self._watching = None

    async def _do_fence(self) -> None:
        self._state = "fencing"
        numbers = set(self._bounce_buffers.fence_begins(time.monotonic()))
        self._grants.fail_ops(numbers, TransferFailedError("its bounce buffer was fenced during the transfer"))
        try:
            await self._fence.rebuild()
        except KvferryError as error:
            self._state = "broken"
            log.exception(
                "the fence failed: bounce buffers stay quarantined, nothing is received; restart this daemon",
                cause=str(error),
            )
            return
        self._state = "ready"
        freed = self._bounce_buffers.fenced()
        self._grants.on_fenced()
        self._counters.add("network.fences")
        log.warning("bounce buffers fenced", freed=freed)
