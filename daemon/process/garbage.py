"""Garbage collections that take no longer however much the daemon keeps.

A full collection looks at every container there is, while the control loop stands still: a second for some millions of
them. Hardly anything of the daemon's is garbage that only a collection finds, as things that have ended let go of each
other. So what has outlived one full collection is not looked at by the next, nor what was imported by any.
"""

from __future__ import annotations

import gc
from typing import Any, Final

FULL: Final = 2
"""The generation of a full collection."""

THRESHOLDS: Final = (700, 10, 2)
"""A full collection comes after some 25,000 more containers, so it takes a few milliseconds."""


def collect_new_only() -> None:
    """From now on, collect, but look only at what is new: since now, and since the last full collection."""
    gc.set_threshold(*THRESHOLDS)
    if _keep not in gc.callbacks:
        gc.callbacks.append(_keep)
    gc.freeze()
    gc.enable()


def _keep(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == FULL:
        gc.freeze()
