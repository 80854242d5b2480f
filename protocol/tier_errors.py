"""Errors of offload, restore and the prefix cache. Import them from ``errors``, which lists all."""

from __future__ import annotations

from kvferry.protocol.error_base import CallerError, DaemonError


class UnknownSnapshotError(CallerError):
    """No snapshot of that name for this tenant."""

    code = "UNKNOWN_SNAPSHOT"
    remedy = "SNAPSHOTS lists the existing ones; a snapshot whose session has ended is dropped after a while"


class UnknownLeaseError(CallerError):
    """No lease of that number in this session."""

    code = "UNKNOWN_LEASE"
    remedy = "LOOKUP again: a lease ends with UNPIN or the session"


class UnknownOperationError(CallerError):
    """No operation of that number in this session."""

    code = "UNKNOWN_OPERATION"
    remedy = "operations are known until their TIER_DONE is acknowledged"


class NoModelError(CallerError):
    """The pool has no model identity, so its blocks cannot be distinguished from another model's."""

    code = "NO_MODEL"
    remedy = "create or register the pool with model=ModelIdentity(name=…, revision=…)"


class TierOffError(CallerError):
    """The daemon has no such tier."""

    code = "TIER_OFF"
    remedy = "configure the named tier under [tiers], and restart the daemon"


class CacheMissError(DaemonError):
    """Cached blocks were evicted or damaged before they were loaded."""

    code = "CACHE_MISS"
    remedy = "recompute the tokens from the named block on; the pages of the blocks before it are filled"


class SnapshotDamagedError(DaemonError):
    """A checksum does not match: the bytes are not those that were offloaded."""

    code = "SNAPSHOT_DAMAGED"
    remedy = "recompute the request's tokens, and check the host's memory: the target pages are unchanged"
