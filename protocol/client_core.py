"""The client's half of the protocol, sans I/O: numbers requests, matches replies, follows transfers.

A shell gives it the frames that arrived and sends the frames it returns; the sync and the async client are such
shells. It never blocks, knows no clock and no socket.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvferry.protocol.base import Body
from kvferry.protocol.cache_messages import Load, Store
from kvferry.protocol.client_operations import TierOperation
from kvferry.protocol.codec import Frames, IncomingReply, PageIds, decode_from_daemon, encode
from kvferry.protocol.envelope import Event, Request
from kvferry.protocol.errors import KvferryError, MisuseError, OverloadedError, raised
from kvferry.protocol.events import Finished, Matched, Settled
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.requests import Busy, ErrorReply, RequestBody
from kvferry.protocol.tier_messages import Offload, Offloading, OperationKind, OperationStarted, Restore, TierDone
from kvferry.protocol.transfer_messages import Accepted, Receive, Send


class TransferKey(NamedTuple):
    """What names one side of a transfer within a session."""

    direction: Literal["send", "receive"]
    request_id: str
    pool: str


class Transfer:
    """One side of a transfer, as far as the client knows.

    Attributes:
        key: what names it.
        accepted: the reply to the latest of its messages, or None.
        finished: the FINISHED event, or None.
        settled: the SETTLED event, or None.
        matched: how many of the destinations of a send, or sources of a receive, the daemon has said to be there.
        wakes_on_match: whether it counts as changed when ``matched`` grows.
        refused: why one of its messages was refused, or None.
        conversation: what its client, and no other, has as its own ``token``.
    """

    def __init__(self, key: TransferKey, conversation: object = None) -> None:
        self.key = key
        self.conversation = conversation
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.settled: Settled | None = None
        self.matched = 0
        self.wakes_on_match = False
        self.refused: KvferryError | None = None

    def __repr__(self) -> str:
        """Show how far it is."""
        return f"<Transfer {self.key.direction} {self.key.request_id} {self.state}>"

    @property
    def state(self) -> Literal["sent", "open", "refused", "finished", "settled"]:
        """Return how far it is."""
        if self.settled:
            return "settled"
        if self.finished:
            return "finished"
        if self.refused:
            return "refused"
        return "open" if self.accepted else "sent"

    @property
    def error(self) -> KvferryError | None:
        """Return why it failed or was refused; None while all is well."""
        if self.finished and self.finished.error:
            return raised(self.finished.error)
        return self.refused

    @property
    def is_finished(self) -> bool:
        """Return whether the outcome is known: the pages of a successful receive are there."""
        return self.finished is not None or self.refused is not None

    @property
    def is_settled(self) -> bool:
        """Return whether the daemon holds its pages no longer: they may be written or freed and used again."""
        return self.settled is not None or (self.refused is not None and self.accepted is None)

    def outcome(self) -> Finished:
        """Return the FINISHED event of a success.

        Raises:
            KvferryError: it failed or was refused.
            MisuseError: it is not finished yet.
        """
        if self.error is not None:
            raise self.error
        if self.finished is None:
            raise MisuseError(f"{self!r} is not finished: wait_finished waits for it, is_finished says whether it is")
        return self.finished


class Outgoing(NamedTuple):
    """A request to put on the wire."""

    message_id: int
    frames: Frames


class ReplyArrived(NamedTuple):
    """A reply to ``message_id``: a body and its page lists, or why it was refused."""

    message_id: int
    body: Body
    ids: tuple[PageIds, ...]
    error: KvferryError | None


class TransferChanged(NamedTuple):
    """A transfer was accepted, refused, finished or settled."""

    transfer: Transfer


class OperationChanged(NamedTuple):
    """An operation of the tiers was accepted, refused, or is done."""

    operation: TierOperation


_KINDS: dict[type[Body], OperationKind] = {Offload: "offload", Restore: "restore", Store: "store", Load: "load"}


class ClientCore:
    """One conversation with one incarnation of a daemon.

    Attributes:
        boot_id: which incarnation; empty until it has said so.
        token: what its transfers and operations have as their ``conversation``.
    """

    def __init__(self, boot_id: BootId = NO_BOOT, secret: bytes = b"") -> None:
        self.boot_id = boot_id
        self.token: object = object()
        self._secret = secret
        self._ids = itertools.count(1)
        self._pending: dict[int, Transfer | TierOperation | None] = {}
        self._operations: dict[int, TierOperation] = {}
        self._transfers: dict[TransferKey, Transfer] = {}
        self._seen_cursor = 0

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<ClientCore pending={len(self._pending)} transfers={len(self._transfers)}>"

    @property
    def pending(self) -> int:
        """Return how many requests have no reply yet."""
        return len(self._pending)

    def request(self, body: RequestBody, ids: Sequence[PageIds] = (), *, deadline_ms: int = 0) -> Outgoing:
        """Return the frames of a new request.

        Args:
            body: the message.
            ids: its page lists, each ``(n,)`` int64, in the order in which the body names them.
            deadline_ms: the time left to it; 0 for the daemon's default.
        """
        message_id = next(self._ids)
        self._pending[message_id] = None
        envelope = Request(message_id, self.boot_id, self._secret, deadline_ms, self._seen_cursor, body)
        return Outgoing(message_id, encode(envelope, ids))

    def transfer(
        self, body: Send | Receive, ids: Sequence[PageIds], *, deadline_ms: int = 0, wakes_on_match: bool = False
    ) -> tuple[Transfer, Outgoing]:
        """Return the transfer that a SEND or RECEIVE begins or continues, and the frames of the request."""
        key = TransferKey("send" if isinstance(body, Send) else "receive", body.request_id, body.pool)
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = self._transfers[key] = Transfer(key, self.token)
        elif transfer.finished is not None:
            transfer = Transfer(key, self.token)  # takes the place of the one before once it is accepted
        transfer.refused = None
        transfer.wakes_on_match |= wakes_on_match
        outgoing = self.request(body, ids, deadline_ms=deadline_ms)
        self._pending[outgoing.message_id] = transfer
        return transfer, outgoing

    def operation(
        self, body: Offload | Restore | Store | Load, ids: Sequence[PageIds], *, deadline_ms: int = 0
    ) -> tuple[TierOperation, Outgoing]:
        """Return a new work of the tiers, and the frames of its request."""
        operation = TierOperation(_KINDS[type(body)], body.snapshot if isinstance(body, Restore) else "", self.token)
        outgoing = self.request(body, ids, deadline_ms=deadline_ms)
        self._pending[outgoing.message_id] = operation
        return operation, outgoing

    def forget(self, message_id: int) -> None:
        """Give up waiting for a reply; one that still comes is ignored."""
        self._pending.pop(message_id, None)

    def feed(self, frames: Sequence[bytes]) -> ReplyArrived | TransferChanged | OperationChanged | None:
        """Take a message from the daemon; return what it means, or None where it means nothing to us any more.

        Raises:
            MalformedError: the bytes are no message of a daemon.
        """
        incoming = decode_from_daemon(frames)
        if self.boot_id == NO_BOOT:
            self.boot_id = BootId(incoming.message.boot_id)
        if isinstance(incoming.message, Event):
            return self._event(incoming.message, incoming.ids)
        if incoming.message.message_id not in self._pending:
            return None
        waiting = self._pending.pop(incoming.message.message_id)
        reply = _read_reply(incoming)
        if waiting is None:
            return reply
        if isinstance(waiting, TierOperation):
            return self._operation_answered(waiting, reply)
        return self._transfer_answered(waiting, reply)

    def _operation_answered(self, operation: TierOperation, reply: ReplyArrived) -> OperationChanged:
        if reply.error is not None:
            operation.refused = reply.error
        elif isinstance(reply.body, Offloading | OperationStarted):
            operation.number = reply.body.operation
            self._operations[operation.number] = operation
            if isinstance(reply.body, Offloading):
                operation.snapshot = reply.body.snapshot
        return OperationChanged(operation)

    def _transfer_answered(self, transfer: Transfer, reply: ReplyArrived) -> TransferChanged:
        if reply.error is not None:
            reply.error.request_id = transfer.key.request_id  # BUSY does not say it
            transfer.refused = transfer.refused or reply.error
            if transfer.is_settled and self._transfers.get(transfer.key) is transfer:
                del self._transfers[transfer.key]
        elif isinstance(reply.body, Accepted):
            transfer.accepted = reply.body
            transfer.matched = max(transfer.matched, reply.body.matched)
            self._transfers[transfer.key] = transfer
        return TransferChanged(transfer)

    def _event(self, event: Event, ids: tuple[PageIds, ...]) -> TransferChanged | OperationChanged | None:
        if event.cursor <= self._seen_cursor or event.boot_id != self.boot_id:
            return None
        self._seen_cursor = event.cursor
        body = event.body
        if isinstance(body, TierDone):
            operation = self._operations.pop(body.operation, None)
            if operation is None:
                return None
            operation.end(body, ids)
            return OperationChanged(operation)
        transfer = self._transfers.get(TransferKey(body.direction, body.request_id, body.pool))
        if transfer is None:
            return None
        if isinstance(body, Matched):
            transfer.matched = max(transfer.matched, body.matched)
            return TransferChanged(transfer) if transfer.wakes_on_match else None
        if isinstance(body, Finished):
            transfer.finished = body
        else:
            transfer.settled = body
            self._transfers.pop(transfer.key, None)
        return TransferChanged(transfer)


def _read_reply(incoming: IncomingReply) -> ReplyArrived:
    body = incoming.message.body
    error = None
    if isinstance(body, ErrorReply):
        error = raised(body.error)
    elif isinstance(body, Busy):
        error = OverloadedError(f"{body.detail}; try again after {body.retry_after_ms} ms")
    message_id = 0 if isinstance(incoming.message, Event) else incoming.message.message_id
    return ReplyArrived(message_id, body, incoming.ids, error)
