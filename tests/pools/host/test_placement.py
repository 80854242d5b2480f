"""Large pages and NUMA nodes, by the texts of files as kernels write them."""

from __future__ import annotations

from typing import Final

import pytest

from kvferry.pools.host.memory import Read
from kvferry.pools.host.placement import (
    Reserved,
    Transparent,
    node_of,
    nodes,
    offer,
    preferred_node,
    reserved,
    transparent,
)
from kvferry.protocol.config.conflicts import HostOffer

THP: Final = "/sys/kernel/mm/transparent_hugepage"
NODES: Final = "/sys/devices/system/node"
MIB: Final = 1 << 20
TWO_NODES: Final = {
    f"{NODES}/has_memory": "0,2\n",
    f"{NODES}/node0/cpulist": "0-3,8-11\n",
    f"{NODES}/node2/cpulist": "4-7,12-15\n",
}


def reading(files: dict[str, str]) -> Read:
    return lambda path: files.get(path, "")


@pytest.mark.parametrize(
    ("general", "of_size", "setting", "is_on"),
    [
        ("always within_size [advise] never deny force", "always [inherit] within_size advise never", "advise", True),
        ("always [within_size] advise never deny force", "", "within_size", True),
        ("always within_size advise [never] deny force", "always inherit within_size [advise] never", "never", False),
        ("always within_size [advise] never deny force", "always inherit within_size advise [never]", "never", False),
        ("always within_size advise never [deny] force", "", "deny", False),
        ("", "", "", False),
    ],
)
def test_transparent_pages(general: str, of_size: str, setting: str, is_on: bool) -> None:  # noqa: FBT001
    files = {f"{THP}/shmem_enabled": general, f"{THP}/hugepages-2048kB/shmem_enabled": of_size}
    found = transparent(reading(files))
    assert found == Transparent(2 * MIB, setting)
    assert found.is_on is is_on
    of_the_machine = {**files, f"{THP}/hpage_pmd_size": str(512 * MIB), f"{THP}/hugepages-524288kB/shmem_enabled": ""}
    assert transparent(reading(of_the_machine)).page_bytes == 512 * MIB


def test_reserved_pages_that_somebody_will_have_are_not_free() -> None:
    text = "MemTotal: 9 kB\nHugePages_Total: 8\nHugePages_Free: 5\nHugePages_Rsvd: 2\nHugepagesize:    2048 kB\n"
    found = reserved(reading({"/proc/meminfo": text}))
    assert found == Reserved(2 * MIB, 8, 3)
    assert [found.missing(size) for size in (0, 6 * MIB, 6 * MIB + 1, 16 * MIB)] == [0, 0, 1, 5]
    assert reserved(reading({})) == Reserved(0, 0, 0)
    assert reserved(reading({})).missing(MIB) == 0


@pytest.mark.parametrize(("cpus", "node"), [({0, 9}, 0), ({4, 5, 15}, 2), ({3, 4}, None), (set(), None), ({99}, None)])
def test_the_node_of_all_cpus(cpus: set[int], node: int | None) -> None:
    assert nodes(reading(TWO_NODES)) == {0, 2}
    assert node_of(reading(TWO_NODES), cpus) == node
    assert preferred_node(reading(TWO_NODES), None, cpus) == node
    assert preferred_node(reading(TWO_NODES), 2, cpus) == 2


def test_where_there_is_one_node_none_is_preferred() -> None:
    one = {**TWO_NODES, f"{NODES}/has_memory": "0\n"}
    assert preferred_node(reading(one), None, {0}) is None
    assert preferred_node(reading(one), 0) is None
    assert preferred_node(reading({}), None) is None


def test_the_configuration_is_compared_with_the_smallest_limit_and_the_nodes() -> None:
    files = {**TWO_NODES, "/proc/meminfo": f"MemTotal: {64 * MIB} kB\n"}
    assert offer(reading(files)) == HostOffer(64 * MIB << 10, "this host", frozenset({0, 2}))
