"""What outlives an endpoint: its result until the session acknowledges it, the payload bytes kept, and tombstones.

A send request keeps its payload until it has settled; a receive request, until its events are acknowledged.

Tombstones are of endpoints that ended before their peer came, so that the late peer fails at once instead of waiting.
An endpoint that ends by itself (deadline, CANCEL, its engine's death) leaves one if a peer had not come. One that fails
because of its peer leaves none: the peer knows, or is expected to retry.

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
from typing import Final

import msgspec

from kvferry.daemon.quota import Quota
from kvferry.daemon.transfer.endpoints import EndpointKey, Half
from kvferry.protocol.errors import ErrorInfo, KvferryError, TransferExistsError, raised
from kvferry.protocol.transfer_messages import TransferResult

GENERATIONS_KEPT = 4096
MOST: Final = 16_384
KEPT_S: Final = 600.0
_MOST_OF_A_REQUEST: Final = 64
"""Bound of the tombstones of one half, and of the pools that were given one: more than a request has pools."""
ABANDONED: Final = ""
"""Stands for the pool's name where a whole half was abandoned before it came."""


# -- results


class Results:
    """The result of each endpoint, until its session acknowledges SETTLED. Bounded by the limits on transfers."""

    def __init__(self, payloads: Quota) -> None:
        """``payloads`` counts the payload bytes in results of receive requests."""
        self._payloads = payloads
        self._by_session: dict[int, dict[EndpointKey, TransferResult]] = {}
        self.total = 0
        """How many endpoints of all sessions are live, or settled and not acknowledged."""

    def open_session(self, session_id: int) -> None:
        """Keep results of this session from now on; without this, none are kept."""
        self._by_session.setdefault(session_id, {})

    def count(self, session_id: int) -> int:
        """Return how many endpoints of the session are live, or settled and not acknowledged."""
        return len(self._by_session.get(session_id, ()))

    def get(self, session_id: int, key: EndpointKey) -> TransferResult | None:
        """Return an endpoint's result so far, or None."""
        return self._by_session.get(session_id, {}).get(key)

    def begin(self, session_id: int, key: EndpointKey) -> None:
        """Record an open endpoint, and forget the result of an earlier one with this key."""
        self.forget(session_id, key)
        self.add(session_id, key, TransferResult(state="open"))

    def add(self, session_id: int, key: EndpointKey, news: TransferResult) -> None:
        """Update an endpoint's result."""
        of_session = self._by_session.get(session_id)
        if of_session is None:
            return
        known = of_session.get(key)
        if known is not None and news.finished is None:
            news = msgspec.structs.replace(news, finished=known.finished)
        of_session[key] = news
        self.total += known is None

    def check_not_failed(self, session_id: int, key: EndpointKey) -> None:
        """Check that no failure of this endpoint is unacknowledged: a late chunk must not start it again.

        Raises:
            TransferExistsError: there is one; the error says which.
        """
        known = self.get(session_id, key)
        if known is not None and known.finished is not None and known.finished.error is not None:
            error = known.finished.error
            raise TransferExistsError(
                f"this transfer has failed with {error.code} ({error.detail}), and its event is not acknowledged yet",
                field="request_id",
            )

    def acknowledged(self, session_id: int, key: EndpointKey, generation: int) -> None:
        """Drop what an acknowledged SETTLED kept: that generation's payload, and the result if it is the latest."""
        if key.direction == "receive":
            self._payloads.drop(session_id, (key, generation))
        known = self.get(session_id, key)
        if known is not None and known.settled is not None and known.settled.generation == generation:
            self.forget(session_id, key)

    def forget(self, session_id: int, key: EndpointKey) -> None:
        """Drop an endpoint's result."""
        if self._by_session.get(session_id, {}).pop(key, None) is not None:
            self.total -= 1

    def forget_session(self, session_id: int) -> None:
        """Drop all of a session's results."""
        self.total -= len(self._by_session.pop(session_id, ()))
        self._payloads.drop_all(session_id, lambda kept: kept[0].direction == "receive")


class Generations:
    """Counts the RECEIVEs of each key; the latest ``GENERATIONS_KEPT`` keys, until their session ends."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[int, EndpointKey], int] = OrderedDict()

    def next(self, session_id: int, key: EndpointKey) -> int:
        """Return 1 for the first RECEIVE of this key, 2 for the next one after it has ended, and so on."""
        count = self._counts.pop((session_id, key), 0) + 1
        self._counts[session_id, key] = count
        if len(self._counts) > GENERATIONS_KEPT:
            self._counts.popitem(last=False)
        return count

    def forget_session(self, session_id: int) -> None:
        """Drop a session's counts."""
        for known in [one for one in self._counts if one[0] == session_id]:
            del self._counts[known]


# -- tombstones


class Tombstone:
    """How one endpoint of ``members`` ended, and which pools of the other half were told, by which message."""

    def __init__(self, error: ErrorInfo, ended_at: float, notified: Iterable[Hashable], members: int) -> None:
        self.error = error
        self.ended_at = ended_at
        self.members = members
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
        return next(iter(self.notices_for(half, who, now, only=ABANDONED)), None)

    def bury(
        self,
        half: Half,
        whose: Hashable,
        error: KvferryError,
        now: float,
        notified: Iterable[Hashable] = (),
        members: int = 1,
    ) -> None:
        """Record that an endpoint ended.

        Args:
            half: its request and direction.
            whose: its pool.
            error: what its late peers fail with.
            now: the time.
            notified: pools of the other half that were matched, and so have been told.
            members: how many endpoints the half has, as far as this one knew.
        """
        stones = self._halves.pop(half, {})
        if len(stones) < _MOST_OF_A_REQUEST or whose in stones:
            stones[whose] = Tombstone(error.info(), now, notified, members)
        self._halves[half] = stones
        while len(self._halves) > self.most:
            self._halves.popitem(last=False)
        self._forget_old(now)

    def members(self, half: Half) -> int:
        """Return how many endpoints a half has, as those that ended have said."""
        return max((one.members for one in self._halves.get(half, {}).values()), default=1)

    def renewed(self, half: Half) -> None:
        """Forget how a half ended, because it has come again."""
        self._halves.pop(half, None)

    def notices_for(
        self, half: Half, who: Hashable, now: float, message: Hashable = None, only: Hashable = None
    ) -> list[KvferryError]:
        """Return the errors of a half's tombstones that this late pool was not given yet, the latest first.

        Args:
            half: the half that ended.
            who: the late pool.
            now: the time.
            message: identifies the pool's message if it may be sent again after the answer was lost: the same message
                is given the same errors again.
            only: the pool whose tombstone is asked for; None: of all of them.
        """
        self._forget_old(now)
        stones = self._halves.get(half, {})
        for whose in [whose for whose, one in stones.items() if one.ended_at + self.kept_s <= now]:
            del stones[whose]
        new = [
            one
            for whose, one in stones.items()
            if only in {None, whose} and (who not in one.notified or one.notified[who] == message is not None)
        ]
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
