"""How much memory there is, large pages and NUMA nodes, by the texts of files as kernels write them."""

from __future__ import annotations

from typing import Final

import pytest

from kvferry.pools.host.memory import Limit, Read, limits, narrowest_limit, smallest_limit
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

MIB: Final = 1 << 20
GIB: Final = 1 << 30
MEMINFO: Final = f"MemTotal: {64 << 20} kB\nMemFree: 9 kB\nMemAvailable: {32 << 20} kB\n"
V2: Final = "30 1 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1: Final = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
UNLIMITED: Final = 9223372036854771712


def reading(files: dict[str, str]) -> Read:
    known = {"/proc/meminfo": MEMINFO, **files}
    return lambda path: known.get(path, "")


def from_files(files: dict[str, str]) -> Read:
    return lambda path: files.get(path, "")


def v2(group: str, mount: str = V2, **at: str) -> dict[str, str]:
    """Return the files of a process in a group; ``at`` are the limits by folder, with ``_`` as the slash."""
    files = {"/proc/self/cgroup": f"0::{group}\n", "/proc/self/mountinfo": mount}
    for folder, limit in at.items():
        files[f"/sys/fs/cgroup{folder.replace('_', '/')}/memory.max"] = f"{limit}\n"
    return files


def test_every_group_above_counts() -> None:
    files = v2("/a/b/c", _a=str(8 * GIB), _a_b="max", _a_b_c=str(16 * GIB))
    found = smallest_limit(reading(files))
    assert found == Limit(8 * GIB, 8 * GIB, "/sys/fs/cgroup/a/memory.max")
    assert list(limits(reading({}))) == [Limit(64 * GIB, 32 * GIB, "/proc/meminfo")]
    assert len(list(limits(reading(files)))) == 3
    other = {**files, "/proc/4711/cgroup": "0::/a/b/c/d\n", "/sys/fs/cgroup/a/b/c/d/memory.max": str(GIB)}
    assert smallest_limit(reading(other), "4711").size_bytes == GIB, "another process's"


def test_what_is_in_use_and_cannot_be_reclaimed_is_gone() -> None:
    stat = f"anon 5\nfile 7\nshmem {2 * GIB}\ninactive_file {GIB}\nactive_file {MIB}\nslab_reclaimable {MIB}\n"
    more = {"/sys/fs/cgroup/a/memory.current": f"{5 * GIB}\n", "/sys/fs/cgroup/a/memory.stat": stat}
    assert smallest_limit(reading({**v2("/a", _a=str(8 * GIB)), **more})).left_bytes == 4 * GIB + 2 * MIB


def v1(group: str, **at: int) -> dict[str, str]:
    files = {"/proc/self/cgroup": f"4:memory:{group}\n1:cpu:/\n0::/\n", "/proc/self/mountinfo": V1 + V2}
    for folder, limit in at.items():
        files[f"/sys/fs/cgroup/memory{folder.replace('_', '/')}/memory.limit_in_bytes"] = f"{limit}\n"
    return files


def container(group: str, root: str) -> dict[str, str]:
    """Return the files of one that sees the groups' names outside: its mount shows its own group alone."""
    return v2(group, f"30 1 0:26 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", **{"": str(GIB)})


V1_GROUPS: Final = v1("/a/b", **{"_a": 8 * GIB, "_a_b": 16 * GIB, "": UNLIMITED})
V1_APART: Final = {**V1_GROUPS, "/sys/fs/cgroup/memory/a/memory.use_hierarchy": "0\n"}
SPACE: Final = v2("/a", "30 1 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n")


