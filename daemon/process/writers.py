"""Which processes may write into memory that outlives the daemon: a helper may end later than the daemon that made it.

A helper is given a descriptor of its own, with a lock on a byte whose number is this daemon's: the kernel takes the
lock away when the helper has neither the descriptor nor a mapping of it any more.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from typing import Final

_MINE: Final = secrets.randbelow(1 << 62) + 1
_FLOCK: Final = struct.Struct("@hhqqi")  # type, whence, start, length (0: to the end), process


def opened_for_helper(fd: int) -> int:
    """Return a new descriptor of a memfd, to be passed to a helper, which is known by it; the caller closes it.

    Raises:
        OSError: it cannot be opened or locked.
    """
    found = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(found, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _MINE, 1, 0))
    except OSError:
        os.close(found)
        raise
    return found


def has_foreign_helpers(fd: int) -> bool:
    """Return whether helpers of other daemons may still write into a memfd.

    Raises:
        OSError: it cannot be opened.
    """
    found = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _is_locked(found, 0, _MINE) or _is_locked(found, _MINE + 1, 0)
    finally:
        os.close(found)


def _is_locked(fd: int, start: int, length: int) -> bool:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    return bool(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)
