"""On a daemon's path: writes down each module that its process looks for, one a line."""

from __future__ import annotations

import os
import sys
from typing import Final

_FILE: Final = os.open(os.environ["KVFERRY_TEST_IMPORTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


class Written:
    """See ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        """Write a module's name down, and leave it to others to find it."""
        os.write(_FILE, f"{name}\n".encode())


sys.meta_path.insert(0, Written)
