"""A BATCH whose requests have not all been answered: their results, and how large they may be together. Sans I/O."""

from __future__ import annotations

from typing import Final, cast

from kvferry.daemon.control.sessions import Session
from kvferry.protocol.base import Body
from kvferry.protocol.batch_messages import Batched, BatchedResult
from kvferry.protocol.codec import PageIds, encoded_bytes
from kvferry.protocol.errors import TooLargeError
from kvferry.protocol.refusals import ErrorReply

SMALL_BYTES: Final = 1024
"""A result up to this size is never left out: what a request has done, its client has to know."""


class OpenBatch:
    """One BATCH.

    Attributes:
        places: which of the results is whose, by the number under which the request runs.
    """

    def __init__(self, session: Session, message_id: int, count: int, max_bytes: int) -> None:
        self.session = session
        self.message_id = message_id
        self.places: dict[int, int] = {}
        self._max_bytes = max_bytes
        self._bytes = 0
        self._missing = count
        self._results: list[tuple[Body, tuple[PageIds, ...]]] = [(Body(), ())] * count

    def __repr__(self) -> str:
        """Show how far it is."""
        return f"<OpenBatch {self.message_id} missing={self._missing}>"

    @property
    def is_complete(self) -> bool:
        """Return whether every request has its result."""
        return self._missing == 0

    def put(self, part_id: int, body: Body, ids: tuple[PageIds, ...]) -> None:
        """Take the result of a request."""
        size_bytes = encoded_bytes(body)
        if size_bytes > SMALL_BYTES and self._bytes + size_bytes > self._max_bytes:
            too_large = TooLargeError(f"the results of the batch are over {self._max_bytes} bytes: ask for this alone")
            body, ids = ErrorReply(error=too_large.info()), ()
        else:
            self._bytes += size_bytes
        self._results[self.places[part_id]] = (body, ids)
        self._missing -= 1

    def reply(self) -> tuple[Batched, tuple[PageIds, ...]]:
        """Return the reply and its page lists."""
        results = tuple(cast("BatchedResult", body) for body, _ in self._results)
        return Batched(results=results), tuple(one for _, ids in self._results for one in ids)
