"""Every error kvferry raises or sends, one class a code.

A code is stable on the wire, ``retryable`` errors may pass later, ``remedy`` says what to do. By whose fault it is::

    KvferryError
    +-- CallerError             the message or its sender is wrong
    |   +-- MalformedError            MALFORMED            bytes that are no message of this protocol
    |   +-- UnknownTypeError          UNKNOWN_TYPE         a message type this daemon does not know
    |   +-- VersionMismatchError      VERSION_MISMATCH     no common protocol version
    |   +-- InvalidFieldError         INVALID_FIELD        a field whose value makes no sense
    |   +-- TooLargeError             TOO_LARGE            over a limit that HELLO announced
    |   +-- NoSessionError            NO_SESSION           needs a session, or its secret is not known
    |   +-- StaleBootError            STALE_BOOT           meant for another incarnation of the daemon
    |   +-- AccessDeniedError         ACCESS_DENIED        not this user's to do
    |   +-- UnknownPoolError          UNKNOWN_POOL         no pool of that name for this tenant
    |   +-- PoolExistsError           POOL_EXISTS          that name has another layout, size, window or model
    |   +-- PoolInUseError            POOL_IN_USE          pages of the pool are owned or in flight
    |   +-- LayoutMismatchError       LAYOUT_MISMATCH      the layout digest is not the pool's
    |   +-- PageOutOfRangeError       PAGE_OUT_OF_RANGE    page 0, negative, or past the pool's end
    |   +-- DuplicatePageError        DUPLICATE_PAGE       a page named twice where each may be named once
    |   +-- NotOwnerError             NOT_OWNER            a page that the session does not own
    |   +-- LengthMismatchError       LENGTH_MISMATCH      lengths that must be equal are not
    |   +-- EmptyPagesError           EMPTY_PAGES          a list that must name pages names none
    |   +-- UnknownComponentError     UNKNOWN_COMPONENT    a component the pool does not have
    |   +-- DuplicateEntryError       DUPLICATE_ENTRY      two entries of one (component, role, layer)
    |   +-- UncoveredEntryError       UNCOVERED_ENTRY      a destination entry that no source covers
    |   +-- GeometryMismatchError     GEOMETRY_MISMATCH    paired entries of different geometry, dtype or format
    |   +-- ScaleMismatchError        SCALE_MISMATCH       paired entries whose 8-bit elements have other scales
    |   +-- ModelMismatchError        MODEL_MISMATCH       pages of one model for a pool of another
    |   +-- WindowMismatchError       WINDOW_MISMATCH      pages of a window that are wanted and not there
    |   +-- EmptyStateError           EMPTY_STATE          a state that one side has and the other lacks
    |   +-- HeadsIndivisibleError     HEADS_INDIVISIBLE    KV heads that do not divide over the ranks
    |   +-- BounceBufferTooSmallError BOUNCE_BUFFER_TOO_SMALL  a page that does not fit into one bounce buffer
    |   +-- PageOverlapError          PAGE_OVERLAP         pages that another SEND of the transfer covers already
    |   +-- PageGapError              PAGE_GAP             a chunk that does not continue the one before it
    |   +-- IncompleteError           INCOMPLETE           the last SEND leaves required pages uncovered
    |   +-- UnexpectedSourceError     UNEXPECTED_SOURCE    more sources than the transfer's RECEIVE names
    |   +-- FirstTokenTwiceError      FIRST_TOKEN_TWICE    a second SEND with a first token or payload
    |   +-- TransferExistsError           TRANSFER_EXISTS          the request id is in use
    |   +-- UnknownTransferError          UNKNOWN_TRANSFER         no transfer of that id, side and pool
    |   +-- TableOverflowError        TABLE_OVERFLOW       a row longer than the graph tables are wide
    |   +-- TableHoleError            TABLE_HOLE           a row's length needs a page that it was never given
    |   +-- CancelledError            CANCELLED            cancelled by its own side
    |   +-- UnknownTablesError        UNKNOWN_TABLES       no graph tables of that name in this session
    |   +-- TablesExistError          TABLES_EXIST         the session has graph tables of that name
    |   +-- TorchMissingError         TORCH_MISSING        a tensor without torch, or an older one than its dtype
    |   +-- ConfigError               CONFIG               the daemon's configuration is wrong
    |   +-- UnknownSnapshotError      UNKNOWN_SNAPSHOT     no snapshot of that name for this tenant
    |   +-- UnknownLeaseError         UNKNOWN_LEASE        no lease of that number in this session
    |   +-- UnknownOperationError          UNKNOWN_OPERATION         no operation of that number in this session
    |   +-- TierOffError              TIER_OFF             the daemon has no such tier
    |   +-- ClientClosedError         CLIENT_CLOSED        the client was closed
    |   +-- ConcurrentUseError        CONCURRENT_USE       a client is used by two threads at a time
    |   +-- ForkedError               FORKED               a client, or what it mapped, in a forked process
    |   +-- MisuseError               MISUSE               a call that makes no sense where it stands
    |   +-- NoModelError              NO_MODEL             the pool does not say whose KV it holds
    +-- PeerError               the other side of a transfer
    |   +-- PeerLostError             PEER_LOST            its engine died or its daemon is gone
    |   +-- PeerCancelledError        PEER_CANCELLED       it cancelled
    |   +-- DeadlineError             DEADLINE             the time allowed ran out
    +-- BusyError               right, but not now
    |   +-- PoolFullError             POOL_FULL            fewer free pages than asked for
    |   +-- PageBusyError             PAGE_BUSY            a page has a reader or writer that excludes this use
    |   +-- TablesBusyError           TABLES_BUSY          an update of these tables waits already
    |   +-- OverloadedError           BUSY                 a bound on work in flight is reached
    |   +-- ShuttingDownError         SHUTTING_DOWN        the daemon is draining
    +-- DaemonError             ours
        +-- OutOfMemoryError          OUT_OF_MEMORY        the host or the device cannot give the memory
        +-- DeviceUnavailableError    DEVICE_UNAVAILABLE   no such device, or what drives it is missing
        +-- DeviceLostError           DEVICE_LOST          a device failed
        +-- PoolLostError             POOL_LOST            the pool's memory is gone
        +-- TransferFailedError       TRANSFER_FAILED      a copy failed
        +-- CacheMissError            CACHE_MISS           cached blocks were gone when they were to be loaded
        +-- SnapshotDamagedError      SNAPSHOT_DAMAGED     a block's bytes are not those that were offloaded
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
    """Bytes that are no message of this protocol."""

    code = "MALFORMED"
    remedy = "send [envelope, one little-endian int64 frame for each page list]"


class UnknownTypeError(CallerError):
    """A message type that this daemon does not know."""

    code = "UNKNOWN_TYPE"
    remedy = "see HELLO's features for what this daemon knows"


class VersionMismatchError(CallerError):
    """Client and daemon have no protocol version in common."""

    code = "VERSION_MISMATCH"
    remedy = "install a client and a daemon whose protocol ranges meet"


class InvalidFieldError(CallerError):
    """A field whose value makes no sense."""

    code = "INVALID_FIELD"
    remedy = "correct the field that is named"


class TooLargeError(CallerError):
    """Over a limit that HELLO announced."""

    code = "TOO_LARGE"
    remedy = "stay within the limits that HELLO's reply gives"


class NoSessionError(CallerError):
    """The message needs a session, or carries a secret that the daemon does not know."""

    code = "NO_SESSION"
    remedy = "open a session on session.sock and send its secret"


class StaleBootError(CallerError):
    """The message expects another incarnation of the daemon."""

    code = "STALE_BOOT"
    remedy = "the daemon was restarted: open a new session, attach the pools again, do not replay blindly"


class AccessDeniedError(CallerError):
    """Not this user's to do."""

    code = "ACCESS_DENIED"
    remedy = "run as a user who may use the runtime directory, or ask for that access"


