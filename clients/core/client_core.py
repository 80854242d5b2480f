"""The client's half of the protocol, sans I/O: numbers requests, matches replies, tracks transfers and operations.

A shell passes in received frames and sends the frames returned; the sync and the async client are such shells. The core
never blocks and uses no clock or socket.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from kvferry.clients.core.followed import TierOperation, Transfer, TransferKey
from kvferry.clients.core.held_pages import HeldPages
from kvferry.protocol.base import Body, Busy, ErrorReply, ReplyBody, RequestBody
from kvferry.protocol.codec import Frames, PageIds, decode_from_daemon, encode, encoded_bytes, split, unpacked
from kvferry.protocol.envelope import Batch, Batched, Event, Request
from kvferry.protocol.errors import (
    DaemonLostError,
    Effect,
    KvferryError,
    MalformedError,
    MisuseError,
    OverloadedError,
    StaleBootError,
    raised,
)
from kvferry.protocol.events import Finished, Matched, OperationKind, Settled, SingleEvent, TierDone, Together
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.pool_messages import Allocate, Allocated, Free, Freed, PoolAttached, PoolCreated
from kvferry.protocol.tier_messages import CancelOperation, Load, Offload, Offloading, OperationStarted, Restore, Store
from kvferry.protocol.transfer_messages import Accepted, Direction, Receive, Send

MAX_CUTS: Final = 3
"""How often a connection may break under a request before it is given up: it may be what breaks it."""


class Outgoing(msgspec.Struct, frozen=True):
    """A request to send, alone or in a batch; ``ClientCore.frames`` makes its frames when it goes.

    Attributes:
        message_id: its number.
        body: the message.
        ids: its page lists, as they travel: the caller's arrays may change before it goes, or goes again.
        deadline_ms: time left for it; 0 for the daemon's default.
    """

    message_id: int
    body: RequestBody
    ids: tuple[bytes, ...] = ()
    deadline_ms: int = 0


def size_bytes(requests: Sequence[Outgoing]) -> int:
    """Return the bytes that the bodies and page lists of requests add to a message."""
    ids = sum([len(one) for request in requests for one in request.ids])
    return encoded_bytes([request.body for request in requests]) + ids


class ReplyArrived(msgspec.Struct, frozen=True):
    """A reply to ``message_id``: a body and its page lists, or why it was refused."""

    message_id: int
    body: Body
    ids: tuple[PageIds, ...]
    error: KvferryError | None


class Unclaimed(NamedTuple):
    """Pages that an ALLOCATE has taken of which nobody waits for the reply any more; see ``ClientCore.give_back``."""

    pool: str
    space: str
    ids: PageIds


class OtherDaemon(NamedTuple):
    """Another daemon has refused a request that was for this conversation's; it is kept for ``ClientCore.waiting``."""

    boot_id: BootId


Result: TypeAlias = tuple[Outgoing, Body, tuple[PageIds, ...]]
"""A request that was sent, its reply, and the reply's page lists."""

News: TypeAlias = "ReplyArrived | Transfer | TierOperation | Unclaimed | OtherDaemon"
"""What a message means: a transfer or an operation has changed, a reply is there, or something is to be done."""


class BatchAnswered(msgspec.Struct, frozen=True):
    """What the results of a BATCH mean, in the order of its requests, or events that came together in theirs."""

    news: tuple[News, ...]


class Sent(msgspec.Struct, frozen=True):
    """A message without a reply.

    Attributes:
        outgoing: what it was made as.
        at_s: when, by its shell's clock.
        waits: whether it is to be sent once there is a connection.
        cuts: how often a connection was lost after it was sent; 0 and ``waits``: no daemon has seen it.
    """

    outgoing: Outgoing
    at_s: float
    waits: bool
    cuts: int = 0


