"""Mappings that are not inherited by forked children.

A child that kept its parent's mapping of a pool could write to pages that belong to somebody else by then. So the
kernel leaves such a mapping out of a fork, and the child reserves the hole: an access to it ends in SIGSEGV instead of
hitting memory of the child's own, and deleting the parent's objects unmaps nothing but the reservation.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Final

import numpy as np

_MAP_FIXED_NOREPLACE: Final = 0x100000
_MAP_NORESERVE: Final = 0x4000
_PROT_NONE: Final = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
_libc.mmap.restype = ctypes.c_void_p

_mappings: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] = weakref.WeakKeyDictionary()


def keep_from_children(mapping: mmap.mmap) -> None:
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
