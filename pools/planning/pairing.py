"""Which entry of a source goes into which entry of a destination: by (component, role, layer), never by position.

Every scheme that pairs by position, count or modulo corrupts some case: compact indexers, uneven pipeline stages,
draft layers on one side (SGLang #27740, #27160, vllm-ascend #15900). Under unequal tensor parallelism a pair exchanges
the heads that both sides hold, each entry with its own width of a head.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvferry.pools.planning.geometry import PAGE_HEADS, page_rows
from kvferry.pools.planning.heads import Heads, intersect
from kvferry.pools.planning.manifest import check_unique, key_of
from kvferry.pools.planning.scales import check_same_scales
from kvferry.protocol.errors import GeometryMismatchError, ScaleMismatchError, UncoveredEntryError
from kvferry.protocol.manifests import Entry

MUST_AGREE = ("dtype", "format", "page_tokens", "head_start", "heads", "total_heads", "page_bytes")
"""What paired entries must have in common, where both give it: what tells most first. Equal bytes are not enough."""

MUST_AGREE_SLICED = ("page_tokens", "total_heads", "dtype", "format")
"""What they must have in common where they hold different heads; beside it the bytes of a token's head."""

SLICEABLE_FORMATS = (None, "ND", PAGE_HEADS)
"""Physical orders in which one head of one token, or of a page without tokens, is contiguous."""

SCALE_ROLES = {"k": "k_scale", "v": "v_scale", "index_k": "index_scale"}
"""Whose scales travel under which role."""


class HeadSlice(msgspec.Struct, frozen=True):
    """The heads that a pair exchanges: ``count``, from ``source`` and ``destination``, each side's own numbers."""

    source: int
    destination: int
    count: int


class Pair(NamedTuple):
    """One destination entry, by its index in its manifest, and the source entry that fills it.

    ``heads`` is None where whole pages are exchanged: both sides hold the same heads.
    """

    source: Entry
    destination: Entry
    destination_index: int
    heads: HeadSlice | None = None


class Pairing(msgspec.Struct, frozen=True):
    """The pairs, in the destination's order; destination entries left uncovered, and source entries left over."""

    pairs: tuple[Pair, ...]
    uncovered: tuple[Entry, ...]
    skipped_source_entries: int


def pair_entries(source: Sequence[Entry], destination: Sequence[Entry]) -> Pairing:
    """Pair the entries and check that each pair may exchange pages.

    Entries of one name without a common head are no pair: the one is left over, the other uncovered.

    Raises:
        DuplicateEntryError: a side has two entries of one (component, role, layer).
        GeometryMismatchError: the entries of a pair differ in a field that both give, or in the bytes of a token's
            head.
        ScaleMismatchError: the heads that a pair exchanges have other scales on the other side, or only one side has
            scales that travel with them.
    """
    check_unique(source, "source.entries")
    check_unique(destination, "destination.entries")
    by_key = {key_of(entry): entry for entry in source}
    pairs, uncovered = [], []
    for index, entry in enumerate(destination):
        partner = by_key.get(key_of(entry))
        pair = None if partner is None else _pair(partner, entry, index)
        if pair is None:
            uncovered.append(entry)
        else:
            pairs.append(pair)
    _check_scales_travel(pairs, by_key, {key_of(entry) for entry in destination})
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


def _pair(source: Entry, destination: Entry, index: int) -> Pair | None:
    """Return the pair, or None without a common head."""
    if (source.head_start, source.heads) != (destination.head_start, destination.heads):
        ours, theirs = _heads_of(source), _heads_of(destination)
        if ours and theirs:
            for field in MUST_AGREE_SLICED:
                _check_field(source, destination, field, index)
            common = intersect(ours, theirs)
            if common is None:
                return None
            _check_sliceable(source, destination, index)
            heads = HeadSlice(common.start - ours.start, common.start - theirs.start, common.count)
            our_part, their_part = Heads(heads.source, heads.count), Heads(heads.destination, heads.count)
            check_same_scales(source, destination, our_part, their_part, f"destination.entries[{index}].scales")
            return Pair(source, destination, index, heads)
    _check_agreement(source, destination, index)
    check_same_scales(source, destination, None, None, f"destination.entries[{index}].scales")
    return Pair(source, destination, index)


