"""The daemon's configuration: one TOML file, every key optional, every mistake reported with its key.

Keys are what an operator knows better than the daemon: where things are, and how much they may take. Everything else
chooses itself. Every number is bounded on both sides, so that a typo is an error at the start and not a daemon that
refuses everybody.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import DeviceName
from kvferry.protocol.limits import Limits

MIB: Final = 1 << 20
MIN_SIZE_BYTES: Final = 4096
"""The minimum of a size that is not 0: a smaller number probably lacks a unit."""

MAX_SIZE_BYTES: Final = 1 << 50
MAX_HEARTBEAT_MS: Final = 20_000
"""Well below the longest time that a heartbeat can say it is good for, 65.5 s: an idle link must not end by it."""
STAGING_BUFFERS: Final = 4
"""Of ``network.bounce_buffer_bytes`` each: what outgoing bytes are gathered in."""

Bytes = Annotated[int, Meta(ge=0, le=MAX_SIZE_BYTES)]
"""A size: 0, or at least ``MIN_SIZE_BYTES``: see ``conflicts``."""
Path = Annotated[str, Meta(pattern="^[^\\x00]+\\Z", max_length=4096, description="a path")]
Host = Annotated[
    str,
    Meta(
        pattern="^[0-9A-Za-z_.:%-]+\\Z|^\\[[0-9A-Fa-f:.%]+\\]\\Z",
        max_length=256,
        description="an address or name of this host, without a port",
    ),
]
Listen = Annotated[
    str,
    Meta(
        pattern="^tcp://[^ ]+:[0-9]+\\Z",
        max_length=256,
        description="tcp://ADDRESS:PORT with a numeric address of this host",
    ),
]
MasterAddress = Annotated[
    str,
    Meta(
        pattern="^[^ :]+:[0-9]{1,5}\\Z|^\\[[0-9A-Fa-f:.]+\\]:[0-9]{1,5}\\Z",
        max_length=256,
        description="HOST:PORT, with an IPv6 address in brackets",
    ),
]
TenantName = Annotated[
    str,
    Meta(
        pattern="^[A-Za-z][A-Za-z0-9_-]*\\Z",
        max_length=32,
        description="a name that begins with a letter, of letters, digits, '_' and '-'",
    ),
]
Member = (
    Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
    | Annotated[str, Meta(pattern="^[^:\\s]+\\Z", max_length=64, description="a name of this host")]
)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file; unknown keys are errors."""


class LoggingConfig(Section, frozen=True, kw_only=True):
    """``auto`` writes console lines to a terminal and JSON lines elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class PoolsConfig(Section, frozen=True, kw_only=True):
    """``max_bytes`` bounds the sum of all regions; by default 80 % of the memory; see ``memory``."""

    max_bytes: Annotated[int, Meta(ge=MIB, le=MAX_SIZE_BYTES)] | None = None
    populate: bool = True

    def size_bytes(self, memory_bytes: int) -> int:
        """Return the bound on the sum of all regions, where there is so much memory."""
        return memory_bytes * 4 // 5 if self.max_bytes is None else self.max_bytes


class MemoryConfig(Section, frozen=True, kw_only=True):
    """What the host memory of pools and of the host tier consists of.

    ``huge_pages``: with ``auto`` those that the kernel forms where it is advised to; with ``reserved``, for pools,
    those that are set aside on the host, and the others where too few are free. It comes from ``numa_node``, by
    default from the one that all CPUs of the daemon are next to, if there is such a one.
    """

    huge_pages: Literal["auto", "reserved", "never"] = "auto"
    numa_node: Annotated[int, Meta(ge=0, le=1023)] | None = None


class DevicesConfig(Section, frozen=True, kw_only=True):
    """Devices: those in ``open`` are opened before the daemon reports ready, others with their first pool.

    Opening the first one takes seconds, in which all requests wait. Pools of the daemon take at most ``max_fraction``
    of a device's memory.
    """

    open: tuple[DeviceName, ...] = ()
    max_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9


class KeeperConfig(Section, frozen=True, kw_only=True):
    """The process that keeps the device memory of pools, for ``grace_s`` after a daemon that was killed."""

    grace_s: Annotated[int, Meta(ge=1, le=86_400)] = 300


class PeersConfig(Section, frozen=True, kw_only=True):
    """Other daemons: those of this host find us by our runtime directory, those of other hosts at ``listen``.

    ``listen`` is ``tcp://ADDRESS:PORT`` with an address of this host that they can reach. ``keys`` is the folder of
    this node's key and of those that it talks to (``kvferry keys``). Without it ``listen`` may only be a loopback
    address, unless ``insecure`` lets whoever reaches it be a daemon. A peer that is silent for ``timeout_ms`` is lost;
    three heartbeats or more are sent in that time.
    """

    listen: Listen | None = None
    keys: Path | None = None
    insecure: bool = False
    timeout_ms: Annotated[int, Meta(ge=50, le=600_000)] = 3000

    @property
    def heartbeat_ms(self) -> int:
        """Return the interval of heartbeats."""
        return min(self.timeout_ms // 3, MAX_HEARTBEAT_MS)


class NetworkConfig(Section, frozen=True, kw_only=True):
    """Transfers between hosts, over Mooncake with ``transport = "mooncake"``.

    Peers write into ``bounce_buffers`` buffers of ``bounce_buffer_bytes`` each; two daemons use the smaller of their
    ``bounce_buffer_bytes``. ``address`` is where Mooncake listens, by default that of ``peers.listen``. With
    ``direct``, peers write whole pages into the pools themselves.
    """

    transport: Literal["none", "mooncake"] = "none"
    protocol: Literal["tcp", "ascend"] = "tcp"
    address: Host | None = None
    direct: bool = False
    bounce_buffers: Annotated[int, Meta(ge=1, le=65_536)] = 8
    bounce_buffer_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)] = 16 << 20


class DiskTierConfig(Section, frozen=True, kw_only=True):
    """Cached blocks on disk, in ``path``, at most ``max_bytes`` of them; without a path there is no disk tier.

    ``fsync`` is ``never``, ``interval`` (every few seconds) or ``block`` (before a block counts as stored). Blocks that
    do not reach the disk are recomputed: nothing else depends on them.
    """

    path: Path | None = None
    max_bytes: Annotated[int, Meta(ge=MIB, le=MAX_SIZE_BYTES)] = 64 << 30
    fsync: Literal["never", "interval", "block"] = "interval"


class RemoteTierConfig(Section, frozen=True, kw_only=True):
    """A Mooncake Store that many nodes share, with ``transport = "mooncake_store"``.

    Its ``mooncake_master`` listens at ``master``; other nodes reach this one at ``address``, by default
    where other daemons do. The store keeps blocks in memory that the nodes contribute: ``segment_bytes`` of this
    node's, possibly 0; blocks stored here are lost with this daemon. Tenants find only their own
    blocks, unless ``shared`` lets all tenants of all nodes find each other's.
    """

    transport: Literal["none", "mooncake_store"] = "none"
    master: MasterAddress = "127.0.0.1:50051"
    protocol: Literal["tcp", "ascend"] = "tcp"
    address: Host | None = None
    segment_bytes: Bytes = 4 << 30
    shared: bool = False


class TiersConfig(Section, frozen=True, kw_only=True):
    """Host memory for what leaves the device: snapshots and cached blocks.

    ``host_bytes``, by default a tenth of the memory (see ``memory``), is populated as it is used; 0 disables the tiers.
    ``policy`` selects the cached blocks to evict. Without ``checksums``, corrupted memory goes unnoticed and
    restores are faster. A snapshot whose instance ended is kept for ``snapshot_grace_s``.
    """

    host_bytes: Bytes | None = None
    policy: Literal["reuse", "lru"] = "reuse"
    checksums: bool = True
    snapshot_grace_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    disk: DiskTierConfig = DiskTierConfig()
    remote: RemoteTierConfig = RemoteTierConfig()

    def size_bytes(self, memory_bytes: int) -> int:
        """Return the host tier's size, where there is so much memory."""
        return memory_bytes // 10 if self.host_bytes is None else self.host_bytes


