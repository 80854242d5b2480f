"""Every benchmark by its name, and running one in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks import (
    allocation,
    coalescing,
    control_messages,
    device_overlap,
    hand_off,
    landing,
    local_transfer,
    npu_handoff,
    overlap,
    page_ids,
    planning,
    tables,
    trace_replay,
    unequal_tp,
)
from benchmarks.measure import Effort, Row

TRACE = "trace"
"""The benchmark that needs a file."""

BENCHMARKS: dict[str, Callable[[Effort], list[Row]]] = {
    "round_trip": control_messages.round_trip,
    "pipelined": control_messages.pipelined,
    "page_ids": page_ids.measure,
    "coalesce": coalescing.measure,
    "plan": planning.measure,
    "local_transfer": local_transfer.measure,
    "unequal_tp": unequal_tp.measure,
    "hand_off": hand_off.measure,
    "landing": landing.measure,
    "overlap": overlap.measure,
    "allocation": allocation.measure,
    "tables": tables.measure,
    "device_overlap": device_overlap.measure,
    "npu_handoff": npu_handoff.measure,
}


def run_apart(name: str, effort: Effort, trace: Path | None) -> list[Row]:
    """Run a benchmark in a fresh process, so that none finds the memory or the threads of another."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(_run, name, effort, trace).result()


def _run(name: str, effort: Effort, trace: Path | None) -> list[Row]:
    if trace is not None and name == TRACE:
        return trace_replay.measure(trace, effort)
    return BENCHMARKS[name](effort)
