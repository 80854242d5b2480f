"""Pairing of source and destination entries by (component, role, layer), never by position.

Pairing by position, count or modulo corrupts data in some case: compact indexers, uneven pipeline stages, draft layers
on one side only (SGLang #27740, #27160, vllm-ascend #15900). Under unequal tensor parallelism a pair exchanges the
heads that both sides hold; each entry has its own head width.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.pools.planning.geometry import (
    CHANNELS_FIRST,
    CONV,
    HND,
    MOST_PARTS,
    PAGE_HEADS,
    Heads,
    Tokens,
    Units,
    has_pages_of_tokens,
    intersect,
    is_channels_first,
    page_rows,
    parts_of,
    units_between,
)
from kvferry.pools.planning.manifest import check_unique, key_of
from kvferry.pools.planning.scales import check_same_scales
from kvferry.pools.planning.sides import Sides, entries_between, make_side, slice_count
from kvferry.protocol.errors import GeometryMismatchError, ScaleMismatchError, UncoveredEntryError
from kvferry.protocol.manifests import Entry

MUST_AGREE = ("dtype", "format", "page_tokens", "head_start", "heads", "total_heads", "page_bytes")
"""Fields that must be equal where both entries give them, most telling first. Equal bytes alone are not enough."""

MUST_AGREE_SLICED = ("page_tokens", "total_heads", "dtype", "format")
"""Fields that must be equal where the entries hold different heads; so must the bytes of one head of one token."""

OF_THE_PAGE: Final = ("page_tokens", "page_bytes")
"""Of these the fields that differ where pages of both sides hold different numbers of tokens, and are cut."""

SLICEABLE_FORMATS = ("ND", PAGE_HEADS, HND, "KV_", f"{CONV}_", f"{CHANNELS_FIRST}_")
"""How the formats begin in which one head of one token, or of one page, is contiguous."""

SCALE_ROLES = {"k": "k_scale", "v": "v_scale", "index_k": "index_scale"}
"""The role of the scales that travel with each role's pages."""


class HeadSlice(msgspec.Struct, frozen=True):
    """The heads that a pair exchanges: first head within the source entry, within the destination entry, and count."""

    source: int
    destination: int
    count: int


class Pair(NamedTuple):
    """A destination entry, its index in its manifest, and the source entry that fills it.

    ``heads`` is None if both sides hold the same heads: whole pages are exchanged.
    """

    source: Entry
    destination: Entry
    destination_index: int
    heads: HeadSlice | None = None

    @property
    def slices(self) -> int:
        """Return how many entries of a plan the pair is."""
        heads = None if self.heads is None else Heads(self.heads.source, self.heads.count)
        units = self.units
        return slice_count(self.source, heads, None if units is None else Tokens(0, units.tokens))

    @property
    def units(self) -> Units | None:
        """Return how the pages of both sides are cut; None: they hold as many tokens."""
        return units_between(self.source, self.destination)


class Pairing(msgspec.Struct, frozen=True, dict=True):
    """The pairs in the destination's order, the uncovered destination entries, and the number of unused source ones.

    ``units``: how the pages of both sides are cut; None: they hold as many tokens. It is made once for two pools: what
    each plan needs of all pairs is computed once, too.
    """

    pairs: tuple[Pair, ...]
    uncovered: tuple[Entry, ...]
    skipped_source_entries: int
    units: Units | None = None

    @cached_property
    def pages(self) -> tuple[int, int]:
        """Return the pages that all paired entries have, the padding page included: of the source, the destination."""
        return min(pair.source.pages for pair in self.pairs), min(pair.destination.pages for pair in self.pairs)

    @cached_property
    def _sides(self) -> dict[tuple[Tokens | None, Tokens | None], Sides]:
        return {}

    def sides_of(self, parts: tuple[Tokens | None, Tokens | None]) -> Sides:
        """Return both sides of a plan that has no pages yet, of which these parts are exchanged; None: whole pages.

        Raises:
            GeometryMismatchError: an entry cannot be cut by the heads or tokens that are exchanged.
        """
        if parts not in self._sides:
            self._sides[parts] = self._make_sides(*parts)
        return self._sides[parts]

    def _make_sides(self, our_part: Tokens | None, their_part: Tokens | None) -> Sides:
        ours = theirs = None
        if any(pair.heads for pair in self.pairs):
            ours = [Heads(pair.heads.source, pair.heads.count) if pair.heads else None for pair in self.pairs]
            theirs = [Heads(pair.heads.destination, pair.heads.count) if pair.heads else None for pair in self.pairs]
        none = np.empty(0, np.int64)
        source = make_side([pair.source for pair in self.pairs], ours, none, our_part)
        destination = make_side([pair.destination for pair in self.pairs], theirs, none, their_part)
        return Sides(source, destination, entries_between(source, destination))

    @cached_property
    def destination_entries(self) -> npt.NDArray[np.intp]:
        """Return the index of each pair's destination entry, ``(pairs,)``."""
        return np.array([pair.destination_index for pair in self.pairs], np.intp)

    @cached_property
    def destination_heads(self) -> tuple[Heads | None, ...] | None:
        """Return the heads of each pair, counted within the destination entry; None: all heads of all pairs."""
        if not any(pair.heads for pair in self.pairs):
            return None
        return tuple(Heads(pair.heads.destination, pair.heads.count) if pair.heads else None for pair in self.pairs)

    @cached_property
    def replicated(self) -> npt.NDArray[np.bool_]:
        """Return whether other sources hold each pair's source entry too, ``(pairs,)``."""
        return np.array([(pair.source.replicas or 1) > 1 for pair in self.pairs], np.bool_)


