"""Copies of many blocks between addresses of this process, with or without their checksums.

The work is done by a small C module, ``native_kernel.c``, which says how. Where it was not built, or is switched off
with ``KVFERRY_COPY_KERNEL=python``, Python does the same, several times slower: ``DESCRIPTION`` says which and why.
Checksums are XXH3-64: of libxxhash where the host has it, in the pass that copies, else of the xxhash package, which
every installation has, in a second one; all give the same values. Callers have checked every address: one that is not
mapped ends the process, as it does with memcpy.

Copies are lists: ``(n, 3)`` uint64 of source address, destination address and size in bytes, or ``(n, 6)`` with the
number of rows, and the distance in bytes from one row to the next at the source and at the destination. They are made
in any order: no destination may overlap another one, or a source.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvferry.protocol.errors import ConfigError, OutOfMemoryError

Copies: TypeAlias = npt.NDArray[np.uint64]
"""``(n, 3)`` or ``(n, 6)`` uint64, see above; any strides. Sources and destinations do not overlap."""

Digests: TypeAlias = npt.NDArray[np.uint64]
"""``(n,)`` uint64, XXH3-64."""

HashState: TypeAlias = Any
"""What a hash has seen so far: made by ``new_hash``, and of use for the kernel that made it alone."""

GateState: TypeAlias = Any
CopyThreadsState: TypeAlias = Any
"""Of a ``Gate``, and of a ``CopyThreads``, for the kernel that made it."""

Entries: TypeAlias = npt.NDArray[np.uint64]
"""``(entries, 8)`` uint64, see ``list_segments``."""

Ids: TypeAlias = npt.NDArray[np.int64]
"""``(pages,)`` int64, page ids."""

Ends: TypeAlias = npt.NDArray[np.int64]
"""``(m,)`` int64, ascending: each digest is of the rows since the last one up to this row."""

SWITCH: Final = "KVFERRY_COPY_KERNEL"
LIBRARIES: Final = ("libxxhash.so.0", str(getattr(getattr(xxhash, "_xxhash", None), "__file__", "")))
"""Where XXH3-64 is looked for; the package's own module has it under the same names."""


class Kernel(Protocol):
    """One of the two kernels."""

    def copy(self, copies: Copies) -> None:
        """Copy, in any order. Releases the GIL where it takes more than a few microseconds.

        Raises:
            TypeError: not an array of that form.
        """

    def list_segments(
        self,
        copies: Copies,
        entries: Entries,
        from_ids: Ids | None,
        to_ids: Ids | None,
        counts: Ids | None,
        first: int,
        from_at: int,
        to_at: int,
        /,
    ) -> int:
        """Fill in the copies of segments from ``first`` on; return how many rows those are. See ``list_segments``."""

    def new_hash(self) -> HashState:
        """Return the state of a hash, for ``copy_hashed``; one thread at a time may use it."""

    def copy_hashed(self, copies: Copies, ends: Ends, digests: Digests, state: HashState, /) -> None:
        """Copy, in any order, and hash the sources in the order of the list; a row with destination 0 is hashed alone.

        Args:
            copies: what to copy.
            ends: where digests end; what comes after the last one continues with the next call's rows.
            digests: ``(m,)``, filled in.
            state: what a hash has seen so far.
        """

    def new_gate(self) -> GateState:
        """Return the state of a gate, which is open."""

    def shut_gate(self, gate: GateState, /) -> None:
        """Shut a gate."""

    def open_gate(self, gate: GateState, /) -> None:
        """Open a gate, and wake who waits at it."""

    def standing_at(self, gate: GateState, /) -> int:
        """Return how many threads stand still at a gate."""

    def give_way(self, gate: GateState | None, patience_s: float, /) -> None:
        """Let the calling thread's copies wait while a gate is shut, until so long after a call began; None: never."""


