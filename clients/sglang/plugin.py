"""What SGLang calls in each of its processes, before it reads its arguments."""

from __future__ import annotations


def register() -> None:
    """Let SGLang know kvferry."""
