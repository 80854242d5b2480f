"""A transfer between two pools, planned with the daemon's own functions but not executed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.planning.coverage import Coverage, cells_of
from kvferry.pools.planning.manifest import OPTIONAL_COMPONENTS, check_optional
from kvferry.pools.planning.page_ids import check_distinct, check_equal_length
from kvferry.pools.planning.page_ranges import (
    PageRange,
    Span,
    check_apart,
    lists_with_pages,
    page_ranges,
    paged_spans,
    state_span,
)
from kvferry.pools.planning.pairing import Pairing, check_covered, pair_entries
from kvferry.pools.planning.plan import Plan, make_plan
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    GeometryMismatchError,
    IncompleteError,
    InvalidFieldError,
    KvferryError,
    LengthMismatchError,
)
from kvferry.protocol.ids import ComponentName
from kvferry.protocol.manifests import Component, Entry, Manifest, PoolSpec

# -- the input of ``kvferry plan``: two sides, each with its entries or its pool's spec, and their page lists.


LogicalPage = Annotated[int, Meta(ge=0, lt=1 << 31)]
PageNumbers = tuple[int, ...]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object without unknown fields."""


class PlanList(_Strict, frozen=True, kw_only=True):
    """One component's pages, as in SEND and RECEIVE.

    ``first_page`` is the logical number of the first one: 0 by default, or unknown for a window or state; ``none``
    states that this side has or wants nothing of a window or state.
    """

    component: ComponentName
    pages: PageNumbers = ()
    first_page: LogicalPage | None = None
    none: bool = False


class PlanSource(_Strict, frozen=True, kw_only=True):
    """The sending side: its entries, or its pool's spec; ``lists`` if components have separate pages."""

    entries: tuple[Entry, ...] | None = None
    spec: PoolSpec | None = None
    lists: tuple[PlanList, ...] | None = None


class PlanDestination(PlanSource, frozen=True, kw_only=True):
    """The receiving side; no source has to cover its optional components.

    ``optional_components`` are those of its manifest; by default the spec's, or without a spec the default ones.
    """

    optional_components: tuple[str, ...] | None = None

    @property
    def optional(self) -> tuple[str, ...]:
        """Return the optional components, from the input, the spec or the default."""
        if self.optional_components is not None:
            return self.optional_components
        return OPTIONAL_COMPONENTS if self.spec is None else self.spec.optional_components


class PlanInput(_Strict, frozen=True, kw_only=True):
    """``partial``: this source is one of several, so destination entries may stay uncovered.

    Either both sides have ``lists``, or all entries share ``source_pages`` and ``destination_pages``; the logical
    numbers of these lists' first pages are ``source_first_page`` and ``destination_first_page``.
    """

    source: PlanSource
    destination: PlanDestination
    source_pages: PageNumbers | None = None
    destination_pages: PageNumbers | None = None
    source_first_page: LogicalPage = 0
    destination_first_page: LogicalPage = 0
    partial: bool = False

    @property
    def has_lists(self) -> bool:
        """Return whether components have separate lists; otherwise all entries share one per side."""
        return self.source.lists is not None or self.destination.lists is not None


def entries_of(side: PlanSource, name: str) -> tuple[Entry, ...]:
    """Return a side's entries, checked.

    Raises:
        InvalidFieldError: the side has neither entries nor a spec, or both; or one of them is invalid.
        GeometryMismatchError: an entry contradicts itself.
    """
    if (side.entries is None) == (side.spec is None):
        raise InvalidFieldError("give the side's `entries` or its pool's `spec`", field=f"{name}.entries")
    if side.spec is not None:
        return manifest_of(side.spec).entries
    assert side.entries is not None
    for index, entry in enumerate(side.entries):
        check_entry(entry, f"{name}.entries[{index}]")
    return side.entries


def destination_entries_of(side: PlanDestination) -> tuple[Entry, ...]:
    """Return the destination's entries, checked together with its optional components.

    Raises:
        InvalidFieldError: as ``entries_of``, or no entry belongs to an optional component, or all do.
        GeometryMismatchError: an entry contradicts itself.
    """
    entries = entries_of(side, "destination")
    if side.optional_components is not None:
        components = {entry.component for entry in entries}
        check_optional(components, side.optional_components, "destination.optional_components")
    return entries


def manifest_of_side(side: PlanSource, entries: tuple[Entry, ...]) -> Manifest:
    """Return a side's manifest; of one that only has entries each component has pages of its own."""
    if side.spec is not None:
        return manifest_of(side.spec)
    pages = {entry.component: entry.pages for entry in entries}
    components = tuple(Component(name=name, space=name, pages=count) for name, count in pages.items())
    return Manifest(pages=0, region_bytes=0, layout_digest="", entries=entries, components=components)


