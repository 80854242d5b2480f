"""What can go wrong with the disk tier, below the daemon. None of these travels: to an engine they are a miss.

A damaged or missing block is computed again; a disk that is full or fails is left alone for a while by who calls.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space, a quota, or a limit on a file's size: removing blocks may help."""


class DiskError(Exception):
    """The base. The text names the file and the cause, never bytes of it."""


class MissingBlockError(DiskError):
    """No file of that block."""


class DamagedBlockError(DiskError):
    """The file is not what was written under that name. It is gone now, and counted."""


class DiskFullError(DiskError):
    """No space left, a quota reached, or a file larger than this process may write."""


class DiskFailedError(DiskError):
    """The operating system refused: an input/output error, a file system that became read-only, no more open files."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors into the ones above.

    Raises:
        DiskFullError: there is no space.
        DiskFailedError: anything else.
    """
    try:
        yield
    except OSError as cause:
        kind = DiskFullError if cause.errno in FULL else DiskFailedError
        raise kind(f"{path}: {cause.strerror}") from cause