class Ended(NamedTuple):
    """What a restart has ended.

    Attributes:
        news: of each transfer, operation and request.
        transfers: those that were under way; their pages may be used.
        operations: those that were under way.
        frees: FREEs that were under way: whoever knows who owns the pages answers them by ``resolve``.
    """

    news: tuple[News, ...]
    transfers: tuple[Transfer, ...]
    operations: tuple[TierOperation, ...]
    frees: tuple[Outgoing, ...]


_KINDS: dict[type[Body], OperationKind] = {Offload: "offload", Restore: "restore", Store: "store", Load: "load"}


class ClientCore:
    """One conversation with one boot id of a daemon, and after its restart with the next one.

    Attributes:
        boot_id: the daemon's boot id; empty until its first message.
        token: identifies this core in the ``conversation`` of its transfers and operations.
        held: the pages that its session owns, as far as is known here; None where others own them, too.
    """

    def __init__(
        self, boot_id: BootId = NO_BOOT, secret: bytes = b"", *, last_message: int = 0, owns_alone: bool = False
    ) -> None:
        """Number requests after ``last_message``: the last message id of a resumed session, else 0.

        ``owns_alone``: whether all pages of the session's instance are given to and taken from this core; it keeps a
        list of them then.
        """
        self.held = HeldPages() if owns_alone else None
        self.boot_id = boot_id
        self.token: object = object()
        self._secret = secret
        self._ids = itertools.count(last_message + 1)
        self._pending: dict[int, Transfer | TierOperation | _Nobody | None] = {}
        self._operations: dict[int, TierOperation] = {}
        self._transfers: dict[tuple[Direction, str, str], list[Transfer]] = {}  # by what is equal to a ``TransferKey``
        self._seen_cursor = 0
        self._batches: dict[int, tuple[Outgoing, ...]] = {}
        self._sent: dict[int, Sent] = {}
        self._movers: dict[TierOperation, tuple[Offload | Restore | Store | Load, tuple[bytes, ...]]] = {}
        self._restores: dict[TierOperation, Sent] = {}
        """RESTOREs under way, as they were sent: the next daemon may be asked for them again."""
        self._early: dict[int, tuple[TierDone, tuple[PageIds, ...]]] = {}  # of operations whose batch has no reply yet
        self._early_of: dict[tuple[Direction, str, str], list[Matched | Finished | Settled]] = {}  # of several RECEIVEs

    def __repr__(self) -> str:
        """Show the live counts."""
        counts = f"pending={len(self._pending)} batches={len(self._batches)} transfers={len(self._transfers)}"
        return f"<ClientCore {counts}>"

    @property
    def pending(self) -> int:
        """Return the number of requests without a reply."""
        return len(self._pending)

    @property
    def is_idle(self) -> bool:
        """Return whether no message is under way."""
        return not self._sent

    def request(
        self,
        body: RequestBody,
        ids: Sequence[bytes] = (),
        *,
        deadline_ms: int = 0,
        follows: Transfer | TierOperation | _Nobody | None = None,
    ) -> Outgoing:
        """Return a new request.

        Args:
            body: the message.
            ids: its page lists, as they travel, in the order in which the body names them.
            deadline_ms: time left for the request; 0 for the daemon's default.
            follows: whose state its reply tells; None where that is a ReplyArrived.
        """
        message_id = next(self._ids)
        self._pending[message_id] = follows
        return Outgoing(message_id, body, tuple(ids), deadline_ms)

    def batch(self, requests: Sequence[Outgoing]) -> Outgoing:
        """Return one message with several requests that were not sent yet; its reply contains theirs."""
        message_id = next(self._ids)
        self._batches[message_id] = tuple(requests)
        deadlines_ms = [one.deadline_ms for one in requests]
        body = Batch(
            requests=tuple([one.body for one in requests]),
            deadlines_ms=tuple(deadlines_ms) if any(deadlines_ms) else (),
        )
        return Outgoing(message_id, body, tuple([ids for one in requests for ids in one.ids]))

    def undo(self, batch: Outgoing) -> None:
        """Take the requests of a batch apart again that was not sent."""
        del self._batches[batch.message_id]

    def frames(self, outgoing: Outgoing) -> Frames:
        """Return the frames of a request as it is to be sent now."""
        number, deadline_ms, body = outgoing.message_id, outgoing.deadline_ms, outgoing.body
        return encode(Request(number, self.boot_id, self._secret, deadline_ms, self._seen_cursor, body), outgoing.ids)

    def refuse(self, requests: Sequence[Outgoing], error: KvferryError) -> BatchAnswered:
        """Drop requests that were not sent, as if each had been refused with this error."""
        body = ErrorReply(error=error.info())
        return self._results([(one, body, ()) for one in requests])

    def transfer(
        self, body: Send | Receive, ids: Sequence[bytes], *, deadline_ms: int = 0
    ) -> tuple[Transfer, Outgoing]:
        """Return what follows the transfer that a SEND or RECEIVE starts or continues, and the request."""
        key = TransferKey("send" if isinstance(body, Send) else "receive", body.request_id, body.pool)
        transfer = Transfer(key, self.token)
        known = self._transfers.get(key)
        if known is None:
            self._transfers[key] = [transfer]
        else:
            if key.direction == "send" and known[-1].finished is None:  # it continues
                transfer.accepted, transfer.matched = known[-1].accepted, known[-1].matched
            known.append(transfer)
        return transfer, self.request(body, ids, deadline_ms=deadline_ms, follows=transfer)

    def is_named_by_key(self, transfer: Transfer) -> bool:
        """Return whether what names a transfer's key names this one: of two RECEIVEs the daemon's answers tell."""
        known = self._transfers.get(transfer.key, [])
        return transfer.accepted is not None or transfer.key.direction == "send" or known == [transfer]

    def operation(
        self, body: Offload | Restore | Store | Load, ids: Sequence[bytes], *, deadline_ms: int = 0
    ) -> tuple[TierOperation, Outgoing]:
        """Return a new operation and its request."""
        operation = TierOperation(_KINDS[type(body)], body.snapshot if isinstance(body, Restore) else "", self.token)
        if self.held is not None:
            gives = isinstance(body, Offload) and body.release
            self._movers[operation] = (body, tuple(ids) if gives else ())
        outgoing = self.request(body, ids, deadline_ms=deadline_ms, follows=operation)
        if isinstance(body, Restore) and body.after is None:  # a device's event would have ended with the daemon
            self._restores[operation] = Sent(outgoing, 0.0, waits=True)
        return operation, outgoing

    def asked_by(self, operation: TierOperation) -> tuple[int, int]:
        """Return by which message an operation without an answer was asked for, and which of a batch it is, or 0.

        Raises:
            MisuseError: it was not sent yet.
        """
        number = next((number for number, follows in self._pending.items() if follows is operation), None)
        for message_id, parts in self._batches.items():
            for at, one in enumerate(parts):
                if one.message_id == number:
                    return message_id, at
        if number is None or number not in self._sent:
            raise MisuseError("its batch was not sent yet: leave the batch's with block first")
        return number, 0

    def forget(self, message_id: int) -> None:
        """Stop waiting for a reply; if it still arrives it is ignored, unless it brings pages: those are Unclaimed."""
        self._pending.pop(message_id, None)
        sent = self._sent.get(message_id)
        if sent is not None and not isinstance(sent.outgoing.body, Allocate):
            del self._sent[message_id]

    def give_back(self, unclaimed: Unclaimed) -> Outgoing:
        """Return the request that frees pages of which nobody knows; its reply is news to nobody."""
        body = Free(pool=unclaimed.pool, pages=len(unclaimed.ids), space=unclaimed.space)
        return self.request(body, (unclaimed.ids.tobytes(),), follows=NOBODY)

    def feed(self, frames: Sequence[bytes]) -> News | BatchAnswered | None:
        """Process a message from the daemon; return what it changed, or None if it is obsolete.

        Raises:
            MalformedError: the bytes are not a message of a daemon.
        """
        incoming = decode_from_daemon(frames)
        if self.boot_id == NO_BOOT:
            self.boot_id = BootId(incoming.message.boot_id)
        if isinstance(incoming.message, Event):
            return self._event(incoming.message, incoming.ids)
        message_id, body = incoming.message.message_id, incoming.message.body
        if incoming.message.boot_id != self.boot_id:
            return self._from_another(BootId(incoming.message.boot_id), message_id)
        sent = self._sent.pop(message_id, None)
        if message_id in self._batches:
            return self._batch_answered(self._batches.pop(message_id), body, incoming.ids)
        if sent is None:
            return self._answered(message_id, body, incoming.ids, None)
        return next(iter(self._results([(sent.outgoing, body, incoming.ids)]).news), None)

    def _from_another(self, boot_id: BootId, message_id: int) -> OtherDaemon:
        """Keep a request that ZeroMQ gave to the next daemon, which has done nothing of it."""
        sent = self._sent.get(message_id)
        if sent is not None:
            self._sent[message_id] = replace(sent, waits=True)
        return OtherDaemon(boot_id)

    # -- connections that are lost

    def sent(self, outgoing: Outgoing, at_s: float, *, connected: bool) -> None:
        """Remember a message until its reply.

        Args:
            outgoing: it.
            at_s: now.
            connected: whether it is sent now; else ``waiting`` returns it.
        """
        self._sent[outgoing.message_id] = Sent(outgoing, at_s, not connected)
        for part in self._parts_of(outgoing) if self._restores else ():
            operation = self._pending.get(part.message_id)
            if isinstance(operation, TierOperation) and operation in self._restores:
                self._restores[operation] = Sent(part, at_s, waits=True)

    def waiting(self, at_s: float, default_ms: int) -> tuple[Outgoing, ...]:
        """Return what is to be sent now that there is a connection, in its order, with the time that each has left.

        Args:
            at_s: now, by the clock of ``sent``.
            default_ms: the daemon's deadline for requests that name none.
        """
        due = [one for one in self._sent.values() if one.waits]
        for one in due:
            self._sent[one.outgoing.message_id] = replace(one, waits=False)
        return tuple(_shortened(one.outgoing, round((at_s - one.at_s) * 1000), default_ms) for one in due)

    def disconnected(self) -> tuple[News, ...]:
        """Take note that a connection was lost: whatever has no reply is sent again, under its number, and done once.

        Returns:
            What is given up, since it may be what breaks the connection.
        """
        news: list[News] = []
        for number, one in list(self._sent.items()):
            if one.waits:
                continue
            self._sent[number] = replace(one, waits=True, cuts=one.cuts + 1)
            if one.cuts + 1 >= MAX_CUTS:
                del self._sent[number]
                news += self.refuse(self._batches.pop(number, (one.outgoing,)), _broken()).news
        return tuple(news)

    def restarted(self, boot_id: BootId, secret: bytes) -> Ended:
        """Go on with another daemon, which has adopted the session: what was under way in the old one has ended.

        What no daemon has seen yet is for the new one, as is what does no harm a second time, also a RESTORE that the
        old one had accepted; other requests fail with STALE_BOOT. A batch goes on as the single requests that are left
        of it.
        """
        what = f"the daemon was restarted: {self.boot_id[:8]} is {boot_id[:8]} now"
        self.boot_id, self._secret, self._seen_cursor = boot_id, secret, 0
        names = {
            (message_id, at): (one.message_id, 0)
            for message_id, parts in self._batches.items()
            for at, one in enumerate(parts)
        }
        messages = [
            replace(one, outgoing=_renamed(part, names))
            for one in self._sent.values()
            for part in self._parts_of(one.outgoing)
        ]
        for known in (self._sent, self._batches, self._early, self._early_of):
            known.clear()
        if self.held is not None:
            moves = [body for body, _ in list(self._movers.values())]
            for body in (*(one.outgoing.body for one in messages), *moves):
                if isinstance(body, Allocate | Restore):
                    self.held.asked(body.pool)
        again = self._restores.keys() - self._cancelled_by(messages)
        self._ask_again(again)
        seen = [one.outgoing.message_id for one in messages if one.cuts or not one.waits]
        under_way = {one: None for one in self._under_way(seen) if one not in again}
        news: list[News] = [self._ended(one, what) for one in under_way]
        frees: list[Outgoing] = []
        for one in messages:
            number, body = one.outgoing.message_id, one.outgoing.body
            takes, after = self.held is not None and isinstance(body, Allocate), body.after_restart
            if self._pending.get(number) in under_way:
                del self._pending[number]
            elif number not in self._pending:
                continue  # given up: what it has taken is unknown to ``held``
            elif (one.waits and not one.cuts) or takes or after == "again":
                self._sent[number] = Sent(one.outgoing, one.at_s, waits=True)
            elif self.held is not None and isinstance(body, Free):
                frees.append(one.outgoing)
            else:
                error = stale(f"{what}, and this request was under way", after)
                news += self.refuse([one.outgoing], error).news
        transfers = tuple(one for one in under_way if isinstance(one, Transfer))
        operations = tuple(one for one in under_way if isinstance(one, TierOperation))
        return Ended(tuple(news), transfers, operations, tuple(frees))

    def _cancelled_by(self, messages: Sequence[Sent]) -> set[object]:
        """Return the operations that these messages are to cancel."""
        bodies = [one.outgoing.body for one in messages]
        cancels = [one for one in bodies if isinstance(one, CancelOperation)]
        return {
            self._pending.get(one.request) if one.operation is None else self._operations.get(one.operation)
            for one in cancels
        }

    def _ask_again(self, restores: Collection[TierOperation]) -> None:
        """Ask for those RESTOREs anew, before anything else, that the daemon before had accepted."""
        for operation in [one for one in self._operations.values() if one in restores]:
            del self._operations[operation.number or 0]
            operation.number = None
            sent = self._restores[operation]
            number = next(self._ids)
            self._pending[number] = operation
            sent = replace(sent, outgoing=replace(sent.outgoing, message_id=number))
            self._restores[operation] = self._sent[number] = sent

    def resolve(self, request: Outgoing, result: ReplyBody | KvferryError) -> tuple[News, ...]:
        """Answer a request whose reply was lost in a restart, by what is known of it now."""
        body = ErrorReply(error=result.info()) if isinstance(result, KvferryError) else result
        return self._results([(request, body, ())]).news

    def lost(self, error: KvferryError) -> None:
        """End everything: there is no daemon to go on with, and the pages are this session's no longer."""
        for one in self._under_way(list(self._pending)):
            self._ended(one, error)
        for known in (self._sent, self._batches, self._early, self._early_of, self._pending):
            known.clear()

    def _parts_of(self, message: Outgoing) -> tuple[Outgoing, ...]:
        return self._batches.get(message.message_id, (message,))

    def _under_way(self, sent: Iterable[int]) -> dict[Transfer | TierOperation, None]:
        """Return the transfers and operations that the daemon knows, or may know by these messages."""
        found: dict[Transfer | TierOperation, None] = {}
        known = itertools.chain.from_iterable(list(self._transfers.values()))
        found.update((one, None) for one in known if one.accepted is not None)
        found.update((one, None) for one in self._operations.values())
        asked = (self._pending.get(number) for number in sent)
        found.update((one, None) for one in asked if isinstance(one, Transfer | TierOperation))
        for one in [one for one in found if isinstance(one, Transfer)]:
            found.update((other, None) for other in self._together_with(one))
        return found

    def _ended(self, one: Transfer | TierOperation, cause: str | KvferryError) -> Transfer | TierOperation:
        """End a transfer or an operation; by a restart (``cause``: what was restarted) its pages are settled, too."""
        restarted = isinstance(cause, str)
        error = stale(f"{cause}, and this was under way", "unknown") if isinstance(cause, str) else cause
        if isinstance(one, TierOperation):
            self._operations.pop(one.number or 0, None)
            self._movers.pop(one, None)
            self._restores.pop(one, None)
            one.end(TierDone(operation=one.number or 0, kind=one.kind, error=error.info()), ())
            return one
        direction, request_id, pool = one.key
        generation = one.accepted.generation if one.accepted else 0
        if one.finished is None:
            info = replace(error.info(), request_id=request_id)
            one.finished = Finished(
                request_id=request_id, pool=pool, direction=direction, generation=generation, error=info
            )
        if restarted:
            one.settled = Settled(request_id=request_id, pool=pool, direction=direction, generation=generation)
        self._drop(one)
        return one

    def _drop(self, transfer: Transfer) -> None:
        """Forget a transfer that is over, if it is known still."""
        known = self._transfers.get(transfer.key, [])
        if transfer in known:
            known.remove(transfer)
            if not known:
                del self._transfers[transfer.key]

    # -- replies and events

    def _batch_answered(self, requests: tuple[Outgoing, ...], body: Body, ids: tuple[PageIds, ...]) -> BatchAnswered:
        if isinstance(body, ErrorReply | Busy):
            news = self._results([(one, body, ()) for one in requests])
        elif isinstance(body, Batched) and len(results := _each(body, ids)) == len(requests):
            news = self._results([(one, *result) for one, result in zip(requests, results, strict=True)])
        else:
            raise MalformedError(f"the daemon answered a batch of {len(requests)} with {type(body).__name__}")
        if not self._batches:
            self._early.clear()
            self._early_of.clear()
        return news

    def _results(self, results: Sequence[Result]) -> BatchAnswered:
        if self.held is not None:
            _keep_books(self.held, results, self._pending)
        found = [self._answered(one.message_id, body, ids, one) for one, body, ids in results]
        return BatchAnswered(tuple([one for one in found if one is not None]))

    def _answered(self, message_id: int, body: Body, ids: tuple[PageIds, ...], request: Outgoing | None) -> News | None:
        waiting = self._pending.pop(message_id, _GIVEN_UP)
        if isinstance(waiting, Transfer):
            return self._transfer_answered(waiting, body)
        if waiting is None:
            return ReplyArrived(message_id, body, ids, _refusal(body))
        if waiting is NOBODY:
            return None
        if waiting is _GIVEN_UP:
            return unclaimed_pages(request.body if request else None, body, ids)
        assert isinstance(waiting, TierOperation), waiting
        return self._operation_answered(waiting, body)

    def _operation_answered(self, operation: TierOperation, body: Body) -> TierOperation:
        error = _refusal(body)
        if error is not None:
            operation.refused = error
            self._movers.pop(operation, None)
            self._restores.pop(operation, None)
        elif isinstance(body, _STARTED):
            operation.number = body.operation
            self._operations[operation.number] = operation
            if isinstance(body, Offloading):
                operation.snapshot = body.snapshot
            early = self._early.pop(operation.number, None)
            if early is not None:
                del self._operations[operation.number]
                self._operation_ended(operation, *early)
        return operation

    def _operation_ended(self, operation: TierOperation, done: TierDone, ids: tuple[PageIds, ...]) -> None:
        operation.end(done, ids)
        self._restores.pop(operation, None)
        request = self._movers.pop(operation, None)
        if self.held is None or request is None:
            return
        body, its = request
        if isinstance(body, Offload) and body.release and done.error is None:
            self.held.gave_lists(body.pool, body.lists, unpacked(its))
        self.held.took_lists(body.pool, done.lists, ids)

    def _transfer_answered(self, transfer: Transfer, body: Body) -> Transfer:
        if isinstance(body, Accepted):
            for one in self._together_with(transfer):
                one.accepted = body
                one.matched = max(one.matched, body.matched)
            for event in self._early_of.get(transfer.key, ()):
                if event.generation == body.generation:
                    self._happened(event, ())
        elif (error := _refusal(body)) is not None:
            error.request_id = transfer.key.request_id  # BUSY does not carry it
            transfer.refused = error
            if transfer.is_settled:
                self._drop(transfer)
        return transfer

    def _together_with(self, transfer: Transfer) -> Sequence[Transfer]:
        """Return the transfers that are accepted with this one: SENDs of one key that have not finished are one."""
        if transfer.key.direction == "receive" or transfer.finished is not None:
            return (transfer,)
        return _unfinished(self._transfers.get(transfer.key, []))

    def _event(self, event: Event, ids: tuple[PageIds, ...]) -> News | BatchAnswered | None:
        if event.cursor <= self._seen_cursor or event.boot_id != self.boot_id:
            return None
        body, seen, self._seen_cursor = event.body, self._seen_cursor, event.cursor
        if not isinstance(body, Together):
            changed = self._happened(body, ids)
            return changed[0] if len(changed) == 1 else BatchAnswered(tuple(changed)) if changed else None
        known = max(0, seen + len(body.events) - event.cursor)  # of these, where they were sent again
        its = split(body.events, ids)
        found = [self._happened(one, its[at]) for at, one in enumerate(body.events) if at >= known]
        return BatchAnswered(tuple([one for some in found for one in some]))

    def _happened(self, body: SingleEvent, ids: tuple[PageIds, ...]) -> Sequence[Transfer | TierOperation]:
        if isinstance(body, TierDone):
            return self._done(body, ids)
        key = body.direction, body.request_id, body.pool
        known = self._transfers.get(key)
        if known is None:
            return ()
        its = known if len(known) == 1 else self._its(key, known, body)
        if isinstance(body, Settled):
            for one in its:
                one.settled = body
        else:
            for one in its:
                one.matched = max(one.matched, body.matched)
            if not isinstance(body, Finished):
                return ()
            for one in its:
                one.finished = body
                one.has_settled |= body.settled
            if not body.settled:
                return its
        if len(its) == len(known):
            del self._transfers[key]
        else:
            self._transfers[key] = [one for one in known if one not in its]
        return its

    def _its(
        self, key: tuple[Direction, str, str], known: Sequence[Transfer], body: Matched | Finished | Settled
    ) -> Sequence[Transfer]:
        """Return those of several transfers of a key that an event is of."""
        if body.direction == "send":
            has_finished = [one for one in known if one.finished is not None]
            return has_finished if has_finished and isinstance(body, Settled) else _unfinished(known)
        its = [one for one in known if one.accepted is not None and one.accepted.generation == body.generation]
        unanswered = [one for one in known if one.accepted is None]
        if its or len(unanswered) == 1:
            return its or unanswered
        if unanswered and self._batches:  # which of them was accepted, the reply of their batch says
            self._early_of.setdefault(key, []).append(body)
        return ()

    def _done(self, body: TierDone, ids: tuple[PageIds, ...]) -> Sequence[TierOperation]:
        operation = self._operations.pop(body.operation, None)
        if operation is None:
            if self._batches:  # its event may come before the reply of its batch
                self._early[body.operation] = (body, ids)
            return ()
        self._operation_ended(operation, body, ids)
        return (operation,)


