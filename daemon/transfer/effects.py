"""Effects: what the transfer state machine asks its shell to do, in order."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.daemon.transfer.endpoints import ReceiveRequest, RemoteEndpoint, SendRequest, SourcePool
from kvferry.daemon.transfer.matching import Trim
from kvferry.daemon.transfer.remote import Incarnation
from kvferry.daemon.transfer.tombstones import Half
from kvferry.pools.planning.plan import Plan
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.events import Finished, Matched, Settled
from kvferry.protocol.peer_messages import ReceiveName


class StartOp(NamedTuple):
    """Execute these plans, then call ``op_done``; the pages are held until then."""

    op_id: int
    source: SourcePool
    destination: Pool
    plans: tuple[Plan, ...]
    request_id: str = ""


class StopOp(NamedTuple):
    """Stop a copy at the next boundary, then call ``op_done`` as usual."""

    op_id: int


class Notify(NamedTuple):
    """Queue an event for a session, if it is still live."""

    session_id: int
    event: Matched | Finished | Settled


class WarnTrimmed(NamedTuple):
    """Warn that page lists of unequal length were cut to the shorter one: the kept pages may not belong together."""

    send_request: SendRequest
    receive_request: ReceiveRequest
    trim: Trim


class ReportBug(NamedTuple):
    """Log that the table has no row for an event of an endpoint, which has failed with INTERNAL."""

    request_id: str
    detail: str


class AnnounceReceive(NamedTuple):
    """Announce a receive request to a daemon that may have send requests for it."""

    address: str
    receive_request: ReceiveRequest


class CloseReceive(NamedTuple):
    """Send another daemon the outcome of a receive request.

    Attributes:
        moved: for each of that daemon's send requests: (its number, bytes moved, pages trimmed).
        unmet: how many sources had not come, where the receiver itself ended the receive request.
    """

    address: str
    receive_request: ReceiveName
    error: KvferryError | None
    moved: tuple[tuple[int, int, int], ...]
    unmet: int = 0


class RefuseSend(NamedTuple):
    """Tell another daemon that its send request does not fit the receive request."""

    peer: Incarnation
    receive_request: ReceiveName
    send_request: int
    error: KvferryError


class NotifyChunk(NamedTuple):
    """Send a chunk to another daemon's receive request."""

    remote_endpoint: RemoteEndpoint
    chunk: int


class NotifyReady(NamedTuple):
    """Tell another daemon how many steps of a chunk are ready."""

    remote_endpoint: RemoteEndpoint
    chunk: int
    ready: int


class Withdraw(NamedTuple):
    """Tell another daemon that a send request has failed."""

    remote_endpoint: RemoteEndpoint
    error: KvferryError


class NotifyEnded(NamedTuple):
    """Tell another daemon that the SENDs its receive request waits for were here and have ended."""

    peer: Incarnation
    receive_request: ReceiveName
    error: KvferryError


class NotifyAbandoned(NamedTuple):
    """Tell another daemon that a half of a request will not come."""

    address: str
    half: Half
    error: KvferryError


class StopSending(NamedTuple):
    """Stop writing transfer ops of this remote endpoint, then call ``sending_done`` for each one in progress."""

    remote_endpoint: RemoteEndpoint


Effect = (
    StartOp
    | StopOp
    | Notify
    | WarnTrimmed
    | ReportBug
    | AnnounceReceive
    | CloseReceive
    | RefuseSend
    | NotifyChunk
    | NotifyReady
    | Withdraw
    | NotifyEnded
    | NotifyAbandoned
    | StopSending
)
