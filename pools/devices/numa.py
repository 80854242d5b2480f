"""The NUMA node that memory is taken from, by the system call: the C library has no function for it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from typing import Final

MBIND: Final = {"x86_64": 237, "aarch64": 235}
"""The number of mbind(2), by machine."""

_PREFERRED: Final = 1
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def prefer_node(address: int, size_bytes: int, node: int) -> None:
    """Let memory come from a node, and from others where that one has none left; what is there already stays.

    Of shared memory this is a property of the memory, not of the mapping: it holds for whoever touches it first.

    Args:
        address: where the mapping begins, a multiple of the page size.
        size_bytes: of the mapping.
        node: its number.

    Raises:
        OSError: the kernel has no NUMA, no such node, or does not let this process choose.
    """
    number = MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    words[node // _WORD_BITS] = 1 << node % _WORD_BITS
    bits = len(words) * _WORD_BITS + 1  # the kernel looks at one less
    if _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_long(_PREFERRED),
        words,
        ctypes.c_ulong(bits),
        ctypes.c_ulong(0),
    ):
        reason = ctypes.get_errno()
        raise OSError(reason, os.strerror(reason))
