"""Offload and restore: OFFLOAD, RESTORE, DROP_SNAPSHOT, SNAPSHOTS, CANCEL_OPERATION, and the event TIER_DONE.

An operation is what one OFFLOAD, RESTORE, STORE or LOAD does: accepted at once, ended by one event.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.base import MAX_PAGE_LISTS, Body, PageList
from kvferry.protocol.device_event import DeviceEvent
from kvferry.protocol.error_info import ErrorInfo
from kvferry.protocol.ids import Hex128, PoolName

OperationKind = Literal["offload", "restore", "store", "load"]
OperationNumber = Annotated[int, Meta(ge=1, lt=1 << 62)]
FewLists = Annotated[tuple[PageList, ...], Meta(max_length=MAX_PAGE_LISTS)]
SomeLists = Annotated[tuple[PageList, ...], Meta(min_length=1, max_length=MAX_PAGE_LISTS)]


class Offload(Body, frozen=True, kw_only=True, tag="OFFLOAD"):
    """Copy these pages of this session to the host tier, as a snapshot.

    Answered by OFFLOADING at once; TIER_DONE follows. The pages may not be written before it, nor freed, unless by this
    message itself with ``release``.
    """

    pool: PoolName
    lists: SomeLists
    release: bool = False
    """Free the pages as soon as they are copied; where that fails they stay the session's."""
    after: DeviceEvent | None = None
    """Wait for this before the pages are read: work that fills them is under way on a device."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple(one.pages for one in self.lists)


class Offloading(Body, frozen=True, kw_only=True, tag="OFFLOADING"):
    """OFFLOAD's reply: the snapshot's name. It can be restored after TIER_DONE."""

    operation: int
    snapshot: str


class Restore(Body, frozen=True, kw_only=True, tag="RESTORE"):
    """Copy a snapshot of this tenant into pages of this session: as many as it has, of a pool of the same layout.

    Answered by OPERATION_STARTED at once; TIER_DONE follows. All or nothing: where a checksum is wrong, the pages are
    as they were; what is given up midway leaves pages that were named with anything in them.
    """

    snapshot: Hex128
    pool: PoolName
    lists: FewLists = ()
    """As many pages for each component as the snapshot has; none with ``allocate``."""
    allocate: bool = False
    """Let the daemon take the pages for this session, once enough are free; TIER_DONE has their ids."""
    drop: bool = False
    """Drop the snapshot once it is restored."""
    after: DeviceEvent | None = None
    """Wait for this before the pages are written: work that still reads them is under way on a device."""
    any_model: bool = False
    """Restore into a pool of another model too: whoever asks knows that its KV fits."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple(one.pages for one in self.lists)


class OperationStarted(Body, frozen=True, kw_only=True, tag="OPERATION_STARTED"):
    """The reply of RESTORE, STORE and LOAD: the checks passed, TIER_DONE follows."""

    operation: int


class DropSnapshot(Body, frozen=True, kw_only=True, tag="DROP_SNAPSHOT"):
    """Give a snapshot of this tenant up. Restores of it that are under way go on."""

    snapshot: Hex128


class SnapshotDropped(Body, frozen=True, kw_only=True, tag="SNAPSHOT_DROPPED"):
    """DROP_SNAPSHOT's reply. ``deferred``: restores read it still; its memory is free after them."""

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
    """One snapshot. ``session`` is None where its session is gone: then it is dropped after a while.

    ``checksum`` is XXH3-128 over the checksums (XXH3-64) of its ``chunks`` chunks, each a page of a list; empty where
    the daemon makes none. ``state``: ``writing``, ``network`` (a transfer fills it), ``ready``.
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
    """How many are under way."""
    model: str = ""
    """The label of the model whose pool it came from: ``NAME@REVISION+ADAPTER``; empty where that has none."""


class SnapshotReport(Body, frozen=True, kw_only=True, tag="SNAPSHOT_REPORT"):
    """SNAPSHOTS's reply, oldest first."""

    snapshots: tuple[SnapshotStatus, ...]


class CancelOperation(Body, frozen=True, kw_only=True, tag="CANCEL_OPERATION"):
    """Give up an operation of this session. Answered once no byte of it moves any more."""

    operation: OperationNumber


class OperationCancelled(Body, frozen=True, kw_only=True, tag="OPERATION_CANCELLED"):
    """CANCEL_OPERATION's reply. ``was_done`` says that the outcome was known before."""

    was_done: bool


class TierDone(Body, frozen=True, kw_only=True, tag="TIER_DONE"):
    """An operation has ended: well exactly where ``error`` is None. No byte of it can move any more.

    ``waited_us`` runs from the request to the first copy, ``moved_us`` from there to the last one. ``stored`` blocks of
    a STORE are new, ``present`` ones were in the cache before, or are being written. ``loaded``: how many leading
    blocks of a LOAD are in their pages, also where it failed.
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
    """The pages that RESTORE with ``allocate`` took; their ids follow in frames."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple(one.pages for one in self.lists)
