"""``python -m tests.torture.sabotage KIND …``: a daemon with a fault of its own, which a run must find.

``flip``: flips a byte of what it copies, now and then. ``late``: writes into a page a moment after its copy was done.
``leak``: keeps a page that a SEND has read. ``swallow``: loses an event.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from typing import Final
from unittest import mock

from kvferry.daemon import daemon
from kvferry.daemon.control.sessions import Session
from kvferry.daemon.process.signals import hold_back
from kvferry.daemon.transports.local import best_copy
from kvferry.pools.allocator import PageAllocator
from kvferry.pools.planning.plan import Blocks

EVERY: Final = 20
LATE_S: Final = 0.1
KINDS: Final = ("flip", "late", "leak", "swallow")


def sabotage(kind: str) -> None:
    turns = itertools.count(1)

    def due() -> bool:
        return next(turns) % EVERY == 0

    copy = best_copy()

    def spoil(address: int) -> None:
        ctypes.memset(address, 0x55, 1)

    def copy_badly(blocks: Blocks) -> None:
        copy(blocks)
        if due():
            address = int(blocks[0, 1])
            if kind == "flip":
                spoil(address)
            else:
                threading.Timer(LATE_S, spoil, [address]).start()

    end_read, add_event = PageAllocator.end_read, Session.add_event
    if kind in {"flip", "late"}:
        mock.patch("kvferry.daemon.transports.local.best_copy", return_value=copy_badly).start()
    elif kind == "leak":
        mock.patch.object(PageAllocator, "end_read", lambda self, ids: None if due() else end_read(self, ids)).start()
    elif kind == "swallow":
        mock.patch.object(Session, "add_event", lambda self, *one: None if due() else add_event(self, *one)).start()
    else:
        raise SystemExit(f"no sabotage {kind!r}; there are {', '.join(KINDS)}")


if __name__ == "__main__":
    hold_back()
    sabotage(sys.argv[1])
    sys.exit(daemon.main(sys.argv[2:]))