class UnknownPoolError(CallerError):
    """No pool of that name for this tenant."""

    code = "UNKNOWN_POOL"
    remedy = "create it first, or name one that is there: kvferry status lists the pools"


class PoolExistsError(CallerError):
    """The name is taken by a pool of another layout, size, window or model."""

    code = "POOL_EXISTS"
    remedy = "take another name, the same spec, or delete_pool first; kvferry status shows the pools and their sessions"


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
    """A page named twice where each may be named once."""

    code = "DUPLICATE_PAGE"
    remedy = "name each page once"


class NotOwnerError(CallerError):
    """A page that the session does not own."""

    code = "NOT_OWNER"
    remedy = "name only pages that ALLOCATE gave this session and that it has not freed"


class ConfigError(CallerError):
    """The daemon's configuration is wrong."""

    code = "CONFIG"
    remedy = "correct the key that is named"


class PeerLostError(PeerError):
    """The other side's engine died, or its daemon is gone."""

    code = "PEER_LOST"
    retryable = True
    remedy = "after settled, RECEIVE again with the same pages and another source, or free them"


class PeerCancelledError(PeerError):
    """The other side cancelled."""

    code = "PEER_CANCELLED"
    remedy = "free the pages after settled"


class DeadlineError(PeerError):
    """The time allowed ran out."""

    code = "DEADLINE"
    retryable = True
    remedy = "see which side was missing; allow more time or give the request up"


class PoolFullError(BusyError):
    """Fewer free pages than asked for."""

    code = "POOL_FULL"
    remedy = "free pages, ask for fewer, or wait; kvferry status shows which sessions hold them"


class PageBusyError(BusyError):
    """A page has a reader or writer that excludes this use."""

    code = "PAGE_BUSY"
    remedy = "wait for the settled event of the transfer that uses the page"


class OverloadedError(BusyError):
    """A bound on work in flight is reached."""

    code = "BUSY"
    remedy = "wait for retry_after_ms, acknowledge events, keep fewer requests in flight"


class ShuttingDownError(BusyError):
    """The daemon is draining and takes no new work."""

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
    remedy = "the daemon's log has the traceback: report it"


def raised(info: ErrorInfo) -> KvferryError:
    """Return the exception that ``info`` describes, of its own class where the code is known."""
    error = KvferryError.by_code.get(info.code, InternalError)(info.detail, field=info.field)
    error.code, error.retryable, error.remedy = info.code, info.retryable, info.remedy or error.remedy
    error.request_id = info.request_id
    return error
