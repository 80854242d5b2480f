"""The arrays of a pool as engines have them: all layers of a role one after another, or one of them.

What each must be follows from the manifest's entries alone, here and nowhere else: for the tensors that a pool gives to
engines, and for those that engines register to the daemon, which both sides of the wire compare with it. Knows no
torch.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvferry.pools.planning.geometry import dtype_bytes
from kvferry.pools.planning.manifest import each_array, key_of, windows_of
from kvferry.protocol.errors import DuplicateEntryError, InvalidFieldError, PoolExistsError, UncoveredEntryError
from kvferry.protocol.manifests import Entry, Manifest


class Array(msgspec.Struct, frozen=True, kw_only=True):
    """One array: contiguous, from byte ``start`` of the pool's region on.

    Attributes:
        name: ``component/role`` of all layers, ``component/role/layer`` of one.
        start: in bytes.
        shape: ``(layers, *shape of an entry)`` of all layers, an entry's of one.
        dtype: by torch's name.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all elements."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """Return how many elements lie between two neighbours of each dimension."""
        steps = itertools.accumulate(reversed(self.shape[1:]), int.__mul__, initial=1)
        return tuple(steps)[::-1]


class Held(NamedTuple):
    """Bytes ``[start, stop)`` of some memory, and which array lies there."""

    start: int
    stop: int
    name: str


def array_of(manifest: Manifest, component: str, role: str, layer: int | None = None) -> Array:
    """Return what the array of a role must be, of all its layers or of one.

    Raises:
        InvalidFieldError: the pool has no such entries, or they are no array: not evenly apart, or of unlike shapes.
    """
    found = [e for e in manifest.entries if (e.component, e.role) == (component, role) and layer in {None, e.layer}]
    if not found:
        raise InvalidFieldError(f"the pool has no {_name(component, role, layer)}", field="role")
    return _array(found, layer)


def arrays_of(manifest: Manifest, keys: Sequence[tuple[str, str, int | None]]) -> list[Array]:
    """Return what each array of a registered pool must be; together they hold every entry once.

    An entry that shares the array of another one's, of an earlier group, is held with that one, under its name.

    Args:
        manifest: the pool's.
        keys: (component, role, layer) of each; None for all layers of the role, one after another.

    Raises:
        InvalidFieldError: the pool has no such entry; names the array.
        DuplicateEntryError: an entry is in two arrays.
        UncoveredEntryError: an entry is in none.
    """
    arrays = each_array(manifest.entries)
    left = {key_of(entry): entry for entry in arrays}
    entries_of: dict[tuple[str, str, int | None], list[Entry]] = {key: [entry] for key, entry in left.items()}
    for entry in arrays:
        entries_of.setdefault((entry.component, entry.role, None), []).append(entry)
    found = []
    for number, (component, role, layer) in enumerate(keys):
        entries = entries_of.get((component, role, layer), [])
        if not entries:
            raise InvalidFieldError(f"the pool has no {_name(component, role, layer)}", field=f"arrays[{number}]")
        for entry in entries:
            if left.pop((component, role, entry.layer), None) is None:
                raise DuplicateEntryError(f"{entry.name} is in two arrays", field=f"arrays[{number}]")
        found.append(_array(entries, layer))
    if left:
        raise UncoveredEntryError(f"{next(iter(left.values())).name} is in no array", field="arrays")
    return found


def check_form(array: Array, shape: Sequence[int], strides: Sequence[int], dtype: str) -> None:
    """Check that a tensor is exactly the array. How far apart the elements of a dimension of one are means nothing.

    Raises:
        InvalidFieldError: it is not; names the array and what of it.
    """
    if dtype != array.dtype:
        raise _not_as("dtype", array, dtype or "nothing", array.dtype)
    if tuple(shape) != array.shape:
        raise _not_as("shape", array, tuple(shape), array.shape)
    apart = [(has, wanted) for has, wanted, size in zip(strides, array.strides, shape, strict=False) if size > 1]
    if len(strides) != len(shape) or any(has != wanted for has, wanted in apart):
        raise _not_as("strides", array, tuple(strides), array.strides)


