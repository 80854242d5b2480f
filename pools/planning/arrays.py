"""The arrays of a pool as engines see them: all layers of a role one after another, or a single layer; pointer lists.

Shape, strides and dtype of each array are derived from the manifest here and nowhere else: for the tensors that engines
get from a pool, and to check the tensors that they register, which client and daemon both do. Needs no torch.
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
    """One contiguous array.

    Attributes:
        name: ``component/role`` for all layers, ``component/role/layer`` for one.
        start: its first byte, as an offset in the pool's region.
        shape: ``(layers, *entry shape)`` for all layers, the entry's shape for one.
        dtype: torch's name of the dtype.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Return the size of all elements in bytes."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the strides of each dimension, in elements."""
        steps = itertools.accumulate(reversed(self.shape[1:]), int.__mul__, initial=1)
        return tuple(steps)[::-1]


class Held(NamedTuple):
    """Byte range ``[start, stop)`` of some memory, and the name of the array in it."""

    start: int
    stop: int
    name: str


def array_of(manifest: Manifest, component: str, role: str, layer: int | None = None) -> Array:
    """Return the array of a role: all its layers, or the one ``layer``.

    Raises:
        InvalidFieldError: the pool has no such entries, or they do not form one array: spacing, dtype or shape differ.
    """
    found = [e for e in manifest.entries if (e.component, e.role) == (component, role) and layer in {None, e.layer}]
    if not found:
        raise InvalidFieldError(f"the pool has no {_name(component, role, layer)}", field="role")
    return _array(found, layer)


def arrays_of(manifest: Manifest, keys: Sequence[tuple[str, str, int | None]]) -> list[Array]:
    """Return the arrays that a registered pool must have; together they contain every entry once.

    Layers of several KV cache groups that share memory are one array, named after the first group's entry.

    Args:
        manifest: the pool's manifest.
        keys: (component, role, layer) of each array; layer None for all layers of the role, one after another.

    Raises:
        InvalidFieldError: the pool has no such entry; names the array.
        DuplicateEntryError: an entry is in two arrays.
        UncoveredEntryError: an entry is in no array.
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
    """Check that a tensor has the array's dtype, shape and strides. Strides of dimensions of size 1 are ignored.

    Raises:
        InvalidFieldError: one of them differs; names the array and the property.
    """
    if dtype != array.dtype:
        raise _differs("dtype", array, dtype or "missing", array.dtype)
    if tuple(shape) != array.shape:
        raise _differs("shape", array, tuple(shape), array.shape)
    apart = [(has, wanted) for has, wanted, size in zip(strides, array.strides, shape, strict=False) if size > 1]
    if len(strides) != len(shape) or any(has != wanted for has, wanted in apart):
        raise _differs("strides", array, tuple(strides), array.strides)


def check_storage(array: Array, offset_bytes: int, storage_bytes: int) -> None:
    """Check that a tensor at ``offset_bytes`` of its storage is aligned to its element size and ends within it.

    Raises:
        InvalidFieldError: it ends beyond the storage or is not aligned.
    """
    if offset_bytes + array.size_bytes > storage_bytes or offset_bytes % dtype_bytes(array.dtype):
        raise InvalidFieldError(
            f"{array.name} needs {array.size_bytes} aligned bytes at offset {offset_bytes}; its storage has "
            f"{storage_bytes}",
            field=f"{array.name}.storage",
        )


def check_apart(held: Iterable[Held]) -> None:
    """Check that no two arrays overlap.

    Raises:
        InvalidFieldError: names the array that begins inside another.
    """
    for one, following in itertools.pairwise(sorted(held)):
        if following.start < one.stop:
            raise InvalidFieldError(
                f"{following.name} begins {following.start - one.start} bytes after the start of {one.name}, which has "
                f"{one.stop - one.start} bytes: each page needs bytes of its own",
                field=f"{following.name}.storage",
            )


def check_free(held: Iterable[Held], taken: Iterable[Held]) -> None:
    """Check that no array overlaps memory in ``taken``; neither of the two may overlap itself.

    Raises:
        InvalidFieldError: names the first array that overlaps.
    """
    both = sorted([*((one, True) for one in held), *((one, False) for one in taken)])
    for (one, ours), (following, _) in itertools.pairwise(both):
        if following.start < one.stop:
            name = one.name if ours else following.name
            raise InvalidFieldError(
                f"{name} overlaps memory of another pool: each page needs bytes of its own", field=f"{name}.storage"
            )


def placed_at(manifest: Manifest, arrays: Sequence[Array], offsets: Sequence[int], region_bytes: int) -> Manifest:
    """Return the manifest with each entry's base moved to where its array lies in a region.

    Args:
        manifest: the pool's manifest.
        arrays: all arrays of the pool.
        offsets: byte offset of each array in the region.
        region_bytes: size of the region.
    """
    by_start = sorted(zip(arrays, offsets, strict=True), key=lambda one: one[0].start)
    starts = [array.start for array, _ in by_start]
    placed = []
    for entry in manifest.entries:
        array, offset = by_start[bisect.bisect_right(starts, entry.base) - 1]
        placed.append(msgspec.structs.replace(entry, base=entry.base - array.start + offset))
    return msgspec.structs.replace(manifest, entries=tuple(placed), region_bytes=region_bytes)


def viewed_as(manifest: Manifest, wanted: Manifest, name: str) -> Manifest:
    """Return a pool's manifest in the view of ``wanted``.

    Two views differ only in the shape of entries and in how equal scales are written.

    Raises:
        PoolExistsError: the manifests differ in more than that.
    """
    same_use = manifest.layout_digest == wanted.layout_digest and windows_of(manifest) == windows_of(wanted)
    if not same_use or _unviewed(manifest) != _unviewed(wanted):
        raise PoolExistsError(f"pool {name!r} exists with other entries or windows than the spec's", field="spec")
    return msgspec.structs.replace(manifest, entries=wanted.entries)


def _unviewed(manifest: Manifest) -> list[Entry]:
    """Return the entries without shape and scales, which the layout digest compares as far as they must be equal."""
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
                f"the layers of {name} differ in spacing, dtype or shape: request each layer by itself", field="role"
            )
    shape = first.shape if layer is not None else (len(entries), *first.shape)
    return Array(name=name, start=first.base, shape=shape, dtype=first.dtype)


def _name(component: str, role: str, layer: int | None) -> str:
    return f"{component}/{role}" if layer is None else f"{component}/{role}/{layer}"


def _differs(field: str, array: Array, has: object, wanted: object) -> InvalidFieldError:
    return InvalidFieldError(f"{array.name}: {field} is {has}, the spec needs {wanted}", field=f"{array.name}.{field}")


# -- pointer lists as SGLang exchanges them: the main list and the state list, in SGLang's order.
#
# An engine's connector registers memory with three parallel lists: address, length and item length of each array. An
# item is a page (for a state: a slot), even where a row of the array is a token. Sources: ``get_contiguous_buf_infos``
# and ``get_state_buf_infos`` of SGLang's pools, and ``setup_state_kv_args``. Positions in these lists mean nothing
# across pools: kvferry itself pairs by (component, role, layer).


INDEX_ROLES = ("index_k", "index_scale")
SCALE_ROLES = ("k_scale", "v_scale")
MAIN_ROLES = ("k", "v", *SCALE_ROLES, *INDEX_ROLES)
STATE_ROLES = ("conv", "ssm", "k", "v", *SCALE_ROLES)


class PointerList(msgspec.Struct, frozen=True):
    """Parallel lists with one element per array.

    ``data_ptrs`` are addresses, ``data_lens`` and ``item_lens`` are in bytes, ``names`` are ``component/role/layer``.
    """

    data_ptrs: tuple[int, ...]
    data_lens: tuple[int, ...]
    item_lens: tuple[int, ...]
    names: tuple[str, ...]


class EngineLists(msgspec.Struct, frozen=True):
    """An engine's lists of KV data and of state data; either may be empty."""

    main: PointerList
    state: PointerList


