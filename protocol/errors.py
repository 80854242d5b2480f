"""Every error that kvferry raises or sends, one class per code.

A code is stable on the wire; ``retryable`` errors may succeed later; ``remedy`` says what to do. By who is at fault::

    KvferryError
    +-- CallerError             the message or its sender is wrong
    |   +-- MalformedError            MALFORMED            bytes that are not a message of this protocol
    |   +-- UnknownTypeError          UNKNOWN_TYPE         a message type this daemon does not know
    |   +-- VersionMismatchError      VERSION_MISMATCH     no common protocol version
    |   +-- InvalidFieldError         INVALID_FIELD        a field with an invalid value
    |   +-- TooLargeError             TOO_LARGE            over a limit that HELLO announced
    |   +-- NoSessionError            NO_SESSION           needs a session, or its secret is not known
    |   +-- StaleBootError            STALE_BOOT           meant for another boot id of the daemon
    |   +-- AccessDeniedError         ACCESS_DENIED        not permitted to this user
    |   +-- UnknownPoolError          UNKNOWN_POOL         no pool of that name for this tenant
    |   +-- PoolExistsError           POOL_EXISTS          a pool of that name has another layout, size, window or model
    |   +-- PoolInUseError            POOL_IN_USE          pages of the pool are owned or in flight
    |   +-- LayoutMismatchError       LAYOUT_MISMATCH      the layout digest is not the pool's
    |   +-- PageOutOfRangeError       PAGE_OUT_OF_RANGE    page 0, negative, or past the pool's end
    |   +-- DuplicatePageError        DUPLICATE_PAGE       a page listed twice where each may be listed once
    |   +-- NotOwnerError             NOT_OWNER            a page that the session does not own
    |   +-- LengthMismatchError       LENGTH_MISMATCH      lengths that must be equal are not
    |   +-- EmptyPagesError           EMPTY_PAGES          a page list that must not be empty is
    |   +-- UnknownComponentError     UNKNOWN_COMPONENT    a component the pool does not have
    |   +-- DuplicateEntryError       DUPLICATE_ENTRY      two entries of one (component, role, layer)
    |   +-- UncoveredEntryError       UNCOVERED_ENTRY      a destination entry that no source covers
    |   +-- GeometryMismatchError     GEOMETRY_MISMATCH    paired entries of different geometry, dtype or format
    |   +-- ScaleMismatchError        SCALE_MISMATCH       paired entries whose 8-bit elements have different scales
    |   +-- ModelMismatchError        MODEL_MISMATCH       pages of one model for a pool of another
    |   +-- WindowMismatchError       WINDOW_MISMATCH      pages of a window that are required and missing
    |   +-- EmptyStateError           EMPTY_STATE          a state that one side has and the other lacks
    |   +-- HeadsIndivisibleError     HEADS_INDIVISIBLE    KV heads that do not divide over the ranks
    |   +-- BounceBufferTooSmallError BOUNCE_BUFFER_TOO_SMALL  a page that does not fit into one bounce buffer
    |   +-- PageOverlapError          PAGE_OVERLAP         pages that another SEND of the transfer already covers
    |   +-- PageGapError              PAGE_GAP             a chunk that does not continue the one before it
    |   +-- IncompleteError           INCOMPLETE           the last SEND leaves required pages uncovered
    |   +-- UnexpectedSourceError     UNEXPECTED_SOURCE    more sources than the transfer's RECEIVE names
    |   +-- FirstTokenTwiceError      FIRST_TOKEN_TWICE    a second SEND with a first token or payload
    |   +-- TransferExistsError       TRANSFER_EXISTS      the request id is in use
    |   +-- UnknownTransferError      UNKNOWN_TRANSFER     no transfer of that id, side and pool
    |   +-- TableOverflowError        TABLE_OVERFLOW       a row longer than the graph tables are wide
    |   +-- TableHoleError            TABLE_HOLE           a row's length needs a page that it was never given
    |   +-- CancelledError            CANCELLED            cancelled by its own side
    |   +-- UnknownTablesError        UNKNOWN_TABLES       no graph tables of that name in this session
    |   +-- TablesExistError          TABLES_EXIST         the session has graph tables of that name
    |   +-- TorchMissingError         TORCH_MISSING        a tensor without torch, or with a torch too old for its dtype
    |   +-- ConfigError               CONFIG               the daemon's configuration is wrong
    |   +-- UnknownSnapshotError      UNKNOWN_SNAPSHOT     no snapshot of that name for this tenant
    |   +-- UnknownLeaseError         UNKNOWN_LEASE        no lease of that number in this session
    |   +-- UnknownOperationError     UNKNOWN_OPERATION    no operation of that number in this session
    |   +-- TierOffError              TIER_OFF             the daemon has no such tier
    |   +-- ClientClosedError         CLIENT_CLOSED        the client was closed
    |   +-- ConcurrentUseError        CONCURRENT_USE       a client is used by two threads at a time
    |   +-- ForkedError               FORKED               a client, or what it mapped, in a forked process
    |   +-- MisuseError               MISUSE               a call that is not valid in the current state
    |   +-- NoModelError              NO_MODEL             the pool has no model identity
    +-- PeerError               the other side of a transfer
    |   +-- PeerLostError             PEER_LOST            its engine died or its daemon is gone
    |   +-- PeerCancelledError        PEER_CANCELLED       it cancelled
    |   +-- DeadlineError             DEADLINE             the time allowed ran out
    +-- BusyError               valid, but not possible now
    |   +-- PoolFullError             POOL_FULL            fewer free pages than asked for
    |   +-- PageBusyError             PAGE_BUSY            a page has a reader or writer that excludes this use
    |   +-- TablesBusyError           TABLES_BUSY          an update of these tables is already waiting
    |   +-- OverloadedError           BUSY                 a bound on requests in flight is reached
    |   +-- ShuttingDownError         SHUTTING_DOWN        the daemon is draining
    +-- DaemonError             the daemon or its host
        +-- OutOfMemoryError          OUT_OF_MEMORY        the host or the device cannot give the memory
        +-- DeviceUnavailableError    DEVICE_UNAVAILABLE   no such device, or its driver or software is missing
        +-- DeviceLostError           DEVICE_LOST          a device failed
        +-- PoolLostError             POOL_LOST            the pool's memory was lost
        +-- TransferFailedError       TRANSFER_FAILED      a copy failed
        +-- CacheMissError            CACHE_MISS           cached blocks were evicted or damaged before they were loaded
        +-- SnapshotDamagedError      SNAPSHOT_DAMAGED     a checksum does not match: the bytes have changed
        +-- DaemonLostError           DAEMON_LOST          no daemon answers, or its connection closed
        +-- InternalError             INTERNAL             a bug in the daemon
"""

