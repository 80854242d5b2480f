"""Regions on a device: pools that the daemon allocated, or that another process shares with this one.

Segments are copied through a staging: a buffer on the device, into which they are gathered by one kernel per entry, and
pinned host memory, to or from which they are copied at once. All of it is queued in order on the stream of the copy's
direction; the caller's thread waits for the last event, and only then the staging is reused. Steps of blocks, for the
tiers, are begun and waited for separately, each with its own staging, so that one can proceed while the next is begun.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.base import Arena, Pending
from kvferry.pools.devices.vendor import Mapped, on_stream
from kvferry.pools.planning.copies import Cells, CopyBlocks, cells_of, segments_that_fit
from kvferry.pools.planning.page_ids import coalesce
from kvferry.pools.planning.plan import Plan
from kvferry.pools.planning.sides import PlanSide
from kvferry.pools.tiers.block_copies import BlockCells
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages, BlockStep, step_runs, zero_padding
from kvferry.protocol.errors import OutOfMemoryError
from kvferry.protocol.ids import new_number
from kvferry.protocol.session_stream import Share

if TYPE_CHECKING:
    import torch

STAGING_BYTES: Final = 8 << 20
FEW_RUNS: Final = 8
"""Up to this many runs of cells, one copy per run costs less than uploading the cell numbers and running a kernel."""

MAX_STEP_COPIES: Final = 1024
"""In a step of blocks: a device that takes 50 ms for each is done within the watchdog's minute."""

MIN_RUN_BYTES: Final = 32 << 10
"""With shorter runs in the arena, copying each by the host costs less than by the device."""

MAX_WORD_BYTES: Final = 4
"""Gather kernels are optimised for 32-bit elements; 64-bit ones may run on the device's slow cores."""


# -- stagings: the caller that takes one ensures that nothing uses it any more when it gives it back.


class Staging:
    """Buffers for one copy at a time: bytes on the device, as many in pinned memory, and space for cell numbers."""

    def __init__(self, accelerator: Accelerator, size_bytes: int) -> None:
        self._accelerator = accelerator
        backend = self._torch = accelerator.torch
        self._device = backend.device(accelerator.kind, accelerator.index)
        self.size_bytes = size_bytes
        self.on_device = backend.empty(size_bytes, dtype=backend.uint8, device=self._device)
        self._pinned: torch.Tensor | None = None
        self.done = backend.Event(device=self._device)
        self._numbers_pinned = backend.empty(0, dtype=backend.int64)
        self._numbers_on_device = backend.empty(0, dtype=backend.int64, device=self._device)
        self._used = 0
        self._known: dict[int, tuple[Any, torch.Tensor]] = {}

    @property
    def pinned(self) -> torch.Tensor:
        """Return the pinned memory; within ``calling``. Allocated on first use: registered memory does not need it."""
        if self._pinned is None:
            self._pinned = self._accelerator.pinned(self.size_bytes, self._torch.uint8)
        return self._pinned

    def begin(self, parts: Sequence[Cells]) -> None:
        """Discard the cell numbers of the previous copy, which is done; reserve space for those of the next one."""
        self._used, self._known = 0, {}
        needed = sum({id(one.numbers): len(one.numbers) for one in parts}.values())
        if needed > len(self._numbers_pinned):
            size = 1 << (needed - 1).bit_length()
            self._numbers_pinned = self._accelerator.pinned(size, self._torch.int64)
            self._numbers_on_device = self._torch.empty(size, dtype=self._torch.int64, device=self._device)

    def numbers(self, numbers: np.typing.NDArray[np.int64]) -> torch.Tensor:
        """Return cell numbers on the device, copied on the current stream; the same array is copied only once."""
        known = self._known.get(id(numbers))
        if known is not None:
            return known[1]
        there: torch.Tensor
        here = slice(self._used, self._used + len(numbers))
        self._used = here.stop
        self._numbers_pinned[here].numpy()[:] = numbers
        there = self._numbers_on_device[here]
        there.copy_(self._numbers_pinned[here], non_blocking=True)
        self._known[id(numbers)] = (numbers, there)
        return there


