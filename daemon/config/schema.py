"""The daemon's configuration: one TOML file, every key optional, every mistake reported with its key.

Every number is bounded on both sides, so that a typo is an error at the start and not a daemon that refuses everybody.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from msgspec import Meta

from kvferry.daemon.config.sections import MAX_SIZE_BYTES, MIB, Host, Listen, Section
from kvferry.daemon.config.sections import Path as PathText
from kvferry.daemon.config.tiers import TiersConfig
from kvferry.protocol.ids import DeviceName
from kvferry.protocol.limits import Limits


class LoggingConfig(Section, frozen=True, kw_only=True):
    """``auto`` writes console lines to a terminal and JSON lines elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class PoolsConfig(Section, frozen=True, kw_only=True):
    """``max_bytes`` bounds the sum of all regions; by default 80 % of the host's memory."""

    max_bytes: Annotated[int, Meta(ge=MIB, le=MAX_SIZE_BYTES)] | None = None
    populate: bool = True


class DevicesConfig(Section, frozen=True, kw_only=True):
    """Devices: those in ``open`` are opened before the daemon reports ready, others with their first pool.

    Opening the first one takes seconds, in which all requests wait. Pools of the daemon take at most ``max_fraction``
    of a device's memory.

    A device call that has not returned after ``stuck_after_s`` counts as the loss of the device: the daemon stops, to
    be restarted.
    """

    open: tuple[DeviceName, ...] = ()
    max_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    stuck_after_s: Annotated[float, Meta(ge=1, le=3600)] = 60.0


class TransfersConfig(Section, frozen=True, kw_only=True):
    """``threads`` copy, by default one per core and at most 4, ``chunk_bytes`` at a time.

    A SEND that releases its layers step by step but moves less than ``whole_below_bytes`` is sent as a whole at its
    last step: for small prompts the steps cost more than the overlap saves.
    """

    threads: Annotated[int, Meta(ge=1, le=64)] | None = None
    chunk_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = 4 << 20
    whole_below_bytes: Annotated[int, Meta(ge=0, le=MAX_SIZE_BYTES)] = 4 << 20


class PeersConfig(Section, frozen=True, kw_only=True):
    """Other daemons: those of this host find us by our runtime directory, those of other hosts at ``listen``.

    ``listen`` is ``tcp://ADDRESS:PORT`` with an address of this host that they can reach; connections are not
    authenticated. A heartbeat is sent every ``heartbeat_ms``; a peer that is silent for ``timeout_ms`` is lost.
    """

    listen: Listen | None = None
    heartbeat_ms: Annotated[int, Meta(ge=10, le=60_000)] = 1000
    timeout_ms: Annotated[int, Meta(ge=50, le=600_000)] = 3000


class NetworkConfig(Section, frozen=True, kw_only=True):
    """Transfers between hosts, over Mooncake with ``transport = "mooncake"``.

    Peers write into ``bounce_buffers`` buffers of ``bounce_buffer_bytes`` each; outgoing bytes are gathered in
    ``staging`` buffers of that size. All daemons need the same ``bounce_buffer_bytes``. ``address`` is where Mooncake
    listens, by default that of ``peers.listen``. A write may take ``write_timeout_s``. Buffers in which a write may
    still land are quarantined: beyond ``quarantined_bytes`` (by default half of all), or after ``quarantined_s``, the
    engine is rebuilt to free them, after running transfers had ``drain_timeout_s`` to end. With ``direct``, peers write
    whole pages into the pools themselves, and pages of failed transfers are quarantined in the same way.
    """

    transport: Literal["none", "mooncake"] = "none"
    protocol: Literal["tcp", "ascend"] = "tcp"
    address: Host | None = None
    direct: bool = False
    bounce_buffers: Annotated[int, Meta(ge=1, le=65_536)] = 16
    bounce_buffer_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)] = 8 << 20
    staging: Annotated[int, Meta(ge=1, le=65_536)] = 4
    write_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    quarantined_bytes: Annotated[int, Meta(ge=0, le=MAX_SIZE_BYTES)] | None = None
    quarantined_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    drain_timeout_s: Annotated[float, Meta(ge=0, le=600)] = 5.0


class ServiceConfig(Section, frozen=True, kw_only=True):
    """``drain_timeout_s`` is how long running transfers may take to finish after SIGTERM.

    For ``resume_grace_s`` a session that lost its socket, and said that it would resume, is kept while its process
    lives; 0: no session is.
    """

    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    resume_grace_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class LimitsConfig(Section, frozen=True, kw_only=True):
    """What one client may send: the configured form of ``protocol.limits.Limits``, which documents the keys.

    Of transfers that ended before their other side came, ``max_tombstones`` are remembered for ``tombstone_s``, so that
    the late side need not wait for them. HELLO does not announce these two.

    A transfer within one daemon counts as two transfers, one per side, possibly of two sessions.
    """

    max_frame_bytes: Annotated[int, Meta(ge=128 << 10, le=1 << 30)] = Limits().max_frame_bytes
    max_frames: Annotated[int, Meta(ge=2, le=4096)] = Limits().max_frames
    max_message_bytes: Annotated[int, Meta(ge=128 << 10, le=1 << 34)] = Limits().max_message_bytes
    max_requests_per_session: Annotated[int, Meta(ge=1, le=65_536)] = Limits().max_requests_per_session
    max_transfers_per_session: Annotated[int, Meta(ge=1, le=1 << 20)] = Limits().max_transfers_per_session
    max_transfers: Annotated[int, Meta(ge=2, le=1 << 24)] = Limits().max_transfers
    max_kept_session_payload_bytes: Annotated[int, Meta(ge=64 << 10, le=1 << 40)] = (
        Limits().max_kept_session_payload_bytes
    )
    max_kept_payload_bytes: Annotated[int, Meta(ge=64 << 10, le=1 << 40)] = Limits().max_kept_payload_bytes
    max_sessions: Annotated[int, Meta(ge=1, le=65_536)] = Limits().max_sessions
    max_deadline_ms: Annotated[int, Meta(ge=1, le=7 * 86_400_000)] = Limits().max_deadline_ms
    default_deadline_ms: Annotated[int, Meta(ge=1, le=7 * 86_400_000)] = Limits().default_deadline_ms
    max_tombstones: Annotated[int, Meta(ge=0, le=1 << 20)] = 16_384
    tombstone_s: Annotated[float, Meta(ge=0, le=86_400)] = 600.0


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
    def announced(self) -> Limits:
        """Return the limits as HELLO's reply says them."""
        given = {name: getattr(self.limits, name) for name in Limits.__struct_fields__ if hasattr(self.limits, name)}
        return Limits(**given, resume_grace_ms=round(self.service.resume_grace_s * 1000))

    @property
    def max_pool_bytes(self) -> int:
        """Return the bound on the sum of all regions."""
        if self.pools.max_bytes is not None:
            return self.pools.max_bytes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // 5

    @property
    def copy_threads(self) -> int:
        """Return the number of threads that copy."""
        return self.transfers.threads or min(4, len(os.sched_getaffinity(0)))
