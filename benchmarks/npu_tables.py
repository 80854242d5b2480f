"""A decode step's block tables on an NPU: the time of SGLang's scheduler thread, the daemon's way and SGLang's own.

Pages of 128 tokens, each row a token longer a step, from evenly spread lengths on: with 8 rows a step in 16 gives a row
a page, with 64 every other one. SGLang's own way is its AscendAttnBackend's: for each step it gathers the map of tokens
on the device into the tables. The adapter's says what has changed, if anything, and waits for the daemon's answer
before the replay. Both only start work on the device, and both end with equal tables. On the simulator the calls are
torch_npu's own.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.measure import MICROSECONDS, Effort, Row, compare
from benchmarks.on_device import Device, measured_on_device
from benchmarks.processes import running_daemon
from kvferry.clients import MhaSpec, ModelIdentity
from kvferry.clients.engine import Engine
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang.graphs import DecodeTables

ROWS = (8, 64)
PAGE_SIZE = 128
CONTEXT_TOKENS = 4096
COLUMNS = CONTEXT_TOKENS // PAGE_SIZE
SGLANG = "SGLang 0.5.23's: block_tables[:bs, :n].copy_(req_to_token[rows, : n * ps : ps] // ps), two fill_, one copy_"


def measure(effort: Effort) -> list[Row]:
    """Measure both ways, where there is a device or its simulator.

    Raises:
        MissingPeerError: there is neither.
    """
    return measured_on_device("npu_tables", effort, kernel_us=0)


def measure_on(device: Device, effort: Effort) -> list[Row]:
    """Measure a run of steps."""
    return [_row(device, effort, rows) for rows in ROWS]


def _row(device: Device, effort: Effort, rows: int) -> Row:
    spec = MhaSpec(
        layers=1, tokens=rows * COLUMNS * PAGE_SIZE, page_size=PAGE_SIZE, kv_heads=1, head_dim=16, dtype="float16"
    )
    with running_daemon() as runtime_dir:
        engine = Engine("bench", str(runtime_dir))
        pool = EnginePool(engine, "bench", spec, ModelIdentity(name="bench"), "daemon", device=device.name)
        pool.compute_stream = torch.accelerator.current_stream()  # as SGLang's overlap scheduler has one
        steps = Steps(device.name, rows, effort.pick(2 * PAGE_SIZE, 4))
        tables = DecodeTables(pool, rows, CONTEXT_TOKENS, steps.map.shape[1])
        try:
            row = compare(
                f"npu_tables/{rows}_rows",
                MICROSECONDS,
                ours=lambda: steps.ours_us(tables),
                peer=steps.sglang_us,
                peer_is=SGLANG,
                rounds=effort.pick(9, 1),
                note=f"processor time of the thread, mean of a step; {device.note}",
            )
            assert torch.equal(tables.tensor[:, :COLUMNS].cpu(), steps.tables.cpu()), "the tables differ"
        finally:
            engine.close()
    return row


class Steps:
    """The steps of a batch, and SGLang's own tables: each run begins where the one before began."""

    def __init__(self, device: str, rows: int, count: int) -> None:
        self._count = rows
        pages = 1 + np.random.default_rng(0).permutation(rows * COLUMNS).reshape(rows, COLUMNS)
        first = CONTEXT_TOKENS - count - np.arange(rows) * (PAGE_SIZE // rows)
        self._lengths = [torch.from_numpy(first + step) for step in range(1, count + 1)]
        self._on_device = [one.to(device) for one in self._lengths]
        slots = pages[:, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
        self.map = torch.from_numpy(slots.reshape(rows, -1).astype(np.int32)).to(device)
        self.tables = torch.zeros((rows, COLUMNS), dtype=torch.int32, device=device)
        self._replayed = torch.zeros(rows, dtype=torch.int64, device=device)
        self._rows = torch.arange(rows, device=device)
        begun = [np.flatnonzero(one.numpy() % PAGE_SIZE == 1) for one in self._lengths]
        new = [pages[begin, one.numpy()[begin] // PAGE_SIZE] for begin, one in zip(begun, self._lengths, strict=True)]
        self._ends = np.cumsum([len(one) for one in new]).tolist()
        self._free = torch.from_numpy(np.concatenate([*new, [0]])).to(device)

    def ours_us(self, tables: DecodeTables) -> float:
        """Return what a step takes the daemon's way; requests are new at the first one, which does not count."""
        requests, times = [object() for _ in range(self._count)], []
        for end, lengths, on_device in zip(self._ends, self._lengths, self._on_device, strict=True):
            batch = SimpleNamespace(
                reqs=requests,
                seq_lens_cpu=lengths,
                req_pool_indices=self._rows,
                req_to_token_pool=SimpleNamespace(req_to_token=self.map),
                token_to_kv_pool_allocator=SimpleNamespace(free_pages=self._free[end:]),
                spec_algorithm=SimpleNamespace(is_none=lambda: True),
                device=self.map.device,
            )
            torch.accelerator.synchronize()
            started = time.thread_time()
            tables.prepare(batch)
            shown = tables.shown("decode")
            self._replayed.copy_(on_device)
            times.append(time.thread_time() - started)
            assert shown
        torch.accelerator.synchronize()
        return statistics.fmean(times[1:]) * 1e6

    def sglang_us(self) -> float:
        """Return what it takes SGLang's way."""
        times = []
        for lengths, on_device in zip(self._lengths, self._on_device, strict=True):
            torch.accelerator.synchronize()
            started = time.thread_time()
            longest = int(lengths.int().max())
            used = -(-longest // PAGE_SIZE)
            self.tables[: self._count, :used].copy_(self.map[self._rows, 0:longest:PAGE_SIZE] // PAGE_SIZE)
            self.tables[: self._count, used:].fill_(0)
            self.tables[self._count :, :].fill_(0)
            self._replayed.copy_(on_device)
            times.append(time.thread_time() - started)
        torch.accelerator.synchronize()
        return statistics.fmean(times[1:]) * 1e6
