"""The client's half of the protocol, sans I/O: numbers requests, matches replies, follows hand-offs.

A shell gives it the frames that arrived and sends the frames it returns; the sync and the async client are such
shells. It never blocks, knows no clock and no socket.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvferry.protocol.base import Body
from kvferry.protocol.cache_messages import Load, Store
from kvferry.protocol.client_works import TierWork
from kvferry.protocol.codec import Frames, IncomingReply, PageIds, decode_from_daemon, encode
from kvferry.protocol.envelope import Event, Request
from kvferry.protocol.errors import KvferryError, MisuseError, OverloadedError, raised
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.requests import Busy, ErrorReply, RequestBody
from kvferry.protocol.room_messages import Accepted, Receive, Send
from kvferry.protocol.tier_messages import Offload, Offloading, Restore, TierDone, WorkKind, WorkStarted


class HandOffKey(NamedTuple):
    """What names one side of a hand-off within a session."""

    side: Literal["send", "receive"]
    request_id: str
    pool: str


class HandOff:
    """One side of a hand-off, as far as the client knows.

    Attributes:
        key: what names it.
        accepted: the reply to the latest of its messages, or None.
        finished: the FINISHED event, or None.
        settled: the SETTLED event, or None.
        refused: why one of its messages was refused, or None.
        conversation: what its client, and no other, has as its own ``token``.
    """

    def __init__(self, key: HandOffKey, conversation: object = None) -> None:
        self.key = key
        self.conversation = conversation
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.settled: Settled | None = None
        self.refused: KvferryError | None = None

    def __repr__(self) -> str:
        """Show how far it is."""
        return f"<HandOff {self.key.side} {self.key.request_id} {self.state}>"

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


class HandOffChanged(NamedTuple):
    """A hand-off was accepted, refused, finished or settled."""

    hand_off: HandOff


class WorkChanged(NamedTuple):
    """A work of the tiers was accepted, refused, or is done."""

    work: TierWork


_KINDS: dict[type[Body], WorkKind] = {Offload: "offload", Restore: "restore", Store: "store", Load: "load"}


class ClientCore:
    """One conversation with one incarnation of a daemon.

    Attributes:
        boot_id: which incarnation; empty until it has said so.
        token: what its hand-offs and works have as their ``conversation``.
    """

    def __init__(self, boot_id: BootId = NO_BOOT, secret: bytes = b"") -> None:
        self.boot_id = boot_id
        self.token: object = object()
        self._secret = secret
        self._ids = itertools.count(1)
        self._pending: dict[int, HandOff | TierWork | None] = {}
        self._works: dict[int, TierWork] = {}
        self._hand_offs: dict[HandOffKey, HandOff] = {}
        self._seen_cursor = 0

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<ClientCore pending={len(self._pending)} hand_offs={len(self._hand_offs)}>"

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

    def hand_off(
        self, body: Send | Receive, ids: Sequence[PageIds], *, deadline_ms: int = 0
    ) -> tuple[HandOff, Outgoing]:
        """Return the hand-off that a SEND or RECEIVE begins or continues, and the frames of the request."""
        key = HandOffKey("send" if isinstance(body, Send) else "receive", body.request_id, body.pool)
        hand_off = self._hand_offs.get(key)
        if hand_off is None:
            hand_off = self._hand_offs[key] = HandOff(key, self.token)
        elif hand_off.finished is not None:
            hand_off = HandOff(key, self.token)  # takes the place of the one before once it is accepted
        hand_off.refused = None
        outgoing = self.request(body, ids, deadline_ms=deadline_ms)
        self._pending[outgoing.message_id] = hand_off
        return hand_off, outgoing

    def work(
        self, body: Offload | Restore | Store | Load, ids: Sequence[PageIds], *, deadline_ms: int = 0
    ) -> tuple[TierWork, Outgoing]:
        """Return a new work of the tiers, and the frames of its request."""
        work = TierWork(_KINDS[type(body)], body.snapshot if isinstance(body, Restore) else "", self.token)
        outgoing = self.request(body, ids, deadline_ms=deadline_ms)
        self._pending[outgoing.message_id] = work
        return work, outgoing

    def forget(self, message_id: int) -> None:
        """Give up waiting for a reply; one that still comes is ignored."""
        self._pending.pop(message_id, None)

    def feed(self, frames: Sequence[bytes]) -> ReplyArrived | HandOffChanged | WorkChanged | None:
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
        if isinstance(waiting, TierWork):
            return self._work_answered(waiting, reply)
        return self._hand_off_answered(waiting, reply)

    def _work_answered(self, work: TierWork, reply: ReplyArrived) -> WorkChanged:
        if reply.error is not None:
            work.refused = reply.error
        elif isinstance(reply.body, Offloading | WorkStarted):
            work.number = reply.body.work
            self._works[work.number] = work
            if isinstance(reply.body, Offloading):
                work.snapshot = reply.body.snapshot
        return WorkChanged(work)

    def _hand_off_answered(self, hand_off: HandOff, reply: ReplyArrived) -> HandOffChanged:
        if reply.error is not None:
            reply.error.request_id = hand_off.key.request_id  # BUSY does not say it
            hand_off.refused = hand_off.refused or reply.error
            if hand_off.is_settled and self._hand_offs.get(hand_off.key) is hand_off:
                del self._hand_offs[hand_off.key]
        elif isinstance(reply.body, Accepted):
            hand_off.accepted = reply.body
            self._hand_offs[hand_off.key] = hand_off
        return HandOffChanged(hand_off)

    def _event(self, event: Event, ids: tuple[PageIds, ...]) -> HandOffChanged | WorkChanged | None:
        if event.cursor <= self._seen_cursor or event.boot_id != self.boot_id:
            return None
        self._seen_cursor = event.cursor
        body = event.body
        if isinstance(body, TierDone):
            work = self._works.pop(body.work, None)
            if work is None:
                return None
            work.end(body, ids)
            return WorkChanged(work)
        hand_off = self._hand_offs.get(HandOffKey(body.side, body.request_id, body.pool))
        if hand_off is None:
            return None
        if isinstance(body, Finished):
            hand_off.finished = body
        else:
            hand_off.settled = body
            self._hand_offs.pop(hand_off.key, None)
        return HandOffChanged(hand_off)


def _read_reply(incoming: IncomingReply) -> ReplyArrived:
    body = incoming.message.body
    error = None
    if isinstance(body, ErrorReply):
        error = raised(body.error)
    elif isinstance(body, Busy):
        error = OverloadedError(f"{body.detail}; try again after {body.retry_after_ms} ms")
    message_id = 0 if isinstance(incoming.message, Event) else incoming.message.message_id
    return ReplyArrived(message_id, body, incoming.ids, error)
