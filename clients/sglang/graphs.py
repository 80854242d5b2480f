"""Block tables of decode's captured graphs on an NPU: the daemon writes them.

SGLang gathers them on the device before each replay, from its map of all requests' tokens. Most of these steps change
nothing: a row gets a page every ``page_size`` tokens. Here the scheduler says what changes as it prepares a step, in
one message with the step's transfers, and the daemon copies it once the replay that still reads the tables is done. A
step of which the daemon was not told, or which it refuses, is SGLang's own, in the same memory.

With speculation a step verifies draft tokens. How many the step before has kept the device alone may know by then, so
SGLang allocates for the most that can be: the tables show all of that.

Which page a row gets is known on the host: SGLang's allocator takes pages from the front of a list. The device is asked
for the rows of requests that are new, and for that list where it is another one.

Layers of a sliding window have a table of their own, of the same rows and columns, whose pages SGLang allocates beside
the others. Both change in one message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvferry.clients import BlockTableEntries, KvferryError, Tables
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import pools
from kvferry.clients.submitting import PendingReply
from kvferry.pools.devices.vendor import on_stream
from kvferry.protocol.errors import DaemonLostError, WindowMismatchError
from kvferry.protocol.ids import HOST
from kvferry.protocol.table_messages import TablesUpdated

logger = logging.getLogger(__name__)

NAME: Final = "decode"
DEADLINE_S: Final = 20.0

Int64s: TypeAlias = npt.NDArray[np.int64]
Step: TypeAlias = Literal["", "decode", "verify"]
"""What a step does of that of which the tables are told: it decodes, or it verifies draft tokens."""
NONE: Final[Int64s] = np.empty(0, np.int64)


# -- what a step changes


class Change(NamedTuple):
    """What a step changes: entries that get a page, and rows that are another request's now, with all their pages."""

    entries: BlockTableEntries
    rows: dict[int, Int64s]


