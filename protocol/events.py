"""What the daemon reports by itself: MATCHED, FINISHED and SETTLED of each side of a transfer."""

from __future__ import annotations

from typing import Literal

from kvferry.protocol.base import Body
from kvferry.protocol.error_info import ErrorInfo


class Matched(Body, frozen=True, kw_only=True, tag="MATCHED"):
    """Another receiver of an open send request has come; ``matched`` of its ``destinations`` are there now.

    It is not said of those that were there when the first SEND came (ACCEPTED counts them), nor to a session that
    acknowledges nothing: RESULT has the count.
    """

    request_id: str
    pool: str
    direction: Literal["send"]
    generation: int = 0
    matched: int
    destinations: int


class Finished(Body, frozen=True, kw_only=True, tag="FINISHED"):
    """The outcome of one side of a transfer is known: success exactly where ``error`` is None.

    For a receiver, success means that every page of its lists holds its bytes. ``first_token`` and ``payload`` are the
    sender's, and go to receivers only. ``waited_us`` runs from this side's first message to the first copy,
    ``moved_us`` from there to the last one.
    ``snapshot``: where the bytes are, of a receiver that asked for them in the host tier.
    ``trimmed_pages``: pages of windows and states that were left out because one side's list was shorter and a side did
    not say where its list starts.
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


class Settled(Body, frozen=True, kw_only=True, tag="SETTLED"):
    """No byte of this side's pages can move any more, and its pages are held no longer."""

    request_id: str
    pool: str
    direction: Literal["send", "receive"]
    generation: int = 0
