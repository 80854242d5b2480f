"""How much memory there is: the machine's, or less where a control group (of a service, a container) allows less.

Functions of the texts of files, which ``Read`` returns, and of nothing else. All control groups above the process's own
count, as far as they can be seen: in a namespace of control groups those outside of it cannot, but with version 1 the
own group knows the smallest limit of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

Read = Callable[[str], str]
"""Returns the text of a file; "" where it cannot be read."""

RESERVE_PART: Final = 16
MAX_RESERVE_BYTES: Final = 1 << 30
"""Of every limit a 16th, but no more than this, is left to whatever else needs memory at the same time."""
KEPT_PART: Final = 16
MAX_KEPT_BYTES: Final = 2 << 30
"""Of every limit another 16th, but no more than this, is what others may make the daemon keep: see ``kept_bytes``."""
DAEMON_BYTES: Final = 256 << 20
"""Of the daemon itself: its code, the books of a million pages and blocks, and what is under way."""
MACHINE: Final = "/proc/meminfo"

_READ_BYTES: Final = 1 << 16
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class Limit(NamedTuple):
    """A limit on memory, and what of it could be had now: what is free, and what the kernel would reclaim."""

    size_bytes: int
    left_bytes: int
    file: str

    @property
    def room_bytes(self) -> int:
        """Return what regions may take now; a reserve stays, and what the daemon may be made to keep."""
        reserve_bytes = min(MAX_RESERVE_BYTES, self.size_bytes // RESERVE_PART)
        return max(0, self.left_bytes - reserve_bytes - kept_bytes(self.size_bytes))

    @property
    def whose(self) -> str:
        """Return who sets the limit, for an error."""
        return "this host" if self.file == MACHINE else f"the control group ({self.file})"


def enough_for(regions_bytes: int) -> int:
    """Return a limit under which pools, tiers and buffers may have so many bytes, beside what the daemon needs."""
    wanted = regions_bytes + DAEMON_BYTES
    parts = RESERVE_PART // 2  # the reserve and what is kept, together
    return min(-(-wanted * parts // (parts - 1)), wanted + MAX_RESERVE_BYTES + MAX_KEPT_BYTES)


def kept_bytes(memory_bytes: int) -> int:
    """Return how many bytes of messages, requests and replies others may make the daemon keep, with so much memory."""
    return min(MAX_KEPT_BYTES, memory_bytes // KEPT_PART)


def read_file(path: str) -> str:
    """Return the text of a file that the kernel makes (no disk is read); "" where it cannot be read."""
    read = b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        while part := os.read(fd, _READ_BYTES):
            read += part
    except OSError:
        return ""
    finally:
        os.close(fd)
    return read.decode(errors="replace")


def smallest_limit(read: Read = read_file, process: str = "self") -> Limit:
    """Return the limit with the fewest bytes; ``process`` is a number below /proc, or "self"."""
    return min(limits(read, process), key=lambda one: one.size_bytes)


def narrowest_limit(read: Read = read_file) -> Limit:
    """Return the limit that leaves this process the least room now."""
    return min(limits(read), key=lambda one: one.room_bytes)


def limits(read: Read, process: str = "self") -> Iterator[Limit]:
    """Yield the machine's memory, then the smaller limits of the process's control groups."""
    machine = _machine(read)
    yield machine
    groups, mounts = read(f"/proc/{process}/cgroup"), read("/proc/self/mountinfo")
    for folder in _folders(groups, mounts, version=2):
        for file in ("memory.max", "memory.high"):
            size_bytes = _number(read(f"{folder}/{file}"))
            if size_bytes is not None and size_bytes < machine.size_bytes:
                yield _limit(read, size_bytes, folder, f"{folder}/{file}", version=2)
    for above, folder in enumerate(_folders(groups, mounts, version=1)):
        file = f"{folder}/memory.limit_in_bytes"
        size_bytes = _number(read(file))
        if not above:  # the smallest of all groups, also of those that cannot be seen from here
            inherited = _numbers(read(f"{folder}/memory.stat")).get("hierarchical_memory_limit")
            if inherited is not None and (size_bytes is None or inherited < size_bytes):
                size_bytes, file = inherited, f"{folder}/memory.stat"
        elif read(f"{folder}/memory.use_hierarchy").strip() == "0":
            continue
        if size_bytes is not None and size_bytes < machine.size_bytes:
            yield _limit(read, size_bytes, folder, file, version=1)


def _machine(read: Read) -> Limit:
    known = _numbers(read(MACHINE).replace(":", " "))
    size_bytes = known.get("MemTotal", 0) << 10 or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Limit(size_bytes, known.get("MemAvailable", size_bytes >> 10) << 10, MACHINE)


def _limit(read: Read, size_bytes: int, folder: str, file: str, *, version: int) -> Limit:
    """Return the limit of a group with what is left of it.

    The kernel would reclaim pages of files (those of pools are not among them) and caches of its own.
    """
    used = _number(read(f"{folder}/{'memory.current' if version == 2 else 'memory.usage_in_bytes'}")) or 0  # noqa: PLR2004
    known, prefix = _numbers(read(f"{folder}/memory.stat")), "" if version == 2 else "total_"  # noqa: PLR2004
    names = (f"{prefix}inactive_file", f"{prefix}active_file", "slab_reclaimable")
    return Limit(size_bytes, size_bytes - max(0, used - sum(known.get(name, 0) for name in names)), file)


def _number(text: str) -> int | None:
    """Return a file's number; None where it says "max", or does not exist."""
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _numbers(text: str) -> dict[str, int]:
    parts = (line.split() for line in text.splitlines())
    return {one[0]: int(one[1]) for one in parts if len(one) > 1 and one[1].isdecimal()}


def _folders(groups: str, mounts: str, *, version: int) -> Iterator[str]:
    """Yield the folder of the process's memory control group, then those above it, as far as they are mounted."""
    path = _group(groups, version)
    if path is None:
        return
    places = [(_below(path, root), folder) for root, folder in _mounts(mounts, version)]
    inner, folder = next((one for one in places if one[0] is not None), places[0] if places else (None, ""))
    if not folder:
        return
    parts = (inner or "").strip("/").split("/") if inner and inner != "/" else []
    for count in range(len(parts), -1, -1):
        yield "/".join((folder.rstrip("/"), *parts[:count]))


def _group(groups: str, version: int) -> str | None:
    """Return the process's group, by the lines ``NUMBER:CONTROLLERS:PATH``; without controllers: version 2."""
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if ("memory" in controllers.split(",")) if version == 1 else not controllers:
            return path
    return None


def _mounts(mounts: str, version: int) -> Iterator[tuple[str, str]]:
    """Yield root and folder of every mount of the hierarchy; see proc(5) on ``mountinfo``."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:  # noqa: PLR2004  number, parent, device, root, folder
            continue
        is_ours = kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and "memory" in kind[-1].split(",")  # noqa: PLR2004
        if is_ours:
            root, folder = (_ESCAPED.sub(lambda one: chr(int(one[1], 8)), field) for field in fields[3:5])
            yield root, folder


def _below(path: str, root: str) -> str | None:
    """Return a group's path below the group that a mount shows; None where the mount does not show it."""
    if ".." in path.split("/") or ".." in root.split("/"):
        return None
    if root == "/":
        return path
    return path[len(root) :] or "/" if path == root or path.startswith(f"{root}/") else None
