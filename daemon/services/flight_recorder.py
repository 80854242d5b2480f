"""The last transfers that have ended, with the time that each stage took: what an operator asks when one was slow.

For the control loop. A fixed number, the oldest go first; each side of a transfer within this daemon is one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kvferry.daemon.transfer.endpoints import EndpointKey, ReceiveRequest, SendRequest
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.session_messages import EndedTransfer

RECORDED: Final = 256


class _Side:
    """One side of a transfer, from its first message until its engine was told of the end."""

    __slots__ = (
        "copied_s", "daemons", "endpoint", "finished", "finished_s", "planned_s", "settled_s", "tenant", "told_s",
    )  # fmt: skip

    def __init__(self, tenant: int) -> None:
        self.tenant = tenant
        self.planned_s = 0.0
        self.copied_s = 0.0
        self.daemons: tuple[str, ...] = ()
        self.endpoint: SendRequest | ReceiveRequest | None = None
        self.finished: Finished | None = None
        self.finished_s = 0.0
        self.settled_s: float | None = None
        self.told_s: float | None = None


_Key = tuple[int, str, str, str]
"""Of a session: request id, pool, direction."""


class FlightRecorder:
    """Stage times of the live sides, and of the last ``recorded`` ones that have settled."""

    def __init__(self, recorded: int = RECORDED, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recorded = recorded
        self._live: dict[_Key, _Side] = {}
        self._ended: deque[tuple[_Key, _Side]] = deque()
        self._untold: dict[_Key, _Side] = {}

    def __repr__(self) -> str:
        """Show how many sides are known."""
        return f"<FlightRecorder live={len(self._live)} ended={len(self._ended)}>"

    def planned(
        self, session_id: int, key: EndpointKey, endpoint: SendRequest | ReceiveRequest | None, seconds: float
    ) -> None:
        """Note that a message was accepted, how long it took to check and match it, and its side if that is live."""
        whole = _key(session_id, key)
        side = self._live.get(whole)
        if side is None:
            side = self._live[whole] = _Side(key.tenant)
        side.planned_s += seconds
        side.endpoint = endpoint

    def copied(self, endpoint: SendRequest | ReceiveRequest, seconds: float) -> None:
        """Note that a copy of a side has ended, and how long it was under way."""
        side = self._live.get(_key(endpoint.session_id, endpoint.key))
        if side is not None:
            side.copied_s += seconds

    def finished(self, session_id: int, event: Finished) -> None:
        """Note a side's outcome."""
        side = self._live.get(_key(session_id, event))
        if side is not None:
            side.finished = msgspec.structs.replace(event, payload=b"") if event.payload else event
            side.finished_s = self._clock()

    def settled(self, session_id: int, event: Settled) -> None:
        """Note that no byte of a side can move any more: it has ended."""
        whole = _key(session_id, event)
        side = self._live.pop(whole, None)
        if side is None or side.finished is None:
            return
        side.settled_s = self._clock()
        side.daemons, side.endpoint = side.endpoint.daemons if side.endpoint else (), None
        self._untold[whole] = side
        self._ended.append((whole, side))
        if len(self._ended) > self._recorded:
            key, oldest = self._ended.popleft()
            if self._untold.get(key) is oldest:
                del self._untold[key]

    def told(self, session_id: int, event: Settled) -> None:
        """Note that the engine has acknowledged the end of a side."""
        side = self._untold.pop(_key(session_id, event), None)
        if side is not None:
            side.told_s = self._clock()

    def ended(self) -> Iterator[EndedTransfer]:
        """Yield the last sides that have ended, the newest first."""
        now_s = self._clock()
        for (session_id, *_), side in reversed(self._ended):
            event = side.finished
            assert event is not None, side
            assert side.settled_s is not None, side
            yield EndedTransfer(
                request_id=event.request_id,
                direction=event.direction,
                pool=event.pool,
                tenant=side.tenant,
                session=session_id,
                ago_ms=round((now_s - side.settled_s) * 1000),
                error=msgspec.structs.replace(event.error, request_id="") if event.error else None,
                pages=event.pages,
                moved_bytes=event.moved_bytes,
                planned_us=round(side.planned_s * 1e6),
                waited_us=event.waited_us,
                moved_us=event.moved_us,
                copied_us=round(side.copied_s * 1e6),
                settled_us=round((side.settled_s - side.finished_s) * 1e6),
                told_us=None if side.told_s is None else round((side.told_s - side.finished_s) * 1e6),
                daemons=side.daemons,
            )


def _key(session_id: int, of: EndpointKey | Finished | Settled) -> _Key:
    return (session_id, of.request_id, of.pool, of.direction)
