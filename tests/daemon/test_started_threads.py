"""Where no more threads may be had: those of the daemon are there already, and what lacks one is refused by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from kvferry.daemon.process.threads import on_thread, started_threads
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


# -- a call that a coroutine waits for


class Calls(NamedTuple):
    """One thread, the calls that were made on it, and the results that were given back."""

    executor: ThreadPoolExecutor
    begun: asyncio.Event
    may_end: threading.Event
    made: list[str]
    given_back: list[str]

    async def call(self, name: str) -> str:
        """Call what lasts as long as the test says, on the thread."""
        loop = asyncio.get_running_loop()

        def call() -> str:
            self.made.append(name)
            loop.call_soon_threadsafe(self.begun.set)
            assert self.may_end.wait(PATIENCE_S)
            return name

        return await on_thread(self.executor, call, self.given_back.append)


@pytest.fixture
async def calls(anyio_backend: object) -> AsyncIterator[Calls]:  # noqa: ARG001  runs on the test's loop
    one = Calls(started_threads(1, "calls"), asyncio.Event(), threading.Event(), [], [])
    yield one
    one.may_end.set()
    await asyncio.to_thread(one.executor.shutdown)


@pytest.mark.anyio
async def test_a_call_is_not_made_that_is_given_up_before_it_has_begun(calls: Calls) -> None:
    first = asyncio.create_task(calls.call("first"))
    await calls.begun.wait()
    second = asyncio.create_task(calls.call("second"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second], timeout=PATIENCE_S)
    assert second.cancelled()
    calls.may_end.set()
    assert await first == "first"
    assert await calls.call("third") == "third"
    assert (calls.made, calls.given_back) == (["first", "third"], [])


@pytest.mark.anyio
async def test_a_call_that_has_begun_is_waited_for_and_what_nobody_takes_is_given_back(calls: Calls) -> None:
    task = asyncio.create_task(calls.call("first"))
    await calls.begun.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    calls.may_end.set()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.cancelled()
    assert await calls.call("second") == "second"
    assert calls.given_back == ["first"]
