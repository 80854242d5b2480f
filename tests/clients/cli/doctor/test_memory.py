"""Memory for pools, large pages, /dev/shm."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.clients.cli.doctor.kernel import GIB, check_huge_pages, check_memory, check_shm
from tests.clients.cli.doctor.fake_host import GIB_IN_KIB, make_host

MEMINFO = f"MemTotal:       {64 * GIB_IN_KIB} kB\nMemFree: 1 kB\nMemAvailable:   {32 * GIB_IN_KIB} kB\n"


@pytest.mark.parametrize(
    ("bound", "pool_gib", "state"),
    [("", 64, "ok"), ("", 65, "missing"), ("max", 51, "ok"), (str(16 * GIB), 16, "ok"), (str(16 * GIB), 17, "warning")],
)
def test_memory(tmp_path: Path, bound: str, pool_gib: int, state: str) -> None:
    host = make_host(tmp_path, {"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.max": bound})
    finding = check_memory(host, pool_gib * GIB)
    assert finding.state == state
    assert finding.found.startswith("64.0 GiB")
    assert ("16.0 GiB of it" in finding.found) is bound.isdigit()
    assert f"32.0 GiB available; pools may take {pool_gib}.0 GiB" in finding.found


def test_no_proc(tmp_path: Path) -> None:
    assert check_memory(make_host(tmp_path), 0).state == "unknown"


def test_huge_pages(tmp_path: Path) -> None:
    folder = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    files = {
        f"{folder}/free_hugepages": "3\n",
        f"{folder}/nr_hugepages": "8\n",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
    }
    found = check_huge_pages(make_host(tmp_path, files)).found
    assert found == "3 of 8 reserved 2 MiB pages free; transparent ones for shared memory: advise"
    nothing = check_huge_pages(make_host(tmp_path / "other")).found
    assert nothing == "no 2 MiB pages; no transparent ones for shared memory"


def test_shared_memory(tmp_path: Path) -> None:
    assert check_shm(make_host(tmp_path), npu=False).state == "warning"
    assert check_shm(make_host(tmp_path), npu=True).state == "missing"
    (tmp_path / "dev/shm").mkdir(parents=True)
    finding = check_shm(make_host(tmp_path), npu=True)
    assert finding.found.startswith("/dev/shm: ")  # noqa: S108  what is printed
    assert finding.found.endswith(" free")
