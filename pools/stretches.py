"""Which stretch of a pool's region an array holds that an engine keeps by itself: a role's layers, or one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.protocol.errors import DuplicateEntryError, InvalidFieldError, UncoveredEntryError
from kvferry.protocol.manifests import Entry, Manifest


class Stretch(NamedTuple):
    """Bytes of a region."""

    start: int
    size_bytes: int


def stretches_of(manifest: Manifest, arrays: Sequence[tuple[str, str, int | None]]) -> list[Stretch]:
    """Return the stretch of each array; together they hold every entry once.

    Args:
        manifest: the pool's.
        arrays: (component, role, layer) of each; None for all layers of the role, one after another.

    Raises:
        InvalidFieldError: the pool has no such entry; names the array.
        DuplicateEntryError: an entry is in two arrays.
        UncoveredEntryError: an entry is in none.
    """
    left = {(entry.component, entry.role, entry.layer): entry for entry in manifest.entries}
    entries_of: dict[tuple[str, str, int | None], list[Entry]] = {key: [entry] for key, entry in left.items()}
    for entry in manifest.entries:
        entries_of.setdefault((entry.component, entry.role, None), []).append(entry)
    found = []
    for number, (component, role, layer) in enumerate(arrays):
        entries = entries_of.get((component, role, layer), [])
        name = f"{component}/{role}" if layer is None else f"{component}/{role}/{layer}"
        if not entries:
            raise InvalidFieldError(f"the pool has no {name}", field=f"arrays[{number}]")
        for entry in entries:
            if left.pop((component, role, entry.layer), None) is None:
                raise DuplicateEntryError(f"{entry.name} is in two arrays", field=f"arrays[{number}]")
        found.append(Stretch(entries[0].base, sum(map(_size, entries))))
    if left:
        raise UncoveredEntryError(f"{next(iter(left.values())).name} is in no array", field="arrays")
    return found


def _size(entry: Entry) -> int:
    return entry.pages * entry.page_bytes