@pytest.mark.parametrize(
    ("files", "file"),
    [
        ({**v2("/a", _a=str(8 * GIB)), "/sys/fs/cgroup/a/memory.high": str(4 * GIB)}, "/sys/fs/cgroup/a/memory.high"),
        (container("/", "/"), "/sys/fs/cgroup/memory.max"),
        (container("/docker/7", "/docker/7"), "/sys/fs/cgroup/memory.max"),
        (container("/../7", "/"), "/sys/fs/cgroup/memory.max"),
        (container("/x", "/docker/7"), "/sys/fs/cgroup/memory.max"),
        ({**SPACE, "/my groups/a/memory.max": str(GIB)}, "/my groups/a/memory.max"),
        (V1_GROUPS, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes"),
        (V1_APART, "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes"),
    ],
    ids=["throttles", "root", "own group", "elsewhere", "not below the mount", "a space", "version 1", "apart"],
)
def test_the_smallest_limit(files: dict[str, str], file: str) -> None:
    assert smallest_limit(reading(files)).file == file


def test_version_1_knows_the_smallest_limit_also_of_groups_out_of_sight() -> None:
    stat = f"inactive_file 1\nhierarchical_memory_limit {2 * GIB}\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}\n"
    files = {
        **v1("/", **{"": UNLIMITED}),
        "/sys/fs/cgroup/memory/memory.stat": stat,
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert smallest_limit(reading(files)) == Limit(2 * GIB, GIB + 2 * MIB, "/sys/fs/cgroup/memory/memory.stat")


def test_the_narrowest_leaves_the_least_room_whatever_its_size() -> None:
    files = {**v2("/a/b", _a=str(16 * GIB), _a_b=str(8 * GIB)), "/sys/fs/cgroup/a/memory.current": str(15 * GIB)}
    assert smallest_limit(reading(files)).file == "/sys/fs/cgroup/a/b/memory.max"
    found = narrowest_limit(reading(files))
    assert (found.file, found.room_bytes) == ("/sys/fs/cgroup/a/memory.max", 0)  # the reserve is what is left


@pytest.mark.parametrize("text", ["", "x\n", "0::\n", ":::\n\n\x00", "4:memory\n"])
def test_what_cannot_be_read_is_no_limit(text: str) -> None:
    mounts = f"{text}\n1 2\n - \n{V2}"
    files = {"/proc/self/cgroup": text, "/proc/self/mountinfo": mounts, "/sys/fs/cgroup/memory.max": "?"}
    assert smallest_limit(reading(files)).file == "/proc/meminfo"


# -- large pages and NUMA nodes

THP: Final = "/sys/kernel/mm/transparent_hugepage"
NODES: Final = "/sys/devices/system/node"
TWO_NODES: Final = {
    f"{NODES}/has_memory": "0,2\n",
    f"{NODES}/node0/cpulist": "0-3,8-11\n",
    f"{NODES}/node2/cpulist": "4-7,12-15\n",
}


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
    found = transparent(from_files(files))
    assert found == Transparent(2 * MIB, setting)
    assert found.is_on is is_on
    of_the_machine = {**files, f"{THP}/hpage_pmd_size": str(512 * MIB), f"{THP}/hugepages-524288kB/shmem_enabled": ""}
    assert transparent(from_files(of_the_machine)).page_bytes == 512 * MIB


def test_reserved_pages_that_somebody_will_have_are_not_free() -> None:
    text = "MemTotal: 9 kB\nHugePages_Total: 8\nHugePages_Free: 5\nHugePages_Rsvd: 2\nHugepagesize:    2048 kB\n"
    found = reserved(from_files({"/proc/meminfo": text}))
    assert found == Reserved(2 * MIB, 8, 3)
    assert [found.missing(size) for size in (0, 6 * MIB, 6 * MIB + 1, 16 * MIB)] == [0, 0, 1, 5]
    assert reserved(from_files({})) == Reserved(0, 0, 0)
    assert reserved(from_files({})).missing(MIB) == 0


@pytest.mark.parametrize(("cpus", "node"), [({0, 9}, 0), ({4, 5, 15}, 2), ({3, 4}, None), (set(), None), ({99}, None)])
def test_the_node_of_all_cpus(cpus: set[int], node: int | None) -> None:
    assert nodes(from_files(TWO_NODES)) == {0, 2}
    assert node_of(from_files(TWO_NODES), cpus) == node
    assert preferred_node(from_files(TWO_NODES), None, cpus) == node
    assert preferred_node(from_files(TWO_NODES), 2, cpus) == 2


def test_where_there_is_one_node_none_is_preferred() -> None:
    one = {**TWO_NODES, f"{NODES}/has_memory": "0\n"}
    assert preferred_node(from_files(one), None, {0}) is None
    assert preferred_node(from_files(one), 0) is None
    assert preferred_node(from_files({}), None) is None


def test_the_configuration_is_compared_with_the_smallest_limit_and_the_nodes() -> None:
    files = {**TWO_NODES, "/proc/meminfo": f"MemTotal: {64 * MIB} kB\n"}
    assert offer(from_files(files)) == HostOffer(64 * MIB << 10, "this host", frozenset({0, 2}))
