"""A transport that does nothing by itself: a test decides when and how each transfer op ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvferry.daemon.transfer.registry import StartOp
from kvferry.daemon.transports.local import OnOpDone
from kvferry.pools.planning.copies import copy_one_by_one, total_segments
from kvferry.protocol.errors import KvferryError


class ScriptedTransport:
    """See ``Transport``. A transfer op is under way from ``start`` to ``end``; its bytes move at ``copy``."""

    def __init__(self) -> None:
        self.under_way: dict[int, StartOp] = {}  # the transfer ops started and not ended, by id, oldest first
        self.stopped: set[int] = set()  # the ids of those that are to stop
        self._on_done: dict[int, OnOpDone] = {}

    def __repr__(self) -> str:
        return f"<ScriptedTransport under_way={list(self.under_way)} stopped={sorted(self.stopped)}>"

    def start(self, op: StartOp, on_done: OnOpDone, reported: Callable[[], None] | None = None) -> None:  # noqa: ARG002
        assert op.op_id not in self.under_way, "a transfer op that is under way"
        self.under_way[op.op_id] = op
        self._on_done[op.op_id] = on_done

    def stop(self, op_id: int) -> bool:
        if op_id in self.under_way:
            self.stopped.add(op_id)
        return op_id in self.under_way

    def close(self) -> None:
        self.under_way.clear()
        self.stopped.clear()

    def copy(self, op_id: int) -> None:
        """Move the transfer op's bytes, without a word: it stays under way."""
        op = self.under_way[op_id]
        for plan in op.plans:
            staging = np.empty(plan.total_bytes, np.uint8)
            stop, at = total_segments(plan.source), staging.ctypes.data
            op.source.region.gather(plan.source, 0, stop, at, copy_one_by_one)
            op.destination.region.scatter(plan.destination, 0, stop, at, copy_one_by_one)

    def end(self, op_id: int, error: KvferryError | None = None) -> None:
        """Report the transfer op's end: no byte of it moves any more."""
        del self.under_way[op_id]
        self.stopped.discard(op_id)
        self._on_done.pop(op_id)(op_id, error)

    def finish(self, op_id: int) -> None:
        self.copy(op_id)
        self.end(op_id)

    def finish_all(self) -> None:
        while self.under_way:
            self.finish(next(iter(self.under_way)))
