"""Copying blocks between addresses of this process, many at a time, with the GIL released.

Small blocks go by one ``process_vm_readv`` on ourselves for up to 1024 of them: no Python object and no call a block.
Larger ones go by memmove, one call each: the kernel pins every 4 KiB that it copies, which costs more than the calls.
Where a sandbox forbids the former, memmove does it all. Knows nothing of pools; the caller has checked every address.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.pools.planning.plan import Blocks
from kvferry.protocol.errors import TransferFailedError

MAX_VECTOR: Final = 1024
"""Blocks of one system call (IOV_MAX)."""

SMALL_BLOCK_BYTES: Final = 8 << 10
"""Below this, a block costs less within a ``process_vm_readv`` than by a memmove of its own."""

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class CopyBlocks(Protocol):
    """Copies blocks of absolute addresses, in order; source and destination blocks may not overlap."""

    def __call__(self, blocks: Blocks) -> None:
        """Copy ``(n, 3)`` blocks; n may be 0.

        Raises:
            TransferFailedError: an address is not mapped; blocks before it have been copied.
        """


def copy_vectored(blocks: Blocks) -> None:
    """Copy by ``process_vm_readv``; see ``CopyBlocks``."""
    local, remote = _vectors(blocks[:, 1], blocks[:, 2]), _vectors(blocks[:, 0], blocks[:, 2])
    pid = os.getpid()
    for start in range(0, len(blocks), MAX_VECTOR):
        count = min(MAX_VECTOR, len(blocks) - start)
        expected = int(blocks[start : start + count, 2].sum())
        offset = start * local.itemsize * 2
        copied = _readv(pid, local.ctypes.data + offset, count, remote.ctypes.data + offset, count, 0)
        if copied != expected:
            reason = os.strerror(ctypes.get_errno()) if copied < 0 else f"{copied} of {expected} bytes"
            raise TransferFailedError(f"copying {count} blocks: {reason}")


def copy_one_by_one(blocks: Blocks) -> None:
    """Copy by memmove; see ``CopyBlocks``. An address that is not mapped is a crash."""
    for source, destination, size in blocks.tolist():
        ctypes.memmove(destination, source, size)


def copy_by_size(blocks: Blocks) -> None:
    """Copy small blocks vectored and larger ones one by one; see ``CopyBlocks``. The mean size decides."""
    if int(blocks[:, 2].sum()) < SMALL_BLOCK_BYTES * len(blocks):
        copy_vectored(blocks)
    else:
        copy_one_by_one(blocks)


def vectored_copy_works() -> bool:
    """Return whether this process may use ``copy_vectored``: some container sandboxes forbid the call."""
    source, destination = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    blocks = np.array([[source.ctypes.data, destination.ctypes.data, 64]], np.uint64)
    try:
        copy_vectored(blocks)
    except TransferFailedError:
        return False
    return bool((source == destination).all())


def split_blocks(blocks: Blocks, max_bytes: int) -> Blocks:
    """Return the same copies with no block above ``max_bytes``, in order."""
    pieces = (blocks[:, 2] + np.uint64(max_bytes - 1)) // np.uint64(max_bytes)
    if len(pieces) == int(pieces.sum()):
        return blocks
    split = np.repeat(blocks, pieces.astype(np.int64), axis=0)
    first_piece = np.repeat(np.cumsum(pieces) - pieces, pieces.astype(np.int64))
    offset = (np.arange(len(split), dtype=np.uint64) - first_piece) * np.uint64(max_bytes)
    split[:, 0] += offset
    split[:, 1] += offset
    split[:, 2] = np.minimum(split[:, 2] - offset, np.uint64(max_bytes))
    return split


def chunk_bounds(blocks: Blocks, chunk_bytes: int) -> npt.NDArray[np.int64]:
    """Return where to cut a list of blocks so that a chunk has about ``chunk_bytes``: ascending, 0 and n included.

    A chunk holds at least one block and exceeds ``chunk_bytes`` by less than one block.
    """
    before = np.cumsum(blocks[:, 2]) - blocks[:, 2]
    number = before // np.uint64(chunk_bytes)
    starts = np.flatnonzero(number[1:] != number[:-1]) + 1
    return np.concatenate(([0], starts, [len(blocks)])).astype(np.int64)


def _vectors(addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return an array of C ``struct iovec``: ``(n, 2)`` uint64."""
    return np.ascontiguousarray(np.stack((addresses, sizes), axis=1))
