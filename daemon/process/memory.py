"""Host memory: how much more of it regions may take, of which pages and node, and their allocation in steps.

The kernel ends a process that takes more than its control group or the machine allows; so what does not fit is refused
before it is taken. Large pages and a near node merely make copies faster: where they are not to be had, that is said
once. Knows regions, but not what they are for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from typing import Final

import structlog

from kvferry.pools.devices.host import HostRegion
from kvferry.pools.host.memory import MACHINE, Limit, Read, limits, narrowest_limit, read_file
from kvferry.pools.host.placement import SHMEM_ENABLED, preferred_node, reserved, transparent
from kvferry.protocol.config.schema import MemoryConfig
from kvferry.protocol.errors import OutOfMemoryError

log = structlog.get_logger(__name__)

_NOT_HUGE: Final = "memory is not of huge pages"
_ALLOW_TRANSPARENT: Final = f'echo advise > {SHMEM_ENABLED}; or memory.huge_pages = "never"; see kvferry doctor'
_ALLOW_RESERVED: Final = "let the control group have them (hugetlb.*.max, a container's hugepages), and restart"
_ALLOW_MBIND: Final = "allow mbind(2): in containers by --cap-add SYS_NICE"
_LESS: Final = "make it smaller, give other memory back, or allow the daemon more"


class HostMemory:
    """What the daemon takes of its host's memory. ``fill`` is for threads, the rest for the control loop."""

    def __init__(
        self, read: Read = read_file, config: MemoryConfig | None = None, cpus: Collection[int] | None = None
    ) -> None:
        """``read`` returns the texts of files about the host's memory; ``cpus``: see ``preferred_node``."""
        config = config or MemoryConfig()
        self._read = read
        self._huge_pages = config.huge_pages
        self._may_reserve = config.huge_pages == "reserved"
        self._node = preferred_node(read, config.numa_node, cpus)
        self._said: set[str] = set()
        self._counted: weakref.WeakKeyDictionary[HostRegion, int] = weakref.WeakKeyDictionary()
        self._inside: weakref.WeakKeyDictionary[HostRegion, frozenset[str]] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        """Show how much is counted on."""
        return f"<HostMemory promised={self.promised_bytes}>"

    @property
    def promised_bytes(self) -> int:
        """Return what regions will still take, beyond the memory that they have."""
        return self._promised(MACHINE)

    def _promised(self, file: str) -> int:
        """Return what regions may still take of a limit."""
        return sum(self._wanted(one, up_to, file) for one, up_to in self._counted.items() if one.fd >= 0)

    def _wanted(self, region: HostRegion, up_to: int, file: str) -> int:
        inside = self._inside.get(region)
        return max(0, up_to - (region.allocated_bytes if inside is None or file in inside else 0))

    def region(self, name: str, size_bytes: int, *, grows: bool = False) -> HostRegion:
        """Make a region, of the pages and on the node that are wanted, as far as these are to be had.

        Args:
            name: see ``HostRegion.create``.
            size_bytes: above 0.
            grows: it is populated bit by bit, if ever at all: then not of reserved pages.

        Raises:
            OutOfMemoryError: see ``HostRegion.create``.
        """
        return self._near((None if grows else self._of_reserved(name, size_bytes)) or self._of_others(name, size_bytes))

    def adopted(self, fd: int, size_bytes: int) -> HostRegion:
        """Map a region that an earlier daemon made, and which grows; it owns ``fd`` from now on.

        Raises:
            KvferryError: see ``HostRegion``.
        """
        region = HostRegion(fd, size_bytes)
        if self._huge_pages != "never":
            region.advise_huge_pages()
        return self._near(region)

    def _near(self, region: HostRegion) -> HostRegion:
        if self._node is not None:
            try:
                region.prefer_node(self._node)
            except OSError as cause:
                why = f"mbind: {cause.strerror}"
                self._say(f"memory is not taken from NUMA node {self._node} first", why, _ALLOW_MBIND)
        return region

    def leave_reserved(self, why: str) -> None:
        """Make no region of reserved pages any more."""
        self._may_reserve = False
        self._say(_NOT_HUGE, why, _ALLOW_RESERVED)

    def _of_reserved(self, name: str, size_bytes: int) -> HostRegion | None:
        """Return a region of reserved pages, which it owns; None if there are too few."""
        found = reserved(self._read)
        if not self._may_reserve or size_bytes < found.page_bytes:
            return None
        try:
            return HostRegion.create(name, size_bytes, "reserved")
        except OutOfMemoryError as cause:
            missing = found.missing(size_bytes)
            why = f"{found.free} of {found.total} pages of {found.page_bytes >> 20} MiB are free: {cause.detail}"
            self._say(_NOT_HUGE, why, f"sysctl vm.nr_hugepages={found.total + missing}" if missing else _ALLOW_RESERVED)
            return None

    def _of_others(self, name: str, size_bytes: int) -> HostRegion:
        offered = transparent(self._read)
        if self._huge_pages == "never" or size_bytes < offered.page_bytes:
            return HostRegion.create(name, size_bytes)
        if not offered.is_on and self._huge_pages == "auto":
            self._say(_NOT_HUGE, f"{SHMEM_ENABLED} says {offered.setting or 'nothing'}", _ALLOW_TRANSPARENT)
        return HostRegion.create(name, size_bytes, "transparent")

    def _say(self, what: str, cause: str, remedy: str) -> None:
        """Warn, once."""
        if what not in self._said:
            self._said.add(what)
            log.warning(what, cause=cause, remedy=remedy)

    def count_on(self, region: HostRegion, up_to: int, process: int | None = None) -> None:
        """Count on a region to take memory for its first ``up_to`` bytes, until it is closed.

        One of reserved pages has them already, and no other memory.

        Args:
            region: not closed.
            up_to: at most its size.
            process: the one that has made it, if it is an engine's; 0: unknown. What it has then is charged to that
                process's control groups. It may give that back at any time, and then the next process that touches the
                memory is charged: so all of it counts for those groups of this process in which the other one is not.

        Raises:
            OutOfMemoryError: there is not so much left; what was counted on before still is.
        """
        if region.is_reserved:
            return
        if process is not None:
            self._inside[region] = frozenset(one.file for one in limits(self._read, str(process)))
        before = self._counted.pop(region, 0)
        try:
            for limit in limits(self._read):
                self._check(limit, self._wanted(region, up_to, limit.file), self._promised(limit.file))
        except OutOfMemoryError:
            up_to = before
            raise
        finally:
            if up_to:
                self._counted[region] = up_to

    def fill(self, region: HostRegion, stopped: threading.Event, start: int = 0, stop: int | None = None) -> None:
        """Allocate a region's memory step by step, as long as there is enough and until ``stopped`` is set.

        Raises:
            OutOfMemoryError: there is too little by now.
        """

        def go_on(step_bytes: int) -> bool:
            if stopped.is_set():
                return False
            if not region.is_reserved:
                self._check(narrowest_limit(self._read), step_bytes)
            return True

        region.populate(go_on, start, stop)

    def _check(self, limit: Limit, wanted_bytes: int, promised_bytes: int = 0) -> None:
        if wanted_bytes and promised_bytes + wanted_bytes > limit.room_bytes:
            promised = f", {promised_bytes} of which pools and tiers will still take" if promised_bytes else ""
            raise OutOfMemoryError(
                f"{wanted_bytes} bytes of host memory are needed; {limit.whose} has {limit.room_bytes} left of "
                f"{limit.size_bytes}{promised}",
                remedy=_LESS,
            )