def pair_entries(source: Sequence[Entry], destination: Sequence[Entry]) -> Pairing:
    """Pair the entries and check that each pair may exchange pages.

    Entries with the same key but no common head are not paired: one is skipped, the other left uncovered.

    Raises:
        DuplicateEntryError: a side has two entries with the same (component, role, layer).
        GeometryMismatchError: paired entries differ in a field that both give, or in the bytes of one head of one
            token.
        ScaleMismatchError: the exchanged heads have different scales on the two sides, or only one side has scales
            that travel with its pages.
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
    return Pairing(tuple(pairs), tuple(uncovered), len(source) - len(pairs), _units_of(source, destination, pairs))


def check_covered(pairing: Pairing, optional_components: Collection[str]) -> None:
    """Check that no required destination entry is left uncovered.

    Raises:
        UncoveredEntryError: names the first uncovered entry and gives their number.
    """
    required = [entry for entry in pairing.uncovered if entry.component not in optional_components]
    if required:
        raise UncoveredEntryError(
            f"no source entry for {required[0].name} ({len(required)} required destination entries uncovered)",
            field="destination.entries",
        )


def _pair(source: Entry, destination: Entry, index: int) -> Pair | None:
    """Return the pair, or None if the entries have no head in common."""
    units = units_between(source, destination)
    if units is not None:
        _check_cut(source, destination, index, units)
    ignored = () if units is None else OF_THE_PAGE
    if (source.head_start, source.heads) != (destination.head_start, destination.heads):
        ours, theirs = _heads_of(source), _heads_of(destination)
        if ours and theirs:
            if (source.heads, source.total_heads) != (destination.heads, destination.total_heads):
                _check_parts_known(source, destination, index)
            for field in MUST_AGREE_SLICED:
                if field not in ignored:
                    _check_field(source, destination, field, index)
            common = intersect(ours, theirs)
            if common is None:
                return None
            if units is None:
                _check_sliceable(source, destination, index)
            heads = HeadSlice(common.start - ours.start, common.start - theirs.start, common.count)
            our_part, their_part = Heads(heads.source, heads.count), Heads(heads.destination, heads.count)
            check_same_scales(source, destination, our_part, their_part, f"destination.entries[{index}].scales")
            return Pair(source, destination, index, heads)
    _check_agreement(source, destination, index, ignored)
    check_same_scales(source, destination, None, None, f"destination.entries[{index}].scales")
    return Pair(source, destination, index)


def _units_of(source: Sequence[Entry], destination: Sequence[Entry], pairs: Iterable[Pair]) -> Units | None:
    """Return how the pages of both sides are cut, of the first component that both have; None: they are not.

    Raises:
        GeometryMismatchError: a pair has pages that cannot be cut as its component's are.
    """
    ours: dict[str, Entry] = {}
    units: dict[str, Units | None] = {}
    for one in source:
        if one.page_tokens is not None:
            ours.setdefault(one.component, one)
    for one in destination:
        if one.page_tokens is not None and one.component in ours:
            units.setdefault(one.component, units_between(ours[one.component], one))
    for pair in pairs:
        if pair.units != units.get(pair.destination.component):
            raise GeometryMismatchError(
                f"{pair.destination.name}: pages of the two sides hold different numbers of tokens, and what it has of "
                "a page cannot be cut",
                field=f"destination.entries[{pair.destination_index}].page_tokens",
            )
    return next(iter(units.values()), None)


def _check_scales_travel(pairs: Iterable[Pair], source: Container[object], destination: Container[object]) -> None:
    """Check that scales which travel as separate entries exist on both sides of each pair, or on neither."""
    for pair in pairs:
        entry = pair.destination
        key = (entry.component, SCALE_ROLES.get(entry.role), entry.layer)
        if (key in source) != (key in destination):
            other, bare = ("source", "destination") if key in source else ("destination", "source")
            raise ScaleMismatchError(
                f"{entry.name} has scales that travel with its pages ({key[1]}) at the {other}, but none at the {bare}",
                field=f"destination.entries[{pair.destination_index}].scales",
            )


def _heads_of(entry: Entry) -> Heads | None:
    """Return the heads that an entry holds, in the model's numbering; None unless all three head fields are given."""
    if entry.head_start is None or entry.heads is None or entry.total_heads is None:
        return None
    return Heads(entry.head_start, entry.heads)