from __future__ import annotations

from kvferry.protocol.client_errors import ClientClosedError, ConcurrentUseError, ForkedError, MisuseError
from kvferry.protocol.device_errors import (
    DeviceLostError,
    DeviceUnavailableError,
    PoolLostError,
    TablesBusyError,
    TablesExistError,
    TorchMissingError,
    UnknownTablesError,
)
from kvferry.protocol.error_base import BusyError, CallerError, DaemonError, KvferryError, PeerError
from kvferry.protocol.error_info import ErrorInfo
from kvferry.protocol.table_errors import TableHoleError, TableOverflowError
from kvferry.protocol.tier_errors import (
    CacheMissError,
    NoModelError,
    SnapshotDamagedError,
    TierOffError,
    UnknownLeaseError,
    UnknownOperationError,
    UnknownSnapshotError,
)
from kvferry.protocol.transfer_errors import (
    BounceBufferTooSmallError,
    CancelledError,
    DuplicateEntryError,
    EmptyPagesError,
    EmptyStateError,
    FirstTokenTwiceError,
    GeometryMismatchError,
    HeadsIndivisibleError,
    IncompleteError,
    LengthMismatchError,
    ModelMismatchError,
    PageGapError,
    PageOverlapError,
    ScaleMismatchError,
    TransferExistsError,
    UncoveredEntryError,
    UnexpectedSourceError,
    UnknownComponentError,
    UnknownTransferError,
    WindowMismatchError,
)

