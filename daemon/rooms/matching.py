"""Whether a chunk fits a room, and what it fills there. Pure: nothing is promised until the caller says so."""

from __future__ import annotations

import weakref
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from kvferry.attention.state_windows import StateList, match_state
from kvferry.daemon.rooms.page_ranges import PageRange, entries_of
from kvferry.daemon.rooms.sides import Chunk, Excused, Promise, Room, SourcePool, rows_by_step
from kvferry.pools.coverage import Rows, Stretch, cells_of
from kvferry.pools.model_checks import check_models
from kvferry.pools.pairing import Pairing, check_covered, pair_entries
from kvferry.pools.plan import make_plan
from kvferry.protocol.errors import FirstTokenTwiceError, LengthMismatchError

DRAFT = "draft"
"""The component whose layers are not numbered as the model's are."""

_Pairings: TypeAlias = "weakref.WeakKeyDictionary[SourcePool, dict[str, Pairing]]"
_pairings: weakref.WeakKeyDictionary[SourcePool, _Pairings] = weakref.WeakKeyDictionary()


class Trim(NamedTuple):
    """Lists of one component that were cut to the shorter length, by their lengths before."""

    component: str
    source_length: int
    destination_length: int

    @property
    def pages(self) -> int:
        """Return how many pages were left out."""
        return abs(self.source_length - self.destination_length)


class Match(msgspec.Struct, frozen=True):
    """What a chunk fills in a room; surplus that the room does not want is counted.

    ``excused`` are cells that nothing fills because lists were trimmed, ``trims`` what was left out of which lists.
    """

    promises: tuple[Promise, ...]
    skipped_source_entries: int = 0
    skipped_source_pages: int = 0
    covered_source_entries: int = 0
    excused: tuple[Excused, ...] = ()
    trims: tuple[Trim, ...] = ()

    @property
    def trimmed_pages(self) -> int:
        """Return how many pages of either side were trimmed."""
        return sum(one.pages for one in self.trims)


class _Span(NamedTuple):
    """Which part of a source's list goes into which part of a room's."""

    source_start: int
    destination_start: int
    pages: int
    skipped_source_pages: int
    trimmed: bool = False


def match(chunk: Chunk, source: SourcePool, room: Room, whole_below_bytes: int = 0) -> Match:
    """Return what the chunk fills in the room.

    Source pages before the room's first page are dropped: decode has that prefix already. Source pages past its end
    are an error where the component is paged: the sides disagree about the length. A chunk with steps that moves less
    than ``whole_below_bytes`` goes with its last step.

    Raises:
        LengthMismatchError: the chunk goes past the room's end, or the last tokens differ.
        WindowMismatchError, EmptyStateError: a window or state does not fit, see ``attention.state_windows``.
        PageOverlapError: a cell has a sender already.
        FirstTokenTwiceError: the room has a first token or payload already.
        ModelMismatchError: the pools are of two models, and the room does not take any.
        UncoveredEntryError, GeometryMismatchError, DuplicateEntryError: the pools do not fit.
    """
    if not room.any_model:
        check_models(source.model, room.pool.model, f"pool {source.name!r}", f"pool {room.pool.name!r}")
    if chunk.carries_token and room.token_chunk is not None:
        raise FirstTokenTwiceError("another SEND of the room carries the first token or payload", field="first_token")
    parts = [_match_component(one, chunk, source, room) for one in chunk.ranges]
    promises = [promise for part in parts for promise in part.promises]
    if chunk.steps:
        total_bytes = sum(promise.plan.total_bytes for promise in promises)
        promises = _by_steps(promises, chunk, whole=total_bytes < whole_below_bytes)
    return Match(
        tuple(promises),
        sum(part.skipped_source_entries for part in parts),
        sum(part.skipped_source_pages for part in parts),
        sum(part.covered_source_entries for part in parts),
        tuple(excused for part in parts for excused in part.excused),
        tuple(trim for part in parts for trim in part.trims),
    )


