"""Host regions: sealed, shared by descriptor, mapped once, given back."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path

import pytest

from kvferry.pools.devices.host import HostRegion, Pages
from kvferry.protocol.errors import InvalidFieldError, OutOfMemoryError
from tests.kit.reserved_pages import PAGE_BYTES, ReservedPages

SIZE = 3 * mmap.PAGESIZE
KERNEL = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
POPULATES_SINCE = (5, 14)


@pytest.fixture
def region() -> HostRegion:
    """Return a small region; the kernel takes it back with the last reference."""
    return HostRegion.create("test", SIZE)


def test_two_mappings_share_the_bytes(region: HostRegion) -> None:
    with region, HostRegion(os.dup(region.fd), SIZE) as other:
        region.view()[17] = 99
        assert other.view()[17] == 99
        assert other.address != region.address
        assert not region.view()[:17].any()


def test_nobody_can_change_its_size(region: HostRegion) -> None:
    with region:
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


def test_more_than_the_host_has_is_an_error() -> None:
    with pytest.raises(OutOfMemoryError):
        HostRegion.create("test", 1 << 62)


def test_views_outlive_the_region(region: HostRegion) -> None:
    view = region.view()
    view[0] = 7
    region.close()
    region.close()
    assert view[0] == 7
    assert "closed" in repr(region)


def test_populate_takes_memory_unless_it_may_not_go_on(region: HostRegion) -> None:
    with region:
        region.populate(lambda _step_bytes: False)
        assert region.allocated_bytes == 0
        region.populate(lambda _step_bytes: True)
        assert region.allocated_bytes == (SIZE if KERNEL >= POPULATES_SINCE else 0)
        assert not region.view().any()


def test_a_region_that_nobody_closes_goes_with_its_last_reference() -> None:
    region = HostRegion.create("forgotten", 4096)
    view, fd = region.view(), region.fd
    view[:] = 7
    del region
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert view.sum() == 7 * 4096, "a view keeps the memory"


def test_a_region_that_could_not_be_mapped_closes_its_descriptor_once() -> None:
    fd = os.memfd_create("unsealed")
    with pytest.raises(InvalidFieldError):
        HostRegion(fd, 4096)
    again = os.memfd_create("another")  # takes the number
    gc.collect()
    os.fstat(again)
    os.close(again)


# -- of huge pages: simulated ones here, real ones in tests/daemon/test_huge_pages.py


def test_a_region_of_reserved_pages_is_as_large_as_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ReservedPages(monkeypatch, free=2)
    size = PAGE_BYTES + SIZE
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


def test_too_few_reserved_pages_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ReservedPages(monkeypatch, free=1)
    with pytest.raises(OutOfMemoryError, match="Cannot allocate memory"):
        HostRegion.create("reserved", PAGE_BYTES + 1, "reserved")


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
