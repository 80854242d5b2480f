"""Pools and their pages: CREATE_POOL, ATTACH_POOL, DELETE_POOL, ALLOCATE, FREE."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvferry.protocol.base import Body, PageCount
from kvferry.protocol.device_event import DeviceEvent
from kvferry.protocol.ids import HOST, MAIN, ComponentName, DeviceName, PoolLifetime, PoolName, ProcessId
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from kvferry.protocol.manifests import Index, Manifest, Offset, PoolSpec, RoleName, Size
from kvferry.protocol.model_identity import ModelIdentity

MAX_DIMENSIONS: Final = 16
PayloadBound = Annotated[int, Meta(ge=0, le=LARGEST_PAYLOAD_BYTES)]
Stride = Annotated[int, Meta(ge=0, lt=1 << 62)]


class CreatePool(Body, frozen=True, kw_only=True, tag="CREATE_POOL"):
    """Create a pool of this tenant. The same name with the same layout, size and model is not created twice."""

    pool: PoolName
    spec: PoolSpec
    device: DeviceName = HOST
    model: ModelIdentity | None = None
    """Whose KV its pages hold; without it they cannot be put into the prefix cache, nor looked for there."""
    lifetime: PoolLifetime = "daemon"
    """``instance``: it is deleted when the instance that creates it ends, once nothing of it is in flight.

    Until then others of the tenant may attach it, and then lose it; another instance does not create it: POOL_EXISTS.
    """
    max_payload_bytes: PayloadBound = MAX_PAYLOAD_BYTES
    """The largest payload of a SEND from or to it; at most half of HELLO's ``max_frame_bytes``."""


class PoolCreated(Body, frozen=True, kw_only=True, tag="POOL_CREATED"):
    """CREATE_POOL's reply, sent when the memory is there. ``created`` is false where the pool existed."""

    pool: str
    created: bool
    manifest: Manifest


class AttachPool(Body, frozen=True, kw_only=True, tag="ATTACH_POOL"):
    """Ask for a pool's region: its descriptor, or its share, comes over the session socket before the reply."""

    pool: PoolName
    layout_digest: Annotated[str, Meta(max_length=64)] = ""
    """Where given, the pool must have it."""
    device_pid: ProcessId | None = None
    """By which number the device's driver knows this process; needed where that is not the kernel's, in containers."""


class RegisteredArrays(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one share, or the memory, holds of a registered pool: a role of a component, all its layers or one.

    ``shape``, ``strides`` (in elements) and ``dtype`` are the tensor's, as its engine has it. They must be what the
    spec needs. Where a device's tensor begins in its storage, and how large that is, the share says; where host memory
    holds it, ``offset_bytes`` does.
    """

    component: ComponentName
    role: RoleName
    layer: Index | None = None
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)] = ()
    strides: Annotated[tuple[Stride, ...], Meta(max_length=MAX_DIMENSIONS)] = ()
    dtype: Annotated[str, Meta(max_length=32)] = ""
    offset_bytes: Offset | None = None


class RegisterPool(Body, frozen=True, kw_only=True, tag="REGISTER_POOL"):
    """Let the daemon use a pool that this session's engine owns.

    Its shares, or the descriptor of its host memory, came over the session socket before.

    All its pages are its instance's: the engine numbers and uses them as it likes, and names them in SEND and RECEIVE.
    The memory is this process's, so the pool ends with the session, or with DELETE_POOL.
    """

    pool: PoolName
    spec: PoolSpec
    device: DeviceName
    arrays: Annotated[tuple[RegisteredArrays, ...], Meta(min_length=1, max_length=16_384)]
    """What each share holds, in their order, or the memory; together every entry of the pool, once. Each share is a
    tensor's."""
    model: ModelIdentity | None = None
    """As in CREATE_POOL."""
    max_payload_bytes: PayloadBound = MAX_PAYLOAD_BYTES
    """As in CREATE_POOL."""


class PoolRegistered(Body, frozen=True, kw_only=True, tag="POOL_REGISTERED"):
    """REGISTER_POOL's reply."""

    pool: str
    manifest: Manifest


class PoolAttached(Body, frozen=True, kw_only=True, tag="POOL_ATTACHED"):
    """ATTACH_POOL's reply."""

    pool: str
    manifest: Manifest
    device: str = HOST
    model: ModelIdentity | None = None
    """What the pool was created with, without the salt."""


class DeletePool(Body, frozen=True, kw_only=True, tag="DELETE_POOL"):
    """Delete a pool that has no owned page. Mappings that engines still have stay valid."""

    pool: PoolName


class PoolDeleted(Body, frozen=True, kw_only=True, tag="POOL_DELETED"):
    """DELETE_POOL's reply."""

    pool: str


class Allocate(Body, frozen=True, kw_only=True, tag="ALLOCATE"):
    """Take ``count`` free pages of one page space for this session's instance: all or none."""

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
    """Give pages of one page space back: all or none. A page in flight is given back when its transfer settles."""

    pool: PoolName
    pages: PageCount
    space: ComponentName = MAIN
    after: DeviceEvent | None = None
    """Wait for this before anyone else gets the pages: work that still uses them is under way on a device."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the one list's length."""
        return (self.pages,)


class Freed(Body, frozen=True, kw_only=True, tag="FREED"):
    """FREE's reply: how many pages are free now, and how many will be when their transfers settle."""

    freed: int
    deferred: int
