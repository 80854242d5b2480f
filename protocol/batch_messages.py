"""BATCH: requests that travel in one message, each with a result of its own."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias, get_args

from msgspec import Meta

from kvferry.protocol.base import Body
from kvferry.protocol.cache_messages import (
    CacheChanges,
    CacheEvents,
    CacheEvict,
    CacheEvicted,
    CacheList,
    CacheListed,
    CachePin,
    CachePinned,
    Found,
    Load,
    Lookup,
    Store,
    Unpin,
    Unpinned,
)
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.pool_messages import (
    Allocate,
    Allocated,
    CreatePool,
    DeletePool,
    Free,
    Freed,
    PoolCreated,
    PoolDeleted,
)
from kvferry.protocol.refusals import Busy, ErrorReply
from kvferry.protocol.table_messages import DeleteTables, TablesDeleted, TablesUpdated, UpdateTables
from kvferry.protocol.tier_messages import (
    CancelOperation,
    DropSnapshot,
    Offload,
    Offloading,
    OperationCancelled,
    OperationStarted,
    Restore,
    SnapshotDropped,
    SnapshotReport,
    Snapshots,
)
from kvferry.protocol.transfer_messages import (
    Abandon,
    Abandoned,
    Accepted,
    Cancel,
    Cancelled,
    Receive,
    Result,
    Send,
    TransferResult,
)

MAX_BATCH: Final = 256
"""Requests of one BATCH."""

BatchedRequest: TypeAlias = (
    CreatePool
    | DeletePool
    | Allocate
    | Free
    | UpdateTables
    | DeleteTables
    | Offload
    | Restore
    | DropSnapshot
    | Snapshots
    | CancelOperation
    | Lookup
    | Load
    | Store
    | Unpin
    | CacheList
    | CachePin
    | CacheEvict
    | CacheEvents
    | Send
    | Receive
    | Cancel
    | Abandon
    | Result
)
"""All that need a session, but BATCH itself and those that pass descriptors over the session socket."""

BatchedResult: TypeAlias = (
    PoolCreated
    | PoolDeleted
    | Allocated
    | Freed
    | TablesUpdated
    | TablesDeleted
    | Offloading
    | OperationStarted
    | SnapshotDropped
    | SnapshotReport
    | OperationCancelled
    | Found
    | Unpinned
    | CacheListed
    | CachePinned
    | CacheEvicted
    | CacheChanges
    | Accepted
    | Cancelled
    | Abandoned
    | TransferResult
    | ErrorReply
    | Busy
)

_BATCHED: Final = get_args(BatchedRequest)


def check_batched(kind: type[Body], field: str) -> None:
    """Check that a request may be in a BATCH.

    Raises:
        InvalidFieldError: it may not.
    """
    if kind not in _BATCHED:
        raise InvalidFieldError(f"{kind.__struct_config__.tag} cannot be in a BATCH: send it by itself", field=field)


DeadlineMs = Annotated[int, Meta(ge=0)]


class Batch(Body, frozen=True, kw_only=True, tag="BATCH"):
    """Requests that are begun in their order, as if each had come by itself; one that fails does not stop the others.

    The frames of their page lists follow one after another. One that waits does not hold up those behind it. The reply
    comes once all have their result. Events of what they begin may come before it.
    """

    requests: Annotated[tuple[BatchedRequest, ...], Meta(min_length=1, max_length=MAX_BATCH)]
    deadlines_ms: Annotated[tuple[DeadlineMs, ...], Meta(max_length=MAX_BATCH)] = ()
    """Of each request, 0 for the message's own; empty: that of the message for all."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the lengths of all requests' lists."""
        return tuple(count for one in self.requests for count in one.page_counts())

    def frame_field(self, number: int) -> str:
        """Return the request whose frame that is."""
        for at, one in enumerate(self.requests):
            frames = len(one.page_counts())
            if number < frames:
                return f"requests[{at}].{one.frame_field(number)}"
            number -= frames
        return "requests"


class Batched(Body, frozen=True, kw_only=True, tag="BATCHED"):
    """BATCH's reply: what each request would have been answered by itself, in their order, and the frames of those.

    A result that would make the message larger than ``limits.max_message_bytes`` is TOO_LARGE: ask for that alone.
    """

    results: Annotated[tuple[BatchedResult, ...], Meta(max_length=MAX_BATCH)]

    def page_counts(self) -> tuple[int, ...]:
        """Return the lengths of all results' lists."""
        return tuple(count for one in self.results for count in one.page_counts())
