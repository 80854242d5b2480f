"""Pools and their pages: CREATE_POOL, ATTACH_POOL, REGISTER_POOL, DELETE_POOL, ALLOCATE, FREE."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvferry.protocol.base import AnsweredBy, DeviceEvent, PageCount, ReplyBody
from kvferry.protocol.ids import HOST, MAIN, ComponentName, DeviceName, ModelIdentity, PoolLifetime, PoolName, ProcessId
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from kvferry.protocol.manifests import Index, Manifest, Offset, PoolSpec, RoleName, Size

MAX_DIMENSIONS: Final = 16
PayloadBound = Annotated[int, Meta(ge=0, le=LARGEST_PAYLOAD_BYTES)]
Stride = Annotated[int, Meta(ge=0, lt=1 << 62)]
RegionNumber = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class PoolCreated(ReplyBody, frozen=True, kw_only=True, tag="POOL_CREATED"):
    """CREATE_POOL's reply, sent when the memory is allocated. ``created`` is false if the pool existed."""

    pool: str
    created: bool
    manifest: Manifest


class CreatePool(AnsweredBy[PoolCreated], frozen=True, kw_only=True, tag="CREATE_POOL"):
    """Create a pool of this tenant. If it exists with the same layout, size and model, it is not created again."""

    after_restart = "again"

    pool: PoolName
    spec: PoolSpec
    device: DeviceName = HOST
    model: ModelIdentity | None = None
    """The model identity of its KV; the prefix cache cannot be used without it."""
    lifetime: PoolLifetime = "daemon"
    """``instance``: the pool is deleted when the instance that creates it ends, once no page is in flight.

    Until then other instances of the tenant may attach it, and then lose it; creating it fails there with POOL_EXISTS.
    """
    max_payload_bytes: PayloadBound = MAX_PAYLOAD_BYTES
    """The largest payload of a SEND from or to it, in bytes; at most half of ``limits.max_frame_bytes``."""


class PoolAttached(ReplyBody, frozen=True, kw_only=True, tag="POOL_ATTACHED"):
    """ATTACH_POOL's reply."""

    pool: str
    manifest: Manifest
    device: str = HOST
    model: ModelIdentity | None = None
    """The model identity that the pool was created with, without the salt."""
    region: RegionNumber = 0
    """The number of its memory: a pool that is made again under its name has another one, also after a restart."""


class AttachPool(AnsweredBy[PoolAttached], frozen=True, kw_only=True, tag="ATTACH_POOL"):
    """Attach to a pool: its region's descriptor, or share, comes over the session socket before the reply.

    Requests that name a pool which was made again since then are POOL_LOST, until the session attaches it again: those
    of all sessions of its instance.
    """

    in_batch = False
    after_restart = "again"

    pool: PoolName
    layout_digest: Annotated[str, Meta(max_length=64)] = ""
    """If given, the pool must have this layout digest."""
    device_pid: ProcessId | None = None
    """This process's pid as the device's driver sees it; needed if the kernel's pid differs, as in containers."""
    region: RegionNumber = 0
    """The memory that this process has mapped already, by POOL_ATTACHED's number: nothing is passed then, and where the
    pool has another memory, the reply is POOL_LOST."""


class RegisteredArrays(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One array of a registered pool, in a share or in host memory: a role of a component, for all layers or one.

    ``shape``, ``strides`` (in elements) and ``dtype`` are those of the engine's tensor, and must be what the spec
    needs. A device tensor's offset and storage size are in its share; in host memory, ``offset_bytes`` is the array's
    offset.
    """

    component: ComponentName
    role: RoleName
    layer: Index | None = None
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)] = ()
    strides: Annotated[tuple[Stride, ...], Meta(max_length=MAX_DIMENSIONS)] = ()
    dtype: Annotated[str, Meta(max_length=32)] = ""
    offset_bytes: Offset | None = None


class PoolRegistered(ReplyBody, frozen=True, kw_only=True, tag="POOL_REGISTERED"):
    """REGISTER_POOL's reply."""

    pool: str
    manifest: Manifest


class RegisterPool(AnsweredBy[PoolRegistered], frozen=True, kw_only=True, tag="REGISTER_POOL"):
    """Register memory that this session's engine allocated as a pool.

    Its shares, or the descriptor of its host memory, must be sent over the session socket before.

    All pages belong to the session's instance: the engine numbers them itself, and names them in SEND and RECEIVE. The
    memory is this process's, so the pool ends with the session, or with DELETE_POOL.
    """

    in_batch = False
    after_restart = "again"

    pool: PoolName
    spec: PoolSpec
    device: DeviceName
    arrays: Annotated[tuple[RegisteredArrays, ...], Meta(min_length=1, max_length=16_384)]
    """The array of each share, which is a tensor, in the order of the shares; or the arrays in host memory. Together
    they hold every entry of the pool once."""
    model: ModelIdentity | None = None
    """As in CREATE_POOL."""
    max_payload_bytes: PayloadBound = MAX_PAYLOAD_BYTES
    """As in CREATE_POOL."""


class PoolDeleted(ReplyBody, frozen=True, kw_only=True, tag="POOL_DELETED"):
    """DELETE_POOL's reply."""

    pool: str


class DeletePool(AnsweredBy[PoolDeleted], frozen=True, kw_only=True, tag="DELETE_POOL"):
    """Delete a pool with no owned page. Mappings that engines still have stay valid."""

    pool: PoolName


class Allocated(ReplyBody, frozen=True, kw_only=True, tag="ALLOCATED"):
    """ALLOCATE's reply; the page ids follow in a frame, ascending."""

    pages: PageCount

    def page_counts(self) -> tuple[int, ...]:
        """Return the one list's length."""
        return (self.pages,)


class Allocate(AnsweredBy[Allocated], frozen=True, kw_only=True, tag="ALLOCATE"):
    """Allocate ``count`` pages of one page space for this session's instance: all or none."""

    pool: PoolName
    count: Annotated[int, Meta(ge=1, lt=1 << 31)]
    space: ComponentName = MAIN


class Freed(ReplyBody, frozen=True, kw_only=True, tag="FREED"):
    """FREE's reply: how many pages are free now, and how many will be when their transfers settle."""

    freed: int
    deferred: int


class Free(AnsweredBy[Freed], frozen=True, kw_only=True, tag="FREE"):
    """Free pages of one page space: all or none. A page in flight becomes free when its transfer settles."""

    pool: PoolName
    pages: PageCount
    space: ComponentName = MAIN
    after: DeviceEvent | None = None
    """Wait for this event before the pages are freed, as a device's kernels may still use them."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the one list's length."""
        return (self.pages,)


class OwnedSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of one page space that an instance owns; their ids follow in a frame, ascending."""

    space: str
    pages: PageCount


class OwnedPages(ReplyBody, frozen=True, kw_only=True, tag="OWNED_PAGES"):
    """LIST_OWNED's reply: the pages of each page space of the pool."""

    spaces: tuple[OwnedSpace, ...]

    def page_counts(self) -> tuple[int, ...]:
        """Return the length of each space's list."""
        return tuple(one.pages for one in self.spaces)


class ListOwned(AnsweredBy[OwnedPages], frozen=True, kw_only=True, tag="LIST_OWNED"):
    """Ask which pages of a pool this session's instance owns: an engine may not have heard of all of them."""

    after_restart = "again"

    pool: PoolName
