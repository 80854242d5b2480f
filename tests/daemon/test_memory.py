"""Which pages, and which node, the host memory of regions comes from; and what is said where it does not."""

from __future__ import annotations

import errno
import os
from typing import Final, Literal, NamedTuple

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.process.memory import HostMemory
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.host.memory import MACHINE
from kvferry.protocol.config.schema import MemoryConfig
from tests.kit.reserved_pages import PAGE_BYTES, ReservedPages

SHMEM: Final = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
NODES: Final = "/sys/devices/system/node"
SIZE: Final = PAGE_BYTES + 4096
Pages = Literal["normal", "transparent", "reserved"]
NEVER: Final = "advise [never]"
SAYS_NEVER: Final = f"{SHMEM} says never -> echo advise > {SHMEM}; or memory"
TOO_FEW: Final = "1 of 1 pages of 2 MiB are free: "
NO_MBIND: Final = "mbind: Operation not permitted -> allow mbind(2): in containers by --cap-add SYS_NICE"


class Case(NamedTuple):
    """A host, a configuration, regions that are made, what they consist of, and what is said, once.

    ``free`` are reserved pages; ``placed`` nodes preferred by a process on CPUs 4 and 5, of node 1; ``refuses``
    why the kernel lets nobody prefer one.
    """

    pages: tuple[Pages, ...]
    huge_pages: Literal["auto", "reserved", "never"] = "auto"
    sizes: tuple[int, ...] = (4096, SIZE)
    grows: bool = False
    free: int = 0
    shmem: str = "[advise] never"
    nodes: str = "0"
    numa_node: int | None = None
    refuses: int = 0
    placed: tuple[int, ...] = ()
    said: str = ""


CASES: Final = {
    "transparent, where there is room for one": Case(("normal", "transparent"), free=8),
    "transparent, growing": Case(("normal", "transparent"), free=8, grows=True),
    # The kernel may still form them later.
    "none are formed": Case(
        ("normal", "transparent", "transparent"), sizes=(9, SIZE, SIZE), shmem=NEVER, said=SAYS_NEVER
    ),
    "none are wanted": Case(("normal", "normal"), "never", shmem=NEVER),
    "reserved": Case(("normal", "reserved"), "reserved", free=2),
    "reserved, growing": Case(("normal", "transparent"), "reserved", free=2, grows=True),
    "too few reserved": Case(
        ("transparent", "transparent", "reserved"),
        "reserved",
        sizes=(SIZE, SIZE, PAGE_BYTES),
        free=1,
        shmem=NEVER,
        said=TOO_FEW,
    ),
    "the process's node": Case(("normal", "transparent"), nodes="0-1", placed=(1, 1)),
    "another node": Case(("normal", "reserved"), "reserved", free=2, nodes="0-1", numa_node=0, placed=(0, 0)),
    "no node": Case(("normal", "transparent"), nodes="0-1", refuses=errno.EPERM, said=NO_MBIND),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_where_memory_comes_from(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, placed = list[Pages](), list[int]()
    host, create = ReservedPages(monkeypatch, case.free), HostRegion.create

    def watched(name: str, size_bytes: int, kind: Pages = "normal") -> HostRegion:
        region = create(name, size_bytes, kind)
        pages.append(kind)
        return region

    def prefer(_region: HostRegion, node: int) -> None:
        if case.refuses:
            raise OSError(case.refuses, os.strerror(case.refuses))
        placed.append(node)

    files = {
        MACHINE: f"MemTotal: 9 kB\n{host.meminfo}",
        SHMEM: case.shmem,
        f"{NODES}/has_memory": case.nodes,
        f"{NODES}/node0/cpulist": "0-3",
        f"{NODES}/node1/cpulist": "4-7",
    }
    monkeypatch.setattr(HostRegion, "create", watched)
    monkeypatch.setattr(HostRegion, "prefer_node", prefer)
    config = MemoryConfig(huge_pages=case.huge_pages, numa_node=case.numa_node)
    memory = HostMemory(lambda path: files.get(path, ""), config, cpus={4, 5})
    with capture_logs() as logs:
        regions = [memory.region("made", size, grows=case.grows) for size in case.sizes]
        said = [f"{one['cause']} -> {one['remedy']}" for one in logs]
    assert [one.size_bytes for one in regions] == list(case.sizes)
    assert [one.is_reserved for one in regions] == [kind == "reserved" for kind in case.pages]
    assert (tuple(pages), tuple(placed)) == (case.pages, case.placed)
    assert [one.startswith(case.said) for one in said] == ([True] if case.said else [])
    assert case.said != TOO_FEW or said[0].endswith(" -> sysctl vm.nr_hugepages=2")
    memory.leave_reserved("a control group has none")
    assert not memory.region("made", PAGE_BYTES).is_reserved
