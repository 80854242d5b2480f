"""HELLO, PING, STATUS, VERIFY, OPEN_EVENTS."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvferry.protocol.base import AnsweredBy, ReplyBody, RingNumber
from kvferry.protocol.errors import ErrorInfo
from kvferry.protocol.ids import HOST, ClientName, DeviceName, ModelIdentity, PoolLifetime
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES, Limits


class Welcome(ReplyBody, frozen=True, kw_only=True, tag="WELCOME"):
    """HELLO's reply: this daemon's protocol version and limits. The envelope carries the boot id."""

    protocol: int
    daemon_version: str
    limits: Limits


class Hello(AnsweredBy[Welcome], frozen=True, kw_only=True, tag="HELLO"):
    """Open a connection on the control socket. Needs no session; with a secret, binds the connection to its session."""

    needs_session = False
    in_batch = False
    after_restart = "again"

    protocol_min: int
    protocol_max: int
    client: ClientName = ""


class Pong(ReplyBody, frozen=True, kw_only=True, tag="PONG"):
    """PING's reply, written by the control loop. ``refuses_transfers``: it ends, or an operator has drained it."""

    refuses_transfers: bool = False


class Ping(AnsweredBy[Pong], frozen=True, kw_only=True, tag="PING"):
    """Ask whether the control loop answers."""

    needs_session = False
    in_batch = False
    after_restart = "again"


class StatusReport(ReplyBody, frozen=True, kw_only=True, tag="STATUS_REPORT"):
    """STATUS's reply. ``counters`` only grow, and have stable names."""

    daemon_version: str
    pid: int
    uptime_ms: int
    draining: bool
    """It ends, or hands over to the next one."""
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
    descriptors: DescriptorsStatus | None = None
    others: OthersStatus | None = None
    """Totals of what other users have; None: everything is listed, as it is for root and the daemon's own user."""
    recent: tuple[EndedTransfer, ...] = ()
    """The last transfers that have ended, the newest first, where STATUS asks for them."""
    drained: bool = False
    """An operator has drained it; see DRAIN."""
    configuration: dict[str, ConfiguredValue] = msgspec.field(default_factory=dict)
    """The daemon's own, where STATUS asks for it; empty for others than root and the daemon's own user."""
    tenants: tuple[TenantStatus, ...] = ()
    """What each tenant has that all share; another tenant is shown its own row."""
    peers_prove: Literal["", "key", "nothing"] = ""
    """What daemons of other hosts prove who they are by: keys, or nothing (``peers.insecure``); empty where none can
    connect."""