__all__ = [
    "AccessDeniedError",
    "BounceBufferTooSmallError",
    "BusyError",
    "CacheMissError",
    "CallerError",
    "CancelledError",
    "ClientClosedError",
    "ConcurrentUseError",
    "ConfigError",
    "DaemonError",
    "DaemonLostError",
    "DeadlineError",
    "DeviceLostError",
    "DeviceUnavailableError",
    "DuplicateEntryError",
    "DuplicatePageError",
    "EmptyPagesError",
    "EmptyStateError",
    "FirstTokenTwiceError",
    "ForkedError",
    "GeometryMismatchError",
    "HeadsIndivisibleError",
    "IncompleteError",
    "InternalError",
    "InvalidFieldError",
    "KvferryError",
    "LayoutMismatchError",
    "LengthMismatchError",
    "MalformedError",
    "MisuseError",
    "ModelMismatchError",
    "NoModelError",
    "NoSessionError",
    "NotOwnerError",
    "OutOfMemoryError",
    "OverloadedError",
    "PageBusyError",
    "PageGapError",
    "PageOutOfRangeError",
    "PageOverlapError",
    "PeerCancelledError",
    "PeerError",
    "PeerLostError",
    "PoolExistsError",
    "PoolFullError",
    "PoolInUseError",
    "PoolLostError",
    "ScaleMismatchError",
    "ShuttingDownError",
    "SnapshotDamagedError",
    "StaleBootError",
    "TableHoleError",
    "TableOverflowError",
    "TablesBusyError",
    "TablesExistError",
    "TierOffError",
    "TooLargeError",
    "TorchMissingError",
    "TransferExistsError",
    "TransferFailedError",
    "UncoveredEntryError",
    "UnexpectedSourceError",
    "UnknownComponentError",
    "UnknownLeaseError",
    "UnknownOperationError",
    "UnknownPoolError",
    "UnknownSnapshotError",
    "UnknownTablesError",
    "UnknownTransferError",
    "UnknownTypeError",
    "VersionMismatchError",
    "WindowMismatchError",
    "raised",
]


class MalformedError(CallerError):
    """Bytes that are not a message of this protocol."""

    code = "MALFORMED"
    remedy = "send [envelope, one little-endian int64 frame for each page list]"


class UnknownTypeError(CallerError):
    """A message type that this daemon does not know."""

    code = "UNKNOWN_TYPE"
    remedy = "see the features in HELLO's reply for what this daemon supports"


class VersionMismatchError(CallerError):
    """Client and daemon have no protocol version in common."""

    code = "VERSION_MISMATCH"
    remedy = "install a client and a daemon whose protocol ranges overlap"


class InvalidFieldError(CallerError):
    """A field with an invalid value."""

    code = "INVALID_FIELD"
    remedy = "correct the named field"


class TooLargeError(CallerError):
    """Over a limit that HELLO announced."""

    code = "TOO_LARGE"
    remedy = "stay within the limits that HELLO's reply gives"


class NoSessionError(CallerError):
    """The message needs a session, or carries a secret that the daemon does not know."""

    code = "NO_SESSION"
    remedy = "open a session on session.sock and send its secret"


class StaleBootError(CallerError):
    """The message expects another boot id of the daemon."""

    code = "STALE_BOOT"
    remedy = "the daemon was restarted: open a new session, attach the pools again, do not resend requests blindly"


class AccessDeniedError(CallerError):
    """Not permitted to this user."""

    code = "ACCESS_DENIED"
    remedy = "run as a user with access to the runtime directory, or request that access"


class UnknownPoolError(CallerError):
    """No pool of that name for this tenant."""

    code = "UNKNOWN_POOL"
    remedy = "create it first, or name an existing one: kvferry status lists the pools"