class Held(NamedTuple):
    """What each row of a step's batch holds: its tokens, how many more may follow them, and its pages."""

    step: Step
    lengths: Int64s
    extra: int
    counts: Int64s


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

    def within(self, lengths: Int64s, window: int) -> Int64s:
        """Return the pages of all rows that hold one of the last ``window`` tokens."""
        columns = np.arange(self._pages.shape[1])
        first = np.maximum(lengths - window, 0) // self.page_size
        shown: Int64s = self._pages[(columns >= first[:, None]) & (columns < self.counts[:, None])]
        return shown

    def forget(self) -> None:
        """Take it that no row is known."""
        self._seat([])

    def follow(
        self,
        requests: Sequence[object],
        counts: Int64s,
        taken: Callable[[int], Int64s],
        read: Callable[[Int64s], Sequence[Int64s]],
    ) -> Change | None:
        """Take a step's batch over; return what it changes, if anything.

        Args:
            requests: that of each row, the same object in each step.
            counts: pages of each row, those of the step included: (rows,).
            taken: return so many pages that the step has got, in the order of the rows; fewer where that is not known.
            read: return the pages of whole rows.
        """
        rows = len(self._requests)
        whole = self._seat(requests) if list(requests) != self._requests else NONE
        more, at, columns = counts - self.counts, NONE, NONE
        if more.any():
            at = np.repeat(np.arange(len(more)), np.maximum(more, 0))
            columns = np.arange(len(at)) - (np.cumsum(more) - counts)[at]
            new = taken(len(at)) if self.counts.all() and more.min() >= 0 else NONE
            if len(new) == len(at):
                self._pages[at, columns] = new
            else:
                unknown = np.flatnonzero(more)
                for row, ids in zip(unknown.tolist(), read(unknown), strict=True):
                    self._pages[row, : len(ids)] = ids
                whole = np.union1d(whole, unknown)
        self.counts = counts
        if not len(at) and not len(whole) and rows == len(requests):
            return None
        alone = np.isin(at, whole, invert=True)
        at, columns = at[alone], columns[alone]
        return Change(
            BlockTableEntries(at, columns, self._pages[at, columns]),
            {row: self._pages[row, : counts[row]] for row in whole.tolist()},
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
        """Return the pages before what is left of a list, fewer where it is a new one since they were taken.

        A list that is not the one seen last is copied.
        """
        storage = free_pages.untyped_storage()
        if self._list is None or self._list.untyped_storage().data_ptr() != storage.data_ptr():
            self._list = free_pages.as_strided((storage.nbytes() // free_pages.itemsize,), (1,), 0)
            self._pages = self._list.cpu().numpy().astype(np.int64)
        end = int(free_pages.storage_offset())
        return self._pages[end - count : end]


class WindowPages:
    """Which window page each page has, and which of them the daemon has been told: those that a window shows.

    Attributes:
        window: in tokens.
        known: the window page of each page that a row has got: (pages,), 0 for none.
        told: what the daemon knows: (pages,), 0 for none.
    """

    def __init__(self, window: int, pages: int) -> None:
        self.window = window
        self.known: Int64s = np.zeros(pages, np.int64)
        self.told = np.zeros_like(self.known)
        self._next = self.told

    def __repr__(self) -> str:
        """Show how many the daemon knows."""
        return f"<WindowPages {np.count_nonzero(self.told)}>"

    def change(self, shown: Int64s) -> dict[str, Any]:
        """Return what an update says of them, where these pages are within a window then."""
        self._next = np.zeros_like(self.told)
        self._next[shown] = self.known[shown]
        differs = self._next != self.told
        bound = np.flatnonzero(differs & (self._next > 0))
        return {"released": np.flatnonzero(differs & (self.told > 0)), "bound": (bound, self._next[bound])}

    def confirm(self) -> None:
        """Note that the daemon has taken the last change."""
        self.told = self._next


# -- the tables, and SGLang's back end over them


class DecodeTables:
    """The daemon's block tables of this process's pool.

    Attributes:
        pool: whose pages they name.
    """

    def __init__(
        self,
        pool: EnginePool,
        max_batch: int,
        max_context_tokens: int,
        row_tokens: int,
        *,
        window: int | None = None,
        draft_tokens: int = 0,
    ) -> None:
        """Have the daemon make them.

        Args:
            pool: whose pages they name.
            max_batch: rows.
            max_context_tokens: the longest request.
            row_tokens: the width of SGLang's map of tokens.
            window: the sliding one's tokens, of a pool that has one.
            draft_tokens: the most beyond a request's own for which there are pages.

        Raises:
            KvferryError: it refuses.
        """
        self.pool = pool
        self._max_batch, self._draft_tokens = max_batch, draft_tokens
        with pool.engine.client() as client:
            self._tables: Tables = client.create_tables(
                NAME,
                pool.name,
                max_batch=max_batch,
                max_context_tokens=max_context_tokens,
                request_row_tokens=row_tokens,
                draft_tokens=draft_tokens,
                window=window,
                deadline_s=DEADLINE_S,
            )
        self._rows = Rows(pool.page_size, self._tables.columns)
        self._free, self._free_window = FreePages(), FreePages()
        self._windows = None if window is None else WindowPages(window, pool.pages)
        self._pending: PendingReply[TablesUpdated] | None = None
        self._ready: Step = ""
        """What was prepared, of which nothing has gone wrong."""
        self._ends = NONE
        """Where the pages end that each row shows."""
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

    @property
    def window_tensor(self) -> torch.Tensor | None:
        """Return the same of the window's pages, of a pool that has one."""
        return self._tables.block_tables_swa

    def prepare(self, batch: Any) -> None:  # noqa: ANN401  SGLang's object
        """Tell the daemon what a step changes, behind the replay before it."""
        self._ready = ""
        held = self._held(batch)
        if held is None:
            self._rows.forget()  # what its requests get is not seen
            return
        try:
            if self.pool.engine.is_away:
                raise DaemonLostError("the daemon is away")
            self._settle()
            if self._is_mixed:
                self._begin_anew()
            change = self._rows.follow(
                batch.reqs,
                held.counts,
                lambda count: self._taken(batch.token_to_kv_pool_allocator, count),
                lambda rows: self._read(batch, rows, held.counts[rows]),
            )
            ends = -(-(held.lengths + held.extra) // self._rows.page_size)
            if change is not None or not np.array_equal(ends, self._ends):
                self._update(held, change)
                self._ends = ends
            self._ready = held.step
        except KvferryError as error:
            self._refused(error)

    def _held(self, batch: Any) -> Held | None:  # noqa: ANN401  SGLang's object
        """Return what a batch holds; None of beams, of one too large for a graph, and where SGLang does not say.

        To verify, its lengths may be those before the last step, and it has pages for all that they may be now. The
        first of the tokens that it verifies is kept in any case.
        """
        lengths, size = batch.seq_lens_cpu, self._rows.page_size
        if lengths is None or not len(batch.reqs) == len(lengths) <= self._max_batch:
            return None
        if batch.spec_algorithm.is_none():
            return Held("decode", lengths.numpy(), 0, -(-lengths.numpy() // size))
        counts = np.array([-(-one.kv.kv_allocated_len // size) for one in batch.reqs], np.int64)
        held = Held("verify", lengths.numpy() + 1, self._draft_tokens, counts)
        return held if (counts * size >= held.lengths + held.extra).all() else None

    def _update(self, held: Held, change: Change | None) -> None:
        more: dict[str, Any] = {} if change is None else change._asdict()
        if self._windows is not None:
            more |= self._windows.change(self._rows.within(held.lengths, self._windows.window))
        after = self._tables.replayed(self.pool.compute_stream)
        with self.pool.engine.step() as step:
            self._pending = step.update_tables(
                self._tables, held.lengths, **more, extra_tokens=held.extra, after=after, deadline_s=DEADLINE_S
            )
        self.pool.engine.flush()

    def shown(self, step: Step) -> bool:
        """Return whether the current stream will find what was prepared for this step; else SGLang has to write it."""
        if self._ready:
            try:
                self._settle()
            except KvferryError as error:
                self._refused(error)
        ready, self._ready = step != "" and step == self._ready, ""
        if self._is_new or not ready:  # what was refused may be under way, also where the daemon is no more
            self._tables.order(self.pool.compute_stream)
            self._is_new = False
        if ready:
            self._logged = ""
        if not ready:
            self._is_mixed = self._tables.overwritten = True
        return ready

    def _begin_anew(self) -> None:
        """Have the tables, and what the daemon knows of them, be all zeros."""
        self._rows.forget()
        self._ends = NONE
        with on_stream(torch, self.pool.compute_stream or torch.accelerator.current_stream()):
            self.tensor.zero_()
            if self.window_tensor is not None:
                self.window_tensor.zero_()
        more = {} if self._windows is None else self._windows.change(NONE)
        try:
            self._empty(more)
        except WindowMismatchError:  # another daemon, which knows of no window page
            self._empty({})
        if self._windows is not None:
            self._windows.confirm()
        self._is_mixed = self._tables.overwritten = False

    def _empty(self, more: dict[str, Any]) -> None:
        after = self._tables.replayed(self.pool.compute_stream)
        with self.pool.engine.client() as client:
            client.wait(client.update_tables(self._tables, [], **more, after=after, deadline_s=DEADLINE_S))

    def _settle(self) -> None:
        """Take the daemon's answer to the last update: it has queued its copies, or refuses."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self.pool.engine.client() as client:
                client.wait(pending)
            self._is_new = True
            if self._windows is not None:
                self._windows.confirm()

    def _refused(self, error: KvferryError) -> None:
        self._ready, self._is_mixed = "", True
        if error.code != self._logged:
            logger.warning("kvferry: SGLang writes the graph tables by itself: %s", error)
            self._logged = error.code

    def _taken(self, allocator: Any, count: int) -> Int64s:  # noqa: ANN401  SGLang's object
        """Return so many pages that a step has got, fewer where they or their window pages are not known."""
        if self._windows is None:
            return self._free.taken(allocator.free_pages, count)
        pages = self._free.taken(allocator.full_attn_allocator.free_pages, count)
        in_window = self._free_window.taken(allocator.swa_attn_allocator.free_pages, count)
        if not len(pages) == len(in_window) == count:
            return NONE
        self._windows.known[pages] = in_window
        return pages

    def _read(self, batch: Any, rows: Int64s, counts: Int64s) -> list[Int64s]:  # noqa: ANN401  SGLang's object
        """Return so many pages of each of these rows from SGLang's map of tokens on the device."""
        size = self._rows.page_size
        requests = batch.req_pool_indices[torch.from_numpy(rows).to(batch.device)]
        slots = batch.req_to_token_pool.req_to_token[requests, : int(counts.max()) * size : size]
        pages = slots.cpu().numpy().astype(np.int64) // size
        if self._windows is not None:
            mapping = batch.token_to_kv_pool_allocator.full_to_swa_index_mapping
            self._windows.known[pages] = mapping[slots].cpu().numpy() // size
        return [row[:count] for row, count in zip(pages, counts.tolist(), strict=True)]


_current: DecodeTables | None = None


def note_step(_: object, batch: Any) -> None:  # noqa: ANN401  SGLang's object
    """Have the tables follow a batch that is prepared to decode."""
    if _current is not None:
        _current.prepare(batch)


def ascend_backend(runner: Any) -> Any:  # noqa: ANN401  SGLang's classes
    """Return SGLang's attention back end for NPUs; the daemon writes the model's tables where it has its pool.

    Those of a draft model are SGLang's own: how far that has come is known on the device only.
    """
    from sglang.srt.hardware_backend.npu.attention.ascend_backend import AscendAttnBackend  # noqa: PLC0415  NPUs only

    pool = pools.current()
    if pool is None or pool.device == HOST or runner.is_draft_worker:
        return AscendAttnBackend(runner)
    return _over_tables(AscendAttnBackend, pool)(runner)


def _over_tables(theirs: Any, pool: EnginePool) -> Any:  # noqa: ANN401  SGLang's classes
    class KvferryAscendBackend(theirs):
        """SGLang's own in all but what writes the block tables of a decode step.

        With two-batch overlap SGLang has several: the first is the whole batch's, and the others write their own.
        """

        _tables: DecodeTables | None = None

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            """Make what captured graphs read."""
            global _current  # noqa: PLW0603  as SGLang's own pool, one a process
            super().init_cuda_graph_state(max_bs, max_num_tokens)
            if _current is None or _current.pool is not pool:
                row_tokens = self.req_to_token.shape[1]
                try:
                    self._tables = _current = DecodeTables(
                        pool,
                        max_bs,
                        self.max_context_len,
                        row_tokens,
                        window=_window_of(self),
                        draft_tokens=_draft_tokens() if self.speculative_num_draft_tokens else 0,
                    )
                except KvferryError as error:  # memory that torch cannot share, say
                    logger.warning("kvferry: SGLang writes the graph tables by itself: %s", error)
            if self._tables is not None:
                self.graph_metadata["block_tables"] = self._tables.tensor
                if self._tables.window_tensor is not None:
                    _use_window_table(self, self._tables.window_tensor)

        def _apply_cuda_graph_metadata(
            self,
            bs: int,
            req_pool_indices: torch.Tensor,
            seq_lens: torch.Tensor,
            seq_lens_cpu: torch.Tensor | None,
            forward_mode: Any,  # noqa: ANN401  SGLang's
            spec_info: Any,  # noqa: ANN401  SGLang's
            out_cache_loc: torch.Tensor | None = None,
            *rest: Any,  # noqa: ANN401
            **more: Any,  # noqa: ANN401
        ) -> None:
            step = _step_of(forward_mode, spec_info)
            if self._tables is None or not self._tables.shown(step):
                super()._apply_cuda_graph_metadata(
                    bs, req_pool_indices, seq_lens, seq_lens_cpu, forward_mode, spec_info, out_cache_loc, *rest, **more
                )
                return
            self.forward_metadata = self.graph_metadata[bs]
            if self._tables.window_tensor is not None:
                _show_window(self, seq_lens[:bs], out_cache_loc)
            if step == "verify":
                seq_lens = seq_lens + self.speculative_num_draft_tokens
            self.forward_metadata.seq_lens[:bs].copy_(seq_lens[:bs])
            self.graph_mode = True

    return KvferryAscendBackend


def _step_of(forward_mode: Any, spec_info: Any) -> Step:  # noqa: ANN401  SGLang's
    """Return what a step is to the tables. One of DFlash has lengths of its own."""
    if forward_mode.is_target_verify():
        return "" if spec_info.spec_input_type.name == "DFLASH_VERIFY" else "verify"
    return "decode" if forward_mode.is_decode() and spec_info is None else ""


def _draft_tokens() -> int:
    """Return for how many tokens beyond a request's own SGLang has pages when it verifies some: those of two steps."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode  # noqa: PLC0415  as above

    return int(get_alloc_reserve_per_decode()) - 1


def _window_of(backend: Any) -> int | None:  # noqa: ANN401  SGLang's object
    """Return how many tokens one of a layer with a window sees, itself included: SGLang counts those before it."""
    return backend.sliding_window_size + 1 if backend.use_sliding_window_kv_pool else None


def _use_window_table(backend: Any, table: torch.Tensor) -> None:  # noqa: ANN401  SGLang's object
    """Have captured graphs read the window's table, with a mask as wide as that."""
    made, theirs = backend.graph_metadata, backend.graph_metadata["swa_mask"]
    tokens = max(theirs.shape[-1], table.shape[1] * backend.page_size)
    made["block_tables_swa"] = table
    made["swa_mask"] = theirs.new_ones((*theirs.shape[:-1], tokens))
    made["swa_indices"] = torch.arange(tokens, dtype=torch.int32, device=table.device)


def _show_window(backend: Any, lengths: torch.Tensor, slots: torch.Tensor | None) -> None:  # noqa: ANN401  SGLang's object
    """Write what else a replay reads of windows: which tokens each row sees, and where its new one goes."""
    if slots is not None:
        own = backend.cuda_graph_swa_out_cache_loc
        own[: len(slots)].copy_(backend.token_to_kv_pool.translate_loc_from_full_to_swa(slots))
        own[len(slots) :].zero_()
    tokens, end = backend.graph_metadata["swa_indices"], lengths.int()[:, None]
    hidden = (tokens >= end) | (tokens < end - backend.sliding_window_size)
    backend.forward_metadata.swa_mask[:, 0].copy_(hidden)
