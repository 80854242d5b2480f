"""The synchronous client's calls about graph tables; see ``tables`` for a decode step."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.clients import calls
from kvferry.clients.arguments import sequence
from kvferry.clients.sync_requests import SyncRequests
from kvferry.clients.tables import Tables, mapped_tables, tables_name
from kvferry.protocol.table_messages import CreateTables


class SyncTables(SyncRequests):
    """Making, updating and deleting the tables of a session."""

    def create_tables(
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
        deadline_s: float | None = None,
    ) -> Tables:
        """Make the tables that captured graphs read, on the pool's device, and map them; before the first capture.

        Args:
            name: unique in this session.
            pool: whose pages they name.
            max_batch: rows.
            max_context_tokens: the longest request.
            draft_tokens: the most that speculation adds to a length.
            request_row_tokens: the width of the engine's own token map, which is wider than the context in practice.
            captured: the captured batch sizes; none: every batch is replayed as it is.
            window: the sliding window of a hybrid pool, in tokens: the one that the pool was made with.
            deadline_s: for the daemon's reply.

        Raises:
            UnknownPoolError, UnknownComponentError, InvalidFieldError: what the request names does not fit together.
            TablesExistError: the session has tables of that name.
            OutOfMemoryError: no memory for them.
        """
        body = CreateTables(
            tables=name,
            pool=pool,
            max_batch=max_batch,
            max_context_tokens=max_context_tokens,
            draft_tokens=draft_tokens,
            request_row_tokens=request_row_tokens,
            captured=sequence(captured, "batch sizes", "captured"),
            window=window,
            device_pid=self._devices.process_id(),
        )
        call = calls.create_tables(body)
        with self._use:  # whole: another thread's call may not come between the reply and its descriptors
            outgoing, created = self._exchange(call, deadline_s=deadline_s)
            channel = self._open_channel()
            try:
                return mapped_tables(created, max_batch, outgoing.message_id, channel, self._devices)
            except BaseException:
                self._begin(calls.delete_tables(name))  # nobody here can use them
                raise

    def delete_tables(self, tables: Tables) -> None:
        """Give tables up and unmap them; graphs captured over them may not be replayed any more."""
        self.call(calls.delete_tables(tables_name(tables)))
        tables.close()
