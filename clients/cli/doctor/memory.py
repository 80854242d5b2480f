"""Checks of host memory: its size, huge pages, /dev/shm."""

from __future__ import annotations

import os
import re
from typing import Final

from kvferry.clients.cli.doctor.findings import Finding
from kvferry.clients.cli.doctor.host import Host
from kvferry.clients.cli.doctor.limits import size
from kvferry.clients.cli.doctor.needs import memory_bytes

SHM_WANTED_BYTES: Final = 16 << 20
"""torch keeps reference counters of shared device memory there: small, but required for exports."""
_HUGE: Final = "/sys/kernel/mm/hugepages/hugepages-2048kB"
_SHMEM: Final = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_SHM: Final = "/dev/shm"  # noqa: S108  only inspected
_CGROUP_MAX: Final = "/sys/fs/cgroup/memory.max"


def check_memory(host: Host, pool_bytes: int) -> Finding:
    """Compare the memory that pools may take with the host's, and with the limit of the container or service."""
    name = "memory"
    total, available = memory_bytes(host, "MemTotal"), memory_bytes(host, "MemAvailable")
    if not total:
        return Finding(name, "unknown", "no /proc/meminfo", "mount /proc")
    bound = host.text(_CGROUP_MAX)
    within = int(bound) if bound.isdigit() and int(bound) < total else total
    limited = f", {size(within)} of it for this container" if within < total else ""
    said = f"{size(total)}{limited}, {size(available)} available; pools may take {size(pool_bytes)}"
    if pool_bytes > within:
        fix = "lower pools.max_bytes, or give the container more memory: the kernel would end the daemon"
        return Finding(name, "warning" if limited else "missing", said, fix)
    return Finding(name, "ok", said)


def check_huge_pages(host: Host) -> Finding:
    """Report the huge pages. Pools request none; the kernel may use transparent ones by itself."""
    free, total = host.text(f"{_HUGE}/free_hugepages"), host.text(f"{_HUGE}/nr_hugepages")
    match = re.search(r"\[(\w+)\]", host.text(_SHMEM))
    reserved = f"{free} of {total} reserved 2 MiB pages free" if free and total else "no 2 MiB pages"
    shared = f"transparent ones for shared memory: {match[1]}" if match else "no transparent ones for shared memory"
    return Finding("huge pages", "ok", f"{reserved}; {shared}")


def check_shm(host: Host, *, npu: bool) -> Finding:
    """Check /dev/shm, where processes that share device memory keep its reference counters."""
    name = "shared memory"
    try:
        folder = os.statvfs(host.path(_SHM))
    except OSError as error:
        fix = "mount -t tmpfs tmpfs /dev/shm; in containers share the host's (docker run --ipc=host)"
        return Finding(name, "missing" if npu else "warning", f"{_SHM}: {error.strerror}", fix)
    free = folder.f_bavail * folder.f_frsize
    said = f"{_SHM}: {size(folder.f_blocks * folder.f_frsize)}, {size(free)} free"
    if free < SHM_WANTED_BYTES:
        # Never advise a new mount over it, or a removal: it may hold memory of running processes.
        wanted = (folder.f_blocks * folder.f_frsize + SHM_WANTED_BYTES >> 20) + 1
        fix = f"mount -o remount,size={wanted}m /dev/shm; in containers docker run --shm-size={wanted}m, or --ipc=host"
        return Finding(name, "warning", said, fix)
    return Finding(name, "ok", said)
