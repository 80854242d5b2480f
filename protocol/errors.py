"""Every error that kvferry raises or sends, one class per code.

A code is stable on the wire; ``retryable`` errors may succeed later; ``remedy`` says what to do. By who is at fault,
which ``fault`` says in words, on the wire too::

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
    |   +-- ReplyGoneError            REPLY_GONE           a retry of a handled request whose reply is no longer kept
    +-- PeerError               the other side of a transfer
    |   +-- PeerLostError             PEER_LOST            its engine died or its daemon is gone
    |   +-- PeerCancelledError        PEER_CANCELLED       it cancelled
    |   +-- DeadlineError             DEADLINE             the time allowed ran out
    +-- BusyError               valid, but not possible now
    |   +-- PoolFullError             POOL_FULL            fewer free pages than requested
    |   +-- PageBusyError             PAGE_BUSY            a page has a reader or writer that excludes this use
    |   +-- TablesBusyError           TABLES_BUSY          an update of these tables is already waiting
    |   +-- OverloadedError           BUSY                 a bound on requests in flight is reached
    |   +-- ShuttingDownError         SHUTTING_DOWN        the daemon ends
    |   +-- DrainedError              DRAINED              an operator lets no new transfers begin here
    +-- DaemonError             the daemon or its host
        +-- OutOfMemoryError          OUT_OF_MEMORY        the host or the device cannot give the memory
        +-- OutOfDescriptorsError     OUT_OF_DESCRIPTORS   the daemon may not open more descriptors
        +-- DeviceUnavailableError    DEVICE_UNAVAILABLE   no such device, or its driver or software is missing
        +-- DeviceLostError           DEVICE_LOST          a device failed
        +-- PoolLostError             POOL_LOST            the pool's memory was lost
        +-- TransferFailedError       TRANSFER_FAILED      a copy failed
        +-- CacheMissError            CACHE_MISS           cached blocks were evicted or damaged before they were loaded
        +-- SnapshotDamagedError      SNAPSHOT_DAMAGED     a checksum does not match: the bytes have changed
        +-- SnapshotLostError         SNAPSHOT_LOST        the snapshot's memory ended with the daemon that made it
        +-- DaemonLostError           DAEMON_LOST          no daemon answers, or its connection closed
        +-- SessionLostError          SESSION_LOST         the daemon that answers does not know the session
        +-- UpgradeRefusedError       UPGRADE_REFUSED      the next daemon cannot take over; this one goes on
        +-- InternalError             INTERNAL             a bug in the daemon
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal, Self, TypeAlias

import msgspec

from kvferry.protocol.ids import PATTERNS

Effect: TypeAlias = Literal["absent", "done", "unknown"]
"""What a failed request has done: nothing, all of it, or nobody knows."""


RETRY_AT_ONCE_MS: Final = 5
"""If the state has just changed."""
RETRY_LATER_MS: Final = 1000
"""If an engine, an operator or a process has to give something up first, not the daemon."""
RETRY_LAST_MS: Final = 5000


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``field`` is the path of the field at fault (``lists[0].pages``), or empty.

    ``request_id`` is that of the transfer concerned, in full; empty if no transfer is concerned. ``fault``: see
    ``KvferryError``; empty from daemons that do not say. ``effect`` is what the request has done despite the error.
    ``retry_after_ms``: of BUSY, when to try again.
    """

    code: str
    detail: str
    retryable: bool = False
    field: str = ""
    remedy: str = ""
    request_id: str = ""
    fault: str = ""
    effect: Effect = "absent"
    retry_after_ms: int = 0


