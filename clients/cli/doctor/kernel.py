"""Checks of what the kernel gives: its version, limits, memory; and how pages are copied.

Limits are the running daemon's if it is known, else those of this shell: a service has its own limits.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from kvferry.clients.cli.doctor.host import Finding, Host, parse_version
from kvferry.clients.cli.doctor.needs import memory_limit
from kvferry.pools.copy_kernel import DESCRIPTION, Description
from kvferry.pools.host.memory import MACHINE
from kvferry.pools.host.placement import SHMEM_ENABLED, Reserved, node_of, nodes, numbers, reserved, transparent
from kvferry.protocol.config.schema import MemoryConfig

MIB: Final = 1 << 20
GIB: Final = 1 << 30
FILES_WANTED: Final = 8192
"""With fewer the daemon can be connected to fewer than 1024 other daemons."""
_LOCKED_ONLY: Final = (5, 10)
"""Up to this version only locked memory can be registered with an NPU (CANN, aclrtHostRegister)."""
_POPULATES: Final = (5, 14)


def check_kernel(host: Host) -> Finding:
    """Report the kernel's version and what it lacks."""
    release = host.text("/proc/sys/kernel/osrelease")
    version = parse_version(release)
    if version is None:
        return Finding("unknown", release or "no /proc/sys/kernel/osrelease", "mount /proc")
    if version[:2] < _POPULATES:
        lacks = f"{release}: before 5.14, a pool's memory is allocated on first access, not when it is created"
        return Finding("warning", lacks, "a newer kernel; or touch the pages once before serving")
    return Finding("ok", release)


def locked_only(host: Host) -> bool:
    """Return whether this kernel allows only locked memory to be registered with an NPU."""
    version = parse_version(host.text("/proc/sys/kernel/osrelease"))
    return version is not None and version[:2] <= _LOCKED_ONLY


def check_memlock(host: Host, daemon_pid: int | None, bound_bytes: int, *, npu: bool) -> Finding:
    """Compare the limit on locked memory with what would be registered with an NPU."""
    limit = _limit(host, "Max locked memory", daemon_pid)
    whose = _whose(daemon_pid)
    if limit is None:
        return Finding("unknown", f"the limits of {whose} cannot be read", "run as root, or as the daemon's user")
    said = f"{size(limit)} for {whose}"
    if not npu:
        return Finding("ok", f"{said}; only NPUs need locked memory")
    if limit >= bound_bytes:
        return Finding("ok", f"{said}, {size(bound_bytes)} may be registered")
    fix = "LimitMEMLOCK=infinity in the unit, docker run --ulimit memlock=-1, or /etc/security/limits.conf"
    if locked_only(host):
        return Finding("missing", f"{said}; this kernel needs {size(bound_bytes)} locked to register it", fix)
    return Finding("warning", f"{said}; up to {size(bound_bytes)} are registered, which a driver may count", fix)


def check_files(host: Host, daemon_pid: int | None) -> Finding:
    """Check the hard limit on open file descriptors: the daemon raises the soft one to it."""
    limit = _limit(host, "Max open files", daemon_pid, hard=True)
    whose = _whose(daemon_pid)
    if limit is None:
        return Finding("unknown", f"the limits of {whose} cannot be read", "run as root, or as the daemon's user")
    if limit >= FILES_WANTED:
        return Finding("ok", f"{_number(limit)} for {whose}")
    fix = "LimitNOFILE=65536 in the unit, or ulimit -Hn 65536 before starting"
    return Finding("warning", f"{limit} for {whose}, wanted: {FILES_WANTED}", fix)


def check_copies(copies: Description = DESCRIPTION) -> Finding:
    """Report what copies pages, and what computes their checksums."""
    if copies.native:
        return Finding("ok", f"native, {copies.stores} stores; checksums by {Path(copies.hash_from).name}")
    fix = "install a C compiler and Python's headers, then kvferry again; or end what switches it off"
    return Finding("warning", f"in Python, several times slower than the native kernel: {copies.why_not}", fix)


def size(count_bytes: int) -> str:
    """Return a number of bytes as text."""
    if count_bytes >= _UNLIMITED:
        return "unlimited"
    return f"{count_bytes / GIB:.1f} GiB" if count_bytes >= GIB else f"{count_bytes / MIB:.0f} MiB"


_UNLIMITED: Final = 1 << 63


def _number(count: int) -> str:
    return "unlimited" if count >= _UNLIMITED else str(count)


def _whose(daemon_pid: int | None) -> str:
    if daemon_pid is None:
        return "this shell"
    return f"the daemon (pid {daemon_pid or 'not seen from here'})"