class ServiceConfig(Section, frozen=True, kw_only=True):
    """``drain_timeout_s`` is how long running transfers may take to finish after SIGTERM.

    For ``resume_grace_s`` a session that lost its socket, and said that it would resume, is kept while its process
    lives, and so is every session that a restarted daemon adopts; 0: no session is.
    """

    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    resume_grace_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0


class MetricsConfig(Section, frozen=True, kw_only=True):
    """Where the metrics are read over TCP, beside ``metrics.sock`` in the runtime directory, which there always is."""

    listen: Listen | None = None


class LimitsConfig(Section, frozen=True, kw_only=True):
    """What one client may send; ``protocol.limits.Limits`` documents the keys, and the limits that follow from them."""

    max_frame_bytes: Annotated[int, Meta(ge=128 << 10, le=1 << 30)] = Limits().max_frame_bytes
    max_transfers_per_session: Annotated[int, Meta(ge=1, le=1 << 20)] = Limits().max_transfers_per_session
    max_kept_payload_bytes: Annotated[int, Meta(ge=256 << 10, le=1 << 40)] = Limits().max_kept_payload_bytes


class TenantConfig(Section, frozen=True, kw_only=True):
    """A tenant: users and groups, by number or name, who see each other's and nobody else's.

    ``share``: the part of everything that is kept for it. ``tier_bytes``: the most that it may have of the host tier.
    """

    users: tuple[Member, ...] = ()
    groups: tuple[Member, ...] = ()
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    tier_bytes: Bytes | None = None


class Config(Section, frozen=True, kw_only=True):
    """The whole file."""

    runtime_dir: Path | None = None
    logging: LoggingConfig = LoggingConfig()
    pools: PoolsConfig = PoolsConfig()
    memory: MemoryConfig = MemoryConfig()
    devices: DevicesConfig = DevicesConfig()
    keeper: KeeperConfig = KeeperConfig()
    peers: PeersConfig = PeersConfig()
    network: NetworkConfig = NetworkConfig()
    tiers: TiersConfig = TiersConfig()
    service: ServiceConfig = ServiceConfig()
    metrics: MetricsConfig = MetricsConfig()
    limits: LimitsConfig = LimitsConfig()
    tenants: dict[TenantName, TenantConfig] = {}

    @property
    def announced(self) -> Limits:
        """Return the limits as HELLO's reply says them."""
        limits = self.limits
        return Limits(
            max_frame_bytes=limits.max_frame_bytes,
            max_message_bytes=4 * limits.max_frame_bytes,
            max_transfers_per_session=limits.max_transfers_per_session,
            max_transfers=16 * limits.max_transfers_per_session,
            max_kept_session_payload_bytes=limits.max_kept_payload_bytes // 4,
            max_kept_payload_bytes=limits.max_kept_payload_bytes,
            resume_grace_ms=round(self.service.resume_grace_s * 1000),
        )

    @property
    def network_address(self) -> str | None:
        """Return the address at which other hosts reach this one, without brackets; None if none is configured."""
        listen = self.peers.listen
        address = self.network.address or (listen and listen.removeprefix("tcp://").rpartition(":")[0])
        return address and address.strip("[]")

    @property
    def store_address(self) -> str | None:
        """Return the address at which other nodes of the store reach this one, as ``network_address`` does."""
        address = self.tiers.remote.address
        return address.strip("[]") if address else self.network_address
