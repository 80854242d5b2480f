"""What the daemon sends by itself: MATCHED, FINISHED and SETTLED of each endpoint, TIER_DONE of each operation.

Those that happen at once go in one message, EVENTS, in which one FINISHED tells what MATCHED before it and SETTLED
behind it would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

from msgspec import Meta
from msgspec.structs import replace

from kvferry.protocol.base import Body, PageList, counts_of
from kvferry.protocol.errors import ErrorInfo

OperationKind = Literal["offload", "restore", "store", "load"]


class Matched(Body, frozen=True, kw_only=True, tag="MATCHED"):
    """Another receiver of an open send request has come; ``matched`` of the ``destinations`` it says have come so far.

    It is not sent for receivers that were there before the first SEND (ACCEPTED counts them), nor to a session that
    acknowledges no events: RESULT has the count.
    """

    request_id: str
    pool: str
    direction: Literal["send"]
    generation: int = 0
    matched: int
    destinations: int


class Finished(Body, frozen=True, kw_only=True, tag="FINISHED"):
    """The outcome of one endpoint of a transfer is known; it succeeded if ``error`` is None.

    For a receiver, success means that every page of its lists holds its bytes. ``first_token`` and ``payload`` are the
    sender's, and go to receivers only. ``waited_us`` runs from this endpoint's first message to the first copy,
    ``moved_us`` from there to the outcome.
    ``snapshot``: the snapshot that holds the bytes, for a receiver into the host tier.
    ``trimmed_pages``: pages of windows and states that were left out, because one list was shorter and one of the lists
    had no first page.
    ``settled`` and ``matched``: SETTLED, too, and for a sender what MATCHED counts, of which no message of their own
    comes then.
    """

    request_id: str
    pool: str
    direction: Literal["send", "receive"]
    generation: int = 0
    error: ErrorInfo | None = None
    first_token: int | None = None
    payload: bytes = b""
    pages: int = 0
    moved_bytes: int = 0
    skipped_source_entries: int = 0
    skipped_source_pages: int = 0
    waited_us: int = 0
    moved_us: int = 0
    trimmed_pages: int = 0
    snapshot: str = ""
    matched: int = 0
    settled: bool = False


class Settled(Body, frozen=True, kw_only=True, tag="SETTLED"):
    """No byte of this endpoint's pages can move any more, and the pages are no longer held."""

    request_id: str
    pool: str
    direction: Literal["send", "receive"]
    generation: int = 0


class TierDone(Body, frozen=True, kw_only=True, tag="TIER_DONE"):
    """An operation has ended, successfully if ``error`` is None. No byte of it can move any more.

    ``waited_us`` runs from the request to the first copy, ``moved_us`` from there to the last one. Of a STORE,
    ``stored`` blocks are new, ``present`` blocks were already cached or are being written. ``loaded`` is the number of
    leading blocks of a LOAD that are in their pages, even if it failed.
    """

    operation: int
    kind: OperationKind
    error: ErrorInfo | None = None
    snapshot: str = ""
    copied_pages: int = 0
    moved_bytes: int = 0
    waited_us: int = 0
    moved_us: int = 0
    stored: int = 0
    present: int = 0
    loaded: int = 0
    lists: tuple[PageList, ...] = ()
    """The pages that RESTORE with ``allocate`` allocated; their ids follow in frames."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple([one.pages for one in self.lists])


SingleEvent = Matched | Finished | Settled | TierDone

MAX_TOGETHER: Final = 256
"""Events of one EVENTS."""


class Together(Body, frozen=True, kw_only=True, tag="EVENTS"):
    """Events in their order, and the frames of their page lists; the envelope's ``cursor`` is that of the last one.

    The cursors of the others are those before it, without a gap; what a FINISHED stands for has its own.
    """

    events: Annotated[tuple[SingleEvent, ...], Meta(min_length=1, max_length=MAX_TOGETHER)]

    def page_counts(self) -> tuple[int, ...]:
        """Return the lengths of all events' lists."""
        return counts_of(self.events)


EventBody = SingleEvent | Together


def merged(events: Iterable[SingleEvent]) -> list[SingleEvent]:
    """Return events that go in one message, in their order, but for those that a FINISHED among them can stand for."""
    found: list[SingleEvent | None] = []
    latest: dict[tuple[str, str, str, int], int] = {}
    for one in events:
        if isinstance(one, TierDone):
            found.append(one)
            continue
        endpoint = one.request_id, one.direction, one.pool, one.generation
        at = latest.get(endpoint, -1)
        known = found[at] if at >= 0 else None
        if isinstance(known, Finished) and isinstance(one, Settled):
            found[at] = replace(known, settled=True)
            continue
        told: SingleEvent = one
        if isinstance(known, Matched):  # no more can follow it than MATCHED and FINISHED, which tell it, too
            found[at] = None
            told = replace(one, matched=known.matched) if isinstance(one, Finished) else one
        latest[endpoint] = len(found)
        found.append(told)
    return [one for one in found if one is not None]