def _is_sliceable(entry: Entry) -> bool:
    return entry.format is None or entry.format.startswith(SLICEABLE_FORMATS)


def _check_sliceable(source: Entry, destination: Entry, index: int) -> None:
    if not (_is_sliceable(destination) and _is_sliceable(source)):
        raise GeometryMismatchError(
            f"{destination.name}: the two sides hold different heads, and pages of format "
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
        return  # its last axis is the heads
    if destination.page_tokens is None:
        ours, theirs = _head_shape(source), _head_shape(destination)
        if ours and theirs and ours != theirs:
            raise GeometryMismatchError(
                f"{destination.name}: a head is {ours} at the source, {theirs} at the destination",
                field=f"destination.entries[{index}].shape",
            )
        return
    if source.shape and destination.shape and source.shape[-1] != destination.shape[-1]:
        raise GeometryMismatchError(
            f"{destination.name}: a head is {source.shape[-1]} wide at the source, {destination.shape[-1]} at the "
            "destination",
            field=f"destination.entries[{index}].shape",
        )


def _check_parts_known(source: Entry, destination: Entry, index: int) -> None:
    """Check that both sides say which channels of a convolution's state are of which head."""
    if destination.role == "conv" and not (parts_of(source.format) and parts_of(destination.format)):
        raise GeometryMismatchError(
            f"{destination.name}: the two sides hold different channels, and which parts of the convolution are split "
            "over ranks is not known: give conv_parts on both sides",
            field=f"destination.entries[{index}].format",
        )


def _head_bytes(entry: Entry, index: int) -> int:
    """Return the bytes of one head of one token."""
    rows = page_rows(entry)
    if rows is None or entry.heads is None:
        raise GeometryMismatchError(
            f"{entry.name}: pages can be cut by heads only if both sides give page_tokens or, of states, the shape",
            field=f"destination.entries[{index}].page_tokens",
        )
    size, rest = divmod(entry.page_bytes, rows * entry.heads)
    if rest:
        raise GeometryMismatchError(
            f"{entry.name}: {entry.page_bytes} bytes do not divide into {rows} tokens x {entry.heads} heads",
            field=f"destination.entries[{index}].page_bytes",
        )
    return size


def _check_cut(source: Entry, destination: Entry, index: int, units: Units) -> None:
    """Check that pages of different numbers of tokens can be cut."""
    _check_field(source, destination, "format", index)
    said = f"page_tokens is {source.page_tokens} at the source, {destination.page_tokens} at the destination"
    field = f"destination.entries[{index}].page_tokens"
    if not (has_pages_of_tokens(source) and has_pages_of_tokens(destination)):
        raise GeometryMismatchError(
            f"{destination.name}: {said}, and pages of format {destination.format or source.format} cannot be cut by "
            "tokens",
            field=field,
        )
    if units.phases > MOST_PARTS:
        raise GeometryMismatchError(
            f"{destination.name}: {said}: that are {units.phases} kinds of parts, at most {MOST_PARTS}", field=field
        )
    ours, theirs = _cell_bytes(source), _cell_bytes(destination)
    if ours != theirs:
        raise GeometryMismatchError(
            f"{destination.name}: {said}, and a head of one token has {ours:g} bytes there, {theirs:g} here",
            field=field,
        )


def _cell_bytes(entry: Entry) -> float:
    return entry.page_bytes / ((entry.page_tokens or 1) * (entry.heads or 1))


def _check_agreement(source: Entry, destination: Entry, index: int, ignored: Collection[str]) -> None:
    for field in MUST_AGREE:
        if field not in ignored:
            _check_field(source, destination, field, index)
    if ignored:
        return
    ours, theirs = _token_shape(source), _token_shape(destination)
    if ours and theirs and ours != theirs:
        raise GeometryMismatchError(
            f"{destination.name}: a token is {ours} at the source, {theirs} at the destination (heads, width)",
            field=f"destination.entries[{index}].shape",
        )


def _token_shape(entry: Entry) -> tuple[int, ...]:
    """Return the last two axes of the shape without its page axis: (heads, width) of a token; () if unknown."""
    return (entry.shape or ())[1:][-2:]


def _head_shape(entry: Entry) -> tuple[int, ...]:
    """Return the shape of a head of a state, or the window of a convolution's; () if unknown."""
    shape = entry.shape or ()
    return shape[1:2] if entry.role == "conv" and not is_channels_first(entry) else shape[2:]


def _check_field(source: Entry, destination: Entry, field: str, index: int) -> None:
    ours, theirs = getattr(source, field), getattr(destination, field)
    if ours is not None and theirs is not None and ours != theirs:
        raise GeometryMismatchError(
            f"{destination.name}: {field} is {ours} at the source, {theirs} at the destination",
            field=f"destination.entries[{index}].{field}",
        )
