"""Tombstones: endpoints that ended before their peer came, so that the late peer fails at once instead of waiting.

An endpoint that ends by itself (deadline, CANCEL, its engine's death) leaves a tombstone if a peer had not come. One
that fails because of its peer leaves none: the peer knows, or is expected to retry.

- Each late pool is given a tombstone once. If it comes again, it waits for a peer that retries too. An endpoint that
  ends because of a tombstone leaves none. So two engines that both retry meet, in either order.
- A new SEND removes all tombstones of the request's SENDs, whatever their pool, and a new RECEIVE those of its
  RECEIVEs: it may replace them. Success leaves none.
- A half that is abandoned before it came leaves a tombstone without a pool, for every endpoint of the other half.
- Their number is bounded, the oldest are dropped first, and so is their age. A tenant gets those of its own requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Final, Literal, NamedTuple

import msgspec

from kvferry.protocol.errors import ErrorInfo, KvferryError, raised

MOST: Final = 16_384
KEPT_S: Final = 600.0
_MOST_OF_A_REQUEST: Final = 64
"""Bound of the tombstones of one half, and of the pools that were given one: more than a request has pools."""


ABANDONED: Final = ""
"""Stands for the pool's name where a whole half was abandoned before it came."""


class Half(NamedTuple):
    """One half of a request: all its SENDs, or all its RECEIVEs."""

    tenant: int
    request_id: str
    direction: Literal["send", "receive"]


class Tombstone:
    """How one endpoint ended, and which pools of the other half were told, by which message."""

    def __init__(self, error: ErrorInfo, ended_at: float, notified: Iterable[Hashable]) -> None:
        self.error = error
        self.ended_at = ended_at
        self.notified: dict[Hashable, Hashable] = dict.fromkeys(notified)

    def error_at(self, now: float) -> KvferryError:
        """Return the error for a late endpoint: of the same code, and saying how long ago the other one ended."""
        detail = f"the other side ended {max(0.0, now - self.ended_at):.1f} s ago: {self.error.detail}"
        return raised(msgspec.structs.replace(self.error, detail=detail))


class Tombstones:
    """The tombstones of a daemon. Times are in seconds of the caller's monotonic clock.

    Attributes:
        most: how many halves are remembered; 0: none.
        kept_s: how long they are remembered, in seconds.
    """

    def __init__(self, most: int = MOST, kept_s: float = KEPT_S) -> None:
        self.most = most
        self.kept_s = kept_s
        self._halves: OrderedDict[Half, dict[Hashable, Tombstone]] = OrderedDict()  # by their latest tombstones

    def __repr__(self) -> str:
        """Show how many halves are remembered."""
        return f"<Tombstones {len(self._halves)} of {self.most}>"

    def __len__(self) -> int:
        """Return how many halves are remembered."""
        return len(self._halves)

    def abandon(self, half: Half, error: KvferryError, now: float, notified: Iterable[Hashable] = ()) -> None:
        """Record that a half will not come from any pool; the arguments are those of ``bury``."""
        self.bury(half, ABANDONED, error, now, notified)

    def abandoned(self, half: Half, who: Hashable, now: float) -> KvferryError | None:
        """Return why a half will not come; None where it may, or where this late pool was told already."""
        self._forget_old(now)
        stone = self._halves.get(half, {}).get(ABANDONED)
        if stone is None or who in stone.notified or stone.ended_at + self.kept_s <= now:
            return None
        stone.notified[who] = None
        return stone.error_at(now)

    def bury(
        self, half: Half, whose: Hashable, error: KvferryError, now: float, notified: Iterable[Hashable] = ()
    ) -> None:
        """Record that an endpoint ended.

        Args:
            half: its request and direction.
            whose: its pool.
            error: what its late peers fail with.
            now: the time.
            notified: pools of the other half that were matched, and so have been told.
        """
        stones = self._halves.pop(half, {})
        if len(stones) < _MOST_OF_A_REQUEST or whose in stones:
            stones[whose] = Tombstone(error.info(), now, notified)
        self._halves[half] = stones
        while len(self._halves) > self.most:
            self._halves.popitem(last=False)
        self._forget_old(now)

    def renewed(self, half: Half) -> None:
        """Forget how a half ended, because it has come again."""
        self._halves.pop(half, None)

    def notices_for(self, half: Half, who: Hashable, now: float, message: Hashable = None) -> list[KvferryError]:
        """Return the errors of a half's tombstones that this late pool was not given yet, the latest first.

        Args:
            half: the half that ended.
            who: the late pool.
            now: the time.
            message: identifies the pool's message if it may be sent again after the answer was lost: the same message
                is given the same errors again.
        """
        self._forget_old(now)
        stones = self._halves.get(half, {})
        for whose in [whose for whose, one in stones.items() if one.ended_at + self.kept_s <= now]:
            del stones[whose]
        new = [one for one in stones.values() if who not in one.notified or one.notified[who] == message is not None]
        for one in new:
            one.notified[who] = message
        for whose in [whose for whose, one in stones.items() if len(one.notified) > _MOST_OF_A_REQUEST]:
            del stones[whose]
        return [one.error_at(now) for one in sorted(new, key=lambda one: one.ended_at, reverse=True)]

    def _forget_old(self, now: float) -> None:
        while self._halves:
            half, stones = next(iter(self._halves.items()))
            if stones and max(one.ended_at for one in stones.values()) + self.kept_s > now:
                return
            del self._halves[half]