def _check_scales_travel(pairs: Iterable[Pair], source: Container[object], destination: Container[object]) -> None:
    """Check that scales which travel as entries of their own are there on both sides of what is paired, or on none."""
    for pair in pairs:
        entry = pair.destination
        key = (entry.component, SCALE_ROLES.get(entry.role), entry.layer)
        if (key in source) != (key in destination):
            other, bare = ("source", "destination") if key in source else ("destination", "source")
            raise ScaleMismatchError(
                f"{entry.name} has scales that travel with its pages ({key[1]}) at the {other}, none at the {bare}",
                field=f"destination.entries[{pair.destination_index}].scales",
            )


def _heads_of(entry: Entry) -> Heads | None:
    """Return the model's heads that an entry holds, where it says all about them."""
    if entry.head_start is None or entry.heads is None or entry.total_heads is None:
        return None
    return Heads(entry.head_start, entry.heads)


def _check_sliceable(source: Entry, destination: Entry, index: int) -> None:
    if destination.format not in SLICEABLE_FORMATS or source.format not in SLICEABLE_FORMATS:
        raise GeometryMismatchError(
            f"{destination.name}: both sides hold other heads, and pages of format "
            f"{destination.format or source.format} cannot be cut by heads",
            field=f"destination.entries[{index}].format",
        )
    if _head_bytes(source, index) != _head_bytes(destination, index):
        raise GeometryMismatchError(
            f"{destination.name}: a head of one token has {_head_bytes(source, index)} bytes at the source, "
            f"{_head_bytes(destination, index)} at the destination",
            field=f"destination.entries[{index}].page_bytes",
        )
    if destination.format == PAGE_HEADS:
        return  # its last axis are the heads
    if source.shape and destination.shape and source.shape[-1] != destination.shape[-1]:
        raise GeometryMismatchError(
            f"{destination.name}: a head is {source.shape[-1]} wide at the source, {destination.shape[-1]} at the "
            "destination",
            field=f"destination.entries[{index}].shape",
        )


def _head_bytes(entry: Entry, index: int) -> int:
    """Return the bytes of one head of one token."""
    rows = page_rows(entry)
    if rows is None or entry.heads is None:
        raise GeometryMismatchError(
            f"{entry.name}: pages can be cut by heads only where both sides give page_tokens",
            field=f"destination.entries[{index}].page_tokens",
        )
    size, rest = divmod(entry.page_bytes, rows * entry.heads)
    if rest:
        raise GeometryMismatchError(
            f"{entry.name}: {entry.page_bytes} bytes do not divide into {rows} tokens x {entry.heads} heads",
            field=f"destination.entries[{index}].page_bytes",
        )
    return size


def _check_agreement(source: Entry, destination: Entry, index: int) -> None:
    for field in MUST_AGREE:
        _check_field(source, destination, field, index)
    ours, theirs = _token_shape(source), _token_shape(destination)
    if ours and theirs and ours != theirs:
        raise GeometryMismatchError(
            f"{destination.name}: a token is {ours} at the source, {theirs} at the destination (heads, width)",
            field=f"destination.entries[{index}].shape",
        )


def _token_shape(entry: Entry) -> tuple[int, ...]:
    """Return (heads, width) of a token, as far as the shape says it; how many pages there are is no part of it."""
    return (entry.shape or ())[1:][-2:]


def _check_field(source: Entry, destination: Entry, field: str, index: int) -> None:
    ours, theirs = getattr(source, field), getattr(destination, field)
    if ours is not None and theirs is not None and ours != theirs:
        raise GeometryMismatchError(
            f"{destination.name}: {field} is {ours} at the source, {theirs} at the destination",
            field=f"destination.entries[{index}].{field}",
        )
