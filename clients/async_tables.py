"""The asynchronous client's calls about graph tables; see ``tables`` for a decode step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy.typing as npt

from kvferry.clients import operations
from kvferry.clients.async_requests import AsyncRequests
from kvferry.clients.operations import Cells
from kvferry.clients.sync_requests import DEFAULT_DEADLINE_S
from kvferry.clients.tables import Tables, mapped_tables
from kvferry.protocol.event_points import EventPoint
from kvferry.protocol.table_messages import CreateTables, TablesUpdated


class AsyncTables(AsyncRequests):
    """Making, updating and deleting the tables of a session."""

    async def create_tables(
        self,
        name: str,
        pool: str,
        *,
        max_batch: int,
        max_context_tokens: int,
        draft_tokens: int = 0,
        request_row_tokens: int = 0,
        captured: Sequence[int] = (),
        window: int | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Tables:
        """See ``Client.create_tables``."""
        body = CreateTables(
            tables=name,
            pool=pool,
            max_batch=max_batch,
            max_context_tokens=max_context_tokens,
            draft_tokens=draft_tokens,
            request_row_tokens=request_row_tokens,
            captured=tuple(captured),
            window=window,
            device_pid=self._devices.process_id(),
        )
        outgoing, created = await self._round_trip(operations.create_tables(body), deadline_s=deadline_s)
        if self._channel is None:
            raise ValueError("graph tables need a session")
        arguments = (created, max_batch, outgoing.message_id, self._channel, self._devices)
        try:
            return await asyncio.to_thread(mapped_tables, *arguments)
        except BaseException:
            await self.call(operations.delete_tables(name))  # nobody here can use them
            raise

    async def update_tables(
        self,
        tables: Tables,
        lengths: npt.ArrayLike,
        *,
        extra_tokens: int = 0,
        cells: Cells | None = None,
        rows: Mapping[int, npt.ArrayLike] | None = None,
        released: npt.ArrayLike = (),
        bound: tuple[npt.ArrayLike, npt.ArrayLike] = ((), ()),
        after: EventPoint | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> TablesUpdated:
        """Change tables for the next replay, and return the daemon's word; see ``Client.update_tables``."""
        operation = operations.update_tables(
            tables.name,
            lengths,
            extra_tokens=extra_tokens,
            cells=cells,
            rows=rows,
            released=released,
            bound=bound,
            after=after,
        )
        return await self.call(operation, deadline_s=deadline_s)

    async def delete_tables(self, tables: Tables) -> None:
        """Give tables up and unmap them; graphs captured over them may not be replayed any more."""
        await self.call(operations.delete_tables(tables.name))
        tables.close()
