"""Block tables of decode's captured graphs on an NPU: the daemon writes them, where it has the pool's memory.

SGLang gathers them on the device before each replay, from its map of all requests' tokens. Most of these steps change
nothing: a row gets a page every ``page_size`` tokens. Here the scheduler says what changes as it prepares a step, in
one message with the step's transfers, and the daemon copies it once the replay that still reads the tables is done. A
step of which the daemon was not told, or which it refuses, is SGLang's own, in the same memory.

Which page a row gets is known on the host: SGLang's allocator takes pages from the front of a list. The device is asked
for the rows of requests that are new, and for that list where it is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvferry.clients import BlockTableEntries, KvferryError, Tables
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import pools
from kvferry.clients.submitting import PendingReply
from kvferry.pools.devices.vendor import on_stream
from kvferry.protocol.ids import HOST
from kvferry.protocol.table_messages import TablesUpdated

logger = logging.getLogger(__name__)

NAME: Final = "decode"
DEADLINE_S: Final = 20.0

Int64s: TypeAlias = npt.NDArray[np.int64]
NONE: Final[Int64s] = np.empty(0, np.int64)


# -- what a step changes


class Change(NamedTuple):
    """What a step changes: entries that get a page, and rows that are another request's now, with all their pages."""

    entries: BlockTableEntries
    rows: dict[int, Int64s]


