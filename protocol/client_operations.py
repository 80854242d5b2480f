"""An operation of the tiers as its client sees it: from the request to its one event."""

from __future__ import annotations

from typing import Literal

from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError, MisuseError, raised
from kvferry.protocol.tier_messages import OperationKind, TierDone


class TierOperation:
    """One OFFLOAD, RESTORE, STORE or LOAD, as far as the client knows.

    Attributes:
        kind: which of them.
        number: the daemon's number of it; None until it is accepted.
        snapshot: of an OFFLOAD, the snapshot's name once it is accepted; of a RESTORE, what is restored; else empty.
        done: the TIER_DONE event, or None.
        pages: the pages that a RESTORE without lists took, by component, once it is done: each ``(n,)`` int64.
        refused: why the request was refused, or None.
        conversation: what its client, and no other, has as its own ``token``.
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
        """Show how far it is."""
        return f"<TierOperation {self.kind} {self.number or ''} {self.state}>"

    @property
    def state(self) -> Literal["sent", "open", "refused", "done"]:
        """Return how far it is."""
        if self.done:
            return "done"
        if self.refused:
            return "refused"
        return "open" if self.number is not None else "sent"

    @property
    def is_done(self) -> bool:
        """Return whether the outcome is known: no byte of it can move any more."""
        return self.done is not None or self.refused is not None

    @property
    def error(self) -> KvferryError | None:
        """Return why it failed or was refused; None while all is well."""
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
            raise MisuseError(f"{self!r} is not done: wait_done waits for it, is_done says whether it is")
        return self.done

    def end(self, done: TierDone, ids: tuple[PageIds, ...]) -> None:
        """Take its event; the received bytes are read-only, so the ids are copied."""
        self.done = done
        self.pages = {one.component: its.copy() for one, its in zip(done.lists, ids, strict=True)}