def engine_lists(manifest: Manifest, base_address: int = 0) -> EngineLists:
    """Return a pool's lists.

    The main list is, component by component: k of all layers, v, the scales that travel with pages, index_k and
    index_scale; main's first, then of each further group those that only it has, then the draft's. An array shared by
    layers of several groups is listed once, under the first one's name.
    The state list is the state slots (conv, ssm), the window's k and v (and scales), then the indexer's arrays again,
    the draft's last.

    Args:
        manifest: the pool's manifest.
        base_address: where its region is mapped; 0 gives offsets.
    """
    paged = [one.name for one in manifest.components if one.kind == "paged"]
    states = [one.name for kind in ("state", "window") for one in manifest.components if one.kind == kind]
    main = _select(manifest, paged, MAIN_ROLES)
    state = [*_select(manifest, states, STATE_ROLES), *_select(manifest, paged, INDEX_ROLES)]
    return EngineLists(main=_pointers(main, base_address), state=_pointers(state, base_address))


def _select(manifest: Manifest, components: Iterable[str], roles: Iterable[str]) -> list[Entry]:
    roles = tuple(roles)
    return [
        entry
        for component in components
        for role in roles
        for entry in manifest.entries
        if (entry.component, entry.role) == (component, role)
    ]


def _pointers(selected: list[Entry], base_address: int) -> PointerList:
    entries = each_array(selected)
    return PointerList(
        data_ptrs=tuple(base_address + entry.base for entry in entries),
        data_lens=tuple(entry.pages * entry.page_bytes for entry in entries),
        item_lens=tuple(entry.page_bytes for entry in entries),
        names=tuple(entry.name for entry in entries),
    )
