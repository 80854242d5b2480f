"""What a client follows from its request to its end: an endpoint of a transfer, and an operation of the tiers."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError, MisuseError, raised
from kvferry.protocol.events import Finished, OperationKind, Settled, TierDone
from kvferry.protocol.transfer_messages import Accepted, Direction


class TransferKey(NamedTuple):
    """The key of an endpoint of a transfer within a session."""

    direction: Direction
    request_id: str
    pool: str


class Transfer(msgspec.Struct, eq=False, weakref=True):
    """A SEND or RECEIVE, and the endpoint of a transfer that it began or continued, as far as the client knows it.

    SENDs of one request and pool are one endpoint: each has its own refusal, and those that are not refused end alike.

    Attributes:
        key: the endpoint's key in the session.
        accepted: the reply to the endpoint's latest accepted message, or None.
        finished: the FINISHED event, or None.
        matched: how many destinations of a send, or sources of a receive, the daemon has reported as matched.
        refused: why this message was refused, or None.
        has_settled: whether the daemon has said that it has settled.
        conversation: the ``token`` of the client core that made it.
    """

    key: TransferKey
    conversation: object = None
    accepted: Accepted | None = None
    finished: Finished | None = None
    matched: int = 0
    refused: KvferryError | None = None
    has_settled: bool = False
    _settled: Settled | None = None

    def __repr__(self) -> str:
        """Show key and state."""
        return f"<Transfer {self.key.direction} {self.key.request_id} {self.state}>"

    @property
    def settled(self) -> Settled | None:
        """Return the SETTLED event, also where a FINISHED stands for it."""
        if self._settled is None and self.has_settled and self.finished is not None:
            one = self.finished
            self._settled = Settled(
                request_id=one.request_id, pool=one.pool, direction=one.direction, generation=one.generation
            )
        return self._settled

    @settled.setter
    def settled(self, event: Settled) -> None:
        self._settled, self.has_settled = event, True

    @property
    def state(self) -> Literal["sent", "open", "refused", "finished", "settled"]:
        """Return the state: sent, open, refused, finished or settled."""
        if self.has_settled:
            return "settled"
        if self.finished:
            return "finished"
        if self.refused:
            return "refused"
        return "open" if self.accepted else "sent"

    @property
    def error(self) -> KvferryError | None:
        """Return why it failed or was refused; None if it has not."""
        if self.finished and self.finished.error:
            return raised(self.finished.error)
        return self.refused

    @property
    def is_finished(self) -> bool:
        """Return whether the outcome is known; the pages of a successful receive have arrived."""
        return self.finished is not None or self.refused is not None

    @property
    def is_settled(self) -> bool:
        """Return whether the daemon has released its pages: they may be written, or freed and reused."""
        return self.has_settled or (self.refused is not None and self.accepted is None)

    def outcome(self) -> Finished:
        """Return the FINISHED event of a success.

        Raises:
            KvferryError: it failed or was refused.
            MisuseError: it is not finished yet.
        """
        if self.error is not None:
            raise self.error
        if self.finished is None:
            raise MisuseError(f"{self!r} is not finished: call wait_finished, or check is_finished, first")
        return self.finished


class TierOperation:
    """One OFFLOAD, RESTORE, STORE or LOAD, as far as the client knows its state.

    Attributes:
        kind: which of them.
        number: the operation's number at the daemon; None until it is accepted.
        snapshot: for OFFLOAD, the snapshot's name once accepted; for RESTORE, the snapshot to restore; else empty.
        done: the TIER_DONE event, or None.
        pages: pages that a RESTORE with ``allocate`` allocated, by component, once it is done: each ``(n,)`` int64.
        refused: why the request was refused, or None.
        conversation: the ``token`` of the client core that made it.
    """

    def __init__(self, kind: OperationKind, snapshot: str = "", conversation: object = None) -> None:
        self.kind = kind
        self.conversation = conversation
        self.number: int | None = None
        self.snapshot = snapshot
        self.done: TierDone | None = None
        self.pages: dict[str, PageIds] = {}
        self.refused: KvferryError | None = None

    def __repr__(self) -> str:
        """Show kind, number and state."""
        return f"<TierOperation {self.kind} {self.number or ''} {self.state}>"

    @property
    def state(self) -> Literal["sent", "open", "refused", "done"]:
        """Return the state: sent, open, refused or done."""
        if self.done:
            return "done"
        if self.refused:
            return "refused"
        return "open" if self.number is not None else "sent"

    @property
    def is_done(self) -> bool:
        """Return whether the outcome is known: no byte moves after that."""
        return self.done is not None or self.refused is not None

    @property
    def error(self) -> KvferryError | None:
        """Return why it failed or was refused; None if it has not."""
        if self.done and self.done.error:
            return raised(self.done.error)
        return self.refused

    def outcome(self) -> TierDone:
        """Return the TIER_DONE event of a success.

        Raises:
            KvferryError: it failed or was refused.
            MisuseError: it is not done yet.
        """
        if self.error is not None:
            raise self.error
        if self.done is None:
            raise MisuseError(f"{self!r} is not done: call wait_done, or check is_done, first")
        return self.done

    def end(self, done: TierDone, ids: tuple[PageIds, ...]) -> None:
        """Record the TIER_DONE event; page ids are copied, because received bytes are read-only."""
        self.done = done
        self.pages = {one.component: its.copy() for one, its in zip(done.lists, ids, strict=True)}
