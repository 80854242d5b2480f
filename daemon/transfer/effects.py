"""What the transfer state machine asks its shell to do, in order."""

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
    """Copy these plans, then report ``op_done``; the pages are held until then."""

    op_id: int
    source: SourcePool
    destination: Pool
    plans: tuple[Plan, ...]
    request_id: str = ""


class StopOp(NamedTuple):
    """The copy is not wanted any more: stop at the next boundary, then report ``op_done`` all the same."""

    op_id: int


class Notify(NamedTuple):
    """Tell a session, if it still lives."""

    session_id: int
    event: Matched | Finished | Settled


class WarnTrimmed(NamedTuple):
    """Warn that lists were cut to one length: nothing proves that what was kept belongs together."""

    send_request: SendRequest
    receive_request: ReceiveRequest
    trim: Trim


class ReportBug(NamedTuple):
    """Log that an event came to an endpoint for which the table has no row; the endpoint has failed with INTERNAL."""

    request_id: str
    detail: str


class AnnounceReceive(NamedTuple):
    """Tell another daemon that a receive request waits for its send requests."""

    address: str
    receive_request: ReceiveRequest


class CloseReceive(NamedTuple):
    """Send another daemon a receive request's outcome; ``moved``: (its send request, bytes moved, pages trimmed).

    ``unmet``: how many sources had not come, where the receiver ended it.
    """

    address: str
    receive_request: ReceiveName
    error: KvferryError | None
    moved: tuple[tuple[int, int, int], ...]
    unmet: int = 0


class RefuseSend(NamedTuple):
    """Tell another daemon that its send request does not fit."""

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
    """Tell another daemon that what its receive request waits for was here and has ended."""

    peer: Incarnation
    receive_request: ReceiveName
    error: KvferryError


class NotifyAbandoned(NamedTuple):
    """Tell another daemon that a half of a request does not come."""

    address: str
    half: Half
    error: KvferryError


class StopSending(NamedTuple):
    """Write no further transfer op of this remote endpoint, then report ``sending_done`` for each under way."""

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
