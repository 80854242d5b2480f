"""What a flood of unauthenticated clients and other engines costs an engine: its latency meanwhile and without.

Four processes send as fast as the daemon takes it: STATUS without a session, SNAPSHOTS and LOOKUP of long lists with
one, and bytes that are no message. All processes share this machine's cores; the echo of that is in both figures.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path

import numpy as np
import zmq

from benchmarks.measure import MILLISECONDS, Effort, Row, row_of
from benchmarks.processes import running_daemon
from kvferry.clients import Client, MhaSpec, ModelIdentity
from kvferry.protocol.conversation import Conversation
from kvferry.protocol.session_messages import Status
from kvferry.protocol.settings import control_address

POOL = "bench"
HASHES = 4096
IN_FLIGHT = 16
WITHOUT = "the same engine while nobody floods"
SPEC = MhaSpec(layers=1, tokens=1 << 12, page_size=1, kv_heads=1, head_dim=8, dtype="float16")
FLOODS = ("status", "snapshots", "lookup", "junk")


def measure(effort: Effort) -> list[Row]:
    """Measure the 99th percentiles of PING, and of ALLOCATE with FREE, with the floods and without."""
    count = effort.pick(1500, 10)
    actions: dict[str, Callable[[Client], object]] = {
        "ping": Client.ping,
        "allocate": lambda client: client.free(POOL, client.allocate(POOL, 16)),
    }
    loaded: dict[str, list[float]] = {name: [] for name in actions}
    alone: dict[str, list[float]] = {name: [] for name in actions}
    with running_daemon() as runtime_dir, Client.connect(runtime_dir, name="engine") as client:
        client.create_pool(POOL, SPEC, model=ModelIdentity(name="bench")).close()
        with flooding(runtime_dir) as go:
            for _ in range(effort.pick(7, 1)):
                for figures in (alone, loaded):
                    (go.set if figures is loaded else go.clear)()
                    _times(client.ping, count // 10)  # until the floods have begun, or are over
                    for name, action in actions.items():
                        figures[name].append(_percentile_ms(_times(partial(action, client), count)))
            go.clear()
    return [
        row_of(f"flood/{name}/p99", MILLISECONDS, loaded[name], alone[name], peer_is=WITHOUT, note=", ".join(FLOODS))
        for name in actions
    ]


def _times(action: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return times


def _percentile_ms(times_s: Sequence[float]) -> float:
    return float(np.percentile(times_s, 99)) * 1e3


@contextlib.contextmanager
def flooding(runtime_dir: Path) -> Iterator[Event]:
    """Run the floods; they rest until the event is set."""
    context = multiprocessing.get_context("spawn")
    go, ready = context.Event(), context.Semaphore(0)
    processes = [context.Process(target=_flood, args=(runtime_dir, kind, go, ready), daemon=True) for kind in FLOODS]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            assert ready.acquire(timeout=60), "a flood does not start"
        yield go
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _flood(runtime_dir: Path, kind: str, go: Event, ready: Semaphore) -> None:
    with Client.connect(runtime_dir, name=kind) as client, zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.connect(control_address(runtime_dir))
        conversation = Conversation(client.boot_id)  # without a secret, so unauthenticated
        ready.release()
        hashes = os.urandom(16 * HASHES)
        while go.wait():
            if kind == "snapshots":
                client.snapshots()
            elif kind == "lookup":
                client.lookup(POOL, [hashes[at : at + 16] for at in range(0, len(hashes), 16)])
            elif kind == "status":
                for _ in range(IN_FLIGHT):
                    raw.send_multipart(conversation.request(Status(), (), deadline_ms=30_000)[1])
                for _ in range(IN_FLIGHT):
                    raw.recv_multipart()
            else:
                for _ in range(IN_FLIGHT):
                    raw.send(b"\xc1" * 1000)
                for _ in range(IN_FLIGHT):
                    raw.recv_multipart()
