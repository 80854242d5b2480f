"""Which entry of a source goes into which entry of a destination: by (component, role, layer), never by position.

Every scheme that pairs by position, count or modulo corrupts some case: compact indexers, uneven pipeline stages,
draft layers on one side (SGLang #27740, #27160, vllm-ascend #15900).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from kvferry.pools.manifest import check_unique, key_of
from kvferry.protocol.errors import GeometryMismatchError, UncoveredEntryError
from kvferry.protocol.manifests import Entry

MUST_AGREE = ("page_bytes", "page_tokens", "head_start", "heads", "total_heads", "dtype", "format")
"""What paired entries must have in common, where both give it. Equal bytes are not equal geometry."""


class Pair(NamedTuple):
    """One destination entry, by its index in its manifest, and the source entry that fills it."""

    source: Entry
    destination: Entry
    destination_index: int


class Pairing(msgspec.Struct, frozen=True):
    """The pairs, in the destination's order; destination entries left uncovered, and source entries left over."""

    pairs: tuple[Pair, ...]
    uncovered: tuple[Entry, ...]
    skipped_source_entries: int


def pair_entries(source: Sequence[Entry], destination: Sequence[Entry]) -> Pairing:
    """Pair the entries and check that each pair may exchange pages.

    Raises:
        DuplicateEntryError: a side has two entries of one (component, role, layer).
        GeometryMismatchError: the entries of a pair differ in a field that both give.
    """
    check_unique(source, "source.entries")
    check_unique(destination, "destination.entries")
    by_key = {key_of(entry): entry for entry in source}
    pairs, uncovered = [], []
    for index, entry in enumerate(destination):
        partner = by_key.get(key_of(entry))
        if partner is None:
            uncovered.append(entry)
        else:
            _check_agreement(partner, entry, index)
            pairs.append(Pair(partner, entry, index))
    return Pairing(tuple(pairs), tuple(uncovered), len(source) - len(pairs))


def check_covered(pairing: Pairing, optional_components: Collection[str]) -> None:
    """Check that no required destination entry is left uncovered.

    Raises:
        UncoveredEntryError: names the first of them and counts them.
    """
    required = [entry for entry in pairing.uncovered if entry.component not in optional_components]
    if required:
        raise UncoveredEntryError(
            f"no source entry for {required[0].name} ({len(required)} required destination entries uncovered)",
            field="destination.entries",
        )


def _check_agreement(source: Entry, destination: Entry, index: int) -> None:
    for field in MUST_AGREE:
        ours, theirs = getattr(source, field), getattr(destination, field)
        if ours is not None and theirs is not None and ours != theirs:
            raise GeometryMismatchError(
                f"{destination.name}: {field} is {ours} at the source, {theirs} at the destination",
                field=f"destination.entries[{index}].{field}",
            )
    if source.shape and destination.shape and source.shape[-2:] != destination.shape[-2:]:
        raise GeometryMismatchError(
            f"{destination.name}: a token is {source.shape[-2:]} at the source, {destination.shape[-2:]} at the "
            "destination (heads, width)",
            field=f"destination.entries[{index}].shape",
        )
