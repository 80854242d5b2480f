"""Blocks that wait for the store together, with a scripted link in the place of a store process."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import cast

import pytest

from kvferry.daemon.tiers.store_link import (
    MAX_CALL_BLOCKS,
    MAX_CALL_BYTES,
    Moved,
    StoreAwayError,
    StoreLink,
    StoreMoves,
)
from kvferry.daemon.tiers.store_process import (
    MAX_HEADER_BYTES,
    OBJECT_NOT_FOUND,
    RPC_FAIL,
    Answer,
    Get,
    GetBlock,
    Put,
    PutBlock,
)

pytestmark = pytest.mark.anyio


class _ScriptedLink:
    """A store process that answers when the test says so."""

    def __init__(self) -> None:
        self.calls: deque[tuple[Put | Get, asyncio.Future[Answer]]] = deque()
        self.killed: list[str] = []
        self.told_to_die = asyncio.Event()
        self.dies_at_once = True
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        return next(self._numbers)

    def ask(self, request: Put | Get) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.calls.append((request, answer))
        return answer

    def kill(self, why: str) -> None:
        """See ``StoreLink``: what is under way fails."""
        self.killed.append(why)
        self.told_to_die.set()
        if not self.dies_at_once:
            return
        for _, answer in self.calls:
            answer.set_exception(StoreAwayError(why))
        self.calls.clear()

    def answer(self, status: int = 0) -> Put | Get:
        """End the oldest call so, for each of its blocks; return it."""
        request, answer = self.calls.popleft()
        count = len(request.blocks)
        answer.set_result(Answer(request.number, statuses=[status] * count, headers=[b"header"] * count))
        return request


class _Harness:
    """What moves, over one slot."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.link: _ScriptedLink | None = _ScriptedLink()
        self.moves = StoreMoves(1, timeout_s, lambda: cast("StoreLink | None", self.link))

    @property
    def there(self) -> _ScriptedLink:
        assert self.link is not None
        return self.link

    async def begin(self, *blocks: PutBlock | GetBlock, size_bytes: int = 1) -> list[asyncio.Task[Moved | None]]:
        """Let blocks be moved; return once they wait or are under way."""
        tasks = [asyncio.create_task(self.moves.move(block, size_bytes)) for block in blocks]
        await settle()
        return tasks


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def put(name: str) -> PutBlock:
    return PutBlock(name, b"header", b"")


def get(name: str, header_bytes: int = 6) -> GetBlock:
    return GetBlock(name, header_bytes, b"")


async def test_what_waits_goes_together_and_gets_first() -> None:
    harness = _Harness()
    tasks = await harness.begin(put("first"), put("a"), put("b"), get("c"), get("d"))
    called: list[list[str]] = []
    while harness.there.calls:
        called.append([block.name for block in harness.there.answer().blocks])
        await settle()
    assert called == [["first"], ["c", "d"], ["a", "b"]]
    assert await asyncio.gather(*tasks) == [Moved(0, b"header")] * 5


async def test_a_call_is_bounded() -> None:
    harness = _Harness()
    sizes = [1, *[MAX_CALL_BYTES // 2] * 3, MAX_CALL_BYTES + 1]
    for size_bytes in sizes:
        await harness.begin(get("a"), size_bytes=size_bytes)
    counts = []
    while harness.there.calls:
        counts.append(len(harness.there.answer().blocks))
        await settle()
    assert counts == [1, 2, 1, 1]
    await harness.begin(*[get("a")] * (MAX_CALL_BLOCKS + 2))
    await harness.begin(*[get("a", MAX_HEADER_BYTES)] * 2)
    counts = []
    while harness.there.calls:
        counts.append(len(harness.there.answer().blocks))
        await settle()
    assert counts == [1, MAX_CALL_BLOCKS, 1, 1, 1]


async def test_each_block_has_its_own_end() -> None:
    harness = _Harness()
    (first,) = await harness.begin(put("first"))
    tasks = await harness.begin(get("a"), get("b"), get("c"))
    harness.there.answer(RPC_FAIL)
    await settle()
    request, answer = harness.there.calls.popleft()
    answer.set_result(Answer(request.number, statuses=[0, OBJECT_NOT_FOUND], headers=[b"x", b""]))
    assert await first == Moved(RPC_FAIL, b"header")
    assert await asyncio.gather(*tasks) == [Moved(0, b"x"), Moved(OBJECT_NOT_FOUND), Moved(-600)]


async def test_a_call_that_takes_too_long_ends_the_process() -> None:
    harness = _Harness(timeout_s=0.25)
    (task,) = await harness.begin(get("a"))
    assert await task is None
    assert len(harness.there.killed) == 1
    (task,) = await harness.begin(get("b"))
    harness.there.answer()
    assert await task == Moved(0, b"header")


async def test_what_waits_too_long_is_given_up() -> None:
    harness = _Harness(timeout_s=0.25)
    link = harness.there
    link.dies_at_once = False
    under_way, waits = await harness.begin(get("a"), get("b"))
    assert await waits is None
    await link.told_to_die.wait()
    assert not under_way.done()
    link.answer()
    assert await under_way == Moved(0, b"header")
    assert not link.calls, "nobody asks for what was given up"


async def test_a_caller_that_is_cancelled_returns_when_it_is_settled() -> None:
    harness = _Harness()
    (task,) = await harness.begin(get("a"))
    for _ in range(2):
        task.cancel()
        await settle()
        assert not task.done()
    harness.there.answer()
    with pytest.raises(asyncio.CancelledError):
        await task