def check_storage(array: Array, offset_bytes: int, storage_bytes: int) -> None:
    """Check that a tensor that begins at a byte of its storage ends within it.

    Raises:
        InvalidFieldError: it does not, or begins within an element.
    """
    if offset_bytes + array.size_bytes > storage_bytes or offset_bytes % dtype_bytes(array.dtype):
        raise InvalidFieldError(
            f"{array.name} has {array.size_bytes} bytes, from byte {offset_bytes} of a storage of {storage_bytes}",
            field=f"{array.name}.storage",
        )


def check_apart(held: Iterable[Held]) -> None:
    """Check that no two arrays have a byte in common.

    Raises:
        InvalidFieldError: names the one that begins in another.
    """
    for one, following in itertools.pairwise(sorted(held)):
        if following.start < one.stop:
            raise InvalidFieldError(
                f"{following.name} begins {following.start - one.start} bytes behind {one.name}, which has "
                f"{one.stop - one.start}: each page needs bytes of its own",
                field=f"{following.name}.storage",
            )


def check_free(held: Iterable[Held], taken: Iterable[Held]) -> None:
    """Check that arrays have no byte in common with what is taken; either by themselves are apart.

    Raises:
        InvalidFieldError: names the first array that has.
    """
    both = sorted([*((one, True) for one in held), *((one, False) for one in taken)])
    for (one, ours), (following, _) in itertools.pairwise(both):
        if following.start < one.stop:
            name = one.name if ours else following.name
            raise InvalidFieldError(
                f"{name} has bytes of another pool: each page needs bytes of its own", field=f"{name}.storage"
            )


def placed_at(manifest: Manifest, arrays: Sequence[Array], offsets: Sequence[int], region_bytes: int) -> Manifest:
    """Return the manifest of a pool whose arrays, all it has, begin at these bytes of a region."""
    by_start = sorted(zip(arrays, offsets, strict=True), key=lambda one: one[0].start)
    starts = [array.start for array, _ in by_start]
    placed = []
    for entry in manifest.entries:
        array, offset = by_start[bisect.bisect_right(starts, entry.base) - 1]
        placed.append(msgspec.structs.replace(entry, base=entry.base - array.start + offset))
    return msgspec.structs.replace(manifest, entries=tuple(placed), region_bytes=region_bytes)


def viewed_as(manifest: Manifest, wanted: Manifest, name: str) -> Manifest:
    """Return a pool's manifest as it is seen by who asked for ``wanted``.

    Views differ in the shape of entries only, and in how equal scales are written.

    Raises:
        PoolExistsError: they differ in more.
    """
    same_use = manifest.layout_digest == wanted.layout_digest and windows_of(manifest) == windows_of(wanted)
    if not same_use or _unviewed(manifest) != _unviewed(wanted):
        raise PoolExistsError(f"pool {name!r} has other entries or windows than were asked for", field="spec")
    return msgspec.structs.replace(manifest, entries=wanted.entries)


def _unviewed(manifest: Manifest) -> list[Entry]:
    """Return the entries but for what the layout digest, which both share, has compared as it must be."""
    return [msgspec.structs.replace(entry, shape=None, scales=None) for entry in manifest.entries]


def _array(entries: Sequence[Entry], layer: int | None) -> Array:
    first = entries[0]
    name = _name(first.component, first.role, layer)
    if first.dtype is None or first.shape is None:
        raise InvalidFieldError(f"{first.name} has no dtype or shape", field="role")
    step = first.pages * first.page_bytes
    for number, entry in enumerate(entries):
        if (entry.base, entry.dtype, entry.shape) != (first.base + number * step, first.dtype, first.shape):
            raise InvalidFieldError(
                f"the layers of {name} are not evenly apart, or not alike: take them one by one", field="role"
            )
    shape = first.shape if layer is not None else (len(entries), *first.shape)
    return Array(name=name, start=first.base, shape=shape, dtype=first.dtype)


def _name(component: str, role: str, layer: int | None) -> str:
    return f"{component}/{role}" if layer is None else f"{component}/{role}/{layer}"


def _not_as(field: str, array: Array, has: object, wanted: object) -> InvalidFieldError:
    return InvalidFieldError(f"{array.name}: {field} is {has}, the spec needs {wanted}", field=f"{array.name}.{field}")
