"""Host memory that an engine makes itself, in a form that a daemon can map: what ``register_pool`` takes there."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvferry.clients.arguments import sequence, text, whole
from kvferry.clients.elements import array_dtype, import_torch, torch_dtype
from kvferry.clients.exclusive_use import OfOneProcess
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.geometry import dtype_bytes
from kvferry.protocol.errors import InvalidFieldError, OutOfMemoryError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 4096
"""Where each array begins."""

_live: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
_live_lock = threading.Lock()


class SharedMemory(OfOneProcess):
    """Zeroed host memory of a fixed size, by a descriptor that can be passed on.

    Arrays are taken from it one after another, by ``array`` or ``tensor``, or cut out of ``view`` by hand. They hold
    it; a forked child does not have it. It uses huge pages if the host allows them for shared memory.
    """

    def __init__(self, size_bytes: int) -> None:
        """Make it; the host's memory is taken as it is touched.

        Raises:
            InvalidFieldError: the size is no whole number above 0.
            OutOfMemoryError: the host does not allow so much.
        """
        size_bytes = whole(size_bytes, "size_bytes", least=1)
        self.region = HostRegion.create("shared-memory", size_bytes, "transparent")
        self.address = self.region.address
        self._used = 0
        with _live_lock:
            _live.add(self)

    def __repr__(self) -> str:
        """Show the size."""
        return f"<SharedMemory {self._used} of {self.region.size_bytes} bytes used>"

    @property
    def size_bytes(self) -> int:
        """Return its bytes."""
        return self.region.size_bytes

    def view(self) -> npt.NDArray[np.uint8]:
        """Return all of it as ``(size_bytes,)`` uint8, without a copy."""
        view = self.region.view()
        weakref.finalize(view, _let_go, self).atexit = False  # numpy's views of this one are its, too
        return view

    def array(self, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
        """Return an array of the next bytes; of a dtype that numpy has not, its bits, as ``AttachedPool.array`` does.

        Raises:
            InvalidFieldError: no such dtype or shape.
            OutOfMemoryError: fewer bytes are left.
        """
        held, sizes = self._take(shape, dtype)
        return held.view(array_dtype(dtype)).reshape(sizes)

    def tensor(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Return a CPU tensor of the next bytes.

        Raises:
            InvalidFieldError: no such dtype or shape.
            OutOfMemoryError: fewer bytes are left.
            TorchMissingError: torch is not installed, or older than the dtype.
        """
        wanted = torch_dtype(text(dtype, "dtype"))
        held, sizes = self._take(shape, dtype)
        made: torch.Tensor = import_torch().from_numpy(held).view(wanted).reshape(sizes)
        return made

    def close(self) -> None:
        """Close the descriptor: no array can be registered any more. The memory itself goes with the last array.

        Registered pools stay registered. Without this the descriptor also goes with the last array.
        """
        with _live_lock:
            _live.discard(self)
        self.region.close()

    def _take(self, shape: Sequence[int], dtype: str) -> tuple[npt.NDArray[np.uint8], tuple[int, ...]]:
        sizes = tuple(whole(one, "shape", least=1) for one in sequence(shape, "sizes", "shape"))
        wanted = math.prod(sizes) * dtype_bytes(text(dtype, "dtype"))
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + wanted > self.size_bytes:
            raise OutOfMemoryError(
                f"{wanted} bytes asked for, {max(0, self.size_bytes - start)} are left", field="shape"
            )
        self._used = start + wanted
        return self.view()[start : start + wanted], sizes


class InheritedMemory(SharedMemory):
    """This process's mapping of a pool whose daemon has ended, to be registered at the next one.

    It owns the region. Arrays are cut out of ``view`` by hand: all of it is used.
    """

    def __init__(self, region: HostRegion) -> None:
        """Take the region."""
        self.region = region
        self.address = region.address
        self._used = region.size_bytes
        with _live_lock:
            _live.add(self)


def _let_go(memory: SharedMemory) -> None:
    """Do nothing: until then an array holds the memory."""


def memory_at(start: int, stop: int) -> SharedMemory | None:
    """Return the shared memory of this process that has these bytes, all of them; None without one."""
    with _live_lock:
        live = list(_live)
    for memory in live:
        is_inside = memory.address <= start and stop <= memory.address + memory.size_bytes
        if is_inside and memory.region.is_ours:
            return memory
    return None


def check_memory(name: str, start: int, stop: int, before: SharedMemory | None) -> SharedMemory:
    """Return the shared memory that an array of a pool lies in, the same one as the arrays before it.

    Raises:
        InvalidFieldError: it lies elsewhere.
    """
    found = memory_at(start, stop)
    if found is None or before not in {None, found}:
        what = "lies outside of" if found is None else "lies in another"
        raise InvalidFieldError(
            f"{name} {what} kvferry.clients.SharedMemory: on the host, take all arrays of a pool from one, by its "
            "array() or tensor()",
            field=f"{name}.storage",
        )
    return found
