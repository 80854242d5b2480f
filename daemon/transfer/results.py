"""Results of transfers, kept for each session until it acknowledges them."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from kvferry.daemon.transfer.endpoints import EndpointKey
from kvferry.daemon.transfer.payloads import KeptPayloads
from kvferry.protocol.errors import TransferExistsError
from kvferry.protocol.transfer_messages import TransferResult

GENERATIONS_KEPT = 4096


class Results:
    """What each session was, or is still to be, told. Bounded by the sessions' limit on receive requests."""

    def __init__(self, payloads: KeptPayloads) -> None:
        """``payloads`` counts those of receivers' results."""
        self._payloads = payloads
        self._by_session: dict[int, dict[EndpointKey, TransferResult]] = {}

    def open_session(self, session_id: int) -> None:
        """Keep results of this session from now on; those of other sessions nobody can ask for."""
        self._by_session.setdefault(session_id, {})

    def count(self, session_id: int) -> int:
        """Return how many sides of the session are live, or settled and not acknowledged."""
        return len(self._by_session.get(session_id, ()))

    @property
    def total(self) -> int:
        """Return the same count over all sessions."""
        return sum(len(of_session) for of_session in self._by_session.values())

    def get(self, session_id: int, key: EndpointKey) -> TransferResult | None:
        """Return the side's result so far, or None."""
        return self._by_session.get(session_id, {}).get(key)

    def begin(self, session_id: int, key: EndpointKey) -> None:
        """Note that a side is open, and drop what was known of one before it."""
        self.forget(session_id, key)
        self.add(session_id, key, TransferResult(state="open"))

    def add(self, session_id: int, key: EndpointKey, news: TransferResult) -> None:
        """Keep news of a side beside what is known of it."""
        of_session = self._by_session.get(session_id)
        if of_session is None:
            return
        known = of_session.get(key)
        if known is not None and news.finished is None:
            news = msgspec.structs.replace(news, finished=known.finished)
        of_session[key] = news

    def check_not_failed(self, session_id: int, key: EndpointKey) -> None:
        """Check that the side did not fail without the session knowing: a late chunk must not start it anew.

        Raises:
            TransferExistsError: it did; says why.
        """
        known = self.get(session_id, key)
        if known is not None and known.finished is not None and known.finished.error is not None:
            error = known.finished.error
            raise TransferExistsError(
                f"this transfer has failed with {error.code} ({error.detail}), and its event is not acknowledged yet",
                field="request_id",
            )

    def forget(self, session_id: int, key: EndpointKey) -> None:
        """Drop what is known of a side: it was acknowledged, or starts anew."""
        if key.direction == "receive":
            self._payloads.drop(session_id, key)
        self._by_session.get(session_id, {}).pop(key, None)

    def forget_session(self, session_id: int) -> None:
        """Drop all of a session's results."""
        for key in self._by_session.pop(session_id, {}):
            if key.direction == "receive":
                self._payloads.drop(session_id, key)


class Generations:
    """How often each receive request was armed: the latest few thousand receive requests, until their session ends."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[int, EndpointKey], int] = OrderedDict()

    def next(self, session_id: int, key: EndpointKey) -> int:
        """Return 1 for a receive request's first RECEIVE, 2 for the one that arms it again, and so on."""
        count = self._counts.pop((session_id, key), 0) + 1
        self._counts[session_id, key] = count
        if len(self._counts) > GENERATIONS_KEPT:
            self._counts.popitem(last=False)
        return count

    def forget_session(self, session_id: int) -> None:
        """Drop a session's counts."""
        for known in [one for one in self._counts if one[0] == session_id]:
            del self._counts[known]
