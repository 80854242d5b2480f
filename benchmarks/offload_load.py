"""An engine in a process of its own that offloads and restores without a pause, whenever it is told to."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

from kvferry.clients import Client, MhaSpec, pages

POOL = "load"
PAGE_SIZE = 128
LAYERS = 4
PAGE_BYTES = 128 << 10
TIMEOUT_S = 60.0


class Signals(NamedTuple):
    """What the two processes share."""

    go: Event
    """The load is wanted."""
    moved: Event
    """One offload and one restore ended."""
    resting: Event
    moved_bytes: Synchronized[int]


class OffloadLoad:
    """Switches the load; it is off at first."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    @property
    def moved_bytes(self) -> int:
        """Return how much was offloaded and restored so far."""
        moved_bytes: int = self._signals.moved_bytes.value
        return moved_bytes

    @contextmanager
    def on(self) -> Iterator[None]:
        """Offload and restore meanwhile: under way when this begins, over when it ends.

        Raises:
            AssertionError: the engine has died, or nothing was moved.
        """
        go, moved, resting, _ = self._signals
        moved.clear()
        resting.clear()
        go.set()
        try:
            assert moved.wait(TIMEOUT_S), "no restore ended"
            yield
        finally:
            go.clear()
        assert resting.wait(TIMEOUT_S), "the load does not stop"


@contextmanager
def running_load(runtime_dir: Path, size_bytes: int) -> Iterator[OffloadLoad]:
    """Run the engine; it moves ``size_bytes`` in each direction at a time."""
    context = multiprocessing.get_context("spawn")
    signals = Signals(context.Event(), context.Event(), context.Event(), context.Value("q", 0))
    process = context.Process(target=_run, args=(runtime_dir, size_bytes, signals))
    process.start()
    try:
        assert signals.resting.wait(TIMEOUT_S), "the load's engine does not start"
        yield OffloadLoad(signals)
    finally:
        process.terminate()
        process.join()


def _run(runtime_dir: Path, size_bytes: int, signals: Signals) -> None:
    count = size_bytes // PAGE_BYTES // LAYERS // 2
    spec = MhaSpec(
        layers=LAYERS,
        tokens=(2 * count + 1) * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=1,
        head_dim=PAGE_BYTES // PAGE_SIZE // 4,
        dtype="float32",
    )
    with Client.connect(runtime_dir, name="load") as client:
        client.create_pool(POOL, spec).close()
        ids = client.allocate(POOL, 2 * count)
        while True:
            if not signals.go.is_set():
                signals.resting.set()
                signals.go.wait()
            operation = client.offload(POOL, [pages(ids[::2])])
            client.wait_done(operation, TIMEOUT_S)
            back = client.restore(POOL, operation.snapshot, [pages(ids[1::2])], drop=True)
            client.wait_done(back, TIMEOUT_S)
            signals.moved_bytes.value += 2 * size_bytes
            signals.moved.set()