class CopyThreadsKernel(Protocol):
    """What the native kernel has besides: copy threads. See ``CopyThreads``."""

    def new_copy_threads(self, threads: int, scheduling: bytes, /) -> CopyThreadsState:
        """Return so many threads that can copy for others. See ``new_copy_threads`` below."""

    def serve(self, copy_threads: CopyThreadsState | None, threads: int, /) -> None:
        """Let so many copy threads make the large copies of the calling thread; None: it makes them itself."""

    def submit(
        self,
        copy_threads: CopyThreadsState,
        copies: Copies,
        threads: int,
        token: object,
        /,
        *hashed: Ends | Digests | HashState,
    ) -> None:
        """Let so many copy threads copy, and return at once; ``hashed``: those three of ``Kernel.copy_hashed``."""

    def told_by(self, copy_threads: CopyThreadsState, /) -> int:
        """Return the descriptor that can be read when something that was submitted has ended."""

    def take_ended(self, copy_threads: CopyThreadsState, /) -> list[Any]:
        """Return the tokens of what was submitted and has ended since the last time."""

    def withdraw(self, copy_threads: CopyThreadsState, token: object, /) -> None:
        """End what was submitted with a token; None: end all, and wait for it."""


class PythonKernel:
    """One memmove, or one copy of numpy's, a row. See ``Kernel``."""

    def copy(self, copies: Copies) -> None:
        """See ``Kernel``."""
        if copies.shape[1:] == (6,):
            for source, destination, size, rows, source_step, step in copies.tolist():
                _rows_at(destination, rows, step, size)[...] = _rows_at(source, rows, source_step, size)
            return
        for source, destination, size in copies.tolist():
            ctypes.memmove(destination, source, size)

    def list_segments(
        self,
        copies: Copies,
        entries: Entries,
        from_ids: Ids | None,
        to_ids: Ids | None,
        counts: Ids | None,
        first: int,
        from_at: int,
        to_at: int,
        /,
    ) -> int:
        """See ``Kernel``."""
        lengths = {len(ids) for ids in (from_ids, to_ids, counts) if ids is not None}
        pages = max(lengths, default=0)
        if len(lengths) > 1 or not 0 <= first <= first + len(copies) <= len(entries) * pages:
            raise ValueError("there are no such segments")
        numbers, positions = np.divmod(np.arange(first, first + len(copies)), pages)
        its = entries[numbers]
        for column, ids, at in ((0, from_ids, from_at), (1, to_ids, to_at)):
            its_pages = (positions if ids is None else ids[positions]).astype(np.uint64)
            copies[:, column] = its[:, 2 * column] + its[:, 2 * column + 1] * its_pages + np.uint64(at % (1 << 64))
        copies[:, 2:] = its[:, 4 : 2 + copies.shape[1]]
        if counts is not None:
            copies[:, 2] *= counts[positions].astype(np.uint64)
        return len(copies) if counts is not None or copies.shape[1] == 6 else _join(copies)  # noqa: PLR2004  columns

    def new_hash(self) -> xxhash.xxh3_64:
        """See ``Kernel``."""
        return xxhash.xxh3_64()

    def copy_hashed(self, copies: Copies, ends: Ends, digests: Digests, state: xxhash.xxh3_64, /) -> None:
        """See ``Kernel``."""
        first = 0
        for number, end in enumerate(ends.tolist()):
            self._hash(copies[first:end], state)
            digests[number], first = state.intdigest(), end
            state.reset()
        self._hash(copies[first:], state)

    def new_gate(self) -> GateState:
        """See ``Kernel``."""

    def shut_gate(self, gate: GateState, /) -> None:
        """See ``Kernel``."""

    def open_gate(self, gate: GateState, /) -> None:
        """See ``Kernel``."""

    def standing_at(self, gate: GateState, /) -> int:
        """Return 0. See ``Kernel``."""
        del gate
        return 0

    def give_way(self, gate: GateState | None, patience_s: float, /) -> None:
        """Do nothing: a call that has begun goes on. See ``Kernel``."""

    def _hash(self, copies: Copies, state: xxhash.xxh3_64) -> None:
        for source, destination, size in _rows(copies):
            state.update((ctypes.c_char * size).from_address(source))
            if destination:
                ctypes.memmove(destination, source, size)


