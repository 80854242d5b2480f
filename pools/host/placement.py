"""Large pages and NUMA nodes: what this host offers, from the texts of files that its kernel makes.

Functions of these texts, which ``Read`` returns, and of nothing else. *Reserved* pages were set aside for whoever asks
for them by name (hugetlbfs); *transparent* ones the kernel forms by itself, of shared memory where it is advised to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Final, NamedTuple

from kvferry.pools.host.memory import MACHINE, Read, read_file, smallest_limit
from kvferry.protocol.config.conflicts import HostOffer

SHMEM_ENABLED: Final = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
NODES: Final = "/sys/devices/system/node"

_TRANSPARENT: Final = "/sys/kernel/mm/transparent_hugepage"
_USUAL_BYTES: Final = 2 << 20
_OFF: Final = frozenset({"never", "deny", ""})
_MEMINFO: Final = re.compile(r"^(HugePages_Total|HugePages_Free|HugePages_Rsvd|Hugepagesize):\s+(\d+)", re.MULTILINE)


class Transparent(NamedTuple):
    """Transparent huge pages of shared memory: their size, and the kernel's setting; "" where it has none."""

    page_bytes: int
    setting: str

    @property
    def is_on(self) -> bool:
        """Return whether memory for which they are advised gets them."""
        return self.setting not in _OFF


class Reserved(NamedTuple):
    """Reserved huge pages of the default size: how many there are, and how many nobody has or will have.

    ``page_bytes`` is 0 where the kernel has none.
    """

    page_bytes: int
    total: int
    free: int

    def missing(self, size_bytes: int) -> int:
        """Return how many more would be needed for so many bytes."""
        return max(0, -(-size_bytes // self.page_bytes) - self.free) if self.page_bytes else 0


def transparent(read: Read) -> Transparent:
    """Return what the kernel does with shared memory.

    The setting of this size alone, without the general one, is as good as none: shared memory is then mapped at
    addresses where no huge page fits (Linux 6.18).
    """
    said = read(f"{_TRANSPARENT}/hpage_pmd_size").strip()
    page_bytes = int(said) if said.isdecimal() and int(said) else _USUAL_BYTES
    general = _chosen(read(SHMEM_ENABLED))
    of_size = _chosen(read(f"{_TRANSPARENT}/hugepages-{page_bytes >> 10}kB/shmem_enabled"))
    return Transparent(page_bytes, of_size if of_size == "never" else general)


def reserved(read: Read) -> Reserved:
    """Return the reserved pages of the default size, of all nodes."""
    known = {name: int(number) for name, number in _MEMINFO.findall(read(MACHINE))}
    free = known.get("HugePages_Free", 0) - known.get("HugePages_Rsvd", 0)
    return Reserved(known.get("Hugepagesize", 0) << 10, known.get("HugePages_Total", 0), max(0, free))


def nodes(read: Read) -> frozenset[int]:
    """Return the NUMA nodes that have memory; of a host that does not say, none."""
    return numbers(read(f"{NODES}/has_memory"))


def offer(read: Read = read_file) -> HostOffer:
    """Return what the configuration is compared with."""
    limit = smallest_limit(read)
    return HostOffer(limit.size_bytes, limit.whose, nodes(read))


def node_of(read: Read, cpus: Collection[int]) -> int | None:
    """Return the node that all these CPUs are next to; None where there is no such one."""
    for node in sorted(nodes(read)):
        if cpus and numbers(read(f"{NODES}/node{node}/cpulist")).issuperset(cpus):
            return node
    return None


def preferred_node(read: Read, wanted: int | None, cpus: Collection[int] | None = None) -> int | None:
    """Return the node that memory should come from; None where all are the same, or there is only one.

    Args:
        read: see ``Read``.
        wanted: what the configuration says.
        cpus: those that the process may run on; None: of this one.
    """
    if len(nodes(read)) < 2:  # noqa: PLR2004  nothing to choose from
        return None
    return node_of(read, os.sched_getaffinity(0) if cpus is None else cpus) if wanted is None else wanted


def numbers(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it: "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.update(range(int(first), int(last if last.isdecimal() else first) + 1))
    return frozenset(found)


def _chosen(text: str) -> str:
    """Return the value in brackets."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""
