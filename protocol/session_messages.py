"""Opening and describing a conversation: HELLO, PING, STATUS, and the frames of the session socket."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.base import Body
from kvferry.protocol.error_info import ErrorInfo
from kvferry.protocol.ids import HOST, PLAIN_TEXT, DeviceName, Hex128, PoolLifetime, PoolName
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES, Limits
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.shares import MAX_SHARES, Share, SharedEvents
from kvferry.protocol.table_messages import TablesFollow

ClientName = Annotated[str, Meta(max_length=128)]
InstanceName = Annotated[str, Meta(pattern=PLAIN_TEXT, max_length=128)]
Secret = Annotated[bytes, Meta(max_length=32)]


class Hello(Body, frozen=True, kw_only=True, tag="HELLO"):
    """Open a conversation on the control socket. Needs no session; with a secret it binds this socket to one."""

    protocol_min: int
    protocol_max: int
    client: ClientName = ""


class Welcome(Body, frozen=True, kw_only=True, tag="WELCOME"):
    """HELLO's reply: what this daemon speaks, can do and accepts. The envelope carries the boot id."""

    protocol: int
    daemon_version: str
    features: tuple[str, ...]
    limits: Limits


class Ping(Body, frozen=True, kw_only=True, tag="PING"):
    """Ask whether the control loop answers."""


class Pong(Body, frozen=True, kw_only=True, tag="PONG"):
    """PING's reply, written by the control loop."""


class Status(Body, frozen=True, kw_only=True, tag="STATUS"):
    """Ask what the daemon holds and does."""


class SpaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One page space of a pool in STATUS; see ``PoolStatus``."""

    space: str
    page_bytes: int
    pages: int
    free: int
    busy: int


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pool in STATUS. ``pages`` leaves the padding page out; ``busy`` pages have a reader or a writer.

    ``page_bytes``, ``pages``, ``free`` and ``busy`` are of the first page space; ``spaces`` has all where there are
    several.
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
    """The session whose engine owns the memory; None: the daemon does."""
    lifetime: PoolLifetime = "daemon"
    ends_with: int | None = None
    """The instance that it ends with, by its number (``owner`` of its sessions); None: none."""
    model: ModelIdentity | None = None
    """Whose KV its pages hold, without the salt; None: nobody said so."""
    max_payload_bytes: int = MAX_PAYLOAD_BYTES


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One session in STATUS. ``pages`` are those of its instance: sessions of one instance show the same number."""

    session: int
    name: str
    tenant: int
    pid: int
    pages: int
    transfers: int
    unacknowledged_events: int
    connected: bool
    instance: str = ""
    """The instance that it named when it opened; empty: it is one of its own."""
    owner: int = 0
    """The number of its instance, which owns its pages: that of the instance's first session."""


class TransferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a live transfer in STATUS. ``request`` is ``request_id`` too, for readers older than that field."""

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
    """Another daemon in STATUS. ``announced`` RECEIVEs of ours wait for its sends, ``waiting`` ones of its for ours."""

    address: str
    state: str
    announced: int
    waiting: int


class NetworkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The memory into which daemons of other hosts write, in slots; ``quarantined`` ones rest until they are fenced.

    ``quarantined_bytes`` are theirs and, where pages are written directly, those of pages that rest. ``state``:
    ``draining`` while a fence waits for live grants, ``fencing``, or ``broken`` where the engine could not be rebuilt.
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
    """One device that a pool was asked for on. ``state``: ``ready``, or why it is not; bytes are the whole device's."""

    device: str
    state: str
    total_bytes: int
    free_bytes: int
    pool_bytes: int


class TablesStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Graph tables in STATUS. ``waiting`` is 1 while an update waits for its event."""

    session: int
    tables: str
    device: str
    max_batch: int
    columns: int
    updates: int
    waiting: int


class TierStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tier in STATUS. ``state``: ``ready``, ``full``, or why it is not in use.

    ``pinned_bytes`` of the host tier are snapshots, and blocks that a lease, an operation or an operator pins.
    """

    tier: str
    state: str
    total_bytes: int
    used_bytes: int
    pinned_bytes: int = 0
    blocks: int = 0
    snapshots: int = 0


class OperationStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One live work in STATUS. ``waits_for`` says what it waits for; nothing: it is copying."""

    session: int
    operation: int
    kind: str
    pool: str
    pages: int
    age_ms: int
    waits_for: str = ""


class StatusReport(Body, frozen=True, kw_only=True, tag="STATUS_REPORT"):
    """STATUS's reply. ``counters`` only grow, by stable names."""

    daemon_version: str
    pid: int
    uptime_ms: int
    draining: bool
    pools: tuple[PoolStatus, ...]
    sessions: tuple[SessionStatus, ...]
    transfers: tuple[TransferStatus, ...]
    counters: dict[str, int]
    addresses: tuple[str, ...] = ()
    """Where other daemons find this one."""
    peers: tuple[PeerStatus, ...] = ()
    network: NetworkStatus | None = None
    devices: tuple[DeviceStatus, ...] = ()
    tables: tuple[TablesStatus, ...] = ()
    tiers: tuple[TierStatus, ...] = ()
    operations: tuple[OperationStatus, ...] = ()


class OpenEvents(Body, frozen=True, kw_only=True, tag="OPEN_EVENTS"):
    """Ask for this session's event ring, by which a SEND says when which layers are ready.

    Its descriptors come over the session socket before the reply. Asked for again, it is the same ring.
    With a device, the engine's interprocess events came over the session socket before: then a slot's counter says how
    often the slot's event was recorded, and the daemon looks at the event itself.
    """

    device: DeviceName = HOST


class EventsOpened(Body, frozen=True, kw_only=True, tag="EVENTS_OPENED"):
    """OPEN_EVENTS's reply: how many little-endian int64 counters the ring has."""

    slots: int


class SessionOpen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="OPEN"):
    """The client's first frame on the session socket. The kernel says who it is (SO_PEERCRED).

    Sessions of one user that name the same ``instance`` are one owner: of pages, leases, pins and snapshots, which are
    given back when the last of them ends. Without a name the session is an instance of its own.
    """

    protocol_min: int
    protocol_max: int
    name: ClientName = ""
    instance: InstanceName = ""
    keep: bool = False
    """Keep the session for ``limits.resume_grace_ms`` where its socket is lost and its process lives."""
    resume: Secret = b""
    """The secret of a session that lost its socket, to take it over; its name and instance stay as they are."""


class RegionRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="REGION_REQUEST"):
    """Another daemon of this host asks, instead of opening a session, for a pool's memory: to read it."""

    tenant: Annotated[int, Meta(ge=0, lt=1 << 32)]
    pool: PoolName
    region: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """Which memory the pool had when it was offered."""


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="OPENED"):
    """The session's number, its secret for the control socket (never log it) and the daemon's boot id.

    ``resumed``: it is the session that was to be resumed; under another boot id than before a restarted daemon has
    adopted it. Not resumed, though that was asked for: nothing of the old session is there.
    """

    session: int
    secret: bytes
    boot_id: Hex128
    resumed: bool = False
    last_message: int = 0
    """The highest message number that the session has used: who resumes goes on above it."""


class SessionEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="END"):
    """A client that asked to be kept ends its session: it will not resume."""


class SessionRefused(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="REFUSED"):
    """Why no session was opened; the daemon closes the connection after it."""

    error: ErrorInfo


class RegionFollows(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="REGION"):
    """One file descriptor comes with this frame: the region of the pool that message ``message_id`` attached."""

    message_id: int
    pool: str


class EventsFollow(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="EVENTS"):
    """Two file descriptors come with this frame: the ring's counters, and the eventfd that says they have changed."""

    message_id: int


class ShareFollows(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="SHARE"):
    """A device's memory, or its events, to be mapped by whoever reads this: for message ``message_id``.

    Several frames for one message add up.

    The daemon says it before the reply of ATTACH_POOL and CREATE_TABLES; an engine says it before REGISTER_POOL,
    OPEN_EVENTS and CREATE_TABLES.
    """

    message_id: int
    shares: Annotated[tuple[Share, ...], Meta(max_length=MAX_SHARES)] = ()
    events: SharedEvents | None = None


class MemoryFollows(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="MEMORY"):
    """One file descriptor comes with this frame: host memory that message ``message_id``, a REGISTER_POOL, registers.

    An engine says it before the message. It is a memfd sealed against every change of its size.
    """

    message_id: int


SessionFrame = SessionOpened | SessionRefused | RegionFollows | EventsFollow | ShareFollows | TablesFollow
