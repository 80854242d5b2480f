"""Where no more threads may be had: those of the daemon are there already, and what lacks one is refused by name."""

from __future__ import annotations

import threading

import pytest

from kvferry.daemon.process.threads import started_threads
from kvferry.protocol.errors import OutOfMemoryError

PATIENCE_S = 20.0


def no_more(_thread: threading.Thread) -> None:
    """Raise what Python raises where ``pthread_create`` fails."""
    raise RuntimeError("can't start new thread")


def test_all_threads_run_before_the_first_task(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = started_threads(3, "early")
    monkeypatch.setattr(threading.Thread, "start", no_more)
    together = threading.Barrier(3)
    assert {one.result(PATIENCE_S) for one in [executor.submit(together.wait) for _ in range(3)]} == {0, 1, 2}
    executor.shutdown()


def test_a_thread_that_is_refused_has_a_name_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(OutOfMemoryError, match="no thread for early") as refused:
        started_threads(1, "early")
    assert "TasksMax" in refused.value.remedy
