"""Every benchmark by its name, and running one in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

from benchmarks import (
    admission,
    allocation,
    cache_replay,
    coalescing,
    command_line,
    contention,
    control_messages,
    device_overlap,
    engine_death,
    engine_step,
    eviction,
    flood,
    growth,
    huge_pages,
    local_transfer,
    network,
    npu_tables,
    npu_transfer,
    offload,
    overhead,
    overlap,
    page_ids,
    planning,
    prefix_cache,
    robustness,
    sglang,
    tables,
    trace_replay,
    transfer,
    unequal_tp,
    vllm,
    warm_restart,
)
from benchmarks.measure import Effort, Row

TRACE = "trace"
"""The benchmark that needs a file."""

BY_NAME_ONLY = ("sglang", "vllm", "robustness")
"""What takes ten minutes or more, and environments of 2 GB, each."""

VARIABLES: dict[str, dict[str, str]] = {"offload": {"GOMP_SPINCOUNT": "10000"}}
"""Of a benchmark's process, unless they are set. torch's threads spin for milliseconds after a call, on the cores that
ours copies with next, and look at this when torch is imported."""

BENCHMARKS: dict[str, Callable[[Effort], list[Row]]] = {
    "command_line": command_line.measure,
    "round_trip": control_messages.round_trip,
    "pipelined": control_messages.pipelined,
    "engine_step": engine_step.measure,
    "page_ids": page_ids.measure,
    "coalesce": coalescing.measure,
    "plan": planning.measure,
    "local_transfer": local_transfer.measure,
    "huge_pages": huge_pages.measure,
    "unequal_tp": unequal_tp.measure,
    "transfer": transfer.measure,
    "network": network.measure,
    "overlap": overlap.measure,
    "offload": offload.measure,
    "overhead": overhead.measure,
    "prefix_cache": prefix_cache.measure,
    "allocation": allocation.measure,
    "tables": tables.measure,
    "flood": flood.measure,
    "growth": growth.measure,
    "engine_death": engine_death.measure,
    "warm_restart": warm_restart.measure,
    "device_overlap": device_overlap.measure,
    "npu_tables": npu_tables.measure,
    "npu_transfer": npu_transfer.measure,
    "robustness": robustness.measure,
    "sglang": sglang.measure,
    "vllm": vllm.measure,
}


def run_apart(name: str, effort: Effort, trace: Path | None, output: Path) -> list[Row]:
    """Run a benchmark in a fresh process, so that none finds the memory or the threads of another.

    ``output`` is the folder for what it leaves besides its rows.
    """
    variables = {**VARIABLES.get(name, {}), **os.environ}
    with (
        mock.patch.dict(os.environ, variables),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor,
    ):
        return executor.submit(run_here, name, effort, trace, output).result()


def run_here(name: str, effort: Effort, trace: Path | None, output: Path) -> list[Row]:
    """Run a benchmark in this process: enough to see that it works."""
    if trace is not None and name == TRACE:
        return [
            *eviction.measure(trace, effort, output),
            *admission.measure(trace, effort),
            *cache_replay.measure(trace, effort),
            *trace_replay.measure(trace, effort),
            *contention.measure(trace, effort),
        ]
    return BENCHMARKS[name](effort)
