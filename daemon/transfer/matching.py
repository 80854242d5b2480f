"""Matching: whether a chunk fits a receive request, and which cells it fills. Pure: the caller reserves the cells."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from kvferry.daemon.transfer.endpoints import PlannedCopy, ReceiveRequest, SendChunk, SourcePool, Waived, rows_by_step
from kvferry.pools.planning.coverage import Cells, Extent, Rows, cells_of
from kvferry.pools.planning.page_ranges import PageRange, Span, entries_of, paged_spans, state_span, units_of
from kvferry.pools.planning.pairing import Pairing, check_covered, pair_entries
from kvferry.pools.planning.plan import cuts_of, plan_of_cut
from kvferry.pools.pool import Pool, check_models
from kvferry.protocol.errors import FirstTokenTwiceError, GeometryMismatchError, TooLargeError

DRAFT = "draft"
"""The component whose layers have their own numbers, not the model's."""

_Pairings: TypeAlias = "weakref.WeakKeyDictionary[SourcePool, dict[str, Pairing]]"
_pairings: weakref.WeakKeyDictionary[SourcePool, _Pairings] = weakref.WeakKeyDictionary()


class Trim(NamedTuple):
    """Page lists of one component that were cut to the shorter length; their lengths before, in pages."""

    component: str
    source_length: int
    destination_length: int

    @property
    def pages(self) -> int:
        """Return how many pages were left out."""
        return abs(self.source_length - self.destination_length)


class Match(msgspec.Struct, frozen=True):
    """What a chunk fills in a receive request, with counts of entries and pages that the receive request does not take.

    Attributes:
        planned_copies: the copies to make.
        skipped_source_entries: entries that the destination does not have.
        skipped_source_pages: pages that the receive request does not list.
        covered_source_entries: entries that a replica has sent already.
        waived: cells that stay unfilled because lists were trimmed.
        trims: how the lists were trimmed.
    """

    planned_copies: tuple[PlannedCopy, ...]
    skipped_source_entries: int = 0
    skipped_source_pages: int = 0
    covered_source_entries: int = 0
    waived: tuple[Waived, ...] = ()
    trims: tuple[Trim, ...] = ()

    @property
    def trimmed_pages(self) -> int:
        """Return how many pages of either side were trimmed."""
        return sum(one.pages for one in self.trims)


def match(chunk: SendChunk, source: SourcePool, receive_request: ReceiveRequest, whole_below_bytes: int = 0) -> Match:
    """Return what the chunk fills in the receive request.

    Source pages before the receive request's first page are skipped: decode has that prefix already. In a paged
    component, source pages past its end are an error: the two engines disagree about the length. A chunk with steps
    that moves less than ``whole_below_bytes`` is copied as a whole, with its last step.

    Raises:
        LengthMismatchError: the chunk goes past the receive request's end, or the last tokens differ.
        WindowMismatchError, EmptyStateError: a window or state does not fit, see ``state_span``.
        PageOverlapError: a cell has a sender already.
        TooLargeError: the payload exceeds the bound of the receive request's pool.
        FirstTokenTwiceError: the receive request has a first token or payload already.
        ModelMismatchError: the pools have different models.
        UncoveredEntryError, GeometryMismatchError, DuplicateEntryError: the pools' layouts do not match.
    """
    check_models(
        source.model, receive_request.pool.model, f"pool {source.name!r}", f"pool {receive_request.pool.name!r}"
    )
    takes_token = receive_request.takes_token_of(source.name)
    if chunk.carries_token and takes_token and receive_request.token_chunk is not None:
        raise FirstTokenTwiceError(
            "another SEND of the request carries the first token or payload", field="first_token"
        )
    check_payload(chunk.payload, receive_request.pool)
    parts = [_match_component(one, chunk, source, receive_request) for one in chunk.ranges]
    if len(parts) == 1 and not chunk.steps:
        return parts[0]
    planned_copies = [planned_copy for part in parts for planned_copy in part.planned_copies]
    if chunk.steps:
        total_bytes = sum(planned_copy.plan.total_bytes for planned_copy in planned_copies)
        planned_copies = _by_steps(planned_copies, chunk, whole=total_bytes < whole_below_bytes)
    return Match(
        tuple(planned_copies),
        sum(part.skipped_source_entries for part in parts),
        sum(part.skipped_source_pages for part in parts),
        sum(part.covered_source_entries for part in parts),
        tuple(waived for part in parts for waived in part.waived),
        tuple(trim for part in parts for trim in part.trims),
    )


