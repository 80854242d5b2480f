"""Regions on a card: pools that the daemon allocated, or that another process shares with this one.

Segments go through staging: a buffer on the card, in which they are gathered by one kernel an entry, and pinned host
memory, to and from which they travel in one copy. Each step is on the stream of its direction, in order; the caller's
thread looks at the last event, and the staging is used again only after it.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvferry.pools.cells import Cells, cells_of, segments_that_fit
from kvferry.pools.copies import CopyBlocks
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.vendor import Mapped, on_stream
from kvferry.pools.plan import Plan, PlanSide
from kvferry.pools.runs import coalesce
from kvferry.protocol.shares import Share

if TYPE_CHECKING:
    import torch

STAGING_BYTES: Final = 8 << 20
FEW_RUNS: Final = 8
"""Up to so many runs of cells, a copy a run costs less than uploading their numbers and a kernel."""

MAX_WORD_BYTES: Final = 4
"""Kernels that take rows by number are made for 32-bit elements; 64-bit ones may run on the card's slow cores."""

_identities = itertools.count(1)


class _Staging:
    """Buffers of one copy at a time: contiguous bytes on the card, the same in pinned memory, and cells' numbers."""

    def __init__(self, accelerator: Accelerator, size_bytes: int) -> None:
        self._accelerator = accelerator
        backend = self._torch = accelerator.torch
        self._device = backend.device(accelerator.kind, accelerator.index)
        self.size_bytes = size_bytes
        self.on_card = backend.empty(size_bytes, dtype=backend.uint8, device=self._device)
        self.pinned = accelerator.pinned(size_bytes, backend.uint8)
        self.done = backend.Event(device=self._device)
        self._numbers_pinned = backend.empty(0, dtype=backend.int64)
        self._numbers_on_card = backend.empty(0, dtype=backend.int64, device=self._device)
        self._used = 0
        self._known: dict[int, tuple[Any, torch.Tensor]] = {}

    def begin(self, parts: Sequence[Cells]) -> None:
        """Forget the numbers of the copy before, which is over; make room for those of all parts of the next one."""
        self._used, self._known = 0, {}
        room = sum({id(one.numbers): len(one.numbers) for one in parts}.values())
        if room > len(self._numbers_pinned):
            size = 1 << (room - 1).bit_length()
            self._numbers_pinned = self._accelerator.pinned(size, self._torch.int64)
            self._numbers_on_card = self._torch.empty(size, dtype=self._torch.int64, device=self._device)

    def numbers(self, numbers: np.typing.NDArray[np.int64]) -> torch.Tensor:
        """Return numbers on the card; the copy there is ordered on the current stream. The same array goes once."""
        known = self._known.get(id(numbers))
        if known is not None:
            return known[1]
        there: torch.Tensor
        here = slice(self._used, self._used + len(numbers))
        self._used = here.stop
        self._numbers_pinned[here].numpy()[:] = numbers
        there = self._numbers_on_card[here]
        there.copy_(self._numbers_pinned[here], non_blocking=True)
        self._known[id(numbers)] = (numbers, there)
        return there


class StagingPool:
    """The stagings of one card; as many as copies go on at a time, each kept for the next.

    Attributes:
        staging_bytes: how much goes at a time; more where one segment alone has more.
    """

    def __init__(self, accelerator: Accelerator, staging_bytes: int = STAGING_BYTES) -> None:
        self.staging_bytes = staging_bytes
        self._accelerator = accelerator
        self._free: list[_Staging] = []
        self._lock = threading.Lock()

    @contextmanager
    def take(self, size_bytes: int, parts: Sequence[Cells]) -> Iterator[_Staging]:
        """Lend a staging of at least this size for a copy of these cells; it comes back after that has ended."""
        with self._lock:
            staging = self._free.pop() if self._free else None
        if staging is None or staging.size_bytes < size_bytes:
            staging = _Staging(self._accelerator, max(size_bytes, self.staging_bytes))
        staging.begin(parts)
        yield staging  # not given back where the card failed: a copy may still use it
        with self._lock:
            self._free.append(staging)


