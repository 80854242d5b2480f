"""The table of request types, with their replies and whether they need a session.

A type's name is never reused or changed. docs/architecture.md, "Where do I change X?", lists where a new type goes.
"""

from __future__ import annotations

from typing import NamedTuple

from kvferry.protocol.base import Body
from kvferry.protocol.batch_messages import Batch, Batched, BatchedRequest, BatchedResult
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
from kvferry.protocol.events import Finished, Matched, Settled
from kvferry.protocol.pool_messages import (
    Allocate,
    Allocated,
    AttachPool,
    CreatePool,
    DeletePool,
    Free,
    Freed,
    PoolAttached,
    PoolCreated,
    PoolDeleted,
    PoolRegistered,
    RegisterPool,
)
from kvferry.protocol.refusals import Busy, ErrorReply
from kvferry.protocol.session_messages import EventsOpened, Hello, OpenEvents, Ping, Pong, Status, StatusReport, Welcome
from kvferry.protocol.table_messages import (
    CreateTables,
    DeleteTables,
    TablesCreated,
    TablesDeleted,
    TablesUpdated,
    UpdateTables,
)
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
    TierDone,
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

__all__ = ["REQUEST_TYPES", "Busy", "ErrorReply", "EventBody", "ReplyBody", "RequestBody", "RequestType"]


class RequestType(NamedTuple):
    """One row: the types of the request's and the reply's body, and whether a session is needed."""

    request: type[Body]
    reply: type[Body]
    needs_session: bool


REQUEST_TYPES: dict[str, RequestType] = {
    "HELLO": RequestType(Hello, Welcome, needs_session=False),
    "PING": RequestType(Ping, Pong, needs_session=False),
    "STATUS": RequestType(Status, StatusReport, needs_session=False),
    "OPEN_EVENTS": RequestType(OpenEvents, EventsOpened, needs_session=True),
    "CREATE_POOL": RequestType(CreatePool, PoolCreated, needs_session=True),
    "ATTACH_POOL": RequestType(AttachPool, PoolAttached, needs_session=True),
    "REGISTER_POOL": RequestType(RegisterPool, PoolRegistered, needs_session=True),
    "DELETE_POOL": RequestType(DeletePool, PoolDeleted, needs_session=True),
    "ALLOCATE": RequestType(Allocate, Allocated, needs_session=True),
    "FREE": RequestType(Free, Freed, needs_session=True),
    "CREATE_TABLES": RequestType(CreateTables, TablesCreated, needs_session=True),
    "UPDATE_TABLES": RequestType(UpdateTables, TablesUpdated, needs_session=True),
    "DELETE_TABLES": RequestType(DeleteTables, TablesDeleted, needs_session=True),
    "OFFLOAD": RequestType(Offload, Offloading, needs_session=True),
    "RESTORE": RequestType(Restore, OperationStarted, needs_session=True),
    "DROP_SNAPSHOT": RequestType(DropSnapshot, SnapshotDropped, needs_session=True),
    "SNAPSHOTS": RequestType(Snapshots, SnapshotReport, needs_session=True),
    "CANCEL_OPERATION": RequestType(CancelOperation, OperationCancelled, needs_session=True),
    "LOOKUP": RequestType(Lookup, Found, needs_session=True),
    "LOAD": RequestType(Load, OperationStarted, needs_session=True),
    "STORE": RequestType(Store, OperationStarted, needs_session=True),
    "UNPIN": RequestType(Unpin, Unpinned, needs_session=True),
    "CACHE_LIST": RequestType(CacheList, CacheListed, needs_session=True),
    "CACHE_PIN": RequestType(CachePin, CachePinned, needs_session=True),
    "CACHE_EVICT": RequestType(CacheEvict, CacheEvicted, needs_session=True),
    "CACHE_EVENTS": RequestType(CacheEvents, CacheChanges, needs_session=True),
    "SEND": RequestType(Send, Accepted, needs_session=True),
    "RECEIVE": RequestType(Receive, Accepted, needs_session=True),
    "CANCEL": RequestType(Cancel, Cancelled, needs_session=True),
    "ABANDON": RequestType(Abandon, Abandoned, needs_session=True),
    "RESULT": RequestType(Result, TransferResult, needs_session=True),
    "BATCH": RequestType(Batch, Batched, needs_session=True),
}

RequestBody = Hello | Ping | Status | OpenEvents | AttachPool | RegisterPool | CreateTables | BatchedRequest | Batch
ReplyBody = (
    Welcome
    | Pong
    | StatusReport
    | EventsOpened
    | PoolAttached
    | PoolRegistered
    | TablesCreated
    | BatchedResult
    | Batched
)
EventBody = Matched | Finished | Settled | TierDone