def _match_component(one: PageRange, chunk: SendChunk, source: SourcePool, receive_request: ReceiveRequest) -> Match:
    destination = receive_request.ranges.get(one.component)
    if destination is None or destination.none:
        return Match(
            (),
            skipped_source_entries=len(entries_of(source.manifest, one.component)),
            skipped_source_pages=len(one.ids) if destination else 0,
        )
    pairing = _pairing(source, receive_request.pool, one.component)
    spans = (
        paged_spans(one, destination, last=chunk.last, units=pairing.units)
        if destination.kind == "paged"
        else [_state_span(one, destination, receive_request, pairing)]
    )
    if receive_request.sources == 1:
        check_covered(pairing, receive_request.pool.manifest.optional_components)
    trimmed = any(span.trimmed for span in spans)
    pages = sum(span.pages for span in spans)
    waived = []
    if trimmed and pages < len(destination.ids):
        waived.append(Waived(one.component, cells_of(pairing, pages, len(destination.ids))))
    planned_copies: tuple[PlannedCopy, ...] = ()
    covered = 0
    if pages and pairing.pairs:
        planned_copies, covered = _planned_copies(one, destination, pairing, spans, receive_request)
    return Match(
        planned_copies,
        pairing.skipped_source_entries,
        sum(span.skipped_source_pages for span in spans),
        covered,
        tuple(waived),
        (Trim(one.component, len(one.ids), len(destination.ids)),) if trimmed and pairing.pairs else (),
    )


def _state_span(one: PageRange, destination: PageRange, receive_request: ReceiveRequest, pairing: Pairing) -> Span:
    if pairing.units is not None:
        raise GeometryMismatchError(
            f"{one.component}: pages of {pairing.units.tokens * pairing.units.source} tokens at the source, "
            f"{pairing.units.tokens * pairing.units.destination} at the destination, and windows are not cut",
            field=one.field,
        )
    return state_span(one, destination, receive_request.request_id)


def _pairing(source: SourcePool, destination: SourcePool, component: str) -> Pairing:
    """Return the pairing of two pools' entries, cached for as long as both pools live."""
    known = _pairings.setdefault(destination, weakref.WeakKeyDictionary()).setdefault(source, {})
    if component not in known:
        entries = entries_of(source.manifest, component)
        known[component] = pair_entries(entries, entries_of(destination.manifest, component))
    return known[component]


def _planned_copies(
    one: PageRange, destination: PageRange, pairing: Pairing, spans: Sequence[Span], receive_request: ReceiveRequest
) -> tuple[tuple[PlannedCopy, ...], int]:
    """Return the copies of cells that no source fills yet, and how many entries a replica has covered completely."""
    wanted: list[Rows] = []
    planned_copies: list[PlannedCopy] = []
    units = None
    if pairing.units is not None:
        each = pairing.units.destination
        units = sum(map(len, units_of(destination, each, pairing.units.tokens))), each
    for span in spans:
        cells = cells_of(pairing, span.destination_start, span.destination_start + span.pages, units)
        for extent in receive_request.coverage[one.component].free_extents(cells, pairing.replicated):
            wanted.append(extent.rows)
            cells = cells_of(pairing, extent.start, extent.stop, units)
            planned_copies += _copies_of_extent(one, destination, pairing, span, extent, cells)
    rows = wanted[0] if len(wanted) == 1 else np.any(wanted, axis=0) if wanted else ()
    return tuple(planned_copies), len(pairing.pairs) - int(np.count_nonzero(rows))


def _copies_of_extent(
    one: PageRange, destination: PageRange, pairing: Pairing, span: Span, extent: Extent, cells: Cells
) -> Iterator[PlannedCopy]:
    """Yield the planned copies of an extent of a span: one, or where pages are cut one of each cut, for the same cells.

    They are of one transfer op, by which cells are counted.
    """
    source_at = span.source_start + extent.start - span.destination_start
    for cut in cuts_of(pairing.units, source_at, extent.start, extent.stop - extent.start):
        plan = plan_of_cut(pairing, one.ids, destination.ids, cut)
        whole = PlannedCopy(one.component, cells, plan, pairing.pairs, cut)
        yield whole if np.count_nonzero(extent.rows) == len(extent.rows) else _of(whole, extent.rows)


def _of(planned_copy: PlannedCopy, rows: Rows) -> PlannedCopy:
    """Return the part of a planned copy with these rows (entry pairs)."""
    pairs = tuple(pair for pair, kept in zip(planned_copy.pairs, rows.tolist(), strict=True) if kept)
    entries = rows
    if len(planned_copy.plan.entries) > len(rows):
        entries = np.repeat(rows, [pair.slices for pair in planned_copy.pairs])
    return planned_copy._replace(cells=planned_copy.cells.of(rows), plan=planned_copy.plan.of(entries), pairs=pairs)


def _by_steps(planned_copies: list[PlannedCopy], chunk: SendChunk, *, whole: bool) -> list[PlannedCopy]:
    """Split the planned copies by the chunk's steps; if ``whole``, all go with the last step."""
    if whole:
        return [one._replace(step=len(chunk.steps) - 1) for one in planned_copies]
    cut = []
    for one in planned_copies:
        layers = [None if one.component == DRAFT else pair.destination.layer for pair in one.pairs]
        steps = rows_by_step(layers, chunk.steps)
        cut += [_of(one, steps == step)._replace(step=step) for step in np.unique(steps).tolist()]
    return cut


def check_payload(payload: bytes, pool: Pool) -> None:
    """Check a payload against ``max_payload_bytes`` of the sender's or a receiver's pool.

    Raises:
        TooLargeError: it is larger; the error names the pool and its bound.
    """
    if len(payload) > pool.max_payload_bytes:
        raise TooLargeError(
            f"{len(payload)} bytes; pool {pool.name!r} takes {pool.max_payload_bytes}: create it with a larger "
            "max_payload_bytes",
            field="payload",
        )