def shared_lists(given: PlanInput) -> tuple[PageRange, PageRange]:
    """Return the source's and the destination's list that all entries share.

    Raises:
        InvalidFieldError: one of them is missing, or has a page id that does not fit in 64 bits.
    """
    source = _shared(given.source_pages, given.source_first_page, "source_pages")
    return source, _shared(given.destination_pages, given.destination_first_page, "destination_pages")


def check_no_shared_lists(given: PlanInput) -> None:
    """Check that no field is given that ``lists`` replace.

    Raises:
        InvalidFieldError: one is.
    """
    for field in ("source_pages", "destination_pages", "source_first_page", "destination_first_page"):
        if getattr(given, field):
            raise InvalidFieldError("the sides have `lists`, which give this for each component", field=field)


def component_lists(side: PlanSource, manifest: Manifest, name: str) -> dict[str, PageRange]:
    """Return each component's list as the daemon reads it, also for components that share a listed one's pages.

    Raises:
        InvalidFieldError: the side has no lists.
        KvferryError: the daemon would refuse the lists; the field begins with the side.
    """
    if side.lists is None:
        raise InvalidFieldError("the other side has `lists`: give this side's", field=f"{name}.lists")
    lists = [
        PageList(component=one.component, first_page=one.first_page, pages=len(one.pages), none=one.none)
        for one in side.lists
    ]
    ids = [_page_ids(one.pages, f"{name}.lists[{index}].pages") for index, one in enumerate(side.lists)]
    try:
        ranges = page_ranges(lists, ids, manifest, may_end_inside=True, may_lack=True)
        if name == "destination":
            for one in lists_with_pages(ranges):
                check_distinct(one.ids, f"{one.field}.pages")
            check_apart(lists_with_pages(ranges), manifest)
    except KvferryError as error:
        if side.spec is None and error.field.endswith(".none"):  # entries alone make every component paged
            error.detail += ": give the pool's `spec` if it is"
        error.field = f"{name}.{error.field}"
        raise
    return {one.component: one for one in ranges}


def _shared(pages: PageNumbers | None, first_page: int, field: str) -> PageRange:
    if pages is None:
        raise InvalidFieldError("give it, or `lists` on both sides", field=field)
    return PageRange("", first_page, _page_ids(pages, field), None, field)


def _page_ids(pages: PageNumbers, field: str) -> PageIds:
    try:
        return np.array(pages, np.int64)
    except OverflowError as cause:
        raise InvalidFieldError("a page id does not fit in 64 bits", field=field) from cause


# -- the dry run


class Part(msgspec.Struct, frozen=True):
    """How one page list of each side is aligned: the pages of each span correspond.

    ``component`` is None if all entries share the lists. ``plans``: one for each span; empty if nothing is copied.
    """

    component: str | None
    source: PageRange
    destination: PageRange
    spans: tuple[Span, ...]
    plans: tuple[Plan, ...] = ()

    @property
    def trimmed(self) -> bool:
        """Return whether lists without logical pages were cut to the shorter length."""
        return any(span.trimmed for span in self.spans)


class DryRun(msgspec.Struct, frozen=True):
    """The result; if a rule refused the transfer, ``error`` says which, and ``parts`` are those before it.

    ``unlisted``: names of entries that would pair, but one side gives no pages of their component.
    """

    source_entries: tuple[Entry, ...]
    destination_entries: tuple[Entry, ...]
    pairing: Pairing
    unlisted: frozenset[str] = frozenset()
    parts: tuple[Part, ...] = ()
    error: KvferryError | None = None