def _unfinished(transfers: Sequence[Transfer]) -> Sequence[Transfer]:
    return [one for one in transfers if one.finished is None]


class _Nobody(enum.Enum):
    """Who waits for the reply to a request that the library sends by itself, or for one that was given up."""

    NOBODY = 0
    GIVEN_UP = 1


NOBODY: Final = _Nobody.NOBODY
_GIVEN_UP: Final = _Nobody.GIVEN_UP


_OF_PAGES: Final = frozenset({Allocated, Freed, PoolCreated, PoolAttached})
_STARTED: Final = (Offloading, OperationStarted)


def _each(body: Batched, ids: tuple[PageIds, ...]) -> list[tuple[Body, tuple[PageIds, ...]]]:
    """Return each result of a batch and its page lists; those that are alike are said once.

    Raises:
        MalformedError: how many each stands for is said of others.
    """
    times = body.times or (1,) * len(body.results)
    if len(times) != len(body.results):
        raise MalformedError(f"the daemon answered with {len(body.results)} results, {len(times)} times")
    found: list[tuple[Body, tuple[PageIds, ...]]] = []
    for result, its, count in zip(body.results, split(body.results, ids), times, strict=True):
        found += [(result, its)] * count
    return found


def _keep_books(held: HeldPages, results: Sequence[Result], pending: Container[int]) -> None:
    """Take note of the pages that replies give, or take; ``pending``: the requests that were not given up."""
    for request, body, ids in results:
        if type(body) not in _OF_PAGES or request.message_id not in pending:
            continue
        asked = request.body
        if isinstance(body, Allocated) and isinstance(asked, Allocate):
            held.took(asked.pool, asked.space, ids[0])
        elif isinstance(body, Freed) and isinstance(asked, Free):
            held.gave(asked.pool, asked.space, unpacked(request.ids)[0])
        elif isinstance(body, PoolCreated | PoolAttached):
            held.learn(body.pool, body.manifest)