class Rows:
    """Which request is in which row of the tables, and with which pages.

    Attributes:
        page_size: in tokens.
        counts: of each row's pages: (rows,).
    """

    def __init__(self, page_size: int, columns: int) -> None:
        self.page_size = page_size
        self.counts: Int64s = np.empty(0, np.int64)
        self._pages: Int64s = np.empty((0, columns), np.int64)
        self._requests: list[object] = []

    def __repr__(self) -> str:
        """Show how many rows are in use."""
        return f"<Rows {len(self._requests)}>"

    def forget(self) -> None:
        """Take it that no row is known."""
        self._seat([])

    def follow(
        self,
        requests: Sequence[object],
        lengths: Int64s,
        taken: Callable[[int], Int64s],
        read: Callable[[Int64s], Sequence[Int64s]],
    ) -> Change | None:
        """Take a step's batch over; return what it changes, if anything.

        Args:
            requests: that of each row, the same object in each step.
            lengths: tokens of each row, the step's own included: (rows,).
            taken: return so many pages that the step has got, in the order of the rows that begin one.
            read: return the pages of whole rows.
        """
        rows = len(self._requests)
        moved = self._seat(requests) if list(requests) != self._requests else NONE
        begin = np.flatnonzero(lengths % self.page_size == 1)
        if len(begin):
            self._pages[begin, self.counts[begin]] = taken(len(begin))
            self.counts[begin] += 1
        needed = -(-lengths // self.page_size)
        unknown = np.flatnonzero(self.counts != needed)
        if len(unknown):
            for row, ids in zip(unknown.tolist(), read(unknown), strict=True):
                self._pages[row, : len(ids)] = ids
            self.counts = needed
        whole = np.union1d(moved, unknown) if len(moved) or len(unknown) else NONE
        more = np.setdiff1d(begin, whole) if len(whole) else begin
        if not len(whole) and not len(more) and rows == len(requests):
            return None
        columns = self.counts[more] - 1
        return Change(
            BlockTableEntries(more, columns, self._pages[more, columns]),
            {row: self._pages[row, : self.counts[row]] for row in whole.tolist()},
        )

    def _seat(self, requests: Sequence[object]) -> Int64s:
        """Give each request its row; return the rows of which it is another one."""
        known = {id(one): row for row, one in enumerate(self._requests)}
        before = np.array([known.get(id(one), -1) for one in requests], np.int64)
        self._requests = list(requests)
        self.counts = np.append(self.counts, 0)[before]
        self._pages = np.pad(self._pages, ((0, 1), (0, 0)))[before]
        return np.flatnonzero(before != np.arange(len(before)))


class FreePages:
    """What SGLang's allocator takes from the front of its list of free pages, without asking the device."""

    def __init__(self) -> None:
        self._list: torch.Tensor | None = None
        self._pages: Int64s = np.empty(0, np.int64)

    def taken(self, free_pages: torch.Tensor, count: int) -> Int64s:
        """Return the pages before what is left of a list; it is copied where it is not the one seen last."""
        storage = free_pages.untyped_storage()
        if self._list is None or self._list.untyped_storage().data_ptr() != storage.data_ptr():
            self._list = free_pages.as_strided((storage.nbytes() // free_pages.itemsize,), (1,), 0)
            self._pages = self._list.cpu().numpy().astype(np.int64)
        end = int(free_pages.storage_offset())
        return self._pages[end - count : end]


# -- the tables, and SGLang's back end over them


class DecodeTables:
    """The daemon's block tables of this process's pool."""

    def __init__(self, pool: EnginePool, max_batch: int, max_context_tokens: int, row_tokens: int) -> None:
        """Have the daemon make them.

        Raises:
            KvferryError: it refuses.
        """
        self._pool = pool
        self._max_batch = max_batch
        with pool.engine.client() as client:
            self._tables: Tables = client.create_tables(
                NAME,
                pool.name,
                max_batch=max_batch,
                max_context_tokens=max_context_tokens,
                request_row_tokens=row_tokens,
                deadline_s=DEADLINE_S,
            )
        self._rows = Rows(pool.spec.page_size, self._tables.columns)
        self._free = FreePages()
        self._pending: PendingReply[TablesUpdated] | None = None
        self._is_ready = False
        """Whether a step was prepared, of which nothing has gone wrong."""
        self._is_new = False
        """Whether the model's stream has not waited yet for what the daemon has written."""
        self._is_mixed = True
        """Whether SGLang has written them since the daemon did, which then does not know what is in them."""
        self._logged = ""
        """Why the step before was refused: of steps that fail alike the first is logged."""

    def __repr__(self) -> str:
        """Show the tables."""
        return f"<DecodeTables {self._tables!r}>"

    @property
    def tensor(self) -> torch.Tensor:
        """Return them: (max_batch, columns) int32 on the pool's device."""
        return self._tables.block_tables

    def prepare(self, batch: Any) -> None:  # noqa: ANN401  SGLang's object
        """Tell the daemon what a decode step changes, behind the replay before it."""
        lengths = batch.seq_lens_cpu
        if lengths is None or not len(batch.reqs) == len(lengths) <= self._max_batch:  # beams; a batch without a graph
            return
        try:
            self._settle()
            if self._is_mixed:
                self._begin_anew()
            change = self._rows.follow(
                batch.reqs,
                lengths.numpy(),
                lambda count: self._free.taken(batch.token_to_kv_pool_allocator.free_pages, count),
                lambda rows: self._read(batch, rows),
            )
            if change is not None:
                after = self._pool.event()
                with self._pool.engine.step() as step:
                    lengths = self._rows.counts * self._rows.page_size  # the model's own are told to the graph
                    self._pending = step.update_tables(
                        self._tables, lengths, **change._asdict(), after=after, deadline_s=DEADLINE_S
                    )
                self._pool.engine.flush()
            self._is_ready = True
        except KvferryError as error:
            self._refused(error)

    def shown(self) -> bool:
        """Return whether the current stream will find what was prepared; else SGLang has to write the tables."""
        if self._is_ready:
            try:
                self._settle()
            except KvferryError as error:
                self._refused(error)
        ready, self._is_ready = self._is_ready, False
        if ready and self._is_new:
            self._tables.order(self._pool.compute_stream)
            self._is_new = False
        if ready:
            self._logged = ""
        self._is_mixed |= not ready
        return ready

    def _begin_anew(self) -> None:
        """Have the tables, and what the daemon knows of them, be all zeros."""
        self._rows.forget()
        with on_stream(torch, self._pool.compute_stream or torch.accelerator.current_stream()):
            self.tensor.zero_()
        after = self._pool.event()
        with self._pool.engine.client() as client:
            client.wait(client.update_tables(self._tables, [], after=after, deadline_s=DEADLINE_S))
        self._is_mixed = False

    def _settle(self) -> None:
        """Take the daemon's answer to the last update: it has queued its copies, or refuses."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._pool.engine.client() as client:
                client.wait(pending)
            self._is_new = True

    def _refused(self, error: KvferryError) -> None:
        self._is_ready, self._is_mixed = False, True
        if error.code != self._logged:
            logger.warning("kvferry: SGLang writes the graph tables by itself: %s", error)
            self._logged = error.code

    def _read(self, batch: Any, rows: Int64s) -> list[Int64s]:  # noqa: ANN401  SGLang's object
        """Return the pages of these rows, of which nothing was known, from SGLang's map of tokens on the device."""
        size = self._rows.page_size
        counts = -(-batch.seq_lens_cpu.numpy()[rows] // size)
        requests = batch.req_pool_indices[torch.from_numpy(rows).to(batch.device)]
        slots = batch.req_to_token_pool.req_to_token[requests, : int(counts.max()) * size : size].cpu().numpy()
        return [row[:count].astype(np.int64) // size for row, count in zip(slots, counts.tolist(), strict=True)]


_current: DecodeTables | None = None


def note_step(_: object, batch: Any) -> None:  # noqa: ANN401  SGLang's object
    """Have the tables follow a batch that is prepared to decode."""
    if _current is not None:
        _current.prepare(batch)


def ascend_backend(runner: Any) -> Any:  # noqa: ANN401  SGLang's classes
    """Return SGLang's attention back end for NPUs, whose tables are the daemon's where this process's pool is.

    A pool that the engine has registered outlives the daemon, and so must the tables.
    """
    from sglang.srt.hardware_backend.npu.attention.ascend_backend import AscendAttnBackend  # noqa: PLC0415  NPUs only

    pool = pools.current()
    if pool is None or pool.device == HOST or pool.memory != "daemon":
        return AscendAttnBackend(runner)
    return _over_tables(AscendAttnBackend, pool)(runner)


def _over_tables(theirs: Any, pool: EnginePool) -> Any:  # noqa: ANN401  SGLang's classes
    class KvferryAscendBackend(theirs):
        """SGLang's own in all but what writes the block tables of a decode step."""

        _tables: DecodeTables | None = None

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            """Make what captured graphs read."""
            global _current  # noqa: PLW0603  as SGLang's own pool, one a process
            super().init_cuda_graph_state(max_bs, max_num_tokens)
            if self._tables is None:
                self._tables = _current = DecodeTables(pool, max_bs, self.max_context_len, self.req_to_token.shape[1])
            self.graph_metadata["block_tables"] = self._tables.tensor

        def _apply_cuda_graph_metadata(
            self,
            bs: int,
            req_pool_indices: torch.Tensor,
            seq_lens: torch.Tensor,
            seq_lens_cpu: torch.Tensor | None,
            forward_mode: Any,  # noqa: ANN401  SGLang's
            *rest: Any,  # noqa: ANN401
            **more: Any,  # noqa: ANN401
        ) -> None:
            assert self._tables is not None
            if not self._tables.shown() or not forward_mode.is_decode():
                super()._apply_cuda_graph_metadata(
                    bs, req_pool_indices, seq_lens, seq_lens_cpu, forward_mode, *rest, **more
                )
                return
            self.forward_metadata = self.graph_metadata[bs]
            self.forward_metadata.seq_lens[:bs].copy_(seq_lens[:bs])
            self.graph_mode = True

    return KvferryAscendBackend