def _limit(host: Host, name: str, pid: int | None, *, hard: bool = False) -> int | None:
    """Return a limit, the soft one unless it says otherwise; None if it cannot be read."""
    text = host.text(f"/proc/{'self' if pid is None else pid}/limits")
    match = re.search(rf"^{name}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
    if match is None:
        return None
    limit = match[2 if hard else 1]
    return _UNLIMITED if limit == "unlimited" else int(limit)


# -- host memory: its size, huge pages, NUMA nodes, /dev/shm


SHM_WANTED_BYTES: Final = 16 << 20
"""torch keeps reference counters of shared device memory there: small, but required for exports."""
_BRING: Final = "with huge pages an engine's first access is several times as fast, and copies are somewhat faster"
_AT_BOOT: Final = 'docs/operations.md, "Huge pages and NUMA nodes", has figures, and how to keep it'
_SHM: Final = "/dev/shm"  # noqa: S108  only inspected


def check_memory(host: Host, pool_bytes: int, daemon_pid: int | None) -> Finding:
    """Compare the memory that pools may take with the host's, and with the limit of the container or service."""
    limit = memory_limit(host, daemon_pid)
    if not limit.size_bytes:
        return Finding("unknown", f"no {MACHINE}", "mount /proc")
    limited = "" if limit.file == MACHINE else f" allowed by {limit.file}"
    said = f"{size(limit.size_bytes)}{limited}, {size(limit.left_bytes)} available; pools may take {size(pool_bytes)}"
    if pool_bytes > limit.size_bytes:
        fix = "lower pools.max_bytes, or allow the daemon more memory: it refuses pools that do not fit"
        return Finding("warning" if limited else "missing", said, fix)
    return Finding("ok", said)


def check_huge_pages(host: Host, wanted: MemoryConfig, pool_bytes: int) -> Finding:
    """Check whether pools get the huge pages that the configuration lets them have.

    Args:
        host: whose they are.
        wanted: what the configuration says.
        pool_bytes: what pools may take.
    """
    offered, kept = transparent(host.text), reserved(host.text)
    said = f"transparent ones of shared memory: {offered.setting or 'none'}"
    if wanted.huge_pages == "never":
        return Finding("ok", f'{said}; memory.huge_pages = "never"')
    if wanted.huge_pages == "reserved":
        return _check_reserved(kept, pool_bytes)
    if kept.total:
        page_mib = kept.page_bytes >> 20
        said += f"; {kept.free} of {kept.total} reserved {page_mib} MiB pages free, which pools take only when told to"
    if offered.is_on:
        return Finding("ok", said)
    if not offered.setting:
        return Finding("ok", f"{said}; this kernel, or container, has no such setting")
    return Finding("warning", f"{said}; {_BRING}", f"on the host itself: echo advise > {SHMEM_ENABLED}; {_AT_BOOT}")


def _check_reserved(kept: Reserved, pool_bytes: int) -> Finding:
    said = f"{kept.free} of {kept.total} reserved {size(kept.page_bytes)} pages free; pools may take {size(pool_bytes)}"
    if not kept.page_bytes:
        return Finding("warning", "this kernel has no reserved pages", 'memory.huge_pages = "auto"')
    missing = kept.missing(pool_bytes)
    if not missing:
        return Finding("ok", said)
    fix = f"sysctl vm.nr_hugepages={kept.total + missing}, and in a file in /etc/sysctl.d; or lower pools.max_bytes"
    return Finding("warning", f"{said}, those that do not fit of other pages: {_BRING}", fix)


def check_numa(host: Host, wanted: MemoryConfig, daemon_pid: int | None) -> Finding | None:
    """Report where pools are on a host with several NUMA nodes; None on others."""
    known = nodes(host.text)
    if len(known) < 2:  # noqa: PLR2004
        return None
    said = f"{len(known)} nodes"
    if wanted.numa_node is not None:
        if wanted.numa_node not in known:
            fix = f"memory.numa_node = one of {', '.join(map(str, sorted(known)))}"
            return Finding("missing", f"{said}; there is no node {wanted.numa_node} with memory", fix)
        return Finding("ok", f"{said}; pools come from node {wanted.numa_node} (memory.numa_node)")
    whose, status = _whose(daemon_pid), host.text(f"/proc/{'self' if daemon_pid is None else daemon_pid}/status")
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    if match is None:
        return Finding("unknown", f"{said}; the CPUs of {whose} cannot be read", "run as root, or as the daemon's user")
    node = node_of(host.text, numbers(match[1]))
    if node is not None:
        return Finding("ok", f"{said}; pools come from node {node}, the one of all CPUs of {whose}")
    fix = "set memory.numa_node to the node of the NPUs, or of the engines; and CPUAffinity= of the unit to its CPUs"
    return Finding("warning", f"{said}; pools come from any of them, as the CPUs of {whose} are of several", fix)


def check_shm(host: Host, *, npu: bool) -> Finding:
    """Check /dev/shm, where processes that share device memory keep its reference counters."""
    try:
        folder = os.statvfs(host.path(_SHM))
    except OSError as error:
        fix = "mount -t tmpfs tmpfs /dev/shm; in containers share the host's (docker run --ipc=host)"
        return Finding("missing" if npu else "warning", f"{_SHM}: {error.strerror}", fix)
    free = folder.f_bavail * folder.f_frsize
    said = f"{_SHM}: {size(folder.f_blocks * folder.f_frsize)}, {size(free)} free"
    if free < SHM_WANTED_BYTES:
        # Never advise a new mount over it, or a removal: it may hold memory of running processes.
        wanted = (folder.f_blocks * folder.f_frsize + SHM_WANTED_BYTES >> 20) + 1
        fix = f"mount -o remount,size={wanted}m /dev/shm; in containers docker run --shm-size={wanted}m, or --ipc=host"
        return Finding("warning", said, fix)
    return Finding("ok", said)