class KvferryError(Exception):
    """The base of every kvferry error. ``detail`` describes what happened, with the values involved.

    ``request_id`` is that of the transfer concerned, for correlating logs; empty if no transfer is concerned. ``fault``
    is who must act: ``caller``, ``peer`` (the other side of a transfer), ``daemon``, or ``busy`` (time helps). It is
    the class's, unless the case has another: DEADLINE has ``daemon`` if only the daemon had work to do.
    ``effect`` is what the request has done despite the error: nothing (``absent``), all (``done``), or ``unknown``.
    ``retry_after_ms``, of BUSY alone, is a typical time until a retry succeeds, 5 ms to 5 s; of others 0.
    """

    by_code: ClassVar[dict[str, type[KvferryError]]] = {}
    code: str = "INTERNAL"
    fault: str = "daemon"
    retryable: bool = False
    remedy: str = ""
    effect: Effect = "absent"
    retry_after_ms: int = 0

    def __init_subclass__(cls) -> None:
        if "code" in vars(cls):
            cls.by_code[cls.code] = cls

    def __init__(
        self,
        detail: str,
        *,
        field: str = "",
        retryable: bool | None = None,
        remedy: str | None = None,
        fault: str | None = None,
    ) -> None:
        """``retryable``, ``remedy`` and ``fault``: if the class's do not fit this case."""
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.request_id = ""
        if retryable is not None:
            self.retryable = retryable
        if remedy is not None:
            self.remedy = remedy
        if fault is not None:
            self.fault = fault

    def __str__(self) -> str:
        where = f"{self.field and f' [{self.field}]'}{self.request_id and f' request {self.request_id}'}"
        return f"{self.code}{where}: {self.detail}{self.remedy and f' ({self.remedy})'}"

    def info(self) -> ErrorInfo:
        """Return the error in its wire form."""
        return ErrorInfo(
            code=self.code,
            detail=self.detail,
            retryable=self.retryable,
            field=self.field,
            remedy=self.remedy,
            request_id=self.request_id,
            fault=self.fault,
            effect=self.effect,
            retry_after_ms=self.retry_after_ms,
        )


class CallerError(KvferryError):
    """The message or its sender is wrong; sending it again unchanged does not help."""

    fault = "caller"


class MalformedError(CallerError):
    """Bytes that are not a message of this protocol."""

    code = "MALFORMED"
    remedy = "send [envelope, one little-endian int64 frame for each page list]"


class UnknownTypeError(CallerError):
    """A message type that this daemon does not know."""

    code = "UNKNOWN_TYPE"
    remedy = "client and daemon are of different versions: kvferry status shows the daemon's"


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
    """The message, or what it began, was for another boot id of the daemon; ``effect`` says what it has done."""

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


class LengthMismatchError(CallerError):
    """Lengths that must be equal are not."""

    code = "LENGTH_MISMATCH"
    remedy = "give both sides the same number of pages and tokens"


class EmptyPagesError(CallerError):
    """A page list that must not be empty is."""

    code = "EMPTY_PAGES"
    remedy = "list at least one page; omit a transfer that moves nothing"


class UnknownComponentError(CallerError):
    """A component that the pool does not have, or a required one without a list."""

    code = "UNKNOWN_COMPONENT"
    remedy = "give one page list for each component of the pool"


class DuplicateEntryError(CallerError):
    """Two entries with the same (component, role, layer) in one manifest."""

    code = "DUPLICATE_ENTRY"
    remedy = "give each (component, role, layer) one entry"


class UncoveredEntryError(CallerError):
    """A destination entry that no source covers."""

    code = "UNCOVERED_ENTRY"
    remedy = "send it from some source, or make its component optional at the destination"


class GeometryMismatchError(CallerError):
    """Paired entries of different geometry, dtype or format."""

    code = "GEOMETRY_MISMATCH"
    remedy = "create both pools with the same page size, heads, widths, dtype and format"


class ScaleMismatchError(CallerError):
    """Paired entries whose 8-bit elements have different scales."""

    code = "SCALE_MISMATCH"
    remedy = "give both pools the scales of the same checkpoint: equal bytes mean different values under other scales"


class ModelMismatchError(CallerError):
    """Pages of one model were sent to a pool of another."""

    code = "MODEL_MISMATCH"
    remedy = "pair pools of one model, revision and adapter"


class WindowMismatchError(CallerError):
    """Pages of a window that are required and missing."""

    code = "WINDOW_MISMATCH"
    remedy = "let both sides compute the window at the same sequence length, and keep its pages until they are sent"


class EmptyStateError(CallerError):
    """A window or state of which one side gives pages and the other none."""

    code = "EMPTY_STATE"
    remedy = "give the pages on both sides, or set none=true at the destination for what it does not want"