class SecondPassKernel(PythonKernel):
    """The C module, which has no hash here: hashed are the sources once they are copied. See ``Kernel``."""

    def __init__(self, native: Kernel) -> None:
        self.copy = native.copy  # type: ignore[method-assign]
        self.list_segments = native.list_segments  # type: ignore[method-assign]
        self.new_gate = native.new_gate  # type: ignore[method-assign]
        self.shut_gate = native.shut_gate  # type: ignore[method-assign]
        self.open_gate = native.open_gate  # type: ignore[method-assign]
        self.standing_at = native.standing_at  # type: ignore[method-assign]
        self.give_way = native.give_way  # type: ignore[method-assign]

    def _hash(self, copies: Copies, state: xxhash.xxh3_64) -> None:
        self.copy(copies[copies[:, 1] != 0])
        for source, _, size in _rows(copies):
            state.update((ctypes.c_char * size).from_address(source))


class _Memory:
    """Memory at an address, for numpy's array interface."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _rows_at(address: int, rows: int, step_bytes: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a view of rows at an address, ``(rows, size_bytes)`` uint8; the memory must outlive it."""
    interface = {"data": (address, False), "shape": (rows, size_bytes), "strides": (step_bytes, 1), "typestr": "|u1"}
    return np.asarray(_Memory({**interface, "version": 3}))


def _join(copies: Copies) -> int:
    """Make one row of those that adjoin on both sides; return how many rows there are then."""
    goes_on = np.zeros(len(copies), np.bool_)
    goes_on[1:] = (copies[1:, :2] == copies[:-1, :2] + copies[:-1, 2:]).all(axis=1)
    starts = np.flatnonzero(~goes_on)
    sizes = np.add.reduceat(copies[:, 2], starts)
    copies[: len(starts)] = copies[starts]
    copies[: len(starts), 2] = sizes
    return len(starts)


def _rows(copies: Copies) -> list[tuple[int, int, int]]:
    """Return (source, destination, bytes) of each row."""
    if copies.shape[1:] == (3,):
        return [tuple(one) for one in copies.tolist()]
    return [
        (source + row * source_step, (destination + row * step) if destination else 0, size)
        for source, destination, size, rows, source_step, step in copies.tolist()
        for row in range(rows)
    ]


class Description(NamedTuple):
    """How pages are copied.

    Attributes:
        stores: the widest of its stores, ``avx512``, ``avx2``, ``sse2``, ``stnp`` or ``memcpy``; ``python`` without it.
            Which kernel variant is taken with them, or whether memcpy is faster, large calls find out while they copy.
        hash_from: where checksums are computed: the path of a library, or ``xxhash``, the package.
        why_not: why the C module does not copy; empty if it does.
    """

    stores: str
    hash_from: str
    why_not: str = ""

    @property
    def native(self) -> bool:
        """Return whether the C module copies."""
        return not self.why_not


def check_switch() -> None:
    """Check what the environment says of the kernel; what it does not understand switches nothing off.

    Raises:
        ConfigError: it is neither empty nor ``python``.
    """
    said = os.environ.get(SWITCH, "")
    if said not in {"", "python"}:
        raise ConfigError(f"{SWITCH}={said}: must be python, or not set", field=SWITCH)


