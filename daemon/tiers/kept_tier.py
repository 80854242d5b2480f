"""The host tier's memory and its record, where a store of descriptors keeps both for the next daemon."""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping
from typing import Final

import structlog

from kvferry.daemon.process.fd_store import PREFIX, FdStore, FdStoreError
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.process.shares import share
from kvferry.daemon.process.writers import has_foreign_helpers
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.records import UnreadableFileError
from kvferry.pools.tiers.tier_record import NOTHING, FoundTier, TierRecord, read_preface, record_bytes
from kvferry.protocol.errors import KvferryError

MEMORY: Final = f"{PREFIX}tier.memory"
RECORD: Final = f"{PREFIX}tier.record"

log = structlog.get_logger(__name__)


class KeptTier:
    """A host tier's memory that outlives the daemon; ``close`` unmaps it.

    Attributes:
        region: the memory.
        file: the memory of the record.
        record: the record.
        found: what the daemon before has left.
    """

    def __init__(self, region: HostRegion, file: HostRegion, found: FoundTier | None = None) -> None:
        """Own both regions; without ``found`` the record is begun."""
        self.region = region
        self.file = file
        self.record = TierRecord(file.view(), region.size_bytes, share)
        self.found = NOTHING
        if found is None:
            self.record.begin(region.identity)

    def __repr__(self) -> str:
        """Show the record."""
        return f"<KeptTier {self.record!r}>"

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing for the next daemon."""
        return self.record.is_empty

    def has_writers(self) -> bool:
        """Return whether a process of the daemon before, such as its store process, may still write into the memory."""
        return has_foreign_helpers(self.region.fd)

    def descriptors(self) -> dict[str, list[int]]:
        """Return what the store keeps of it, by name; they stay its own."""
        return {MEMORY: [self.region.fd], RECORD: [self.file.fd]}

    def close(self) -> None:
        """Unmap both. What is recorded stays."""
        self.region.close()
        del self.record
        self.file.close()


def open_kept_tier(
    store: FdStore, left: MutableMapping[str, int], memory: HostMemory, size_bytes: int, *, checksums: bool
) -> KeptTier | None:
    """Return a host tier's memory that outlives this daemon: of the one before, or new; None where it cannot.

    Args:
        store: keeps it.
        left: what the daemon before has left there; what is used is taken out, and what cannot be is closed.
        memory: of the host.
        size_bytes: of the tier, above 0. One of another size is begun anew.
        checksums: whether pages without a digest are dropped.

    Raises:
        OutOfMemoryError: there is no room for the tier itself.
    """
    fds = [left.pop(name, -1) for name in (MEMORY, RECORD)]
    if max(fds) >= 0:
        try:
            return _adopted(memory, fds, size_bytes, checksums=checksums)
        except (KvferryError, UnreadableFileError) as cause:
            log.warning("the host tier is begun anew", cause=str(cause))
            store.remove([MEMORY, RECORD])
    region = memory.region("host-tier", size_bytes, grows=True)
    file: HostRegion | None = None
    try:
        file = HostRegion.create("host-tier-record", record_bytes(size_bytes))
        kept = KeptTier(region, file)
        store.put({MEMORY: region.fd, RECORD: file.fd})
    except (FdStoreError, KvferryError) as cause:
        log.warning("the host tier does not outlive the daemon", cause=str(cause))
        region.close()
        if file is not None:
            file.close()
            store.remove([MEMORY, RECORD])
        return None
    return kept


def check_format(name: str, fd: int) -> None:
    """Check that this version can go on with a host tier, where that is its record; the descriptor stays the caller's.

    Raises:
        KvferryError, UnreadableFileError: it cannot.
    """
    if name == RECORD:
        with contextlib.closing(HostRegion(os.dup(fd), os.fstat(fd).st_size)) as file:
            read_preface(file.buffer)


def _adopted(memory: HostMemory, fds: list[int], size_bytes: int, *, checksums: bool) -> KeptTier:
    """Return the tier of these descriptors, which are owned from now on.

    Raises:
        KvferryError, UnreadableFileError: it cannot be trusted, or has another size.
    """
    with contextlib.ExitStack() as undo:
        for fd in fds:
            if fd >= 0:
                undo.callback(os.close, fd)
        if min(fds) < 0:
            raise UnreadableFileError("its memory or its record is missing")
        sizes = [os.fstat(fd).st_size for fd in fds]
        if sizes != [size_bytes, record_bytes(size_bytes)]:
            raise UnreadableFileError(f"it has {sizes[0]} bytes, and is to have {size_bytes}")
        region = memory.adopted(os.dup(fds[0]), sizes[0])
        undo.callback(region.close)
        file = HostRegion(os.dup(fds[1]), sizes[1])
        undo.callback(file.close)
        kept = KeptTier(region, file, NOTHING)
        kept.found = kept.record.read(region.identity, file.data_ranges(), checksums=checksums)
        undo.pop_all()
        for fd in fds:
            os.close(fd)
    return kept