class HeadsIndivisibleError(CallerError):
    """A number of KV heads and a number of ranks of which neither is a multiple of the other."""

    code = "HEADS_INDIVISIBLE"
    remedy = "choose a tensor-parallel size that divides the KV heads, or is a multiple of them"


class BounceBufferTooSmallError(CallerError):
    """A page of an entry is larger than one bounce buffer."""

    code = "BOUNCE_BUFFER_TOO_SMALL"
    remedy = "increase the bounce buffer size to at least the largest page_bytes, or make the pools' pages smaller"


class PageOverlapError(CallerError):
    """Pages that another SEND of the transfer already covers."""

    code = "PAGE_OVERLAP"
    remedy = "send each logical page of each entry once"


class PageGapError(CallerError):
    """A chunk that does not continue the one before it."""

    code = "PAGE_GAP"
    remedy = "start a chunk at the logical page at which the last one ended, on a page boundary"


class IncompleteError(CallerError):
    """The last SEND leaves required pages uncovered."""

    code = "INCOMPLETE"
    remedy = "send the named pages, or set last=false if more follow"


class UnexpectedSourceError(CallerError):
    """More sources than the transfer's RECEIVE names."""

    code = "UNEXPECTED_SOURCE"
    remedy = "set sources of RECEIVE to the number of pools that send"


class FirstTokenTwiceError(CallerError):
    """A second SEND of a transfer that carries a first token or a payload."""

    code = "FIRST_TOKEN_TWICE"
    remedy = "let one SEND of the transfer carry first_token and payload"


class TransferExistsError(CallerError):
    """The request id is in use by a live transfer."""

    code = "TRANSFER_EXISTS"
    remedy = "wait for the other transfer's SETTLED event, or use a new request id"


class UnknownTransferError(CallerError):
    """No transfer of that request id, side and pool belongs to the session."""

    code = "UNKNOWN_TRANSFER"
    remedy = "results are kept until they are acknowledged; check request_id, pool and side"


class TableOverflowError(CallerError):
    """A row needs more pages than the graph tables have columns."""

    code = "TABLE_OVERFLOW"
    remedy = "create the tables for the longest request, all draft tokens and the width of the engine's own token map"


class TableHoleError(CallerError):
    """A row's length needs a page that the row was never given."""

    code = "TABLE_HOLE"
    remedy = "send the page as an entry, or the row as a whole, at the latest with the length that needs it"


class CancelledError(CallerError):
    """Cancelled by its own side."""

    code = "CANCELLED"


class UnknownTablesError(CallerError):
    """No graph tables of that name in this session."""

    code = "UNKNOWN_TABLES"
    remedy = "create them first: tables live as long as their session"


class TablesExistError(CallerError):
    """The session already has graph tables of that name."""

    code = "TABLES_EXIST"
    remedy = "use another name, or delete the old tables; captured graphs keep the addresses they were captured with"


class TorchMissingError(CallerError):
    """A tensor was requested, but torch is missing or too old for its dtype; raised by the client, never sent."""

    code = "TORCH_MISSING"
    remedy = "on the host use array(), which needs only numpy; or install torch, or a newer version"


class ConfigError(CallerError):
    """The daemon's configuration is wrong."""

    code = "CONFIG"
    remedy = "correct the named key"


class UnknownSnapshotError(CallerError):
    """No snapshot of that name for this tenant."""

    code = "UNKNOWN_SNAPSHOT"
    remedy = "SNAPSHOTS lists the existing ones; a snapshot whose session has ended is dropped after a while"


class UnknownLeaseError(CallerError):
    """No lease of that number in this session."""

    code = "UNKNOWN_LEASE"
    remedy = "LOOKUP again: a lease ends with UNPIN, with the session, or after 5 minutes without a use"


class UnknownOperationError(CallerError):
    """No operation of that number in this session."""

    code = "UNKNOWN_OPERATION"
    remedy = "operations are known until their TIER_DONE is acknowledged"


class TierOffError(CallerError):
    """The daemon has no such tier."""

    code = "TIER_OFF"
    remedy = "configure the named tier under [tiers], and restart the daemon"


