"""Copying blocks between addresses of this process, many per call, with the GIL released.

Small blocks are copied by ``process_vm_readv`` on this process, up to 1024 per call: no Python object or call per
block. Larger blocks use one memmove each, because the kernel pins every 4 KiB page that ``process_vm_readv`` copies,
which costs more than the calls. Where a sandbox forbids ``process_vm_readv``, memmove copies everything. Callers have
checked every address.
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
"""Blocks per system call (IOV_MAX)."""

SMALL_BLOCK_BYTES: Final = 8 << 10
"""Below this mean size, ``process_vm_readv`` is faster than one memmove per block."""

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
    """Copies blocks at absolute addresses, in order; source and destination blocks must not overlap."""

    def __call__(self, blocks: Blocks) -> None:
        """Copy ``(n, 3)`` blocks; n may be 0.

        Raises:
            TransferFailedError: an address is not mapped; earlier blocks may have been copied.
        """


def copy_vectored(blocks: Blocks) -> None:
    """Copy with ``process_vm_readv``; see ``CopyBlocks``."""
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
    """Copy with one memmove per block; see ``CopyBlocks``. An unmapped address crashes the process."""
    for source, destination, size in blocks.tolist():
        ctypes.memmove(destination, source, size)


def copy_by_size(blocks: Blocks) -> None:
    """Choose between ``copy_vectored`` and ``copy_one_by_one`` by the mean block size; see ``CopyBlocks``."""
    if int(blocks[:, 2].sum()) < SMALL_BLOCK_BYTES * len(blocks):
        copy_vectored(blocks)
    else:
        copy_one_by_one(blocks)


def vectored_copy_works() -> bool:
    """Return whether ``copy_vectored`` works in this process: some container sandboxes forbid ``process_vm_readv``."""
    source, destination = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    blocks = np.array([[source.ctypes.data, destination.ctypes.data, 64]], np.uint64)
    try:
        copy_vectored(blocks)
    except TransferFailedError:
        return False
    return bool((source == destination).all())


def split_blocks(blocks: Blocks, max_bytes: int) -> Blocks:
    """Return the same copies, in order, as blocks of at most ``max_bytes``."""
    parts = (blocks[:, 2] + np.uint64(max_bytes - 1)) // np.uint64(max_bytes)
    if len(parts) == int(parts.sum()):
        return blocks
    split = np.repeat(blocks, parts.astype(np.int64), axis=0)
    first_part = np.repeat(np.cumsum(parts) - parts, parts.astype(np.int64))
    offset = (np.arange(len(split), dtype=np.uint64) - first_part) * np.uint64(max_bytes)
    split[:, 0] += offset
    split[:, 1] += offset
    split[:, 2] = np.minimum(split[:, 2] - offset, np.uint64(max_bytes))
    return split


def chunk_bounds(blocks: Blocks, chunk_bytes: int) -> npt.NDArray[np.int64]:
    """Return the block indices at which to cut into chunks of about ``chunk_bytes``: ascending, with 0 and n.

    A chunk holds at least one block and exceeds ``chunk_bytes`` by less than one block.
    """
    before = np.cumsum(blocks[:, 2]) - blocks[:, 2]
    number = before // np.uint64(chunk_bytes)
    starts = np.flatnonzero(number[1:] != number[:-1]) + 1
    return np.concatenate(([0], starts, [len(blocks)])).astype(np.int64)


def _vectors(addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return an array of C ``struct iovec``: ``(n, 2)`` uint64."""
    return np.ascontiguousarray(np.stack((addresses, sizes), axis=1))
