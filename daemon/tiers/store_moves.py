"""Blocks on their way to and from the store: those that wait for one of the few slots go together, gets first.

One block a call makes some hundred calls a second, whatever their size: for small blocks that is the tenth part of what
the store can do. A block is settled when nothing of its call is under way any more. Knows nothing of what blocks mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from kvferry.daemon.tiers.store_link import StoreAwayError, StoreLink, to_its_end
from kvferry.daemon.tiers.store_messages import INVALID_PARAMS, MAX_HEADER_BYTES, Answer, Get, GetBlock, Put, PutBlock

MAX_CALL_BLOCKS: Final = 128
MAX_CALL_BYTES: Final = 32 << 20
"""More than one block together may have so many bytes."""


class Moved(NamedTuple):
    """How a block's call ended: Mooncake's status, and what was stored before a block that was fetched."""

    status: int
    header: bytes = b""


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    block: PutBlock | GetBlock
    size_bytes: int
    header_bytes: int
    moved: asyncio.Future[Moved | None]


class StoreMoves:
    """See the module. All methods belong on the loop."""

    def __init__(self, slots: int, timeout_s: float, link: Callable[[], StoreLink | None]) -> None:
        """Prepare.

        Args:
            slots: calls at a time.
            timeout_s: what has waited for so long is given up; a call that takes so long costs the process its life.
            link: returns where calls go now, None where nowhere.
        """
        self._free = slots
        self._timeout_s = timeout_s
        self._link = link
        self._gets: deque[_Waiting] = deque()
        self._puts: deque[_Waiting] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show what waits and what runs."""
        return f"<StoreMoves gets={len(self._gets)} puts={len(self._puts)} calls={len(self._calls)}>"

    async def move(self, block: PutBlock | GetBlock, size_bytes: int) -> Moved | None:
        """Return how it went once it is settled, also where cancelled; None where the store could not be asked."""
        return await to_its_end(self._move(block, size_bytes))

    async def _move(self, block: PutBlock | GetBlock, size_bytes: int) -> Moved | None:
        is_put = isinstance(block, PutBlock)
        header_bytes = len(block.header) if isinstance(block, PutBlock) else block.header_bytes
        waiting = _Waiting(block, size_bytes, header_bytes, asyncio.get_running_loop().create_future())
        row = self._puts if is_put else self._gets
        row.append(waiting)
        self._pump()
        await asyncio.wait({waiting.moved}, timeout=self._timeout_s)
        if waiting in row:
            row.remove(waiting)
            return None
        return await waiting.moved

    def _pump(self) -> None:
        while self._free and (row := self._gets or self._puts):
            self._free -= 1
            call = asyncio.create_task(self._call(_together(row)))
            self._calls.add(call)
            call.add_done_callback(self._called)

    def _called(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._free += 1
        self._pump()

    async def _call(self, together: list[_Waiting]) -> None:
        answer = await self._answered(together)
        for index, waiting in enumerate(together):
            waiting.moved.set_result(None if answer is None else _of_one(answer, index))

    async def _answered(self, together: list[_Waiting]) -> Answer | None:
        link = self._link()
        if link is None:
            return None
        puts = [one.block for one in together if isinstance(one.block, PutBlock)]
        gets = [one.block for one in together if isinstance(one.block, GetBlock)]
        number = link.next_number()
        answer = link.ask(Put(number, puts) if puts else Get(number, gets))
        done, _ = await asyncio.wait({answer}, timeout=self._timeout_s)
        if not done:
            # It may still read or write the arena: only its end makes sure that it does not.
            link.kill(f"{len(together)} blocks were under way for {self._timeout_s} s")
        try:
            return await answer
        except StoreAwayError:
            return None


def _together(row: deque[_Waiting]) -> list[_Waiting]:
    """Take from the row what goes in one call: at least one."""
    taken = [row.popleft()]
    size_bytes, header_bytes = taken[0].size_bytes, taken[0].header_bytes
    while row and len(taken) < MAX_CALL_BLOCKS:
        size_bytes += row[0].size_bytes
        header_bytes += row[0].header_bytes
        if size_bytes > MAX_CALL_BYTES or header_bytes > MAX_HEADER_BYTES:
            break
        taken.append(row.popleft())
    return taken


def _of_one(answer: Answer, index: int) -> Moved:
    if index >= len(answer.statuses):
        return Moved(answer.status or INVALID_PARAMS)
    header = answer.headers[index] if index < len(answer.headers) else b""
    return Moved(answer.statuses[index], header)
