"""Pools and their pages: CREATE_POOL, ATTACH_POOL, DELETE_POOL, ALLOCATE, FREE."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.protocol.base import Body, PageCount
from kvferry.protocol.ids import MAIN, ComponentName, PoolName
from kvferry.protocol.manifests import Manifest, PoolSpec


class CreatePool(Body, frozen=True, kw_only=True, tag="CREATE_POOL"):
    """Create a pool of this tenant. The same name with the same layout and size is not created twice."""

    pool: PoolName
    spec: PoolSpec


class PoolCreated(Body, frozen=True, kw_only=True, tag="POOL_CREATED"):
    """CREATE_POOL's reply, sent when the memory is there. ``created`` is false where the pool existed."""

    pool: str
    created: bool
    manifest: Manifest


class AttachPool(Body, frozen=True, kw_only=True, tag="ATTACH_POOL"):
    """Ask for a pool's region: its file descriptor comes over the session socket before the reply."""

    pool: PoolName
    layout_digest: Annotated[str, Meta(max_length=64)] = ""
    """Where given, the pool must have it."""


class PoolAttached(Body, frozen=True, kw_only=True, tag="POOL_ATTACHED"):
    """ATTACH_POOL's reply."""

    pool: str
    manifest: Manifest


class DeletePool(Body, frozen=True, kw_only=True, tag="DELETE_POOL"):
    """Delete a pool that has no owned page. Mappings that engines still have stay valid."""

    pool: PoolName


class PoolDeleted(Body, frozen=True, kw_only=True, tag="POOL_DELETED"):
    """DELETE_POOL's reply."""

    pool: str


class Allocate(Body, frozen=True, kw_only=True, tag="ALLOCATE"):
    """Take ``count`` free pages of one page space for this session: all or none."""

    pool: PoolName
    count: Annotated[int, Meta(ge=1, lt=1 << 31)]
    space: ComponentName = MAIN


class Allocated(Body, frozen=True, kw_only=True, tag="ALLOCATED"):
    """ALLOCATE's reply; the page ids, ascending, follow in a frame."""

    pages: PageCount

    def page_counts(self) -> tuple[int, ...]:
        """Return the one list's length."""
        return (self.pages,)


class Free(Body, frozen=True, kw_only=True, tag="FREE"):
    """Give pages of one page space back: all or none. A page in flight is given back when its hand-off settles."""

    pool: PoolName
    pages: PageCount
    space: ComponentName = MAIN

    def page_counts(self) -> tuple[int, ...]:
        """Return the one list's length."""
        return (self.pages,)


class Freed(Body, frozen=True, kw_only=True, tag="FREED"):
    """FREE's reply: how many pages are free now, and how many will be when their hand-offs settle."""

    freed: int
    deferred: int
