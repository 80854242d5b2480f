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
    |   +-- PoolExistsError           POOL_EXISTS          that name has another layout or size
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
    |   +-- PageOverlapError          PAGE_OVERLAP         pages that another SEND of the room covers already
    |   +-- PageGapError              PAGE_GAP             a chunk that does not continue the one before it
    |   +-- IncompleteError           INCOMPLETE           the last SEND leaves required pages uncovered
    |   +-- UnexpectedSourceError     UNEXPECTED_SOURCE    more sources than the room's RECEIVE names
    |   +-- FirstTokenTwiceError      FIRST_TOKEN_TWICE    a second SEND with a first token or payload
    |   +-- RoomExistsError           ROOM_EXISTS          the request id is in use
    |   +-- UnknownRoomError          UNKNOWN_ROOM         no hand-off of that id, side and pool
    |   +-- CancelledError            CANCELLED            cancelled by its own side
    |   +-- ConfigError               CONFIG               the daemon's configuration is wrong
    +-- PeerError               the other side of a hand-off
    |   +-- PeerLostError             PEER_LOST            its engine died or its daemon is gone
    |   +-- PeerCancelledError        PEER_CANCELLED       it cancelled
    |   +-- DeadlineError             DEADLINE             the time allowed ran out
    +-- BusyError               right, but not now
    |   +-- PoolFullError             POOL_FULL            fewer free pages than asked for
    |   +-- PageBusyError             PAGE_BUSY            a page has a reader or writer that excludes this use
    |   +-- OverloadedError           BUSY                 a bound on work in flight is reached
    |   +-- ShuttingDownError         SHUTTING_DOWN        the daemon is draining
    +-- DaemonError             ours
        +-- OutOfMemoryError          OUT_OF_MEMORY        the host cannot give the memory
        +-- TransferFailedError       TRANSFER_FAILED      a copy failed
        +-- DaemonLostError           DAEMON_LOST          no daemon answers, or its connection closed
        +-- InternalError             INTERNAL             a bug in the daemon
"""

from __future__ import annotations

from typing import ClassVar

from kvferry.protocol.error_info import ErrorInfo


class KvferryError(Exception):
    """The base of every error here. ``detail`` says what happened, with the values concerned."""

    by_code: ClassVar[dict[str, type[KvferryError]]] = {}
    code: str = "INTERNAL"
    retryable: bool = False
    remedy: str = ""

    def __init_subclass__(cls) -> None:
        if "code" in vars(cls):
            cls.by_code[cls.code] = cls

    def __init__(self, detail: str, *, field: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field

    def __str__(self) -> str:
        return f"{self.code}{self.field and f' [{self.field}]'}: {self.detail}{self.remedy and f' ({self.remedy})'}"

    def info(self) -> ErrorInfo:
        """Return the error as it travels."""
        return ErrorInfo(
            code=self.code, detail=self.detail, retryable=self.retryable, field=self.field, remedy=self.remedy
        )


class CallerError(KvferryError):
    """The message or its sender is wrong; sending it again unchanged cannot help."""


class PeerError(KvferryError):
    """The other side of a hand-off failed it."""


class BusyError(KvferryError):
    """The message is right and may succeed later, unchanged."""

    retryable = True


class DaemonError(KvferryError):
    """The daemon or its host failed."""


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
    remedy = "create it first; STATUS lists the pools"


class PoolExistsError(CallerError):
    """The name is taken by a pool of another layout or size."""

    code = "POOL_EXISTS"
    remedy = "take another name, the same spec, or delete the old pool"


class PoolInUseError(CallerError):
    """Pages of the pool are owned or in flight."""

    code = "POOL_IN_USE"
    retryable = True
    remedy = "free the pages, or end the sessions that own them, and try again"


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


class LengthMismatchError(CallerError):
    """Lengths that must be equal are not."""

    code = "LENGTH_MISMATCH"
    remedy = "give both sides the same number of pages and tokens"


class EmptyPagesError(CallerError):
    """A list that must name pages names none."""

    code = "EMPTY_PAGES"
    remedy = "name at least one page; leave out a hand-off that moves nothing"


class UnknownComponentError(CallerError):
    """A component that the pool does not have, or a required one without a list."""

    code = "UNKNOWN_COMPONENT"
    remedy = "give one page list for each component of the pool"


class DuplicateEntryError(CallerError):
    """Two entries of one (component, role, layer) in one manifest."""

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


class PageOverlapError(CallerError):
    """Pages that another SEND of the room covers already."""

    code = "PAGE_OVERLAP"
    remedy = "send each logical page of each entry once"


class PageGapError(CallerError):
    """A chunk that does not continue the one before it."""

    code = "PAGE_GAP"
    remedy = "start a chunk at the logical page at which the last one ended, on a page boundary"


class IncompleteError(CallerError):
    """The last SEND leaves required pages uncovered."""

    code = "INCOMPLETE"
    remedy = "send the pages that are named, or set last=false if more follow"


class UnexpectedSourceError(CallerError):
    """More sources than the room's RECEIVE names."""

    code = "UNEXPECTED_SOURCE"
    remedy = "RECEIVE with sources= the number of pools that send"


class FirstTokenTwiceError(CallerError):
    """A second SEND of a room that carries a first token or a payload."""

    code = "FIRST_TOKEN_TWICE"
    remedy = "let one SEND of the room carry first_token and payload"


class RoomExistsError(CallerError):
    """The request id is in use by a live hand-off or by another tenant."""

    code = "ROOM_EXISTS"
    remedy = "wait for the other hand-off's settled event, or make a fresh request id"


class UnknownRoomError(CallerError):
    """No hand-off of that request id, side and pool belongs to the session."""

    code = "UNKNOWN_ROOM"
    remedy = "results are kept until they are acknowledged; check request_id, pool and side"


class CancelledError(CallerError):
    """Cancelled by its own side."""

    code = "CANCELLED"


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
    remedy = "free pages, ask for fewer, or wait"


class PageBusyError(BusyError):
    """A page has a reader or writer that excludes this use."""

    code = "PAGE_BUSY"
    remedy = "wait for the settled event of the hand-off that uses the page"


class OverloadedError(BusyError):
    """A bound on work in flight is reached."""

    code = "BUSY"
    remedy = "wait for retry_after_ms, acknowledge events, keep fewer requests in flight"


class ShuttingDownError(BusyError):
    """The daemon is draining and takes no new work."""

    code = "SHUTTING_DOWN"
    remedy = "connect again once the daemon is back"


class OutOfMemoryError(DaemonError):
    """The host cannot give the memory."""

    code = "OUT_OF_MEMORY"
    remedy = "make the pool smaller, delete another, or raise pools.max_bytes"


class TransferFailedError(DaemonError):
    """A copy failed."""

    code = "TRANSFER_FAILED"
    retryable = True
    remedy = "hand off again; the daemon's log has the cause"


class DaemonLostError(DaemonError):
    """No daemon answers, or its connection closed."""

    code = "DAEMON_LOST"
    retryable = True
    remedy = "check that the daemon runs: kvferry status"


class InternalError(DaemonError):
    """A bug in the daemon, or an error code from a newer one."""

    code = "INTERNAL"
    remedy = "the daemon's log has the traceback: report it"


def raised(info: ErrorInfo) -> KvferryError:
    """Return the exception that ``info`` describes, of its own class where the code is known."""
    error = KvferryError.by_code.get(info.code, InternalError)(info.detail, field=info.field)
    error.code, error.retryable, error.remedy = info.code, info.retryable, info.remedy or error.remedy
    return error
