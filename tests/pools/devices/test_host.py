"""Host regions: sealed, shared by descriptor, mapped once, given back."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kvferry.pools.devices.host import HostRegion, Pages
from kvferry.pools.host.memory import read_file
from kvferry.pools.host.placement import nodes
from kvferry.protocol.errors import InvalidFieldError, OutOfMemoryError
from tests.kit.reserved_pages import PAGE_BYTES, ReservedPages

SIZE = 3 * mmap.PAGESIZE
KERNEL = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
POPULATES_SINCE = (5, 14)


@pytest.fixture
def region() -> HostRegion:
    return HostRegion.create("test", SIZE)


def test_mappings_share_the_bytes_and_nobody_can_change_the_size(region: HostRegion) -> None:
    with region, HostRegion(os.dup(region.fd), SIZE) as other:
        region.view()[17] = 99
        assert other.view()[17] == 99, "two mappings share the bytes"
        for size in (0, SIZE - 1, SIZE + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size)


def test_a_descriptor_of_another_size_is_refused_and_closed(region: HostRegion) -> None:
    with region:
        fd = os.dup(region.fd)
        with pytest.raises(InvalidFieldError, match="its manifest"):
            HostRegion(fd, SIZE + 1)
        with pytest.raises(OSError, match="Bad file descriptor") as closed:
            os.fstat(fd)
        assert closed.value.errno == errno.EBADF


def test_populate_takes_memory_unless_it_may_not_go_on(region: HostRegion) -> None:
    with region:
        region.populate(lambda _step_bytes: False)
        assert region.allocated_bytes == 0
        region.populate(lambda _step_bytes: True)
        assert region.allocated_bytes == (SIZE if KERNEL >= POPULATES_SINCE else 0)
        assert not region.view().any()


def test_a_region_that_nobody_closes_goes_with_its_last_reference() -> None:
    with pytest.raises(OutOfMemoryError):
        HostRegion.create("test", 1 << 62)
    region = HostRegion.create("forgotten", 4096)
    view, fd = region.view(), region.fd
    view[:] = 7
    del region
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert view.sum() == 7 * 4096, "a view keeps the memory"


# -- of huge pages: simulated ones here, real ones in tests/daemon/test_huge_pages.py


def test_a_region_of_reserved_pages_is_as_large_as_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ReservedPages(monkeypatch, free=2)
    size = PAGE_BYTES + SIZE
    with pytest.raises(OutOfMemoryError, match="Cannot allocate memory"):
        HostRegion.create("reserved", 2 * PAGE_BYTES + 1, "reserved")
    with HostRegion.create("reserved", size, "reserved") as region:
        assert region.is_reserved
        assert (region.size_bytes, region.view().shape) == (size, (size,))
        assert os.fstat(region.fd).st_size == len(region.buffer) == 2 * PAGE_BYTES
        with HostRegion(os.dup(region.fd), size) as other:
            region.view()[-1] = 9
            assert other.is_reserved
            assert other.view()[-1] == 9
            assert other.identity == region.identity != os.fstat(region.fd).st_ino
        for wrong in (PAGE_BYTES, 2 * PAGE_BYTES + 1):
            with pytest.raises(InvalidFieldError, match="its manifest"):
                HostRegion(os.dup(region.fd), wrong)
        with pytest.raises(InvalidFieldError, match="it is in huge pages"):
            HostRegion.registered(os.dup(region.fd))


@pytest.mark.parametrize(
    ("kind", "size", "is_advised"),
    [("normal", 4 << 20, False), ("transparent", 4 << 20, True), ("transparent", SIZE, False)],
)
def test_the_kernel_is_advised_to_form_huge_pages(kind: Pages, size: int, *, is_advised: bool) -> None:
    with HostRegion.create("advised-or-not", size, kind) as region:
        _, _, ours = Path("/proc/self/smaps").read_text().partition(f"{region.address:x}-")
        flags = next(line for line in ours.splitlines() if line.startswith("VmFlags:"))
        assert ("hg" in flags.split()) is is_advised


def test_where_the_kernel_cannot_populate_reserved_pages_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    ReservedPages(monkeypatch, free=1)
    unaligned = 1  # EINVAL, as madvise says before Linux 5.14
    with HostRegion.create("reserved", PAGE_BYTES, "reserved") as region, HostRegion.create("not", SIZE) as other:
        region.populate(lambda _step_bytes: True, unaligned)
        assert region.allocated_bytes == PAGE_BYTES
        other.populate(lambda _step_bytes: True, unaligned)
        assert other.allocated_bytes == 0

        def refuse(*_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OutOfMemoryError, match="no reserved huge page is to be had"):
            region.populate(lambda _step_bytes: True, unaligned)


# -- the node that memory is taken from: what the kernel then says of it

GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS: Final = 2
PREFERRED: Final = 1
NO_NODE: Final = 1000


def policy_at(address: int) -> tuple[int, int]:
    """Return the mode and the nodes, as bits, of the memory there."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = ctypes.c_long(GET_MEMPOLICY[platform.machine()])
    assert not ctypes.CDLL(None).syscall(
        number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), ctypes.c_void_p(address), ctypes.c_ulong(OF_ADDRESS)
    )
    return mode.value, mask[0]


def test_memory_comes_from_a_node_whoever_touches_it(require: Callable[[object, str], None]) -> None:
    require(nodes(read_file), "a kernel with NUMA")
    node = max(nodes(read_file))
    with HostRegion.create("placed", 1 << 20) as region, HostRegion.create("free", 1 << 20) as other:
        region.prefer_node(node)
        assert policy_at(region.address + (1 << 20) - 1) == (PREFERRED, 1 << node)
        assert policy_at(other.address) == (0, 0)
        with pytest.raises(OSError, match="Invalid argument"):
            region.prefer_node(NO_NODE)


def test_a_machine_whose_calls_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with HostRegion.create("placed", 4096) as region, pytest.raises(OSError, match="not implemented"):
        region.prefer_node(0)
