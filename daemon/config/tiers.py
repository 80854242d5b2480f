"""The configuration of the tiers: ``[tiers]``, ``[tiers.disk]`` and ``[tiers.remote]``."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from msgspec import Meta

from kvferry.daemon.config.remote_tier import RemoteTierConfig
from kvferry.daemon.config.sections import MAX_SIZE_BYTES, MIB, Bytes, Path, Section

UserId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
HOST_FRACTION = 10
"""By default the host tier may use a tenth of the host's memory."""


class DiskTierConfig(Section, frozen=True, kw_only=True):
    """Cached blocks on disk, in ``path``, at most ``max_bytes`` of them; without a path there is no disk tier.

    ``fsync`` is ``never``, ``interval`` (every few seconds) or ``block`` (before a block counts as stored). Blocks that
    do not reach the disk are recomputed: nothing else depends on them.
    """

    path: Path | None = None
    max_bytes: Annotated[int, Meta(ge=MIB, le=MAX_SIZE_BYTES)] = 64 << 30
    fsync: Literal["never", "interval", "block"] = "interval"


class TiersConfig(Section, frozen=True, kw_only=True):
    """Host memory for what leaves the device: snapshots and cached blocks.

    ``host_bytes``, by default a tenth of the host's memory, is populated as it is used, or at once with ``populate``; 0
    disables the tiers. ``tenant_bytes`` bounds each user's part of it, ``quotas`` that of users given by number.
    ``policy`` selects the cached blocks to evict. Without ``checksums``, corrupted memory goes unnoticed and restores
    are faster. ``threads`` copy, by default one per core and at most 2. A snapshot whose session ended is kept for
    ``snapshot_grace_s``. A chunk that has waited for transfers for ``patience_s`` is copied despite them, 0: never.
    ``max_in_flight_bytes`` bounds the bytes in flight of each class of operations.
    """

    host_bytes: Bytes | None = None
    populate: bool = False
    tenant_bytes: Bytes | None = None
    quotas: dict[UserId, Bytes] = {}  # noqa: RUF012  msgspec copies it
    policy: Literal["sieve", "lru"] = "sieve"
    checksums: bool = True
    threads: Annotated[int, Meta(ge=1, le=16)] | None = None
    snapshot_grace_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    patience_s: Annotated[float, Meta(ge=0, le=60)] = 0.1
    max_in_flight_bytes: Annotated[int, Meta(ge=MIB, le=MAX_SIZE_BYTES)] = 64 << 20
    disk: DiskTierConfig = DiskTierConfig()
    remote: RemoteTierConfig = RemoteTierConfig()

    @property
    def host_tier_bytes(self) -> int:
        """Return the host tier's size."""
        if self.host_bytes is not None:
            return self.host_bytes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // HOST_FRACTION

    @property
    def copy_threads(self) -> int:
        """Return the number of threads that copy."""
        return self.threads or min(2, len(os.sched_getaffinity(0)))
