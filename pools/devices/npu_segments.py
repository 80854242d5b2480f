"""Expandable segments of torch_npu's allocator: which physical handles a shared storage lies on, and in which order.

An allocator that grows its segments in place takes them from the driver in units of 2 or 20 MiB, a handle each. Tensors
that lie beside each other have a unit in common. A process may import a handle once, so all registered tensors of a
segment are one run of units, mapped side by side as they are in their owner. Source: the allocator's
``ExpandableSegment::share`` (torch_npu/csrc/core/npu/NPUCachingAllocator.cpp).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvferry.protocol.errors import InvalidFieldError

_HEAD: Final = struct.Struct("<BcQQ")
"""Version, kind, bytes of a unit, number of units; then a handle each."""
_HANDLE_BYTES: Final = 8
_VERSION: Final = 1
_KIND: Final = b"e"
_LEAST_BYTES: Final = 2 << 20
_MOST_BYTES: Final = 1 << 30


class Units(NamedTuple):
    """Units of a segment, side by side.

    Attributes:
        unit_bytes: of each.
        handles: the driver's, of each; they may be imported by any process.
    """

    unit_bytes: int
    handles: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all of them."""
        return self.unit_bytes * len(self.handles)


def units_of(handle: bytes) -> Units | None:
    """Return the units that torch's handle of a storage names; None: it is of another kind of memory.

    Raises:
        InvalidFieldError: it does not hold what it announces.
    """
    if len(handle) < _HEAD.size or not handle.startswith(bytes([_VERSION]) + _KIND):
        return None
    _, _, unit_bytes, count = _HEAD.unpack_from(handle)
    is_whole = len(handle) == _HEAD.size + count * _HANDLE_BYTES and count
    if not is_whole or not _LEAST_BYTES <= unit_bytes <= _MOST_BYTES or unit_bytes % _LEAST_BYTES:
        raise InvalidFieldError(f"a share of {count} units of {unit_bytes} bytes", field="share")
    return Units(unit_bytes, struct.unpack_from(f"<{count}Q", handle, _HEAD.size))


def joined(units: Units, others: Iterable[Units]) -> Units:
    """Return the longest run that these units are in, by what others have in common with them.

    Raises:
        InvalidFieldError: they contradict each other.
    """
    after: dict[int, int] = {}
    before: dict[int, int] = {}
    for one in (units, *others):
        for left, right in itertools.pairwise(one.handles if one.unit_bytes == units.unit_bytes else ()):
            if after.setdefault(left, right) != right or before.setdefault(right, left) != left:
                raise InvalidFieldError("the shares have the same units in other orders", field="share")
    start = units.handles[0]
    while start in before:
        start = before[start]
        if start == units.handles[0]:
            raise InvalidFieldError("the shares have the same units twice", field="share")
    run = [start]
    while run[-1] in after:
        run.append(after[run[-1]])
    return Units(units.unit_bytes, tuple(run))