class ConfiguredValue(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a key of the daemon's configuration, and where it comes from.

    ``source``: ``default``, a file's path, a variable's name after a ``$``, or ``--runtime-dir``.
    """

    value: Any
    source: str


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tenant in STATUS. ``name``: as it is configured; empty: it is the user of that number.

    ``share``: the part of everything that is kept for it. ``descriptors``: that are promised to it. ``kept_bytes``: of
    its requests and replies. ``pool_bytes``: of its pools in host memory. ``tier_bytes``: in the host tier.
    """

    tenant: int
    name: str = ""
    share: float = 0.0
    sessions: int = 0
    descriptors: int = 0
    kept_bytes: int = 0
    pool_bytes: int = 0
    tier_bytes: int = 0
    disk_bytes: int = 0


class OthersStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What ``users`` tenants have in STATUS who are not the one that asks.

    ``kept_bytes``: of their requests and replies.
    """

    users: int = 0
    pools: int = 0
    region_bytes: int = 0
    sessions: int = 0
    transfers: int = 0
    operations: int = 0
    tables: int = 0
    kept_bytes: int = 0


class DescriptorsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's descriptors in STATUS: open now, of so many that it may open.

    ``promised`` of ``room`` are for sessions, pools, rings and tables; a tenant may have three quarters of them.
    ``listening``: it accepts connections; not where none is left.
    """

    open: int
    limit: int
    promised: int
    room: int
    listening: bool = True


class Status(AnsweredBy[StatusReport], frozen=True, kw_only=True, tag="STATUS"):
    """Ask for the daemon's pools, sessions, transfers, tiers and counters.

    A tenant is shown its own, and totals of what others have; root and the daemon's own user are shown all.
    ``holders``: also who holds the pages of each pool. ``recent``: also the last transfers that have ended.
    ``configuration``: also that with which the daemon began.
    """

    needs_session = False
    in_batch = False
    after_restart = "again"

    holders: bool = False
    recent: bool = False
    configuration: bool = False


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that VERIFY found wrong: one line for an operator.

    ``at``: the first few page ids, or offsets in bytes, of ``count``. ``holder``: what holds them, or should.
    """

    where: str
    what: str
    remedy: str
    at: tuple[int, ...] = ()
    count: int = 0
    holder: str = ""


class Verified(ReplyBody, frozen=True, kw_only=True, tag="VERIFIED"):
    """VERIFY's reply. No finding: every page, block and file is in exactly one state, and all counts add up.

    ``checked``: how many of what were looked at. ``left_out``: findings beyond those that are listed.
    ``longest_step_us``: for how long other requests had to wait at most.
    """

    findings: tuple[Finding, ...]
    checked: dict[str, int]
    left_out: int = 0
    longest_step_us: int = 0


class Verify(AnsweredBy[Verified], frozen=True, kw_only=True, tag="VERIFY"):
    """Check the daemon's books: pages, tiers and index against everything that holds a part of them.

    For the daemon's own user and root. ``deep``: also read the disk tier's files and compare their checksums.
    """

    in_batch = False

    deep: bool = False


class Upgrading(ReplyBody, frozen=True, kw_only=True, tag="UPGRADING"):
    """UPGRADE's reply: the next daemon, of this version, is ready; this one ends its copies and hands over."""

    daemon_version: str
    pid: int


class Upgrade(AnsweredBy[Upgrading], frozen=True, kw_only=True, tag="UPGRADE"):
    """Start the daemon that is installed by now beside this one, and let it take over: sessions and pools go on.

    It reads the configuration anew. For the daemon's own user and root.
    """

    in_batch = False


class PageHolder(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that has pages of a pool. ``owner``: its number, as in its sessions' status.

    ``age_ms``: since the oldest of its pages was allocated, in whole seconds, or since this daemon has adopted it.
    """

    space: str
    owner: int
    pages: int
    busy: int
    age_ms: int
    name: str = ""
    """The instance's name and its sessions, for people."""


class Drained(ReplyBody, frozen=True, kw_only=True, tag="DRAINED"):
    """DRAIN's reply: how many sides of transfers are under way."""

    transfers: int


class Drain(AnsweredBy[Drained], frozen=True, kw_only=True, tag="DRAIN"):
    """Let no new transfers begin here, or let them again; what is under way goes on, with both its halves.

    It lasts until it is undone, or the daemon ends. For the daemon's own user and root.
    """

    in_batch = False
    after_restart = "again"

    drain: bool = True


class SpaceStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One page space of a pool in STATUS; see ``PoolStatus``."""

    space: str
    page_bytes: int
    pages: int
    free: int
    busy: int
    largest_free_run: int = 0


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pool in STATUS. ``pages`` excludes the padding page; ``busy`` pages have a reader or a writer.

    ``page_bytes``, ``pages``, ``free``, ``busy`` and ``largest_free_run`` (in a row) are of the first page space;
    ``spaces`` has all of them if there are several. ``holders`` and free runs are there where STATUS asks for holders.
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
    largest_free_run: int = 0
    holders: tuple[PageHolder, ...] = ()


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
    kept_bytes: int = 0
    """Of its requests that wait, and of its transfers and operations that are not over or acknowledged."""
    reply_bytes: int = 0
    """Of large replies that are kept for a retry."""


class TransferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint of a live transfer in STATUS. ``request`` equals ``request_id``, for older readers.

    ``deadline_ms``: what is left of its time. ``quiet_ms``: since something last happened to it here: where another
    daemon reads its bytes, nothing does until the end. ``daemons``: the addresses of the other daemons that it is
    exchanged with, or may be.
    """

    request: str
    direction: str
    pool: str
    state: str
    age_ms: int
    pages: int
    arrived: int
    waits_for: str
    request_id: str = ""
    tenant: int = 0
    session: int = 0
    deadline_ms: int = 0
    quiet_ms: int = 0
    daemons: tuple[str, ...] = ()


class EndedTransfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side of a transfer that has ended, ``ago_ms`` ago; it succeeded if ``error`` is None.

    Times of its stages: ``planned_us`` to check and match its messages, ``waited_us`` from the first one to the first
    copy, ``moved_us`` from there to the outcome, ``copied_us`` in which copies of this daemon were under way (of
    several at once, of each), ``settled_us`` from the outcome until no byte could move, ``told_us`` from the outcome
    until the engine had acknowledged the end; None: it has not.
    """

    request_id: str
    direction: str
    pool: str
    tenant: int
    session: int
    ago_ms: int
    error: ErrorInfo | None = None
    pages: int = 0
    moved_bytes: int = 0
    planned_us: int = 0
    waited_us: int = 0
    moved_us: int = 0
    copied_us: int = 0
    settled_us: int = 0
    told_us: int | None = None
    daemons: tuple[str, ...] = ()


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Another daemon in STATUS: ``announced`` of our RECEIVEs wait for its SENDs, ``waiting`` of its for ours.

    ``state``: ``connecting`` until there is a connection, ``greeting`` until the daemon has proved that it listens at
    its address, ``up`` while it answers heartbeats, ``silent`` while one is unanswered, ``refused`` where the two
    cannot speak with each other, ``lost`` where it was up; ``why`` it is not up. ``round_trip_us``: of the last
    heartbeat that was answered; ``quiet_ms``: since it last said anything; 0: never. ``node``: its name, by its
    key; ``keys``: how those of its keys begin that the connections of both are made with.
    """

    address: str
    state: str
    announced: int
    waiting: int
    round_trip_us: int = 0
    quiet_ms: int = 0
    why: str = ""
    node: str = ""
    keys: tuple[str, ...] = ()


class NetworkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The bounce buffers into which daemons of other hosts write; ``quarantined`` ones are unused until a fence.

    ``quarantined_bytes``: their bytes and, with direct writes, those of quarantined pages. ``state``: ``ready``,
    ``draining`` while a fence waits for live write credits, ``fencing``, or ``broken`` if the transport could not be
    rebuilt. ``held_by``: how many write credits each peer has not answered, by its address.
    """

    session: str
    bounce_buffer_bytes: int
    bounce_buffers: int
    free: int
    credits: int
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
    reaches: tuple[str, ...] = ()
    """The other devices in use that it copies from directly; from those that are not here, through host memory."""
    keeper: str = ""
    """Who keeps pools on it for the next daemon: ``process N``, or ``lost: `` and why; empty: nobody does."""


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
    """One tier in STATUS. ``state``: ``ready``, ``full``, or what is wrong: ``away: …``, ``failing: …``, ``slow: …``.

    ``pinned_bytes``: in the host tier, the bytes of snapshots and of blocks pinned by a lease, an operation or an
    operator. ``write_us`` and ``read_us``: what the last few blocks took, of the last five minutes; 0: there was none.
    """

    tier: str
    state: str
    total_bytes: int
    used_bytes: int
    pinned_bytes: int = 0
    blocks: int = 0
    snapshots: int = 0
    write_us: int = 0
    read_us: int = 0


class OperationStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One live operation in STATUS. ``waits_for`` says what it waits for; empty: it is copying."""

    session: int
    operation: int
    kind: str
    pool: str
    pages: int
    age_ms: int
    waits_for: str = ""


class EventsOpened(ReplyBody, frozen=True, kw_only=True, tag="EVENTS_OPENED"):
    """OPEN_EVENTS's reply: how many little-endian int64 counters the ring has."""

    slots: int
    ring: RingNumber = 0
    """For the steps and events that the engine makes."""


class OpenEvents(AnsweredBy[EventsOpened], frozen=True, kw_only=True, tag="OPEN_EVENTS"):
    """Open this session's event ring, by which requests wait for the engine's progress.

    Its descriptors come over the session socket before the reply. A second request returns the same ring.
    For a device, the engine first sends its interprocess events over the session socket: a slot's counter then says
    how often the slot's event was recorded, and the daemon queries the event itself.
    """

    in_batch = False
    after_restart = "again"

    device: DeviceName = HOST