def unclaimed_pages(asked: Body | None, body: Body, ids: tuple[PageIds, ...]) -> Unclaimed | None:
    """Return the pages that a request has taken by its reply, for nobody; None if it is no ALLOCATE that succeeded."""
    if isinstance(asked, Allocate) and isinstance(body, Allocated):
        return Unclaimed(asked.pool, asked.space, ids[0].copy())
    return None


def _renamed(outgoing: Outgoing, names: Mapping[tuple[int, int], tuple[int, int]]) -> Outgoing:
    """Return a request that names another one, if it does, by that one's new name."""
    body = outgoing.body
    if not isinstance(body, CancelOperation) or (body.request, body.part) not in names:
        return outgoing
    message_id, part = names[body.request, body.part]
    return replace(outgoing, body=replace(body, request=message_id, part=part))


def _shortened(outgoing: Outgoing, passed_ms: int, default_ms: int) -> Outgoing:
    """Return a request with the time that is left for it."""
    body = outgoing.body
    if isinstance(body, Batch):
        left = tuple(one and _left_ms(one, passed_ms) for one in body.deadlines_ms)
        body = replace(body, deadlines_ms=left)
    left_ms = _left_ms(outgoing.deadline_ms or default_ms, passed_ms)
    return Outgoing(outgoing.message_id, body, outgoing.ids, left_ms)


