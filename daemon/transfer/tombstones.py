"""What is remembered of sides that ended before the other side came: a late half hears it at once, and need not wait.

A side that ends by itself (its deadline, its CANCEL, its engine's death) leaves a tombstone where the other side was
not there to be told. One that fails because of the other side leaves none: that has been told, or is expected again.

- Each late pool hears a tombstone once: it knows then, and if it comes again it waits for a side that comes again too.
  Who ends because he heard one leaves none himself. So two engines that both try again meet, in either order.
- A new SEND takes away all tombstones of the request's SENDs, whatever pool they were from, a new RECEIVE those of its
  RECEIVEs: it may take their place. Success leaves none.
- A half that is given up before it came leaves one of no pool, which every side of the other half hears.
- They are bounded by number, the oldest go first, and by age. A tenant hears of its own requests only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Final, Literal, NamedTuple

import msgspec

from kvferry.protocol.error_info import ErrorInfo
from kvferry.protocol.errors import KvferryError, raised

MOST: Final = 16_384
KEPT_S: Final = 600.0
_MOST_OF_A_REQUEST: Final = 64
"""Tombstones of one request's side, and pools that heard one: more than a request has pools."""


ABANDONED: Final = ""
"""Whose end it is, in place of a pool's name, where a whole half was given up before it came."""


class Half(NamedTuple):
    """One half of a request: all its SENDs, or all its RECEIVEs."""

    tenant: int
    request_id: str
    direction: Literal["send", "receive"]


class Tombstone:
    """How one side ended, and which pools of the other one have heard of it, as what."""

    def __init__(self, error: ErrorInfo, ended_at: float, notified: Iterable[Hashable]) -> None:
        self.error = error
        self.ended_at = ended_at
        self.notified: dict[Hashable, Hashable] = dict.fromkeys(notified)

    def said(self, now: float) -> KvferryError:
        """Return the error for a late half: the code is that of the end."""
        detail = f"the other side ended {max(0.0, now - self.ended_at):.1f} s ago: {self.error.detail}"
        return raised(msgspec.structs.replace(self.error, detail=detail))


class Tombstones:
    """Those of a daemon. Knows no clock: times are seconds of whatever clock the caller reads.

    Attributes:
        most: how many halves are remembered; 0: none.
        kept_s: for how long.
    """

    def __init__(self, most: int = MOST, kept_s: float = KEPT_S) -> None:
        self.most = most
        self.kept_s = kept_s
        self._halves: OrderedDict[Half, dict[Hashable, Tombstone]] = OrderedDict()  # in the order of their last ends

    def __repr__(self) -> str:
        """Show how many halves are remembered."""
        return f"<Tombstones {len(self._halves)} of {self.most}>"

    def __len__(self) -> int:
        """Return how many halves are remembered."""
        return len(self._halves)

    def abandon(self, half: Half, error: KvferryError, now: float, notified: Iterable[Hashable] = ()) -> None:
        """Remember that a half does not come at all, of whatever pool; else as ``bury``."""
        self.bury(half, ABANDONED, error, now, notified)

    def abandoned(self, half: Half, who: Hashable, now: float) -> KvferryError | None:
        """Return why a half does not come at all, unless this late pool has heard it; None where it may come."""
        self._forget_old(now)
        stone = self._halves.get(half, {}).get(ABANDONED)
        if stone is None or who in stone.notified or stone.ended_at + self.kept_s <= now:
            return None
        stone.notified[who] = None
        return stone.said(now)

    def bury(
        self, half: Half, whose: Hashable, error: KvferryError, now: float, notified: Iterable[Hashable] = ()
    ) -> None:
        """Remember that a side ended.

        Args:
            half: of which request, and which side of it.
            whose: its pool.
            error: what the other side is told.
            now: the time.
            notified: pools of the other side that were there and were told.
        """
        stones = self._halves.pop(half, {})
        if len(stones) < _MOST_OF_A_REQUEST or whose in stones:
            stones[whose] = Tombstone(error.info(), now, notified)
        self._halves[half] = stones
        while len(self._halves) > self.most:
            self._halves.popitem(last=False)
        self._forget_old(now)

    def renewed(self, half: Half) -> None:
        """Forget how a half ended: it has begun anew."""
        self._halves.pop(half, None)

    def notices_for(self, half: Half, who: Hashable, now: float, message: Hashable = None) -> list[KvferryError]:
        """Return how the sides of a half ended, the latest first: those that this late pool has not heard of.

        Args:
            half: the other side's.
            who: the late pool.
            now: the time.
            message: what it asks by, where that may be said again because the answer was lost: it hears it again then.
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
        return [one.said(now) for one in sorted(new, key=lambda one: one.ended_at, reverse=True)]

    def _forget_old(self, now: float) -> None:
        while self._halves:
            half, stones = next(iter(self._halves.items()))
            if stones and max(one.ended_at for one in stones.values()) + self.kept_s > now:
                return
            del self._halves[half]