class ClientClosedError(CallerError):
    """The client was closed, possibly while the call was waiting; or an object that it mapped was closed separately."""

    code = "CLIENT_CLOSED"
    remedy = (
        "connect again: a closed client's pages and transfers were released; if the client is open, attach the pool, "
        "or create the tables or the ring, again"
    )


class ConcurrentUseError(CallerError):
    """A client is used by two threads at a time, or outside its event loop. Nothing was sent."""

    code = "CONCURRENT_USE"
    remedy = "give each thread or event loop its own client, or let one thread at a time call this one"


class ForkedError(CallerError):
    """A client, or memory that it mapped, is used in a process forked from its owner."""

    code = "FORKED"
    remedy = "connect and attach the pools in this process; the parent's client is not affected"


class MisuseError(CallerError):
    """A call that is not valid in the current state."""

    code = "MISUSE"
    remedy = "see docs/engines.md and the examples"


class NoModelError(CallerError):
    """The pool has no model identity, so its blocks cannot be distinguished from another model's."""

    code = "NO_MODEL"
    remedy = "create or register the pool with model=ModelIdentity(name=…, revision=…)"


class ReplyGoneError(CallerError):
    """A request with this number was handled, and its reply is no longer kept; it was not handled again."""

    code = "REPLY_GONE"
    remedy = "read replies as they come, and do not retry answered requests; RESULT and STATUS say what was done"


class PeerError(KvferryError):
    """The other side of a transfer failed it."""

    fault = "peer"


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


class BusyError(KvferryError):
    """The message is valid and may succeed later, unchanged."""

    fault = "busy"
    retryable = True


class PoolFullError(BusyError):
    """Fewer free pages than requested."""

    code = "POOL_FULL"
    remedy = "free pages, ask for fewer, or wait; kvferry pools shows who holds them, and since when"


class PageBusyError(BusyError):
    """A page has a reader or writer that excludes this use."""

    code = "PAGE_BUSY"
    remedy = "wait for the SETTLED event of the transfer that uses the page"


class TablesBusyError(BusyError):
    """An update of these tables is already waiting."""

    code = "TABLES_BUSY"
    remedy = "let the waiting update complete: record the replay event it waits for, then send the next one"


class OverloadedError(BusyError):
    """A bound on requests in flight is reached."""

    code = "BUSY"
    remedy = "wait for retry_after_ms, acknowledge events, keep fewer requests in flight"
    retry_after_ms = 50

    def after(self, retry_after_ms: int) -> Self:
        """Set when to try again, at least 5 and at most 5000 ms from now, and return the error."""
        self.retry_after_ms = min(max(retry_after_ms, RETRY_AT_ONCE_MS), RETRY_LAST_MS)
        return self


class ShuttingDownError(BusyError):
    """The daemon ends and accepts no new requests."""

    code = "SHUTTING_DOWN"
    remedy = "connect again once the daemon is back"


class DrainedError(BusyError):
    """An operator has drained the daemon: it accepts no new transfers, and goes on with those under way."""

    code = "DRAINED"
    remedy = "send the request to an engine of another daemon, or let the operator run kvferry undrain"


class DaemonError(KvferryError):
    """The daemon or its host failed."""


class OutOfMemoryError(DaemonError):
    """The host or the device cannot give the memory."""

    code = "OUT_OF_MEMORY"
    remedy = "make the pool smaller, delete another, or raise pools.max_bytes"


class OutOfDescriptorsError(DaemonError):
    """A user, or all users together, made the daemon open as many descriptors as they may."""

    code = "OUT_OF_DESCRIPTORS"
    remedy = (
        "delete pools or end sessions that are not needed: kvferry status shows them; or raise the daemon's "
        "LimitNOFILE (ulimit -n)"
    )


class DeviceUnavailableError(DaemonError):
    """No such device on this host, or its driver or software is missing."""

    code = "DEVICE_UNAVAILABLE"
    remedy = "run kvferry doctor: it reports what is missing and how to get it"


class DeviceLostError(DaemonError):
    """A device failed, or a call to it never returned: its contents can no longer be trusted."""

    code = "DEVICE_LOST"
    remedy = "the daemon exits and is restarted; create the pools again and capture graphs again"