def _match_component(one: PageRange, chunk: Chunk, source: SourcePool, room: Room) -> Match:
    target = room.ranges.get(one.component)
    if target is None or target.none:
        return Match(
            (),
            skipped_source_entries=len(entries_of(source.manifest, one.component)),
            skipped_source_pages=len(one.ids) if target else 0,
        )
    span = _paged_span(one, target, last=chunk.last) if target.kind == "paged" else _state_span(one, target, room)
    pairing = _pairing(source, room.pool, one.component)
    if room.sources == 1:
        check_covered(pairing, room.pool.manifest.optional_components)
    excused = []
    if span.trimmed and span.pages < len(target.ids):
        excused.append(Excused(one.component, cells_of(pairing.pairs, span.pages, len(target.ids))))
    promises: tuple[Promise, ...] = ()
    covered = 0
    if span.pages and pairing.pairs:
        promises, covered = _promises(one, target, pairing, span, room)
    return Match(
        promises,
        pairing.skipped_source_entries,
        span.skipped_source_pages,
        covered,
        tuple(excused),
        (Trim(one.component, len(one.ids), len(target.ids)),) if span.trimmed and pairing.pairs else (),
    )


def _pairing(source: SourcePool, destination: SourcePool, component: str) -> Pairing:
    """Return the pairing, which the destination's pool remembers for as long as both live."""
    known = _pairings.setdefault(destination, weakref.WeakKeyDictionary()).setdefault(source, {})
    if component not in known:
        entries = entries_of(source.manifest, component)
        known[component] = pair_entries(entries, entries_of(destination.manifest, component))
    return known[component]


def _paged_span(one: PageRange, target: PageRange, *, last: bool) -> _Span:
    if one.end_page > target.end_page:
        raise LengthMismatchError(
            f"{one.component}: source pages {one.start_page}..{one.end_page - 1} go past the room's "
            f"{target.start_page}..{target.end_page - 1}",
            field=one.field,
        )
    ends_known = one.end_token is not None and target.end_token is not None
    if last and ends_known and one.end_token != target.end_token:
        raise LengthMismatchError(
            f"{one.component}: the source ends after token {one.end_token}, the room after {target.end_token}",
            field=f"{one.field}.tokens",
        )
    surplus = min(max(target.start_page - one.start_page, 0), len(one.ids))
    start = max(one.start_page - target.start_page, 0)
    return _Span(surplus, start, len(one.ids) - surplus, surplus)


def _state_span(one: PageRange, target: PageRange, room: Room) -> _Span:
    found = match_state(
        StateList(one.first_page, one.ids, one.none),
        StateList(target.first_page, target.ids, target.none),
        one.component,
        room.request_id,
    )
    skipped = 0 if found.trimmed else found.dropped_source
    return _Span(found.source_start, found.destination_start, found.count, skipped, found.trimmed)


def _promises(
    one: PageRange, target: PageRange, pairing: Pairing, span: _Span, room: Room
) -> tuple[tuple[Promise, ...], int]:
    """Return what of it is still wanted, and how many entries were wholly covered by a replica."""
    cells = cells_of(pairing.pairs, span.destination_start, span.destination_start + span.pages)
    replicated = np.array([(pair.source.replicas or 1) > 1 for pair in pairing.pairs], np.bool_)
    free = room.coverage[one.component].free_stretches(cells, replicated)
    covered = len(pairing.pairs) - sum(int(np.count_nonzero(stretch.rows)) for stretch in free)
    return tuple(_promise(one, target, pairing, span, stretch) for stretch in free), covered


def _promise(one: PageRange, target: PageRange, pairing: Pairing, span: _Span, stretch: Stretch) -> Promise:
    """Return what a stretch of a span is."""
    source_start = span.source_start + stretch.start - span.destination_start
    source_ids = one.ids[source_start : source_start + stretch.stop - stretch.start]
    plan = make_plan(pairing, source_ids, target.ids[stretch.start : stretch.stop])
    cells = cells_of(pairing.pairs, stretch.start, stretch.stop)
    whole = Promise(one.component, cells, plan, pairing.pairs, source_start)
    return whole if stretch.rows.all() else _of(whole, stretch.rows)


def _of(promise: Promise, rows: Rows) -> Promise:
    """Return what some rows of a promise are."""
    pairs = tuple(pair for pair, kept in zip(promise.pairs, rows.tolist(), strict=True) if kept)
    return promise._replace(cells=promise.cells.of(rows), plan=promise.plan.of(rows), pairs=pairs)


def _by_steps(promises: list[Promise], chunk: Chunk, *, whole: bool) -> list[Promise]:
    """Cut the promises into the chunk's steps; all of them are the last one's where they go as a whole."""
    if whole:
        return [one._replace(step=len(chunk.steps) - 1) for one in promises]
    cut = []
    for one in promises:
        layers = [None if one.component == DRAFT else pair.destination.layer for pair in one.pairs]
        steps = rows_by_step(layers, chunk.steps)
        cut += [_of(one, steps == step)._replace(step=step) for step in np.unique(steps).tolist()]
    return cut