class StagingPool:
    """The stagings of one device: one for each concurrent copy, kept for reuse.

    Attributes:
        staging_bytes: size of a staging; larger if one segment alone is larger.
    """

    def __init__(self, accelerator: Accelerator, staging_bytes: int = STAGING_BYTES) -> None:
        self.staging_bytes = staging_bytes
        self._accelerator = accelerator
        self._free: list[Staging] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of free stagings."""
        return len(self._free)

    @contextmanager
    def take(self, size_bytes: int, parts: Sequence[Cells]) -> Iterator[Staging]:
        """Take a staging for a copy of these cells; the copy ends inside this context."""
        staging = self.take_buffer(size_bytes, parts)
        yield staging  # not given back if the device failed: a copy may still use it
        self.give_back(staging)

    def take_buffer(self, size_bytes: int, parts: Sequence[Cells]) -> Staging:
        """Return a staging of at least this size for a copy of these cells; within ``calling``."""
        with self._lock:
            staging = self._free.pop() if self._free else None
        if staging is None or staging.size_bytes < size_bytes:
            staging = Staging(self._accelerator, max(size_bytes, self.staging_bytes))
        staging.begin(parts)
        return staging

    def give_back(self, staging: Staging) -> None:
        """Return a staging to the pool; its copy is done."""
        with self._lock:
            self._free.append(staging)


# -- regions.


class RegionSegment(NamedTuple):
    """Memory that is mapped at once, and where in the region it begins. No entry of a pool spans two of them."""

    start: int
    mapped: Mapped


class KeptMemory(Protocol):
    """Memory of a region that another process owns, which does not map it.

    Attributes:
        key: under which it has it; it names memory, and lets nobody map it.
        size_bytes: of it, as allocated.
        outlives: whether it stays there when the region is closed.
    """

    key: str
    size_bytes: int
    outlives: bool

    def share(self, process_id: int) -> Share:
        """Return what a process needs to map it."""

    def closed(self) -> None:
        """Free it, unless it ``outlives``: this process has unmapped it."""


def _nothing() -> None:
    return


class _PendingStep:
    """See ``Pending``. ``wait`` also does what is left to do on the host."""

    done = False

    def __init__(self, region: AcceleratorRegion, staging: Staging, finish: Callable[[], None]) -> None:
        self._region = region
        self._staging = staging
        self._finish = finish

    def wait(self) -> None:
        """See ``Pending.wait``."""
        self._region.end_step(self._staging, self._finish)


class AcceleratorRegion:
    """See ``Region``. The mapping stays until ``close``, after which no tensor over it may be used.

    Attributes:
        accelerator: the device.
        kept: memory that this process only maps; None if it is its own, or an engine's.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parts: Sequence[RegionSegment],
        size_bytes: int,
        stagings: StagingPool,
        on_closed: Callable[[], None] = lambda: None,
        *,
        kept: KeptMemory | None = None,
        identity: int | None = None,
    ) -> None:
        """Take ownership of the mapped memory.

        Args:
            accelerator: the device.
            parts: what is mapped of it.
            size_bytes: of the region.
            stagings: of the device.
            on_closed: called once it is unmapped.
            kept: the memory, if another process owns it.
            identity: of adopted memory; see ``Region.identity``.
        """
        self.accelerator = accelerator
        self.device = accelerator.name
        self.size_bytes = size_bytes
        self._parts = sorted(parts, key=lambda part: part.start)
        self._starts = [part.start for part in self._parts]
        self._stagings = stagings
        self._on_closed = on_closed
        self.kept = kept
        self._identity = new_number() if identity is None else identity
        self._cells: weakref.WeakKeyDictionary[BlockLayout, BlockCells] = weakref.WeakKeyDictionary()
        self._users = threading.Condition()
        self._using = 0

    def __repr__(self) -> str:
        """Show size and state."""
        state = f"in use by {self._using}" if self._parts else "closed"
        return f"<AcceleratorRegion {self.device} {self.size_bytes} bytes {state}>"

    @property
    def identity(self) -> int:
        """See ``Region.identity``."""
        return self._identity

    @property
    def tensor(self) -> torch.Tensor:
        """Return the region, of a single part, as ``(size_bytes,)`` uint8 on the device, valid until ``close``."""
        [part] = self._parts
        return part.mapped.tensor[: self.size_bytes]

    def share(self, process_id: int) -> Share:
        """Return what the process needs to map the region. Never log it."""
        [part] = self._parts
        if self.kept is not None:
            return self.kept.share(process_id)
        with self.accelerator.calling():
            return self.accelerator.vendor.share(part.mapped, process_id)

    def gather(self, side: PlanSide, first: int, stop: int, out_address: int, copy: CopyBlocks) -> None:
        """See ``Region.gather``."""
        del copy
        stream = self.accelerator.streams.device_to_host
        for begin, end, size, address in self._staged(side, first, stop, out_address):
            parts = list(cells_of(side, begin, end))
            with self._use(), self._stagings.take(size, parts) as staging, self._on(stream):
                self._to_staging(parts, staging)
                there = self.accelerator.registered(address, size)
                self.accelerator.copy(
                    staging.pinned[:size] if there is None else there, staging.on_device[:size], stream
                )
                staging.done.record(stream)
                self.accelerator.wait(staging.done)
                if there is None:
                    ctypes.memmove(address, staging.pinned.data_ptr(), size)

    def scatter(self, side: PlanSide, first: int, stop: int, in_address: int, copy: CopyBlocks) -> None:
        """See ``Region.scatter``."""
        del copy
        stream = self.accelerator.streams.host_to_device
        for begin, end, size, address in self._staged(side, first, stop, in_address):
            parts = list(cells_of(side, begin, end))
            with self._use(), self._stagings.take(size, parts) as staging, self._on(stream):
                there = self.accelerator.registered(address, size)
                if there is None:
                    ctypes.memmove(staging.pinned.data_ptr(), address, size)
                self.accelerator.copy(
                    staging.on_device[:size], staging.pinned[:size] if there is None else there, stream
                )
                self._from_staging(parts, staging)
                staging.done.record(stream)
                self.accelerator.wait(staging.done)

    def copy_from(self, source: AcceleratorRegion, plan: Plan, first: int, stop: int) -> None:
        """Copy segments ``[first, stop)`` of a plan from a region of a device that this one reaches, without the host.

        Raises:
            DeviceLostError: a device failed.
        """
        stream = self.accelerator.streams.device_to_device
        for begin, end, size, _ in self._staged(plan.source, first, stop, 0):
            ours, theirs = (list(cells_of(side, begin, end)) for side in (plan.destination, plan.source))
            if source.accelerator is not self.accelerator:
                self._copy_from_peer(source, ours, theirs, size)
                continue
            staged = self._stagings.take(size, [*ours, *theirs])
            with source._use(), self._count(), staged as staging, self._on(stream):
                source._to_staging(theirs, staging)
                self._from_staging(ours, staging)
                staging.done.record(stream)
                self.accelerator.wait(staging.done)

    def _copy_from_peer(
        self, source: AcceleratorRegion, ours: Sequence[Cells], theirs: Sequence[Cells], size: int
    ) -> None:
        """Gather on the source's device, copy the staging to this one, and scatter; each call is on one device."""
        stream = source.accelerator.streams.device_to_device
        with source._use(), source._on(stream):
            there = source._stagings.take_buffer(size, theirs)
            source._to_staging(theirs, there)
            there.done.record(stream)
            source.accelerator.wait(there.done)
        stream = self.accelerator.streams.device_to_device
        try:
            with self._use(), self._stagings.take(size, ours) as here, self._on(stream):
                here.on_device[:size].copy_(there.on_device[:size], non_blocking=True)
                self._from_staging(ours, here)
                here.done.record(stream)
                self.accelerator.wait(here.done)
        except OutOfMemoryError:  # for a staging: nothing was queued
            source._stagings.give_back(there)
            raise
        source._stagings.give_back(there)

    def most_blocks(self, layout: BlockLayout) -> int:
        """See ``Region.most_blocks``: the watchdog gives a slow device as long for a step as for a single copy."""
        copies = self._cells_of(layout).copies_of_block
        return max(1, MAX_STEP_COPIES // copies) if copies else layout.pages

    def begin_offload(self, pages: BlockPages, step: BlockStep, arena: Arena) -> Pending:
        """See ``Region.begin_offload``. Copies directly to the arena if that is registered with the device."""
        stream, copy, runs = (
            self.accelerator.streams.device_to_host,
            self.accelerator.copy,
            list(step_runs(pages, step)),
        )

        def finish() -> None:
            if there is None:
                held = staging.pinned.numpy()
                for at, offset, count in runs:
                    arena[offset : offset + count] = held[at : at + count]
            zero_padding(pages, step, arena)

        with self._step(pages, step) as (cells, staging, size), self._on(stream):
            self._to_staging(cells, staging)
            there = self._direct(arena, len(runs), size)
            if there is None:
                copy(staging.pinned[:size], staging.on_device[:size], stream)
            else:
                for at, offset, count in runs:
                    copy(there[offset : offset + count], staging.on_device[at : at + count], stream)
            staging.done.record(stream)
        return _PendingStep(self, staging, finish)

    def begin_restore(self, pages: BlockPages, step: BlockStep, arena: Arena) -> Pending:
        """See ``Region.begin_restore``. Copies directly from the arena if that is registered with the device."""
        stream, copy, runs = (
            self.accelerator.streams.host_to_device,
            self.accelerator.copy,
            list(step_runs(pages, step)),
        )
        with self._step(pages, step) as (cells, staging, size), self._on(stream):
            there = self._direct(arena, len(runs), size)
            if there is None:
                held = staging.pinned.numpy()
                for at, offset, count in runs:
                    held[at : at + count] = arena[offset : offset + count]
                copy(staging.on_device[:size], staging.pinned[:size], stream)
            else:
                for at, offset, count in runs:
                    copy(staging.on_device[at : at + count], there[offset : offset + count], stream)
            self._from_staging(cells, staging)
            staging.done.record(stream)
        return _PendingStep(self, staging, _nothing)

    def end_step(self, staging: Staging, finish: Callable[[], None]) -> None:
        """Wait for a step that has begun, and release its staging and its use of the region."""
        try:
            with self.accelerator.calling():
                self.accelerator.wait(staging.done)
            finish()
            self._stagings.give_back(staging)
        finally:
            self._release()

    def close(self) -> None:
        """See ``Region.close``; waits for copies on other threads, unless the device is lost."""
        with self._users:
            self._users.wait_for(lambda: not self._using or self.accelerator.lost is not None)
            parts, self._parts = self._parts, []
        if not parts:
            return
        self._unmap(parts)
        self.accelerator.retire(one.mapped for one in parts if one.mapped.keep is None)
        parts.clear()
        self.accelerator.let_go()
        self._on_closed()
        if self.kept is not None:
            self.kept.closed()

    def _unmap(self, parts: Sequence[RegionSegment]) -> None:
        if self.accelerator.lost is None:
            with self.accelerator.calling():
                for one in parts:
                    self.accelerator.vendor.unmap(one.mapped)

    def _bytes_at(self, start: int, size_bytes: int) -> torch.Tensor:
        """Return bytes that lie within one part."""
        part = self._parts[bisect.bisect_right(self._starts, start) - 1]
        return part.mapped.tensor[start - part.start : start - part.start + size_bytes]

    def _to_staging(self, parts: Sequence[Cells], staging: Staging) -> None:
        """Gather cells into a staging's buffer on the device, on the current stream."""
        for cells in parts:
            view, flat = self._views(cells, staging)
            runs = coalesce(cells.numbers, np.arange(len(cells.numbers)))
            if len(runs.pages) > FEW_RUNS:
                self.accelerator.torch.index_select(view, 0, staging.numbers(cells.numbers), out=flat)
                continue
            for source, at, count in zip(*(one.tolist() for one in runs), strict=True):
                flat[at : at + count].copy_(view[source : source + count], non_blocking=True)

    def _from_staging(self, parts: Sequence[Cells], staging: Staging) -> None:
        """Scatter a staging's buffer on the device to cells, on the current stream."""
        for cells in parts:
            view, flat = self._views(cells, staging)
            runs = coalesce(cells.numbers, np.arange(len(cells.numbers)))
            if len(runs.pages) > FEW_RUNS:
                view.index_copy_(0, staging.numbers(cells.numbers), flat)
                continue
            for to, at, count in zip(*(one.tolist() for one in runs), strict=True):
                view[to : to + count].copy_(flat[at : at + count], non_blocking=True)

    def _views(self, cells: Cells, staging: Staging) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the region and of the staging, ``(rows, words)``, in the widest words that both allow."""
        rows = int(cells.numbers.max()) + 1
        memory = self._bytes_at(cells.offset_bytes, rows * cells.cell_bytes)
        # A registered pool's storage may begin at any offset.
        alignment = int(memory.storage_offset()) | cells.cell_bytes | cells.flat_bytes | MAX_WORD_BYTES
        backend = self.accelerator.torch
        words = {1: backend.uint8, 2: backend.int16, 4: backend.int32}[alignment & -alignment]
        flat = staging.on_device[cells.flat_bytes : cells.flat_bytes + cells.size_bytes]
        return memory.view(words).view(rows, -1), flat.view(words).view(len(cells.numbers), -1)

    def _staged(self, side: PlanSide, first: int, stop: int, address: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first, stop, bytes, address) of ranges of segments that fit a staging."""
        sizes, pages = side.segment_bytes, len(side.ids)
        while first < stop:
            end = segments_that_fit(side, first, stop, self._stagings.staging_bytes)
            size = int(sizes[np.arange(first, end) // pages].sum())
            yield first, end, size, address
            first, address = end, address + size

    def _on(self, stream: torch.Stream) -> AbstractContextManager[torch.Stream]:
        return on_stream(self.accelerator.torch, stream)

    @contextmanager
    def _step(self, pages: BlockPages, step: BlockStep) -> Iterator[tuple[list[Cells], Staging, int]]:
        """Begin a step: yield its cells, a staging, and the bytes staged. The region is in use until ``end_step``."""
        parts = list(self._cells_of(pages.layout).of(step, pages.ids[step.first : step.stop]))
        size = step.staged_bytes(pages.layout)
        self._acquire()
        try:
            with self.accelerator.calling():
                yield parts, self._stagings.take_buffer(size, parts), size
        except BaseException:
            self._release()
            raise

    def _cells_of(self, layout: BlockLayout) -> BlockCells:
        cells = self._cells.get(layout)
        if cells is None:
            cells = self._cells[layout] = BlockCells(layout, self._starts)
        return cells

    def _direct(self, arena: Arena, runs: int, size_bytes: int) -> torch.Tensor | None:
        """Return the arena as a tensor that the device accesses; None if copies through pinned memory are better."""
        if runs > 1 and size_bytes < runs * MIN_RUN_BYTES:
            return None
        return self.accelerator.registered(arena.ctypes.data, len(arena))

    @contextmanager
    def _use(self) -> Iterator[None]:
        with self._count(), self.accelerator.calling():
            yield

    @contextmanager
    def _count(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        with self._users:
            self._using += 1

    def _release(self) -> None:
        with self._users:
            self._using -= 1
            self._users.notify_all()