class PoolLostError(DaemonError):
    """The pool's memory was lost with its device, the previous daemon, or the engine that registered it.

    Or the pool was deleted and made again since this engine, or another one of its instance, attached it.
    """

    code = "POOL_LOST"
    remedy = "create or register it again, recompute its contents, and capture graphs again"


class TransferFailedError(DaemonError):
    """A copy failed."""

    code = "TRANSFER_FAILED"
    retryable = True
    remedy = "transfer again; the daemon's log has the cause"


class CacheMissError(DaemonError):
    """Cached blocks were evicted or damaged before they were loaded."""

    code = "CACHE_MISS"
    remedy = "recompute the tokens from the named block on; the pages of the blocks before it are filled"


class SnapshotDamagedError(DaemonError):
    """A checksum does not match: the bytes are not those that were offloaded."""

    code = "SNAPSHOT_DAMAGED"
    remedy = "recompute the request's tokens, and check the host's memory: the target pages are undefined"


class SnapshotLostError(DaemonError):
    """The snapshot's memory ended with the daemon that made it."""

    code = "SNAPSHOT_LOST"
    remedy = "recompute its content"


class DaemonLostError(DaemonError):
    """No daemon answers, or its connection closed."""

    code = "DAEMON_LOST"
    retryable = True
    remedy = "start it with kvferry daemon or systemctl, or name its folder in KVFERRY_RUNTIME_DIR"


class SessionLostError(DaemonError):
    """The daemon that answers does not know the session: it began anew, or the session was not resumed in time."""

    code = "SESSION_LOST"
    remedy = (
        "close the client, connect again and create the pools anew: their pages are no longer this engine's, but what "
        "was mapped can still be read"
    )


class UpgradeRefusedError(DaemonError):
    """The next daemon cannot take over; this one goes on as before."""

    code = "UPGRADE_REFUSED"
    remedy = "mend what it says, or restart the daemon: what the next one cannot read is lost then"


class InternalError(DaemonError):
    """A bug in the daemon, or an error code from a newer one that does not say whose fault it is."""

    code = "INTERNAL"
    remedy = "report it with the traceback in the daemon's log"


_BY_FAULT: Final[dict[str, type[KvferryError]]] = {kind.fault: kind for kind in (CallerError, PeerError, BusyError)}


def raised(info: ErrorInfo) -> KvferryError:
    """Return the exception that ``info`` describes, of the code's class; of an unknown code, of the fault's."""
    kind = KvferryError.by_code.get(info.code) or _BY_FAULT.get(info.fault, InternalError)
    error = kind(
        info.detail,
        field=info.field,
        retryable=info.retryable,
        remedy=info.remedy or None,
        fault=info.fault or None,
    )
    error.code = info.code
    error.request_id = info.request_id
    error.effect = info.effect
    if isinstance(error, OverloadedError) and info.retry_after_ms:
        error.after(info.retry_after_ms)
    return error


# -- msgspec's validation errors as typed errors: which field is wrong, and what it should be.

ENVELOPE: Final = ("message_id", "boot_id", "secret", "deadline_ms", "acknowledged")
"""The fields of a request's envelope by index; the body follows them."""

_ENVELOPE_FIELDS: Final = {f"[{place}]": name for place, name in enumerate(ENVELOPE)}
_BODY: Final = f"[{len(ENVELOPE)}]"


def in_words(cause: msgspec.ValidationError) -> str:
    """Return msgspec's message, with patterns replaced by descriptions of them."""
    text = str(cause)
    for pattern, words in PATTERNS.items():
        text = text.replace(f"`str` matching regex {pattern!r}", words)
    return text


def invalid_field(cause: msgspec.ValidationError) -> InvalidFieldError:
    """Return msgspec's error, like ``Expected `int` - at `$[5].count```, as an error that names the field."""
    what, _, where = in_words(cause).partition(" - at `$")
    path = where.rstrip("`")
    field = _ENVELOPE_FIELDS.get(path, path.removeprefix(_BODY).lstrip("."))
    if not field and " field `" in what:  # types are quoted in the same way
        field = what.rsplit("`", 2)[-2]
    return InvalidFieldError(what, field=field)
