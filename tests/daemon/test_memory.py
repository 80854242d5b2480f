"""Which pages, and which node, the host memory of regions comes from; and what is said where it does not."""

from __future__ import annotations

import errno
import os
from typing import Final, Literal

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
HugePages = Literal["auto", "reserved", "never"]


class Machine:
    """A host, and the warnings of what takes its memory.

    Attributes:
        nodes: its NUMA nodes with memory.
        shmem: its setting of transparent huge pages.
        reserved: its reserved ones.
        advised: the regions of transparent ones, by their sizes.
        placed: the nodes that were preferred.
        refuses: why the kernel does not let anybody prefer one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int = 0) -> None:
        self.reserved = ReservedPages(monkeypatch, free)
        self.nodes = "0"
        self.shmem = "[advise] never"
        self.advised: list[int] = []
        self.placed: list[int] = []
        self.refuses = 0
        create = HostRegion.create

        def watched(
            name: str, size_bytes: int, pages: Literal["normal", "transparent", "reserved"] = "normal"
        ) -> HostRegion:
            if pages == "transparent":
                self.advised.append(size_bytes)
            return create(name, size_bytes, pages)

        monkeypatch.setattr(HostRegion, "create", watched)
        monkeypatch.setattr(HostRegion, "prefer_node", lambda _region, node: self._prefer(node))

    def memory(self, huge_pages: HugePages = "auto", numa_node: int | None = None) -> HostMemory:
        """Return the memory of a process on CPUs 4 and 5, those of node 1."""
        return HostMemory(self._read, MemoryConfig(huge_pages=huge_pages, numa_node=numa_node), cpus={4, 5})

    def _read(self, path: str) -> str:
        return {
            MACHINE: f"MemTotal: 9 kB\n{self.reserved.meminfo}",
            SHMEM: self.shmem,
            f"{NODES}/has_memory": self.nodes,
            f"{NODES}/node0/cpulist": "0-3",
            f"{NODES}/node1/cpulist": "4-7",
        }.get(path, "")

    def _prefer(self, node: int) -> None:
        if self.refuses:
            raise OSError(self.refuses, os.strerror(self.refuses))
        self.placed.append(node)


def made(memory: HostMemory, *sizes: int, grows: bool = False) -> tuple[list[bool], list[str]]:
    """Return which of these regions consist of reserved pages, and what was said, each with its remedy."""
    with capture_logs() as logs:
        regions = [memory.region("made", size, grows=grows) for size in sizes]
    assert [one.size_bytes for one in regions] == list(sizes)
    return [one.is_reserved for one in regions], [f"{one['cause']} -> {one['remedy']}" for one in logs]


def test_transparent_pages_are_asked_for_where_a_region_has_room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, free=8)
    assert made(machine.memory(), 4096, SIZE) == ([False, False], [])
    assert machine.advised == [SIZE]
    assert made(machine.memory(), SIZE, grows=True) == ([False], [])
    assert machine.advised == [SIZE, SIZE]
    assert machine.placed == []


def test_that_the_kernel_forms_none_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.shmem = "advise [never]"
    _, said = made(machine.memory(), 4096, SIZE, SIZE)
    assert len(said) == 1
    assert f"{SHMEM} says never -> echo advise > {SHMEM}" in said[0]
    assert made(machine.memory("never"), SIZE) == ([False], [])
    assert machine.advised == [SIZE, SIZE], "the kernel may still form them later"


def test_reserved_pages_are_for_those_that_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, free=2)
    assert made(machine.memory("reserved"), 4096, SIZE) == ([False, True], [])
    assert made(machine.memory("reserved"), SIZE, grows=True) == ([False], [])


def test_too_few_reserved_pages_are_said_once_and_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, free=1)
    machine.shmem = "advise [never]"
    memory = machine.memory("reserved")
    assert made(memory, SIZE, grows=True) == ([False], []), "reserved ones were asked for, and are not missing yet"
    found, said = made(memory, SIZE, SIZE, PAGE_BYTES)
    assert found == [False, False, True]
    assert len(said) == 1
    assert "1 of 1 pages of 2 MiB are free: " in said[0]
    assert said[0].endswith(" -> sysctl vm.nr_hugepages=2")
    memory.leave_reserved("a control group has none")
    assert made(memory, PAGE_BYTES) == ([False], []), "that they are missing was said"


def test_memory_comes_from_the_node_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, free=2)
    machine.nodes = "0-1"
    made(machine.memory(), 4096)
    made(machine.memory("reserved", numa_node=0), SIZE)
    assert machine.placed == [1, 0]


def test_a_node_that_cannot_be_preferred_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.nodes, machine.refuses = "0-1", errno.EPERM
    _, said = made(machine.memory(), 4096, 4096)
    assert said == ["mbind: Operation not permitted -> allow mbind(2): in containers by --cap-add SYS_NICE"]