class RegionPart(NamedTuple):
    """Memory mapped in one go, and where in the region it begins. No entry of a pool lies in two parts."""

    start: int
    mapped: Mapped


class AcceleratorRegion:
    """See ``Region``. The mapping stays until ``close``, after which no tensor over it may be used.

    Attributes:
        accelerator: the card.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parts: Sequence[RegionPart],
        size_bytes: int,
        stagings: StagingPool,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Own what is mapped from now on; ``on_closed`` is called once it is given back."""
        self.accelerator = accelerator
        self.device = accelerator.name
        self.size_bytes = size_bytes
        self._parts = sorted(parts, key=lambda part: part.start)
        self._starts = [part.start for part in self._parts]
        self._stagings = stagings
        self._on_closed = on_closed
        self._identity = next(_identities)
        self._users = threading.Condition()
        self._using = 0

    def __repr__(self) -> str:
        """Show size and state."""
        state = f"in use by {self._using}" if self._parts else "closed"
        return f"<AcceleratorRegion {self.device} {self.size_bytes} bytes {state}>"

    @property
    def identity(self) -> int:
        """See ``Region.identity``; of this process's regions only."""
        return self._identity

    @property
    def tensor(self) -> torch.Tensor:
        """Return the region as ``(size_bytes,)`` uint8 on the card, valid until ``close``; only of one part."""
        [part] = self._parts
        return part.mapped.tensor[: self.size_bytes]

    def share(self, process_id: int) -> Share:
        """Return what that process needs to map the region. Never log it."""
        [part] = self._parts
        with self.accelerator.calling():
            return self.accelerator.vendor.share(part.mapped, process_id)

    def gather(self, side: PlanSide, first: int, stop: int, out_address: int, copy: CopyBlocks) -> None:
        """See ``Region.gather``."""
        del copy
        stream = self.accelerator.streams.device_to_host
        for begin, end, size, address in self._pieces(side, first, stop, out_address):
            parts = list(cells_of(side, begin, end))
            with self._use(), self._stagings.take(size, parts) as staging, self._on(stream):
                self._to_staging(parts, staging)
                there = self.accelerator.registered(address, size)
                self.accelerator.copy(staging.pinned[:size] if there is None else there, staging.on_card[:size], stream)
                staging.done.record(stream)
                self.accelerator.wait(staging.done)
                if there is None:
                    ctypes.memmove(address, staging.pinned.data_ptr(), size)

    def scatter(self, side: PlanSide, first: int, stop: int, in_address: int, copy: CopyBlocks) -> None:
        """See ``Region.scatter``."""
        del copy
        stream = self.accelerator.streams.host_to_device
        for begin, end, size, address in self._pieces(side, first, stop, in_address):
            parts = list(cells_of(side, begin, end))
            with self._use(), self._stagings.take(size, parts) as staging, self._on(stream):
                there = self.accelerator.registered(address, size)
                if there is None:
                    ctypes.memmove(staging.pinned.data_ptr(), address, size)
                self.accelerator.copy(staging.on_card[:size], staging.pinned[:size] if there is None else there, stream)
                self._from_staging(parts, staging)
                staging.done.record(stream)
                self.accelerator.wait(staging.done)

    def copy_from(self, source: AcceleratorRegion, plan: Plan, first: int, stop: int) -> None:
        """Copy segments ``[first, stop)`` of a plan from another region of the same card, without the host.

        Raises:
            DeviceLostError: the card failed.
        """
        assert source.accelerator is self.accelerator, (source, self)
        stream = self.accelerator.streams.device_to_device
        for begin, end, size, _ in self._pieces(plan.source, first, stop, 0):
            ours, theirs = (list(cells_of(side, begin, end)) for side in (plan.destination, plan.source))
            staged = self._stagings.take(size, [*ours, *theirs])
            with source._use(), self._count(), staged as staging, self._on(stream):
                source._to_staging(theirs, staging)
                self._from_staging(ours, staging)
                staging.done.record(stream)
                self.accelerator.wait(staging.done)

    def close(self) -> None:
        """See ``Region.close``; waits for copies on other threads, unless the card is lost."""
        with self._users:
            self._users.wait_for(lambda: not self._using or self.accelerator.lost is not None)
            parts, self._parts = self._parts, []
        if parts and self.accelerator.lost is None:
            with self.accelerator.calling():
                for part in parts:
                    self.accelerator.vendor.unmap(part.mapped)
        if parts:
            self._on_closed()

    def _bytes_at(self, start: int, size_bytes: int) -> torch.Tensor:
        """Return bytes that lie in one part."""
        part = self._parts[bisect.bisect_right(self._starts, start) - 1]
        return part.mapped.tensor[start - part.start : start - part.start + size_bytes]

    def _to_staging(self, parts: Sequence[Cells], staging: _Staging) -> None:
        """Gather cells into a staging's bytes on the card, on the current stream."""
        for cells in parts:
            view, flat = self._views(cells, staging)
            runs = coalesce(cells.numbers, np.arange(len(cells.numbers)))
            if len(runs.pages) > FEW_RUNS:
                self.accelerator.torch.index_select(view, 0, staging.numbers(cells.numbers), out=flat)
                continue
            for source, at, count in zip(*(one.tolist() for one in runs), strict=True):
                flat[at : at + count].copy_(view[source : source + count], non_blocking=True)

    def _from_staging(self, parts: Sequence[Cells], staging: _Staging) -> None:
        """Scatter a staging's bytes on the card to cells, on the current stream."""
        for cells in parts:
            view, flat = self._views(cells, staging)
            runs = coalesce(cells.numbers, np.arange(len(cells.numbers)))
            if len(runs.pages) > FEW_RUNS:
                view.index_copy_(0, staging.numbers(cells.numbers), flat)
                continue
            for to, at, count in zip(*(one.tolist() for one in runs), strict=True):
                view[to : to + count].copy_(flat[at : at + count], non_blocking=True)

    def _views(self, cells: Cells, staging: _Staging) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a view of the region and one of the staging, ``(rows, words)``, in the widest words that fit both."""
        rows = int(cells.numbers.max()) + 1
        memory = self._bytes_at(cells.offset_bytes, rows * cells.cell_bytes)
        together = int(memory.storage_offset()) | cells.cell_bytes | cells.flat_bytes | MAX_WORD_BYTES  # any, if lent
        backend = self.accelerator.torch
        words = {1: backend.uint8, 2: backend.int16, 4: backend.int32}[together & -together]
        flat = staging.on_card[cells.flat_bytes : cells.flat_bytes + cells.size_bytes]
        return memory.view(words).view(rows, -1), flat.view(words).view(len(cells.numbers), -1)

    def _pieces(self, side: PlanSide, first: int, stop: int, address: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first, stop, bytes, address) of stretches that fit a staging."""
        sizes, pages = side.segment_bytes, len(side.ids)
        while first < stop:
            end = segments_that_fit(side, first, stop, self._stagings.staging_bytes)
            size = int(sizes[np.arange(first, end) // pages].sum())
            yield first, end, size, address
            first, address = end, address + size

    def _on(self, stream: torch.Stream) -> AbstractContextManager[torch.Stream]:
        return on_stream(self.accelerator.torch, stream)

    @contextmanager
    def _use(self) -> Iterator[None]:
        with self._count(), self.accelerator.calling():
            yield

    @contextmanager
    def _count(self) -> Iterator[None]:
        with self._users:
            self._using += 1
        try:
            yield
        finally:
            with self._users:
                self._using -= 1
                self._users.notify_all()
