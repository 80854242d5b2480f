"""Blocks on their way to and from the store. Blocks that wait for a call slot are batched, gets before puts.

One block per call makes some hundred calls a second, whatever their size; for small blocks that is a tenth of what the
store can do. A block is settled when nothing of its call is in progress any more. Knows nothing of the blocks' meaning.
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
"""A bound on the bytes of a call of several blocks."""


class Moved(NamedTuple):
    """The outcome of a block: Mooncake's status, and the header of a block that was fetched."""

    status: int
    header: bytes = b""


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    block: PutBlock | GetBlock
    size_bytes: int
    header_bytes: int
    moved: asyncio.Future[Moved | None]


class StoreMoves:
    """Batches blocks into calls, see the module. For the control loop."""

    def __init__(self, slots: int, timeout_s: float, link: Callable[[], StoreLink | None]) -> None:
        """Prepare.

        Args:
            slots: concurrent calls.
            timeout_s: a block that waited so long is dropped; a call that takes so long has the process killed.
            link: returns the process to send calls to, or None.
        """
        self._free = slots
        self._timeout_s = timeout_s
        self._link = link
        self._gets: deque[_Waiting] = deque()
        self._puts: deque[_Waiting] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show the numbers of queued blocks and running calls."""
        return f"<StoreMoves gets={len(self._gets)} puts={len(self._puts)} calls={len(self._calls)}>"

    async def move(self, block: PutBlock | GetBlock, size_bytes: int) -> Moved | None:
        """Return the outcome once the block is settled, also where cancelled; None where the store was unreachable."""
        return await to_its_end(self._move(block, size_bytes))

    async def _move(self, block: PutBlock | GetBlock, size_bytes: int) -> Moved | None:
        is_put = isinstance(block, PutBlock)
        header_bytes = len(block.header) if isinstance(block, PutBlock) else block.header_bytes
        waiting = _Waiting(block, size_bytes, header_bytes, asyncio.get_running_loop().create_future())
        queue = self._puts if is_put else self._gets
        queue.append(waiting)
        self._pump()
        await asyncio.wait({waiting.moved}, timeout=self._timeout_s)
        if waiting in queue:
            queue.remove(waiting)
            return None
        return await waiting.moved

    def _pump(self) -> None:
        while self._free and (queue := self._gets or self._puts):
            self._free -= 1
            call = asyncio.create_task(self._call(_take_batch(queue)))
            self._calls.add(call)
            call.add_done_callback(self._on_call_done)

    def _on_call_done(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._free += 1
        self._pump()

    async def _call(self, batch: list[_Waiting]) -> None:
        answer = await self._ask(batch)
        for index, waiting in enumerate(batch):
            waiting.moved.set_result(None if answer is None else _moved(answer, index))

    async def _ask(self, batch: list[_Waiting]) -> Answer | None:
        link = self._link()
        if link is None:
            return None
        puts = [one.block for one in batch if isinstance(one.block, PutBlock)]
        gets = [one.block for one in batch if isinstance(one.block, GetBlock)]
        number = link.next_number()
        answer = link.ask(Put(number, puts) if puts else Get(number, gets))
        done, _ = await asyncio.wait({answer}, timeout=self._timeout_s)
        if not done:
            # The process may still access the arena: only its end rules that out.
            link.kill(f"a call of {len(batch)} blocks took over {self._timeout_s} s")
        try:
            return await answer
        except StoreAwayError:
            return None


def _take_batch(queue: deque[_Waiting]) -> list[_Waiting]:
    """Take the blocks of one call from the queue: at least one."""
    taken = [queue.popleft()]
    size_bytes, header_bytes = taken[0].size_bytes, taken[0].header_bytes
    while queue and len(taken) < MAX_CALL_BLOCKS:
        size_bytes += queue[0].size_bytes
        header_bytes += queue[0].header_bytes
        if size_bytes > MAX_CALL_BYTES or header_bytes > MAX_HEADER_BYTES:
            break
        taken.append(queue.popleft())
    return taken


def _moved(answer: Answer, index: int) -> Moved:
    if index >= len(answer.statuses):
        return Moved(answer.status or INVALID_PARAMS)
    header = answer.headers[index] if index < len(answer.headers) else b""
    return Moved(answer.statuses[index], header)