class PoolExistsError(CallerError):
    """A pool of that name exists with another layout, size, window or model."""

    code = "POOL_EXISTS"
    remedy = "use another name, the same spec, or delete_pool first; kvferry status shows the pools and their sessions"


class PoolInUseError(CallerError):
    """Pages of the pool are owned or in flight."""

    code = "POOL_IN_USE"
    retryable = True
    remedy = "free the pages, or end the sessions that own them, and try again; kvferry status shows them"


class LayoutMismatchError(CallerError):
    """The layout digest is not the pool's."""

    code = "LAYOUT_MISMATCH"
    remedy = "attach with the spec that the pool was created with"


class PageOutOfRangeError(CallerError):
    """Page 0 (the padding page), a negative page, or one past the end."""

    code = "PAGE_OUT_OF_RANGE"
    remedy = "name pages from 1 to pages - 1"


class DuplicatePageError(CallerError):
    """A page listed twice where each may be listed once."""

    code = "DUPLICATE_PAGE"
    remedy = "list each page once"


class NotOwnerError(CallerError):
    """A page that the session does not own."""

    code = "NOT_OWNER"
    remedy = "list only pages that ALLOCATE gave this session and that it has not freed"


class ConfigError(CallerError):
    """The daemon's configuration is wrong."""

    code = "CONFIG"
    remedy = "correct the named key"


class PeerLostError(PeerError):
    """The other side's engine died, or its daemon is gone."""

    code = "PEER_LOST"
    retryable = True
    remedy = "after SETTLED, RECEIVE again with the same pages and another source, or free them"


class PeerCancelledError(PeerError):
    """The other side cancelled."""

    code = "PEER_CANCELLED"
    remedy = "free the pages after SETTLED"


class DeadlineError(PeerError):
    """The time allowed ran out."""

    code = "DEADLINE"
    retryable = True
    remedy = "check which side was missing; allow more time or abandon the request"


class PoolFullError(BusyError):
    """Fewer free pages than asked for."""

    code = "POOL_FULL"
    remedy = "free pages, ask for fewer, or wait; kvferry status shows which sessions hold them"


class PageBusyError(BusyError):
    """A page has a reader or writer that excludes this use."""

    code = "PAGE_BUSY"
    remedy = "wait for the SETTLED event of the transfer that uses the page"


class OverloadedError(BusyError):
    """A bound on requests in flight is reached."""

    code = "BUSY"
    remedy = "wait for retry_after_ms, acknowledge events, keep fewer requests in flight"


class ShuttingDownError(BusyError):
    """The daemon is draining and accepts no new requests."""

    code = "SHUTTING_DOWN"
    remedy = "connect again once the daemon is back"


class OutOfMemoryError(DaemonError):
    """The host or the device cannot give the memory."""

    code = "OUT_OF_MEMORY"
    remedy = "make the pool smaller, delete another, or raise pools.max_bytes"


class TransferFailedError(DaemonError):
    """A copy failed."""

    code = "TRANSFER_FAILED"
    retryable = True
    remedy = "transfer again; the daemon's log has the cause"


class DaemonLostError(DaemonError):
    """No daemon answers, or its connection closed."""

    code = "DAEMON_LOST"
    retryable = True
    remedy = "start it with kvferry daemon or systemctl, or name its folder in KVFERRY_RUNTIME_DIR"


class InternalError(DaemonError):
    """A bug in the daemon, or an error code from a newer one."""

    code = "INTERNAL"
    remedy = "report it with the traceback in the daemon's log"


def raised(info: ErrorInfo) -> KvferryError:
    """Return the exception that ``info`` describes, of the code's class, or InternalError for an unknown code."""
    error = KvferryError.by_code.get(info.code, InternalError)(info.detail, field=info.field)
    error.code, error.retryable, error.remedy = info.code, info.retryable, info.remedy or error.remedy
    error.request_id = info.request_id
    return error
