"""How this process's allocator keeps freed memory."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT_BYTES = 32 << 20  # glibc's maximum
_KEEP_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Make glibc keep freed arrays for the next plan instead of returning each to the kernel.

    Planning makes and drops arrays of megabytes; faulting in their pages anew each time costs several times the
    planning itself. Return False where the C library has no mallopt; then plans are merely slower.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))