def dry_run(given: PlanInput) -> DryRun:
    """Pair the entries, align the pages, check and plan.

    Raises:
        KvferryError: a page list is invalid, or the entries cannot be paired at all.
    """
    source_entries = entries_of(given.source, "source")
    destination_entries = destination_entries_of(given.destination)
    pairing = pair_entries(source_entries, destination_entries)
    for pair in pairing.pairs:
        if pair.units is not None:
            raise GeometryMismatchError(
                f"{pair.destination.name}: page_tokens is {pair.source.page_tokens} at the source, "
                f"{pair.destination.page_tokens} at the destination: a dry run cuts no pages",
                field=f"destination.entries[{pair.destination_index}].page_tokens",
            )
    lists: list[tuple[str | None, PageRange, PageRange]]
    unlisted: frozenset[str] = frozenset()
    if given.has_lists:
        sources = component_lists(given.source, manifest_of_side(given.source, source_entries), "source")
        manifest = manifest_of_side(given.destination, destination_entries)
        destinations = component_lists(given.destination, manifest, "destination")
        check_no_shared_lists(given)
        listed = _listed_only(pairing, sources.keys() & destinations.keys())
        unlisted = frozenset(one.name for one in listed.uncovered) - {one.name for one in pairing.uncovered}
        pairing = listed
        paired = {pair.destination.component for pair in pairing.pairs}
        lists = [(name, sources[name], one) for name, one in destinations.items() if name in paired]
    else:
        lists = [(None, *shared_lists(given))]
    parts: list[Part] = []
    error = None
    try:
        parts += [Part(name, ours, theirs, _spans(ours, theirs)) for name, ours, theirs in lists]
        if not given.partial:
            check_covered(pairing, given.destination.optional)
        for index, part in enumerate(parts):
            parts[index] = _planned(destination_entries, pairing, part, given)
    except KvferryError as refused:
        error = refused
    return DryRun(source_entries, destination_entries, pairing, unlisted, tuple(parts), error)


def _listed_only(pairing: Pairing, components: Collection[str]) -> Pairing:
    """Return the pairing without the components for which one side has no list: they are not exchanged."""
    pairs = tuple(pair for pair in pairing.pairs if pair.destination.component in components)
    unlisted = tuple(pair.destination for pair in pairing.pairs if pair.destination.component not in components)
    skipped = pairing.skipped_source_entries + len(unlisted)
    return Pairing(pairs, (*pairing.uncovered, *unlisted), skipped)


def _spans(source: PageRange, destination: PageRange) -> tuple[Span, ...]:
    """Return which pages correspond."""
    if not destination.component:
        surplus = min(max(destination.start_page - source.start_page, 0), len(source.ids))
        return (Span(surplus, 0, len(source.ids) - surplus, surplus),)
    if destination.kind != "paged":
        return (state_span(source, destination, "of the dry run"),)
    try:
        return tuple(paged_spans(source, destination, last=True))
    except KvferryError as refused:  # both sides have lists of these numbers
        refused.field = f"source.{refused.field}"
        raise


def _planned(entries: tuple[Entry, ...], pairing: Pairing, part: Part, given: PlanInput) -> Part:
    """Return the part with its plans, if the destination gets all of it or other sources may send the rest."""
    source, destination = part.source, part.destination
    if part.component is None:
        _check_shared(part)
    else:
        pairing = msgspec.structs.replace(
            pairing, pairs=tuple(one for one in pairing.pairs if one.destination.component == part.component)
        )
    if not given.partial and not destination.none:
        _check_filled(entries, pairing, part, given.destination.optional)
    plans = [
        make_plan(
            pairing,
            source.ids[span.source_start : span.source_start + span.pages],
            destination.ids[span.destination_start : span.destination_start + span.pages],
        )
        for span in part.spans
        if span.pages or part.component is None
    ]
    return msgspec.structs.replace(part, plans=tuple(plans))


def _check_filled(entries: tuple[Entry, ...], pairing: Pairing, part: Part, optional: tuple[str, ...]) -> None:
    """Check that the destination gets each page of the paired entries, with all heads, from this one source."""
    coverage = Coverage(
        [entries[pair.destination_index] for pair in pairing.pairs], len(part.destination.ids), optional
    )
    numbered = (pair._replace(destination_index=index) for index, pair in enumerate(pairing.pairs))
    pairing = msgspec.structs.replace(pairing, pairs=tuple(numbered))
    for span in part.spans:
        coverage.plan(cells_of(pairing, span.destination_start, span.destination_start + span.pages))
        if span.trimmed:
            coverage.waive(cells_of(pairing, span.pages, len(part.destination.ids)))
    coverage.check_planned()


def _check_shared(part: Part) -> None:
    """Check lists that all entries share: without logical pages of their own they must be equally long."""
    source, destination = part.source, part.destination
    if source.end_page > destination.end_page and (source.first_page or destination.first_page):
        raise LengthMismatchError(
            f"source pages {source.start_page}..{source.end_page - 1} go past the destination's "
            f"{destination.start_page}..{destination.end_page - 1}",
            field=source.field,
        )
    if source.start_page > destination.start_page:
        raise IncompleteError(
            f"the source starts at logical page {source.start_page}: nothing fills the destination's pages "
            f"{destination.start_page}..{source.start_page - 1}",
            field="source_first_page",
        )
    check_equal_length(source.ids[part.spans[0].source_start :], destination.ids, destination.field)
    check_distinct(destination.ids, destination.field)