def _choose() -> tuple[Kernel, Description, CopyThreadsKernel | None]:
    """Return the best kernel here; and what has copy threads, if anything does."""
    if os.environ.get(SWITCH) == "python":
        return PythonKernel(), Description("python", "xxhash", f"it is switched off by {SWITCH}=python"), None
    try:
        from kvferry.pools import native_kernel as native  # noqa: PLC0415
    except ImportError as cause:
        return PythonKernel(), Description("python", "xxhash", f"it was not built for here: {cause}"), None
    if not hasattr(native, "list_segments"):  # what it learned last
        return PythonKernel(), Description("python", "xxhash", "it is that of an older kvferry"), None
    found = next((path for path in LIBRARIES if path and native.load_hash(path)), None)
    if found is None:
        return SecondPassKernel(native), Description(native.variants()[0], "xxhash"), native
    return native, Description(native.variants()[0], found), native


_KERNEL, DESCRIPTION, _COPY_THREADS = _choose()


def copy(copies: Copies) -> None:
    """Copy, in any order; see ``Kernel.copy``."""
    _KERNEL.copy(copies)


def list_segments(
    entries: Entries,
    from_ids: Ids | None,
    to_ids: Ids | None,
    segments: tuple[int, int],
    at: tuple[int, int],
    *,
    counts: Ids | None = None,
    with_rows: bool = False,
) -> Copies:
    """Return the copies of some segments: a segment is one page of one entry, numbered entry by entry.

    Args:
        entries: ``(entries, 8)`` uint64, C-contiguous: the address of an entry's page 0 and the distance from page to
            page at the source, the same at the destination, and of a segment the bytes, rows and the two distances
            between rows as in ``Copies``.
        from_ids: ``(pages,)`` int64, the source's pages; None: they are numbered in order.
        to_ids: the destination's; at most one of both is None.
        segments: the first one, and the one after the last.
        at: what is added to the source's addresses, and to the destination's; may be negative.
        counts: ``(pages,)`` int64, of runs: how many pages each stands for, itself and those after it; None: one each.
        with_rows: whether the copies have six columns. Else single pages that adjoin on both sides share a row, of a
            MiB at most, or in Python of any size.

    Raises:
        ValueError: there are no such segments.
    """
    first, stop = segments
    copies = np.empty((stop - first, 6 if with_rows else 3), np.uint64)
    rows = _KERNEL.list_segments(copies, entries, from_ids, to_ids, counts, first, *at)
    return copies if rows == len(copies) else copies[:rows]


def copy_hashed(copies: Copies, ends: Ends, state: HashState = None) -> Digests:
    """Copy as ``copy`` does, and return the digest of the sources up to each end; see ``Kernel.copy_hashed``.

    Args:
        copies: what to copy; where the destination is 0, a row is only hashed.
        ends: ``(m,)`` int64, row numbers, ascending.
        state: of ``new_hash``, for digests that begin or end in other calls; by default none does.
    """
    digests = np.zeros(len(ends), np.uint64)
    _KERNEL.copy_hashed(copies, ends, digests, _KERNEL.new_hash() if state is None else state)
    return digests


def copy_with_digest(copies: Copies) -> int:
    """Copy as ``copy_hashed`` does, and return the digest of all sources."""
    return int(copy_hashed(copies, np.array([len(copies)]))[0])


def new_hash() -> HashState:
    """Return the state of a hash that goes over several calls; one thread at a time may use it."""
    return _KERNEL.new_hash()


class Gate:
    """Stops copies that have begun, after a MiB at most, or 8 KiB that are hashed, while something more urgent copies.

    The Python kernel knows no gates: what has begun there goes on.
    """

    def __init__(self) -> None:
        self._state = _KERNEL.new_gate()

    def __repr__(self) -> str:
        """Show how many threads stand at it."""
        return f"<Gate standing={self.standing}>"

    @property
    def standing(self) -> int:
        """Return how many threads stand still in the middle of a copy."""
        return _KERNEL.standing_at(self._state)

    def shut(self) -> None:
        """Stop the copies of threads that give way."""
        _KERNEL.shut_gate(self._state)

    def open(self) -> None:
        """Let them go on."""
        _KERNEL.open_gate(self._state)

    def giving_way(self, patience_s: float) -> contextlib.AbstractContextManager[None]:
        """Let the calling thread's copies wait in this block while the gate is shut, until so long after each began.

        They also yield their processor every MiB, to whoever waits for it.
        """
        return _GivingWay(self._state, patience_s)


