"""The daemon's configuration: one TOML file, every key optional, every mistake named by its key.

Every number is bounded on both sides, so that a slip of the finger is a message at the start and not a daemon that
refuses everybody.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from msgspec import Meta

from kvferry.daemon.config.sections import MIB, MOST_BYTES, Host, Listen, Section
from kvferry.daemon.config.sections import Path as PathText
from kvferry.daemon.config.tiers import TiersConfig
from kvferry.protocol.ids import DeviceName
from kvferry.protocol.limits import Limits


class LoggingConfig(Section, frozen=True, kw_only=True):
    """``auto`` writes console lines to a terminal and JSON lines elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class PoolsConfig(Section, frozen=True, kw_only=True):
    """``max_bytes`` bounds all regions together; by default 80 % of the host's memory."""

    max_bytes: Annotated[int, Meta(ge=MIB, le=MOST_BYTES)] | None = None
    populate: bool = True


class DevicesConfig(Section, frozen=True, kw_only=True):
    """Devices: those in ``open`` are opened before the daemon says that it is ready, any other for its first pool.

    To open the first one takes seconds, in which everybody waits. Pools of the daemon take at most ``max_fraction`` of
    a device's memory.

    A call to a device that has not come back after ``stuck_after_s`` is taken for the device's end: the daemon stops,
    to be started anew.
    """

    open: tuple[DeviceName, ...] = ()
    max_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    stuck_after_s: Annotated[float, Meta(ge=1, le=3600)] = 60.0


class TransfersConfig(Section, frozen=True, kw_only=True):
    """``threads`` copy, by default one a core and at most 4; ``chunk_bytes`` between two looks at the queue.

    A SEND that gives its layers step by step but moves less than ``whole_below_bytes`` goes as a whole, at its last
    step: for small prompts the steps cost more than the overlap saves.
    """

    threads: Annotated[int, Meta(ge=1, le=64)] | None = None
    chunk_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = 4 << 20
    whole_below_bytes: Annotated[int, Meta(ge=0, le=MOST_BYTES)] = 4 << 20


class PeersConfig(Section, frozen=True, kw_only=True):
    """Other daemons: those of this host find us by our runtime directory, those of other hosts at ``listen``.

    ``listen`` is ``tcp://ADDRESS:PORT`` with an address of this host that they can reach; nobody is asked who he is
    there. A peer that says nothing for ``timeout_ms`` is lost; every ``heartbeat_ms`` a heartbeat is asked for.
    """

    listen: Listen | None = None
    heartbeat_ms: Annotated[int, Meta(ge=10, le=60_000)] = 1000
    timeout_ms: Annotated[int, Meta(ge=50, le=600_000)] = 3000


class NetworkConfig(Section, frozen=True, kw_only=True):
    """Transfers between hosts, over Mooncake with ``transport = "mooncake"``.

    Peers write into ``bounce_buffers`` slots of ``bounce_buffer_bytes`` each; as many staging buffers are gathered into
    on the way out as ``staging`` says. All daemons need the same ``bounce_buffer_bytes``. ``address`` is where Mooncake
    listens, by default that of ``peers.listen``. A write may take ``write_timeout_s``. Slots in which a write may still
    land rest: beyond ``quarantined_bytes`` (by default half of all), or after ``quarantined_s``, the engine is rebuilt
    to free them, for which running transfers get ``drain_timeout_s`` to end. With ``direct`` peers write whole pages
    into the pools
    themselves: then the pages of a transfer that failed rest in the same way.
    """

    transport: Literal["none", "mooncake"] = "none"
    protocol: Literal["tcp", "ascend"] = "tcp"
    address: Host | None = None
    direct: bool = False
    bounce_buffers: Annotated[int, Meta(ge=1, le=65_536)] = 16
    bounce_buffer_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)] = 8 << 20
    staging: Annotated[int, Meta(ge=1, le=65_536)] = 4
    write_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    quarantined_bytes: Annotated[int, Meta(ge=0, le=MOST_BYTES)] | None = None
    quarantined_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    drain_timeout_s: Annotated[float, Meta(ge=0, le=600)] = 5.0


class ServiceConfig(Section, frozen=True, kw_only=True):
    """``drain_timeout_s`` is how long SIGTERM lets running transfers finish."""

    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0


class LimitsConfig(Section, frozen=True, kw_only=True):
    """What one client may send: the file's form of ``protocol.limits.Limits``, which has the words.

    Of transfers that ended before their other side came, ``max_tombstones`` are remembered for ``tombstone_s``, so that
    who comes late need not wait for them. HELLO does not say these two.

    A transfer within one daemon is two transfers, one a side; they may be of two sessions.
    """

    max_frame_bytes: Annotated[int, Meta(ge=128 << 10, le=1 << 30)] = Limits().max_frame_bytes
    max_frames: Annotated[int, Meta(ge=2, le=4096)] = Limits().max_frames
    max_message_bytes: Annotated[int, Meta(ge=128 << 10, le=1 << 34)] = Limits().max_message_bytes
    max_requests_per_session: Annotated[int, Meta(ge=1, le=65_536)] = Limits().max_requests_per_session
    max_transfers_per_session: Annotated[int, Meta(ge=1, le=1 << 20)] = Limits().max_transfers_per_session
    max_transfers: Annotated[int, Meta(ge=2, le=1 << 24)] = Limits().max_transfers
    max_kept_payload_bytes_per_session: Annotated[int, Meta(ge=64 << 10, le=1 << 40)] = (
        Limits().max_kept_payload_bytes_per_session
    )
    max_kept_payload_bytes: Annotated[int, Meta(ge=64 << 10, le=1 << 40)] = Limits().max_kept_payload_bytes
    max_sessions: Annotated[int, Meta(ge=1, le=65_536)] = Limits().max_sessions
    max_deadline_ms: Annotated[int, Meta(ge=1, le=7 * 86_400_000)] = Limits().max_deadline_ms
    default_deadline_ms: Annotated[int, Meta(ge=1, le=7 * 86_400_000)] = Limits().default_deadline_ms
    max_tombstones: Annotated[int, Meta(ge=0, le=1 << 20)] = 16_384
    tombstone_s: Annotated[float, Meta(ge=0, le=86_400)] = 600.0

    @property
    def announced(self) -> Limits:
        """Return the limits as HELLO's reply says them."""
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})


class Config(Section, frozen=True, kw_only=True):
    """The whole file."""

    runtime_dir: PathText | None = None
    logging: LoggingConfig = LoggingConfig()
    pools: PoolsConfig = PoolsConfig()
    devices: DevicesConfig = DevicesConfig()
    transfers: TransfersConfig = TransfersConfig()
    peers: PeersConfig = PeersConfig()
    network: NetworkConfig = NetworkConfig()
    tiers: TiersConfig = TiersConfig()
    service: ServiceConfig = ServiceConfig()
    limits: LimitsConfig = LimitsConfig()

    @property
    def max_pool_bytes(self) -> int:
        """Return the bound on all regions together."""
        if self.pools.max_bytes is not None:
            return self.pools.max_bytes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // 5

    @property
    def copy_threads(self) -> int:
        """Return how many threads copy."""
        return self.transfers.threads or min(4, len(os.sched_getaffinity(0)))
