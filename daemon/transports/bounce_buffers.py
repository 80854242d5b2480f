"""Bounce buffers: the bounded memory that daemons of other hosts may write, and the grants to write it.

Pages that peers write directly, where ``network.direct`` is on, are tracked in the same way: as bounce buffers that
exist while they are granted or quarantined.

A bounce buffer is free, granted to one (peer, grant), or quarantined: its grant is over, but a write of the peer may
still land. Quarantine ends for a single bounce buffer when the peer reports that its writes have ended, or for all at
once by a fence: this daemon destroys and rebuilds its network engine, after which no old write can land. As a fence
aborts the writes of live grants too, it waits for them to end, with no new grants meanwhile, for at most
``drain_timeout_s``.
Knows nothing of sockets, engines or clocks: times are seconds of any clock that the caller reads.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

from kvferry.protocol.ids import BootId


class FenceBounds(NamedTuple):
    """When a fence is due.

    Attributes:
        quarantined_bytes: more quarantined bytes than this require a fence.
        quarantined_s: a bounce buffer that is quarantined for longer requires a fence.
        drain_timeout_s: how long a fence that is due waits for live grants to end.
    """

    quarantined_bytes: int
    quarantined_s: float
    drain_timeout_s: float


class BounceBuffer(NamedTuple):
    """One granted bounce buffer.

    Attributes:
        number: its index, 0 to ``count - 1``.
        address: its first byte in this process, by which the peer's writes address it.
        size_bytes: its length.
    """

    number: int
    address: int
    size_bytes: int


class _Granted(NamedTuple):
    peer: BootId
    grant_id: int
    size_bytes: int


class _Quarantined(NamedTuple):
    peer: BootId
    grant_id: int
    since_s: float
    size_bytes: int


class BounceBuffers:
    """``count`` contiguous buffers of ``bounce_buffer_bytes`` each, from ``base_address``, in memory of the caller."""

    def __init__(self, base_address: int, bounce_buffer_bytes: int, count: int, bounds: FenceBounds) -> None:
        assert base_address > 0, base_address
        assert bounce_buffer_bytes > 0, bounce_buffer_bytes
        assert count > 0, count
        self.bounce_buffer_bytes: Final = bounce_buffer_bytes
        self.count: Final = count
        self._base_address = base_address
        self.bounds: Final = bounds
        self._free = list(range(count - 1, -1, -1))  # a stack: lowest first, then the last one returned
        self._granted: dict[int, _Granted] = {}
        self._quarantined: dict[int, _Quarantined] = {}  # oldest first
        self._quarantined_bytes = 0
        self._page_numbers = itertools.count(count)
        self._draining_since_s: float | None = None
        self._fencing = False

    def __repr__(self) -> str:
        """Show the number of bounce buffers in each state."""
        state = " draining" if self.draining else ""
        return (
            f"<BounceBuffers free={len(self._free)} granted={len(self._granted)} "
            f"quarantined={len(self._quarantined)} bounce_buffer_bytes={self.bounce_buffer_bytes}{state}>"
        )

    @property
    def free(self) -> int:
        """Return the number of free bounce buffers, grantable unless a fence is due."""
        return len(self._free)

    @property
    def granted(self) -> int:
        """Return the number of live grants, of bounce buffers and of pages."""
        return len(self._granted)

    @property
    def quarantined_bytes(self) -> int:
        """Return the number of quarantined bytes, of bounce buffers and of pages."""
        return self._quarantined_bytes

    @property
    def quarantined(self) -> int:
        """Return the number of quarantined bounce buffers, not counting pages."""
        return sum(number < self.count for number in self._quarantined)

    @property
    def draining(self) -> bool:
        """Return whether a fence waits for live grants to end or is in progress: nothing is granted."""
        return self._fencing or self._draining_since_s is not None

    def oldest_quarantine_s(self, now_s: float) -> float:
        """Return the age in seconds of the oldest quarantine; 0 where there is none."""
        for quarantined in self._quarantined.values():
            return now_s - quarantined.since_s
        return 0.0

    def take(self, peer: BootId, grant_id: int) -> BounceBuffer | None:
        """Grant a bounce buffer to a peer; None where none is free or a fence is due."""
        if self.draining or not self._free:
            return None
        number = self._free.pop()
        self._granted[number] = _Granted(peer, grant_id, self.bounce_buffer_bytes)
        return BounceBuffer(number, self._base_address + number * self.bounce_buffer_bytes, self.bounce_buffer_bytes)

    def take_pages(self, peer: BootId, grant_id: int, size_bytes: int) -> int | None:
        """Grant pages of this size to a peer; return the number that identifies them, or None where a fence is due."""
        if self.draining:
            return None
        number = next(self._page_numbers)
        self._granted[number] = _Granted(peer, grant_id, size_bytes)
        return number

    def give_back(self, number: int, peer: BootId, grant_id: int) -> bool:
        """Free the buffer of a grant whose writes have ended. Return False where the grant is over already.

        Ends a quarantine as well, so a late report of ended writes counts. A report that comes after a fence and a new
        grant of the same buffer does not match that grant and changes nothing.
        """
        if self._matches(self._granted.get(number), peer, grant_id):
            del self._granted[number]
        elif self._matches(quarantined := self._quarantined.get(number), peer, grant_id):
            assert quarantined is not None
            del self._quarantined[number]
            self._quarantined_bytes -= quarantined.size_bytes
        else:
            return False
        self._put_back(number)
        return True

    def quarantine(self, number: int, peer: BootId, grant_id: int, now_s: float) -> bool:
        """Quarantine the buffer of a grant whose writes may still land.

        Return False where the grant is over already.
        """
        if not self._matches(self._granted.get(number), peer, grant_id):
            return False
        granted = self._granted.pop(number)
        self._quarantined[number] = _Quarantined(peer, grant_id, now_s, granted.size_bytes)
        self._quarantined_bytes += granted.size_bytes
        return True

    def quarantine_peer(self, peer: BootId, now_s: float) -> list[int]:
        """End all grants of a lost peer; return the numbers that are quarantined by this."""
        lost = [(number, granted.grant_id) for number, granted in self._granted.items() if granted.peer == peer]
        for number, grant_id in lost:
            self.quarantine(number, peer, grant_id, now_s)
        return [number for number, _ in lost]

    def fence_due(self, now_s: float, *, writing: bool = False) -> bool:
        """Return whether to fence now. Where a bound is exceeded but grants are live, start draining and return False.

        ``writing``: this daemon has writes in flight, which a fence would abort, so it waits for those too.
        Draining ends without a fence when quarantine falls below its bounds again. False while a fence is in progress.
        """
        if self._fencing or not self._bounds_exceeded(now_s):
            self._draining_since_s = None
            return False
        if self._draining_since_s is None:
            self._draining_since_s = now_s
        idle = not self._granted and not writing
        return idle or now_s - self._draining_since_s >= self.bounds.drain_timeout_s

    def fence_begins(self, now_s: float) -> list[int]:
        """Quarantine what is still granted, just before the engine is destroyed; return the numbers.

        Nothing is granted until ``fenced``, also where the engine cannot be rebuilt and ``fenced`` is never called.
        """
        self._fencing = True
        peers = {granted.peer for granted in self._granted.values()}
        ended = [number for peer in peers for number in self.quarantine_peer(peer, now_s)]
        assert not self._granted, "a grant outlived its engine"
        return ended

    def fenced(self) -> int:
        """Free everything quarantined, after the engine was rebuilt; return how many bounce buffers and page grants.

        Nothing is granted after ``fence_begins``, so everything quarantined was granted before the fence.
        """
        assert self._fencing, "fenced() without fence_begins()"
        assert not self._granted, "granted while the engine was being rebuilt"
        freed = list(self._quarantined)
        self._quarantined.clear()
        self._quarantined_bytes = 0
        for number in freed:
            self._put_back(number)
        self._draining_since_s = None
        self._fencing = False
        return len(freed)

    def check(self) -> None:
        """Check that each bounce buffer is in exactly one state.

        Raises:
            AssertionError: a bug in this module; the process must not continue.
        """
        states = sorted([*self._free, *self._granted, *self._quarantined])
        bounce_buffers = [number for number in states if number < self.count]
        assert bounce_buffers == list(range(self.count)), f"a bounce buffer is lost or in two states: {self!r}"
        assert len(set(states)) == len(states), f"pages are in two states: {self!r}"
        quarantined = sum(one.size_bytes for one in self._quarantined.values())
        assert quarantined == self._quarantined_bytes, f"{quarantined} bytes are quarantined: {self!r}"

    @staticmethod
    def _matches(state: _Granted | _Quarantined | None, peer: BootId, grant_id: int) -> bool:
        return state is not None and state[:2] == (peer, grant_id)

    def _put_back(self, number: int) -> None:
        if number < self.count:
            self._free.append(number)

    def _bounds_exceeded(self, now_s: float) -> bool:
        return (
            self.quarantined_bytes > self.bounds.quarantined_bytes
            or self.oldest_quarantine_s(now_s) > self.bounds.quarantined_s
        )
