"""Offload and restore: OFFLOAD, RESTORE, DROP_SNAPSHOT, SNAPSHOTS, CANCEL_OPERATION, and the event TIER_DONE.

An operation (OFFLOAD, RESTORE, STORE or LOAD) is accepted immediately and ended by one TIER_DONE.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.base import MAX_PAGE_LISTS, Body, PageList
from kvferry.protocol.device_event import DeviceEvent
from kvferry.protocol.errors import ErrorInfo
from kvferry.protocol.ids import Hex128, PoolName

OperationKind = Literal["offload", "restore", "store", "load"]
OperationNumber = Annotated[int, Meta(ge=1, lt=1 << 62)]
FewLists = Annotated[tuple[PageList, ...], Meta(max_length=MAX_PAGE_LISTS)]
SomeLists = Annotated[tuple[PageList, ...], Meta(min_length=1, max_length=MAX_PAGE_LISTS)]


class Offload(Body, frozen=True, kw_only=True, tag="OFFLOAD"):
    """Copy these pages of this session to the host tier, as a snapshot.

    Answered by OFFLOADING immediately; TIER_DONE follows. Until then the pages must not be written, or freed other than
    by ``release`` of this message.
    """

    pool: PoolName
    lists: SomeLists
    release: bool = False
    """Free the pages once they are copied; if the copy fails, the session keeps them."""
    after: DeviceEvent | None = None
    """Device event to wait for before the pages are read: the end of the kernels that fill them."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple(one.pages for one in self.lists)


class Offloading(Body, frozen=True, kw_only=True, tag="OFFLOADING"):
    """OFFLOAD's reply: the snapshot's name. The snapshot can be restored after TIER_DONE."""

    operation: int
    snapshot: str


class Restore(Body, frozen=True, kw_only=True, tag="RESTORE"):
    """Copy a snapshot of this tenant into as many pages of this session, in a pool of the same layout.

    Answered by OPERATION_STARTED immediately; TIER_DONE follows. If a checksum is wrong, the pages are unchanged; if
    the operation is stopped midway, the contents of the listed pages are undefined.
    """

    snapshot: Hex128
    pool: PoolName
    lists: FewLists = ()
    """As many pages for each component as the snapshot has; empty with ``allocate``."""
    allocate: bool = False
    """Let the daemon allocate the pages for this session once enough are free; TIER_DONE has their ids."""
    drop: bool = False
    """Drop the snapshot once it is restored."""
    after: DeviceEvent | None = None
    """Device event to wait for before the pages are written: the end of the kernels that still read them."""
    any_model: bool = False
    """Allow a pool of another model: the caller knows that its KV fits."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple(one.pages for one in self.lists)


class OperationStarted(Body, frozen=True, kw_only=True, tag="OPERATION_STARTED"):
    """The reply to RESTORE, STORE and LOAD: the checks passed, TIER_DONE follows."""

    operation: int


class DropSnapshot(Body, frozen=True, kw_only=True, tag="DROP_SNAPSHOT"):
    """Drop a snapshot of this tenant. Running restores of it continue."""

    snapshot: Hex128


class SnapshotDropped(Body, frozen=True, kw_only=True, tag="SNAPSHOT_DROPPED"):
    """DROP_SNAPSHOT's reply. ``deferred``: restores still read it; its memory is freed after them."""

    snapshot: str
    deferred: bool


class Snapshots(Body, frozen=True, kw_only=True, tag="SNAPSHOTS"):
    """Ask for this tenant's snapshots."""


class SnapshotList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One page list of a snapshot."""

    component: str
    count: int
    tokens: int | None = None


class SnapshotStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One snapshot. ``session`` is None if its session has ended: then it is dropped after a while.

    ``checksum`` is XXH3-128 over the checksums (XXH3-64) of its ``chunks`` chunks, each a page of a list; empty if the
    daemon computes none. ``state``: ``writing``, ``network`` (a transfer fills it) or ``ready``.
    """

    snapshot: str
    pool: str
    layout_digest: str
    lists: tuple[SnapshotList, ...]
    tokens: int | None
    chunks: int
    size_bytes: int
    checksum: str
    age_ms: int
    session: int | None
    state: str
    restores: int = 0
    """Number of running restores."""
    model: str = ""
    """Label of the source pool's model, ``NAME@REVISION+ADAPTER``; empty if the pool has no model identity."""


class SnapshotReport(Body, frozen=True, kw_only=True, tag="SNAPSHOT_REPORT"):
    """SNAPSHOTS's reply, oldest first."""

    snapshots: tuple[SnapshotStatus, ...]


class CancelOperation(Body, frozen=True, kw_only=True, tag="CANCEL_OPERATION"):
    """Cancel an operation of this session. Answered once no byte of it moves any more."""

    operation: OperationNumber


class OperationCancelled(Body, frozen=True, kw_only=True, tag="OPERATION_CANCELLED"):
    """CANCEL_OPERATION's reply. ``was_done``: the operation had already ended."""

    was_done: bool


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
        return tuple(one.pages for one in self.lists)
