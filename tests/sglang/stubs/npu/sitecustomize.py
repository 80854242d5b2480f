"""What must be there before the first import of SGLang, in each process that has this folder on its PYTHONPATH."""

from __future__ import annotations

import importlib.abc
import sys


class _BeforeSglang(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        """Set this process up when it imports SGLang, and not before: kvferry's commands need no torch_npu."""
        if name == "sglang":
            sys.meta_path.remove(self)
            import without_cann  # noqa: F401, PLC0415


sys.meta_path.insert(0, _BeforeSglang())