def _left_ms(deadline_ms: int, passed_ms: int) -> int:
    """Return what is left of a deadline; at least 1, so that the daemon says what has become of the request."""
    return max(1, deadline_ms - passed_ms)


def stale(detail: str, effect: Effect) -> StaleBootError:
    """Return why something that was under way at a restart has ended."""
    error = StaleBootError(detail, retryable=effect != "done", remedy=_REMEDIES[effect], fault="daemon")
    error.effect = effect
    return error


_REMEDIES: Final[dict[Effect, str]] = {
    "absent": "it was not done: create what it named again, and repeat it",
    "done": "what it was to end has ended with the old daemon",
    "unknown": "it may have been done or not. Its pages are still yours, and nothing writes them: do it again",
}


def _broken() -> DaemonLostError:
    error = DaemonLostError(
        f"the connection broke {MAX_CUTS} times under this request: it is not sent again",
        retryable=False,
        remedy="see the daemon's log: a message over the limits that HELLO gives is one cause",
    )
    error.effect = "unknown"
    return error


def _refusal(body: Body) -> KvferryError | None:
    """Return why a request was refused; None: it was not."""
    if isinstance(body, ErrorReply):
        return raised(body.error)
    if isinstance(body, Busy):
        return OverloadedError(f"{body.detail}; try again after {body.retry_after_ms} ms").after(body.retry_after_ms)
    return None
