"""HELLO, PING, STATUS, OPEN_EVENTS, and the frames of the session socket."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.base import Body
from kvferry.protocol.errors import ErrorInfo
from kvferry.protocol.ids import HOST, PLAIN_TEXT, DeviceName, Hex128, PoolLifetime, PoolName
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES, Limits
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.shares import MAX_SHARES, Share, SharedEvents
from kvferry.protocol.table_messages import TablesFollow

ClientName = Annotated[str, Meta(max_length=128)]
InstanceName = Annotated[str, Meta(pattern=PLAIN_TEXT, max_length=128)]
Secret = Annotated[bytes, Meta(max_length=32)]


class Hello(Body, frozen=True, kw_only=True, tag="HELLO"):
    """Open a connection on the control socket. Needs no session; with a secret, binds the connection to its session."""

    protocol_min: int
    protocol_max: int
    client: ClientName = ""


class Welcome(Body, frozen=True, kw_only=True, tag="WELCOME"):
    """HELLO's reply: this daemon's protocol version, features and limits. The envelope carries the boot id."""

    protocol: int
    daemon_version: str
    features: tuple[str, ...]
    limits: Limits


class Ping(Body, frozen=True, kw_only=True, tag="PING"):
    """Ask whether the control loop answers."""


class Pong(Body, frozen=True, kw_only=True, tag="PONG"):
    """PING's reply, written by the control loop."""


class Status(Body, frozen=True, kw_only=True, tag="STATUS"):
    """Ask for the daemon's pools, sessions, transfers, tiers and counters."""


class SpaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One page space of a pool in STATUS; see ``PoolStatus``."""

    space: str
    page_bytes: int
    pages: int
    free: int
    busy: int


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pool in STATUS. ``pages`` excludes the padding page; ``busy`` pages have a reader or a writer.

    ``page_bytes``, ``pages``, ``free`` and ``busy`` are of the first page space; ``spaces`` has all of them if there
    are several.
    """

    pool: str
    tenant: int
    layout_digest: str
    region_bytes: int
    page_bytes: int
    pages: int
    free: int
    busy: int
    spaces: tuple[SpaceStatus, ...] = ()
    device: str = HOST
    registered_by: int | None = None
    """The session whose engine owns the memory; None: the daemon owns it."""
    lifetime: PoolLifetime = "daemon"
    ends_with: int | None = None
    """The number of the instance that the pool ends with (``owner`` of its sessions); None: it ends with none."""
    model: ModelIdentity | None = None
    """The model identity of its KV, without the salt; None: it was created without one."""
    max_payload_bytes: int = MAX_PAYLOAD_BYTES


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One session in STATUS. ``pages`` counts its instance's pages: sessions of one instance show the same number."""

    session: int
    name: str
    tenant: int
    pid: int
    pages: int
    transfers: int
    unacknowledged_events: int
    connected: bool
    instance: str = ""
    """The instance that it named when it opened; empty: it is an instance of its own."""
    owner: int = 0
    """The number of its instance, which owns its pages: that of the instance's first session."""


class TransferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint of a live transfer in STATUS. ``request`` equals ``request_id``, for older readers."""

    request: str
    direction: str
    pool: str
    state: str
    age_ms: int
    pages: int
    arrived: int
    waits_for: str
    request_id: str = ""


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Another daemon in STATUS: ``announced`` of our RECEIVEs wait for its SENDs, ``waiting`` of its for ours."""

    address: str
    state: str
    announced: int
    waiting: int


class NetworkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The bounce buffers into which daemons of other hosts write; ``quarantined`` ones are unused until a fence.

    ``quarantined_bytes``: their bytes and, with direct writes, those of quarantined pages. ``state``: ``ready``,
    ``draining`` while a fence waits for live grants, ``fencing``, or ``broken`` if the transport could not be rebuilt.
    ``held_by``: how many grants each peer has not answered, by its address.
    """

    session: str
    bounce_buffer_bytes: int
    bounce_buffers: int
    free: int
    granted: int
    quarantined: int
    quarantined_bytes: int = 0
    direct: bool = False
    state: str = "ready"
    held_by: dict[str, int] = {}


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device on which a pool was requested. ``state``: ``ready``, or why it is not usable.

    ``total_bytes`` and ``free_bytes`` are of the whole device.
    """

    device: str
    state: str
    total_bytes: int
    free_bytes: int
    pool_bytes: int


class TablesStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Graph tables in STATUS. ``waiting`` is 1 while an update waits for its event or is being copied."""

    session: int
    tables: str
    device: str
    max_batch: int
    columns: int
    updates: int
    waiting: int


class TierStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tier in STATUS. ``state``: ``ready``, ``full``, or why it is not in use.

    ``pinned_bytes``: in the host tier, the bytes of snapshots and of blocks pinned by a lease, an operation or an
    operator.
    """

    tier: str
    state: str
    total_bytes: int
    used_bytes: int
    pinned_bytes: int = 0
    blocks: int = 0
    snapshots: int = 0


class OperationStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One live operation in STATUS. ``waits_for`` says what it waits for; empty: it is copying."""

    session: int
    operation: int
    kind: str
    pool: str
    pages: int
    age_ms: int
    waits_for: str = ""


class StatusReport(Body, frozen=True, kw_only=True, tag="STATUS_REPORT"):
    """STATUS's reply. ``counters`` only grow, and have stable names."""

    daemon_version: str
    pid: int
    uptime_ms: int
    draining: bool
    pools: tuple[PoolStatus, ...]
    sessions: tuple[SessionStatus, ...]
    transfers: tuple[TransferStatus, ...]
    counters: dict[str, int]
    addresses: tuple[str, ...] = ()
    """The addresses at which other daemons reach this one."""
    peers: tuple[PeerStatus, ...] = ()
    network: NetworkStatus | None = None
    devices: tuple[DeviceStatus, ...] = ()
    tables: tuple[TablesStatus, ...] = ()
    tiers: tuple[TierStatus, ...] = ()
    operations: tuple[OperationStatus, ...] = ()


class OpenEvents(Body, frozen=True, kw_only=True, tag="OPEN_EVENTS"):
    """Open this session's event ring, by which requests wait for the engine's progress.

    Its descriptors come over the session socket before the reply. A second request returns the same ring.
    For a device, the engine first sends its interprocess events over the session socket: a slot's counter then says
    how often the slot's event was recorded, and the daemon queries the event itself.
    """

    device: DeviceName = HOST


class EventsOpened(Body, frozen=True, kw_only=True, tag="EVENTS_OPENED"):
    """OPEN_EVENTS's reply: how many little-endian int64 counters the ring has."""

    slots: int


class SessionOpen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="OPEN"):
    """The client's first frame on the session socket. The kernel identifies its process (SO_PEERCRED).

    Sessions of one user that name the same ``instance`` are one owner of pages, leases, pins and snapshots, which are
    released when the last session ends. Without a name, the session is an instance of its own.
    """

    protocol_min: int
    protocol_max: int
    name: ClientName = ""
    instance: InstanceName = ""
    keep: bool = False
    """Keep the session for ``limits.resume_grace_ms`` if its socket is lost while its process lives."""
    resume: Secret = b""
    """The secret of a session that lost its socket, to resume it; its name and instance do not change."""


class RegionRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="REGION_REQUEST"):
    """Sent by another daemon of this host instead of OPEN: it asks for a pool's memory, for reading."""

    tenant: Annotated[int, Meta(ge=0, lt=1 << 32)]
    pool: PoolName
    region: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """The identity of the pool's memory when its pages were sent."""


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="OPENED"):
    """The session's number, its secret for the control socket (never log it) and the daemon's boot id.

    ``resumed``: the session was resumed; if the boot id has changed, a restarted daemon has adopted it. If ``resume``
    was given and this is false, nothing of the old session is left.
    """

    session: int
    secret: bytes
    boot_id: Hex128
    resumed: bool = False
    last_message: int = 0
    """The highest message number that the session has used; a client that resumes continues above it."""


class SessionEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="END"):
    """Ends a session that was opened with ``keep``: the client will not resume it."""


class SessionRefused(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="REFUSED"):
    """Why no session was opened; the daemon then closes the connection."""

    error: ErrorInfo


class RegionFollows(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="REGION"):
    """Comes with one file descriptor: the region of the pool that message ``message_id`` attaches."""

    message_id: int
    pool: str


class EventsFollow(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="EVENTS"):
    """Comes with two file descriptors: the ring's counters, and the eventfd that signals a change of them."""

    message_id: int


class ShareFollows(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="SHARE"):
    """Shares of a device's memory or events, for the reader to map; they belong to message ``message_id``.

    Several frames for one message add up.

    The daemon sends it before the reply to ATTACH_POOL and CREATE_TABLES; an engine sends it before REGISTER_POOL,
    OPEN_EVENTS and CREATE_TABLES.
    """

    message_id: int
    shares: Annotated[tuple[Share, ...], Meta(max_length=MAX_SHARES)] = ()
    events: SharedEvents | None = None


class MemoryFollows(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="MEMORY"):
    """Comes with one file descriptor: the host memory that message ``message_id``, a REGISTER_POOL, registers.

    An engine sends it before the message. The descriptor is a memfd that is sealed against resizing.
    """

    message_id: int


SessionFrame = SessionOpened | SessionRefused | RegionFollows | EventsFollow | ShareFollows | TablesFollow
