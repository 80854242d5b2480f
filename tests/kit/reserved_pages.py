"""Reserved huge pages of a host that has none: memfds of normal pages that look as if they consisted of them."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any, Final

import pytest

PAGE_BYTES: Final = 2 << 20


class ReservedPages:
    """The border to the kernel, for as long as ``monkeypatch`` lasts.

    Attributes:
        free: how many there are; a memfd that is larger cannot be mapped. Never fewer by those in use.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free = free
        self._identities: set[int] = set()
        self._memfd_create, self._fstatvfs, self._ftruncate = os.memfd_create, os.fstatvfs, os.ftruncate
        monkeypatch.setattr(os, "memfd_create", self._create)
        monkeypatch.setattr(os, "fstatvfs", self._stat)
        monkeypatch.setattr(os, "ftruncate", self._truncate)

    @property
    def meminfo(self) -> str:
        """Return the lines of /proc/meminfo about them."""
        return f"HugePages_Total: {self.free}\nHugePages_Free: {self.free}\nHugepagesize: {PAGE_BYTES >> 10} kB\n"

    def _create(self, name: str, flags: int = os.MFD_CLOEXEC) -> int:
        fd = self._memfd_create(name, flags & ~os.MFD_HUGETLB)
        if flags & os.MFD_HUGETLB:
            self._identities.add(os.fstat(fd).st_ino)
        return fd

    def _stat(self, fd: int) -> Any:  # noqa: ANN401  what looks like os.statvfs_result
        if os.fstat(fd).st_ino in self._identities:
            return SimpleNamespace(f_bsize=PAGE_BYTES)
        return self._fstatvfs(fd)

    def _truncate(self, fd: int, size_bytes: int) -> None:
        if os.fstat(fd).st_ino in self._identities:
            if size_bytes % PAGE_BYTES:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if size_bytes > self.free * PAGE_BYTES:  # of real ones the mapping fails, with the same error
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self._ftruncate(fd, size_bytes)
