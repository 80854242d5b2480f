"""Host regions: one sealed memfd each, mapped here and passed to engines as a file descriptor.

The seals forbid any later change of size, so that no holder of the descriptor can make another's access fault. Regions
are excluded from core dumps, since they hold user data, and from forked children. Independent of pools.

A memfd of reserved huge pages is a whole number of these, so that it may be larger than the region: what is behind its
end belongs to nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.pools.copy_kernel import HashState
from kvferry.pools.devices.base import NOTHING_PENDING, Arena, Hashed, Pending
from kvferry.pools.devices.numa import prefer_node
from kvferry.pools.planning.copies import CopyBlocks, gather, scatter
from kvferry.pools.planning.sides import PlanSide
from kvferry.pools.tiers.block_copies import offload_step, offload_step_hashed, restore_step, restore_step_hashed
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages, BlockStep
from kvferry.protocol.errors import (
    AccessDeniedError,
    ClientClosedError,
    ForkedError,
    InvalidFieldError,
    KvferryError,
    OutOfMemoryError,
)
from kvferry.protocol.ids import HOST

STEP_BYTES: Final = 8 << 20
"""How much is populated, or given back, at a time: meanwhile no other thread can map or unmap anything."""

MAX_STEP_COPIES: Final = 16384
"""In a step of blocks: to expand more of them would take longer than a step may."""

Pages: TypeAlias = Literal["normal", "transparent", "reserved"]
"""What a region's memory consists of; ``transparent``: of huge pages as far as the kernel forms any, see madvise(2);
``reserved``: of those that were set aside on this host."""

_LEAST_TRANSPARENT: Final = 2 << 20
_BLOCK_BYTES: Final = 512  # st_blocks, see stat(2)
_OF_RESERVED: Final = 1 << 62
_MADV_POPULATE_WRITE: Final = 23
_MAP_FIXED_NOREPLACE: Final = 0x100000
_MAP_NORESERVE: Final = 0x4000
_PROT_NONE: Final = 0
_NO_PAGE: Final = "no reserved huge page is to be had: a control group (hugetlb.*.max) or a cpuset allows none"
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_WRITE_SEALS: Final = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
_libc.mmap.restype = ctypes.c_void_p


class HostRegion:
    """Zeroed host memory of a fixed size, shared by file descriptor.

    Valid until ``close``; existing views keep the memory mapped. Not thread-safe, but its views are. Not inherited by
    forked children: accessing a view there ends in SIGSEGV.

    Attributes:
        size_bytes: what was asked for.
        is_reserved: it consists of reserved huge pages.
    """

    device = HOST

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = True) -> None:
        """Map ``fd``, which this object owns from now on, even if this raises.

        Raises:
            InvalidFieldError: the descriptor's size differs from the manifest's, or it is not sealed.
            OutOfMemoryError: no address space.
        """
        self._fd = fd
        self.size_bytes = size_bytes
        self._is_populated = False
        try:
            self._map = _map(fd, size_bytes, writable=writable)
        except KvferryError:
            os.close(fd)
            self._fd = -1
            raise
        self.is_reserved = _is_reserved(fd)
        self._pid = os.getpid()
        self._address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self._map.madvise(mmap.MADV_DONTDUMP)
        _keep_from_children(self._map)

    def __repr__(self) -> str:
        """Show size and state."""
        return f"<HostRegion {self.size_bytes} bytes {'closed' if self._fd < 0 else f'fd {self._fd}'}>"

    def __del__(self) -> None:
        """Close the descriptor if nobody has: Python does not count references to it."""
        self.close()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the region."""
        self.close()

    @classmethod
    def create(cls, name: str, size_bytes: int, pages: Pages = "normal") -> HostRegion:
        """Make a new region; its memory is allocated on first access, see ``populate``.

        One of reserved pages has to be populated before anybody uses it: where the host cannot give a page on access,
        that ends the process.

        Args:
            name: shown in ``/proc/PID/maps``.
            size_bytes: above 0.
            pages: what it consists of; a region smaller than any huge page is of normal ones.

        Raises:
            OutOfMemoryError: no descriptor or address space is left, or the host does not allow that size, or has too
                few reserved pages.
        """
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if pages == "reserved" else 0)
        try:
            fd = os.memfd_create(f"kvferry:{name}", flags)
        except OSError as cause:
            raise OutOfMemoryError(f"cannot create a memfd: {cause}") from cause
        try:
            os.ftruncate(fd, _file_bytes(fd, size_bytes))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as cause:
            os.close(fd)
            raise OutOfMemoryError(f"cannot make a region of {size_bytes} bytes: {cause}") from cause
        region = cls(fd, size_bytes)
        if pages == "transparent":
            region.advise_huge_pages()
        return region

    @classmethod
    def registered(cls, fd: int) -> HostRegion:
        """Map all of a memfd that an engine has made; the region owns ``fd`` from now on, even if this raises.

        Raises:
            InvalidFieldError: its size could change, or writing to it could fault.
            OutOfMemoryError: no address space.
        """
        try:
            size_bytes = _registered_bytes(fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size_bytes)

    @property
    def fd(self) -> int:
        """Return the descriptor, owned by the region; -1 once closed."""
        return self._fd

    @property
    def identity(self) -> int:
        """Return a number that no other region of this host has while this one exists."""
        return identity_of(self._fd)

    def advise_huge_pages(self) -> None:
        """Let the kernel form huge pages of it, where it does that and the region is large enough."""
        if self.size_bytes >= _LEAST_TRANSPARENT:
            with contextlib.suppress(OSError):  # a kernel without them
                self.buffer.madvise(mmap.MADV_HUGEPAGE)

    def data_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the parts that have memory, from byte to byte: elsewhere are zeros, which reading would allocate."""
        stop = 0
        with contextlib.suppress(OSError):  # ENXIO: there is no more
            while True:
                start = os.lseek(self._fd, stop, os.SEEK_DATA)
                stop = os.lseek(self._fd, start, os.SEEK_HOLE)
                yield start, stop

    def prefer_node(self, node: int) -> None:
        """Let what is allocated from now on, by whomever, come from a NUMA node as long as that has any.

        Raises:
            OSError: this is not possible.
        """
        prefer_node(self.address, len(self._map), node)

    def is_same(self, fd: int) -> bool:
        """Return whether a descriptor is of this very memory, whose mapping can then stay."""
        if self._fd < 0:
            return False
        ours, other = os.fstat(self._fd), os.fstat(fd)
        return (ours.st_dev, ours.st_ino, ours.st_size) == (other.st_dev, other.st_ino, other.st_size)

    def read_only_fd(self) -> int:
        """Return a new descriptor of the region that cannot be mapped for writing; the caller closes it.

        Raises:
            AccessDeniedError: an engine registered the region, and does not let this process open it.
        """
        try:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError as cause:
            raise AccessDeniedError(
                f"the region's owner does not allow opening it: {cause.strerror}", field="region"
            ) from cause

    @property
    def address(self) -> int:
        """Return the region's address in this process; see ``view``."""
        self.check_process()
        self._check_open()
        return self._address

    @property
    def buffer(self) -> mmap.mmap:
        """Return the mapping, as a writable buffer of ``size_bytes`` bytes, or more of reserved pages."""
        self.check_process()
        return self._map

    def view(self) -> npt.NDArray[np.uint8]:
        """Return the region as ``(size_bytes,)`` uint8 without a copy, writable if the region is.

        Raises:
            ForkedError: this process was forked from the one that mapped the region.
            ClientClosedError: the region is closed.
        """
        self.check_process()
        self._check_open()
        return np.frombuffer(self._map, np.uint8, self.size_bytes)

    def _check_open(self) -> None:
        if self._map.closed:
            raise ClientClosedError(f"{self!r} is no longer mapped")

    def gather(self, side: PlanSide, first: int, stop: int, out_address: int, copy: CopyBlocks) -> None:
        """See ``Region.gather``."""
        gather(side, self.address, first, stop, out_address, copy)

    def scatter(self, side: PlanSide, first: int, stop: int, in_address: int, copy: CopyBlocks) -> None:
        """See ``Region.scatter``."""
        scatter(side, self.address, first, stop, in_address, copy)

    def most_blocks(self, layout: BlockLayout) -> int:
        """See ``Region.most_blocks``."""
        return max(1, MAX_STEP_COPIES // len(layout.entries))

    def begin_offload(self, pages: BlockPages, step: BlockStep, arena: Arena) -> Pending:
        """See ``Region.begin_offload``."""
        offload_step(self.view(), pages, step, arena)
        return NOTHING_PENDING

    def offload_hashed(self, pages: BlockPages, step: BlockStep, arena: Arena, state: HashState) -> Hashed:
        """Offload a step as ``begin_offload`` does, and hash it in the same pass; see ``offload_step_hashed``."""
        return Hashed(offload_step_hashed(self.view(), pages, step, arena, state))

    def begin_restore(self, pages: BlockPages, step: BlockStep, arena: Arena) -> Pending:
        """See ``Region.begin_restore``."""
        restore_step(self.view(), pages, step, arena)
        return NOTHING_PENDING

    def restore_hashed(self, pages: BlockPages, step: BlockStep, arena: Arena, state: HashState) -> Hashed:
        """Restore a step as ``begin_restore`` does, and hash it in the same pass; see ``restore_step_hashed``."""
        return Hashed(restore_step_hashed(self.view(), pages, step, arena, state))

    @property
    def allocated_bytes(self) -> int:
        """Return how much of the region has memory by now."""
        return os.fstat(self._fd).st_blocks * _BLOCK_BYTES

    @property
    def is_populated(self) -> bool:
        """Return whether all of the region has memory. What it has once, it keeps."""
        self._is_populated = self._is_populated or (self._fd >= 0 and self.allocated_bytes >= self.size_bytes)
        return self._is_populated

    def populate(self, go_on: Callable[[int], bool], start: int = 0, stop: int | None = None) -> None:
        """Allocate memory now, all of it by default, so that no copy pays for page faults. Slow: not on the event loop.

        It is allocated in steps; before each one ``go_on`` is asked with the step's size, and where it returns False
        or raises, that is the end. The GIL is released. Does nothing if the kernel cannot (before Linux 5.14), but for
        reserved pages.

        Args:
            go_on: see above.
            start: a multiple of the host's page size.
            stop: where to stop; None: at the region's end.

        Raises:
            OutOfMemoryError: the host, or the process's control group, has too little memory, or too few reserved
                pages; what was allocated is freed with the region.
        """
        address, end = self.address, self.size_bytes if stop is None else stop
        for offset in range(start, end, STEP_BYTES):
            size = min(STEP_BYTES, end - offset)
            if not go_on(size):
                return
            if _libc.madvise(address + offset, size, _MADV_POPULATE_WRITE):
                reason = ctypes.get_errno()
                if reason == errno.EINVAL and not self.is_reserved:
                    return
                if reason == errno.EINVAL:
                    reason = _allocated(self._fd, offset, size)
                if reason:
                    why = _NO_PAGE if self.is_reserved else os.strerror(reason)
                    raise OutOfMemoryError(f"cannot populate byte {offset} of {self.size_bytes}: {why}")

    def close(self) -> None:
        """Close the descriptor and, once no view is left, the mapping. Closing twice does nothing."""
        if self._fd >= 0:
            self.release()()

    def release(self) -> Callable[[], None]:
        """Close the region, but for what takes long where there is much memory: the call that is returned.

        That may be made on any thread, once; it releases the GIL.
        """
        fd, self._fd = self._fd, -1
        return functools.partial(_give_back, fd, self._map)

    @property
    def is_ours(self) -> bool:
        """Return whether this process made the mapping; a child that was forked since does not have it."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Check that this process made the mapping.

        Raises:
            ForkedError: this is a child that was forked since.
        """
        if not self.is_ours:
            raise ForkedError(f"process {self._pid} mapped this memory, not its child {os.getpid()}")


def identity_of(fd: int) -> int:
    """Return ``HostRegion.identity`` of a region by its descriptor: of each kind of memory, the kernel counts anew."""
    return os.fstat(fd).st_ino | (_OF_RESERVED if _is_reserved(fd) else 0)


def _is_reserved(fd: int) -> bool:
    """Return whether a memfd consists of reserved huge pages."""
    return os.fstatvfs(fd).f_bsize > mmap.PAGESIZE


def _file_bytes(fd: int, size_bytes: int) -> int:
    """Return the size of a region's memfd, which reserved pages must fill."""
    page_bytes = os.fstatvfs(fd).f_bsize if _is_reserved(fd) else 1
    return -(-size_bytes // page_bytes) * page_bytes


def _allocated(fd: int, offset: int, size_bytes: int) -> int:
    """Allocate memory; return 0, or the reason why not, as errno has it."""
    try:
        os.posix_fallocate(fd, offset, size_bytes)
    except OSError as cause:
        return cause.errno or errno.EIO
    return 0


def _give_back(fd: int, mapping: mmap.mmap) -> None:
    """Close a descriptor and its mapping, in steps."""
    if fd < 0:
        return
    for offset in range(0, 0 if mapping.closed else len(mapping), STEP_BYTES):
        # Drops what this process has mapped; the memory is the file's, and whoever else has mapped it keeps it.
        with contextlib.suppress(OSError):  # locked memory stays until it is unmapped
            mapping.madvise(mmap.MADV_DONTNEED, offset, min(STEP_BYTES, len(mapping) - offset))
    with contextlib.suppress(BufferError):  # views exist: the last one unmaps
        mapping.close()
    os.close(fd)


def _registered_bytes(fd: int) -> int:
    """Return the size of memory to be registered.

    Raises:
        InvalidFieldError: it cannot be registered.
    """
    wrong = ""
    if not _is_sealed(fd):
        wrong = "it is not a memfd sealed against changes of its size, and could be truncated"
    elif (
        fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _WRITE_SEALS or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR
    ):
        wrong = "it cannot be written"
    elif _is_reserved(fd):
        wrong = "it is in huge pages, where accessing a page that the host lacks ends the process"
    elif not os.fstat(fd).st_size:
        wrong = "it is empty"
    if wrong:
        raise InvalidFieldError(
            f"the memory cannot be registered: {wrong}. Make it with kvferry.clients.SharedMemory, or with "
            "memfd_create(MFD_ALLOW_SEALING), ftruncate and F_ADD_SEALS of F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL",
            field="memory",
        )
    return os.fstat(fd).st_size


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # not a memfd
        return False


def _map(fd: int, size_bytes: int, *, writable: bool) -> mmap.mmap:
    found, file_bytes = os.fstat(fd).st_size, _file_bytes(fd, size_bytes)
    if found != file_bytes or not found:
        raise InvalidFieldError(f"the region has {found} bytes, its manifest {size_bytes}", field="region")
    if not _is_sealed(fd):
        raise InvalidFieldError("the region is not sealed: any holder of it could shrink it", field="region")
    try:
        return mmap.mmap(fd, file_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except OSError as cause:
        raise OutOfMemoryError(f"cannot map {size_bytes} bytes: {cause}") from cause


# -- mappings that are not inherited by forked children.
#
# A child that kept its parent's mapping of a pool could write to pages that belong to somebody else by then. So the
# kernel leaves such a mapping out of a fork, and the child reserves the hole: an access to it ends in SIGSEGV instead
# of hitting memory of the child's own, and deleting the parent's objects unmaps nothing but the reservation.

_mappings: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] = weakref.WeakKeyDictionary()


def _keep_from_children(mapping: mmap.mmap) -> None:
    """Exclude a mapping from every fork, for as long as it exists."""
    mapping.madvise(mmap.MADV_DONTFORK)
    _mappings[mapping] = (int(np.frombuffer(mapping, np.uint8).ctypes.data), len(mapping))


def _reserve_holes() -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    for mapping, (address, size) in list(_mappings.items()):
        if not mapping.closed and _libc.mmap(address, size, _PROT_NONE, flags, -1, 0) != address:
            # The child has other memory there: keep the object alive, so that it is never unmapped.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
    _mappings.clear()


os.register_at_fork(after_in_child=_reserve_holes)
