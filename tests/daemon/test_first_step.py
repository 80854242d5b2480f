"""A coroutine that takes its first step at once, and goes on as a task would."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.daemon.control import first_step

pytestmark = pytest.mark.anyio


async def test_cancel_comes_also_before_the_task_has_begun_and_to_what_it_waits_for() -> None:
    waits_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    said: list[str] = []

    async def work() -> None:
        try:
            await waits_for
        finally:
            said.append("over")

    task = first_step.begin(work())
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert waits_for.cancelled()
    assert said == ["over"]


@pytest.mark.parametrize("others_wait", [True, False])
async def test_it_goes_on_once_what_it_waits_for_is_there(*, others_wait: bool) -> None:
    first, second = asyncio.Event(), asyncio.get_running_loop().create_future()
    said: list[object] = []

    async def work() -> str:
        said.append("begun")
        said.append(await second)
        await first.wait()
        await asyncio.sleep(0)
        return "done"

    task = first_step.begin(work())
    assert said == ["begun"]
    other = first_step.begin(work()) if others_wait else None
    second.set_result(2)
    first.set()
    assert await task == "done"
    assert said[-1] == 2
    assert other is None or await other == "done"
