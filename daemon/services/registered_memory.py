"""Checks of memory that engines register: against the pool's manifest, and against other pools in the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvferry.daemon.devices.registry import RegisteredSegment
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.arrays import Held, arrays_of, check_apart, check_form, check_free, check_storage, placed_at
from kvferry.pools.planning.manifest import each_array
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.pool_messages import RegisteredArrays
from kvferry.protocol.session_stream import Share, TorchShare


class MemoryInUse(NamedTuple):
    """A region and the manifest of a pool whose arrays lie in it; the pool may be coming or leaving."""

    region: Region
    manifest: Manifest


def placed_in(
    region: HostRegion, manifest: Manifest, said: Sequence[RegisteredArrays], in_use: Iterable[MemoryInUse]
) -> Manifest:
    """Return the manifest of a pool in a registered region, with its arrays at the offsets that the engine gives.

    Raises:
        InvalidFieldError: an array is not exactly what the spec needs, does not lie within the memory, or has bytes of
            another array or another pool; the error names the array.
        DuplicateEntryError, UncoveredEntryError: some entry is in two arrays, or in none.
    """
    arrays = arrays_of(manifest, [(one.component, one.role, one.layer) for one in said])
    held, offsets = [], []
    for array, one in zip(arrays, said, strict=True):
        check_form(array, one.shape, one.strides, one.dtype)
        if one.offset_bytes is None:
            raise InvalidFieldError(
                f"{array.name} does not say where in the memory it begins", field=f"{array.name}.offset_bytes"
            )
        check_storage(array, one.offset_bytes, region.size_bytes)
        offsets.append(one.offset_bytes)
        held.append(Held(one.offset_bytes, one.offset_bytes + array.size_bytes, array.name))
    check_apart(held)
    identity = region.identity
    check_free(
        held,
        [
            Held(entry.base, entry.base + entry.pages * entry.page_bytes, entry.name)
            for other in in_use
            if isinstance(other.region, HostRegion) and other.region.identity == identity
            for entry in each_array(other.manifest.entries)
        ],
    )
    return placed_at(manifest, arrays, offsets, region.size_bytes)


def registered_segments(
    manifest: Manifest, said: Sequence[RegisteredArrays], shares: Sequence[Share]
) -> list[RegisteredSegment]:
    """Return the registered tensors, checked against the manifest; the driver checks the memory itself later."""
    arrays = arrays_of(manifest, [(one.component, one.role, one.layer) for one in said])
    parts = []
    for array, one, share in zip(arrays, said, shares, strict=True):
        check_form(array, one.shape, one.strides, one.dtype)
        if not isinstance(share, TorchShare):  # memory by its driver handle could be a pool of ours
            raise InvalidFieldError(
                f"{array.name} is registered by {share!r}, not as a tensor", field=f"{array.name}.share"
            )
        check_storage(array, share.offset_bytes, share.storage_bytes)
        parts.append(RegisteredSegment(array, share))
    return parts
