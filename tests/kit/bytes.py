"""A region's bytes, read and written as a whole on any device: for harnesses and oracles that compare all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.pools.devices.base import Region
from kvferry.pools.planning.copies import copy_one_by_one, total_segments
from kvferry.pools.planning.sides import PlanSide, make_side
from kvferry.protocol.codec import PageIds
from kvferry.protocol.manifests import Entry

Bytes = npt.NDArray[np.uint8]


def read_region(region: Region, start: int = 0, size_bytes: int | None = None) -> Bytes:
    """Return a copy of a region's bytes from ``start`` on, all of them by default: ``(size_bytes,)`` uint8."""
    size = region.size_bytes - start if size_bytes is None else size_bytes
    held = np.empty(size, np.uint8)
    region.gather(_one_page(start, size), 0, 1, held.ctypes.data, copy_one_by_one)
    return held


def write_region(region: Region, content: Bytes, start: int = 0) -> None:
    """Write ``(n,)`` uint8 to a region from ``start`` on."""
    held = np.ascontiguousarray(content)
    region.scatter(_one_page(start, len(held)), 0, 1, held.ctypes.data, copy_one_by_one)


def fill_region(region: Region, value: int) -> None:
    """Write one value to every byte of a region."""
    write_region(region, np.full(region.size_bytes, value, np.uint8))


def read_pages(region: Region, entries: Sequence[Entry], ids: PageIds) -> Bytes:
    """Return a copy of some pages of some entries: entry by entry, page by page."""
    side = make_side(entries, None, ids)
    held = np.empty(int(side.segment_bytes.sum()) * len(ids), np.uint8)
    region.gather(side, 0, total_segments(side), held.ctypes.data, copy_one_by_one)
    return held


def write_pages(region: Region, entries: Sequence[Entry], ids: PageIds, content: Bytes) -> None:
    """Write some pages of some entries, and no other byte: the reverse of ``read_pages``."""
    side, held = make_side(entries, None, ids), np.ascontiguousarray(content)
    assert len(held) == int(side.segment_bytes.sum()) * len(ids), "as many bytes as the pages have"
    region.scatter(side, 0, total_segments(side), held.ctypes.data, copy_one_by_one)


def _one_page(start: int, size_bytes: int) -> PlanSide:
    """Return a side whose only page is an extent of the region."""
    size = np.array([size_bytes], np.uint64)
    one, none = np.ones(1, np.uint64), np.zeros(1, np.uint64)
    return PlanSide(
        base=np.array([start], np.uint64),
        page_bytes=size,
        rows=one,
        row_bytes=size,
        slice_offset=none,
        slice_bytes=size,
        ids=np.zeros(1, np.int64),
    )