class _GivingWay(contextlib.AbstractContextManager[None]):
    """A block of ``Gate.giving_way``; ``contextlib.contextmanager`` takes three times as long."""

    def __init__(self, gate: GateState, patience_s: float) -> None:
        self._gate = gate
        self._patience_s = patience_s

    def __enter__(self) -> None:
        """Begin to give way."""
        _KERNEL.give_way(self._gate, self._patience_s)

    def __exit__(self, *raised: object) -> None:
        """End it."""
        _KERNEL.give_way(None, 0.0)


class Hashing(NamedTuple):
    """What is hashed in the pass that copies, for ``CopyThreads.submit``; see ``Kernel.copy_hashed``."""

    ends: Ends
    digests: Digests
    state: HashState


class CopyThreads:
    """Threads that make the large copies of others, who wait meanwhile, or are told later; several share one call.

    They never have Python's lock: so they may run when nobody else wants to, and whoever wants that lock does not wait
    until they do.
    """

    def __init__(self, kernel: CopyThreadsKernel, state: CopyThreadsState) -> None:
        """Use ``new_copy_threads``."""
        self._kernel = kernel
        self._state = state

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Make the large copies of the calling thread in this block, as ``serve`` says there."""
        try:
            yield
        finally:
            self._kernel.serve(None, 1)

    def serve(self, threads: int) -> None:
        """Let so many of its threads make the next large copies of the calling thread, in a block of ``serving``."""
        self._kernel.serve(self._state, threads)

    def submit(self, copies: Copies, threads: int, token: object, hashed: Hashing | None = None) -> None:
        """Let so many of its threads copy, and return at once; ``take_ended`` returns the token at the end.

        The arrays must not change before that. ``hashed``: only where it ``hashes``.
        """
        self._kernel.submit(self._state, copies, threads, token, *(hashed or ()))

    @property
    def hashes(self) -> bool:
        """Return whether its threads hash: the native kernel has found a library that does."""
        return not isinstance(_KERNEL, PythonKernel)

    def fileno(self) -> int:
        """Return a descriptor that can be read when something that was submitted has ended."""
        return self._kernel.told_by(self._state)

    def take_ended(self) -> list[Any]:
        """Return the tokens of what was submitted and has ended since the last time."""
        return self._kernel.take_ended(self._state)

    def withdraw(self, token: object) -> None:
        """End what was submitted with this token, some of it not copied, as soon as what threads are at is."""
        self._kernel.withdraw(self._state, token)

    def withdraw_all(self) -> None:
        """End all that was submitted; return when no byte of it moves any more. Not beside another call of this."""
        self._kernel.withdraw(self._state, None)


def new_copy_threads(threads: int, scheduling: bytes) -> CopyThreads | None:
    """Return so many copy threads; None where Python copies, which has its lock.

    Args:
        threads: 1 to 64.
        scheduling: of its threads, as ``sched_setattr`` takes it; empty: as the calling thread.

    Raises:
        OutOfMemoryError: the system gives no more memory, or threads.
    """
    if _COPY_THREADS is None:
        return None
    try:
        return CopyThreads(_COPY_THREADS, _COPY_THREADS.new_copy_threads(threads, scheduling))
    except MemoryError as cause:
        raise OutOfMemoryError(
            f"no {threads} threads that copy", remedy="allow more threads (TasksMax, ulimit -u), descriptors or memory"
        ) from cause


def digest(*extents: tuple[int, int]) -> int:
    """Return the digest of some extents of memory together, each its address and its size in bytes."""
    rows = np.array([(address, 0, size_bytes) for address, size_bytes in extents], np.uint64)
    return int(copy_hashed(rows, np.array([len(rows)]))[0])
