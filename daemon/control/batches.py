"""A BATCH in progress: collects the results of its requests, within a bound on their total size. Without I/O."""

from __future__ import annotations

from typing import Final

from kvferry.daemon.control.sessions import Session
from kvferry.protocol.base import ErrorReply, ReplyBody
from kvferry.protocol.codec import PageIds, encoded_bytes
from kvferry.protocol.envelope import Batched
from kvferry.protocol.errors import TooLargeError

SMALL_BYTES: Final = 1024
"""A result of up to this size is never left out: the client must learn what its request did."""


class OpenBatch:
    """One BATCH.

    Attributes:
        places: the index of each request's result, by the number under which the request runs.
    """

    def __init__(self, session: Session, message_id: int, count: int, max_bytes: int) -> None:
        self.session = session
        self.message_id = message_id
        self.places: dict[int, int] = {}
        self._max_bytes = max_bytes
        self._bytes = 0
        self._missing = count
        self._results: list[tuple[ReplyBody, tuple[PageIds, ...]]] = [(ReplyBody(), ())] * count

    def __repr__(self) -> str:
        """Show how many results are missing."""
        return f"<OpenBatch {self.message_id} missing={self._missing}>"

    @property
    def is_complete(self) -> bool:
        """Return whether every request has its result."""
        return self._missing == 0

    def put(self, part_id: int, body: ReplyBody, ids: tuple[PageIds, ...]) -> None:
        """Store a request's result; one that makes the reply too large is replaced by TOO_LARGE."""
        size_bytes = encoded_bytes(body)
        if size_bytes > SMALL_BYTES and self._bytes + size_bytes > self._max_bytes:
            too_large = TooLargeError(f"the batch's results exceed {self._max_bytes} bytes: send this request alone")
            body, ids = ErrorReply(error=too_large.info()), ()
        else:
            self._bytes += size_bytes
        self._results[self.places[part_id]] = (body, ids)
        self._missing -= 1

    def reply(self) -> tuple[Batched, tuple[PageIds, ...]]:
        """Return the reply and its page lists."""
        results = tuple(body for body, _ in self._results)
        return Batched(results=results), tuple(one for _, ids in self._results for one in ids)
