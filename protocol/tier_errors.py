"""What can be wrong with offload, restore and the prefix cache. Import them from ``errors``, which has the tree."""

from __future__ import annotations

from kvferry.protocol.error_base import CallerError, DaemonError


class UnknownSnapshotError(CallerError):
    """No snapshot of that name for this tenant."""

    code = "UNKNOWN_SNAPSHOT"
    remedy = "SNAPSHOTS lists those there are; one that its session left behind is dropped after a while"


class UnknownLeaseError(CallerError):
    """No lease of that number in this session."""

    code = "UNKNOWN_LEASE"
    remedy = "LOOKUP again: a lease ends with UNPIN or the session"


class UnknownOperationError(CallerError):
    """No operation of that number in this session."""

    code = "UNKNOWN_OPERATION"
    remedy = "operations are known until their TIER_DONE is acknowledged"


class NoModelError(CallerError):
    """The pool does not say whose KV it holds, so its blocks cannot be told from another model's."""

    code = "NO_MODEL"
    remedy = "create or register the pool with model=ModelIdentity(name=…, revision=…)"


class TierOffError(CallerError):
    """The daemon has no such tier."""

    code = "TIER_OFF"
    remedy = "configure the tier that is named under [tiers], and restart the daemon"


class CacheMissError(DaemonError):
    """Cached blocks were gone, or damaged, when they were to be loaded."""

    code = "CACHE_MISS"
    remedy = "compute the tokens from the block that is named; the pages of the blocks before it are filled"


class SnapshotDamagedError(DaemonError):
    """A block's bytes are not those that were offloaded: its checksum is another one."""

    code = "SNAPSHOT_DAMAGED"
    remedy = "compute the request's tokens again, and look at the host's memory: the target pages are untouched"
