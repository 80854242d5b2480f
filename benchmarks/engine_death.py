"""How soon a killed engine's pages are free again, while the daemon is busy with others.

The time runs from the end of the process, as its pidfd shows it, to the moment at which another engine has been given
all of its pages. Meanwhile an engine hands pages over without a pause, and another one makes and deletes large pools.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, row_of
from benchmarks.pools import MIB
from benchmarks.processes import running_daemon
from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.protocol.errors import PoolFullError

SPEC = MhaSpec(layers=4, tokens=4096, page_size=16, kv_heads=8, head_dim=128, dtype="float16")
POOL = "killed"
PAGES = 256
LARGE = 512 * MIB
PATIENCE_S = 60.0
PEER = "PING of another engine under the same load, the same percentile"


def measure(effort: Effort) -> list[Row]:
    """Measure the median, the 99th percentile and the worst of many kills."""
    kills = effort.pick(1000, 2)
    large_bytes = LARGE if not effort.quick else LARGE // 32
    with (
        running_daemon("[tiers]\nhost_bytes = 0\n") as runtime_dir,
        Client.connect(runtime_dir, name="observer") as observer,
        background(_transfers, runtime_dir),
        background(_large_pools, runtime_dir, large_bytes),
        killed_engines(runtime_dir) as start_one,
    ):
        observer.create_pool(POOL, SPEC)
        times_ms, pings_ms = [], []
        for _ in range(kills):
            times_ms.append(_kill(observer, start_one) * 1e3)
            pings_ms.append(observer.ping() * 1e3)
    return [
        row_of(
            f"engine_death/{name}",
            MILLISECONDS,
            [float(np.percentile(times_ms, percent))],
            [float(np.percentile(pings_ms, percent))],
            peer_is=PEER,
            target=Target(100, "ours"),
            note=f"{kills} engines with {PAGES} pages killed by SIGKILL, one after another",
        )
        for name, percent in (("median", 50), ("p99", 99), ("worst", 100))
    ]


def _kill(observer: Client, start_one: Connection) -> float:
    """Kill an engine that has all pages; return after how many seconds another one has them."""
    start_one.send(None)
    assert start_one.poll(PATIENCE_S), "no engine came up"
    pid = start_one.recv()
    pidfd = os.pidfd_open(pid)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    os.kill(pid, signal.SIGKILL)
    assert ended.poll(PATIENCE_S * 1e3)
    ended_at = time.perf_counter()
    os.close(pidfd)
    while True:
        try:
            ids = observer.allocate(POOL, PAGES)
        except PoolFullError:
            assert time.perf_counter() - ended_at < PATIENCE_S, "the pages never came back"
        else:
            took_s = time.perf_counter() - ended_at
            observer.free(POOL, ids)
            return took_s


@contextlib.contextmanager
def killed_engines(runtime_dir: Path) -> Iterator[Connection]:
    """Run a process that forks an engine at each message and answers with its process id once it has all pages."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_fork_engines, args=(runtime_dir, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(PATIENCE_S)
        process.kill()


def _fork_engines(runtime_dir: Path, asked: Connection) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with contextlib.suppress(EOFError):
        while True:
            asked.recv()
            if os.fork() == 0:
                client = Client.connect(runtime_dir, name="to be killed")
                pool = client.attach_pool(POOL)
                ids = client.allocate(POOL, PAGES)
                pool.array("main", "k")[:, ids] = 1
                asked.send(os.getpid())
                signal.pause()


# -- the load


@contextlib.contextmanager
def background(run: object, *arguments: object) -> Iterator[None]:
    """Run a load in a process of its own; it is under way when this begins."""
    context = multiprocessing.get_context("spawn")
    begun, ends = context.Event(), context.Event()
    process = context.Process(target=run, args=(begun, ends, *arguments), daemon=True)  # type: ignore[arg-type]
    process.start()
    assert begun.wait(PATIENCE_S)
    try:
        yield
    finally:
        ends.set()
        process.join(PATIENCE_S)
        process.kill()


def _transfers(begun: Event, ends: Event, runtime_dir: Path) -> None:
    with Client.connect(runtime_dir, name="busy") as client:
        client.create_pool("from", SPEC)
        client.create_pool("to", SPEC)
        source, target = client.allocate("from", 64), client.allocate("to", 64)
        while not ends.is_set():
            request_id = new_request_id()
            received = client.receive("to", request_id, [pages(target)])
            client.send("from", request_id, [pages(source)])
            client.wait_settled(received)
            begun.set()


def _large_pools(begun: Event, ends: Event, runtime_dir: Path, size_bytes: int) -> None:
    page_bytes = 2 * SPEC.layers * SPEC.page_size * SPEC.kv_heads * SPEC.head_dim * 2
    large = MhaSpec(
        layers=SPEC.layers,
        tokens=size_bytes // page_bytes * SPEC.page_size,
        page_size=SPEC.page_size,
        kv_heads=SPEC.kv_heads,
        head_dim=SPEC.head_dim,
        dtype=SPEC.dtype,
    )
    with Client.connect(runtime_dir, name="large") as client:
        while not ends.is_set():
            client.create_pool("large", large, deadline_s=PATIENCE_S).close()
            begun.set()
            client.delete_pool("large")
