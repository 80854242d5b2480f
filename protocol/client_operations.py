"""An operation as the client sees it: from the request to TIER_DONE."""

from __future__ import annotations

from typing import Literal

from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError, MisuseError, raised
from kvferry.protocol.tier_messages import OperationKind, TierDone


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
