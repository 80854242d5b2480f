"""A transfer between two pools, planned with the daemon's own functions but not executed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.attention.state_windows import StateList, match_state
from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.planning.coverage import Coverage, cells_of
from kvferry.pools.planning.manifest import OPTIONAL_COMPONENTS, check_optional
from kvferry.pools.planning.page_ids import PageIds, check_distinct, check_equal_length, check_range
from kvferry.pools.planning.pairing import Pairing, check_covered, pair_entries
from kvferry.pools.planning.plan import Plan, make_plan
from kvferry.protocol.errors import (
    IncompleteError,
    InvalidFieldError,
    KvferryError,
    LengthMismatchError,
    UnknownComponentError,
)
from kvferry.protocol.ids import ComponentName
from kvferry.protocol.manifests import Component, Entry, PoolSpec

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


class ListedPages(NamedTuple):
    """A page list; ``field``: where the input has it; ``paged``: whether it is not of a window or state."""

    first_page: int | None
    ids: PageIds
    none: bool
    field: str
    paged: bool

    @property
    def state(self) -> StateList:
        """Return it as the list of a window or state."""
        return StateList(self.first_page, self.ids, self.none)


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


def shared_lists(given: PlanInput) -> tuple[ListedPages, ListedPages]:
    """Return the source's and the destination's list that all entries share.

    Raises:
        InvalidFieldError: one of them is missing, or has a page id that does not fit in 64 bits.
    """
    source = _listed(given.source_pages, given.source_first_page, "source_pages")
    return source, _listed(given.destination_pages, given.destination_first_page, "destination_pages")


def check_no_shared_lists(given: PlanInput) -> None:
    """Check that no field is given that ``lists`` replace.

    Raises:
        InvalidFieldError: one is.
    """
    for field in ("source_pages", "destination_pages", "source_first_page", "destination_first_page"):
        if getattr(given, field):
            raise InvalidFieldError("the sides have `lists`, which give this for each component", field=field)


def component_lists(side: PlanSource, name: str) -> dict[str, ListedPages]:
    """Return each component's list, also for components that share the pages of a listed one.

    Raises:
        InvalidFieldError: the side has no lists, or a list is not possible for its component.
        UnknownComponentError: the side has no such component, or two lists for one.
        EmptyPagesError, PageOutOfRangeError: a list is invalid.
    """
    if side.lists is None:
        raise InvalidFieldError("the other side has `lists`: give this side's", field=f"{name}.lists")
    components = {one.name: one for one in _components(side)}
    found: dict[str, ListedPages] = {}
    for index, one in enumerate(side.lists):
        field = f"{name}.lists[{index}]"
        component = components.get(one.component)
        if component is None or one.component in found:
            what = "has two lists" if component else "is not in the pool"
            raise UnknownComponentError(f"component {one.component!r} {what}", field=f"{field}.component")
        paged = component.kind == "paged"
        if paged and one.none:
            raise InvalidFieldError(
                f"{one.component!r} is not a window or state (give the pool's `spec` if it is)", field=f"{field}.none"
            )
        ids = _page_ids(one.pages, f"{field}.pages")
        if paged or len(ids):
            check_range(ids, component.pages, f"{field}.pages")
        first_page = 0 if paged and one.first_page is None else one.first_page
        found[one.component] = ListedPages(first_page, ids, one.none, f"{field}.pages", paged)
    for component in components.values():
        if component.kind == "paged" and not component.group and component.space in found:
            found.setdefault(component.name, found[component.space])
    return found


def _components(side: PlanSource) -> tuple[Component, ...]:
    if side.spec is not None:
        return manifest_of(side.spec).components
    pages = {entry.component: entry.pages for entry in side.entries or ()}
    return tuple(Component(name=name, space=name, pages=count) for name, count in pages.items())


def _listed(pages: PageNumbers | None, first_page: int, field: str) -> ListedPages:
    if pages is None:
        raise InvalidFieldError("give it, or `lists` on both sides", field=field)
    return ListedPages(first_page, _page_ids(pages, field), none=False, field=field, paged=True)


def _page_ids(pages: PageNumbers, field: str) -> PageIds:
    try:
        return np.array(pages, np.int64)
    except OverflowError as cause:
        raise InvalidFieldError("a page id does not fit in 64 bits", field=field) from cause


class Part(msgspec.Struct, frozen=True):
    """How one page list of each side is aligned: ``count`` pages from each start on.

    ``component`` is None if all entries share the lists. ``trimmed``: lists without logical pages were cut to the
    shorter length. ``plan`` is None if nothing is copied.
    """

    component: str | None
    source: ListedPages
    destination: ListedPages
    source_start: int
    destination_start: int
    count: int
    trimmed: bool = False
    plan: Plan | None = None


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
        InvalidFieldError, UnknownComponentError: a page list is invalid.
        InvalidFieldError, DuplicateEntryError, GeometryMismatchError: the entries cannot be paired at all.
    """
    source_entries = entries_of(given.source, "source")
    destination_entries = destination_entries_of(given.destination)
    pairing = pair_entries(source_entries, destination_entries)
    lists: list[tuple[str | None, ListedPages | None, ListedPages]]
    if given.has_lists:
        sources = component_lists(given.source, "source")
        destinations = component_lists(given.destination, "destination")
        check_no_shared_lists(given)
        lists = [(name, sources.get(name), one) for name, one in destinations.items()]
        listed = _listed_only(pairing, sources.keys() & destinations.keys())
        unlisted = frozenset(one.name for one in listed.uncovered) - {one.name for one in pairing.uncovered}
        pairing = listed
    else:
        lists = [(None, *shared_lists(given))]
        unlisted = frozenset()
    parts: list[Part] = []
    error = None
    try:
        for name, ours, theirs in lists:
            if ours and (name is None or _of_component(pairing, name).pairs):
                parts.append(_align(name, ours, theirs))
        if not given.partial:
            check_covered(pairing, given.destination.optional)
            for part in parts:
                _check_heads(destination_entries, pairing, part, given.destination.optional)
        for index, part in enumerate(parts):
            parts[index] = _planned(pairing if part.component is None else _of_component(pairing, part.component), part)
    except KvferryError as refused:
        error = refused
    return DryRun(source_entries, destination_entries, pairing, unlisted, tuple(parts), error)


def _listed_only(pairing: Pairing, components: Collection[str]) -> Pairing:
    """Return the pairing without the components for which one side has no list: they are not exchanged."""
    pairs = tuple(pair for pair in pairing.pairs if pair.destination.component in components)
    unlisted = tuple(pair.destination for pair in pairing.pairs if pair.destination.component not in components)
    skipped = pairing.skipped_source_entries + len(unlisted)
    return Pairing(pairs, (*pairing.uncovered, *unlisted), skipped)


def _of_component(pairing: Pairing, name: str) -> Pairing:
    pairs = tuple(pair for pair in pairing.pairs if pair.destination.component == name)
    return msgspec.structs.replace(pairing, pairs=pairs)


def _align(name: str | None, source: ListedPages, destination: ListedPages) -> Part:
    """Return which pages correspond; for paged components, source pages before the destination's first are dropped."""
    if destination.paged:
        surplus = (destination.first_page or 0) - (source.first_page or 0)
        start = min(max(surplus, 0), len(source.ids))
        return Part(name, source, destination, start, 0, len(source.ids) - start)
    found = match_state(source.state, destination.state, name or "", "of the dry run")
    return Part(
        name, source, destination, found.source_start, found.destination_start, found.count, trimmed=found.trimmed
    )


def _check_heads(entries: tuple[Entry, ...], pairing: Pairing, part: Part, optional: tuple[str, ...]) -> None:
    """Check that the destination gets all heads of the paired entries from this one source."""
    mine = pairing if part.component is None else _of_component(pairing, part.component)
    paired = [entries[pair.destination_index] for pair in mine.pairs]
    coverage = Coverage(paired, 1, optional)
    pairs = [pair._replace(destination_index=index) for index, pair in enumerate(mine.pairs)]
    coverage.plan(cells_of(pairs, 0, 1))
    coverage.check_planned()


def _planned(pairing: Pairing, part: Part) -> Part:
    if part.destination.paged:
        _check_logical_pages(part.source, part.destination)
    elif not part.count:
        return part
    return msgspec.structs.replace(part, plan=_plan(pairing, part))


def _plan(pairing: Pairing, part: Part) -> Plan:
    source_ids = part.source.ids[part.source_start : part.source_start + part.count]
    stop = None if part.destination.paged else part.destination_start + part.count
    destination_ids = part.destination.ids[part.destination_start : stop]
    check_equal_length(source_ids, destination_ids, part.destination.field)
    check_distinct(destination_ids, part.destination.field)
    return make_plan(pairing, source_ids, destination_ids)


def _check_logical_pages(source: ListedPages, destination: ListedPages) -> None:
    source_first, destination_first = source.first_page or 0, destination.first_page or 0
    source_end = source_first + len(source.ids)
    destination_end = destination_first + len(destination.ids)
    if source_end > destination_end and (source_first or destination_first):
        raise LengthMismatchError(
            f"source pages {source_first}..{source_end - 1} go past the destination's "
            f"{destination_first}..{destination_end - 1}",
            field=source.field,
        )
    if source_first > destination_first:
        raise IncompleteError(
            f"the source starts at logical page {source_first}: nothing fills the destination's pages "
            f"{destination_first}..{source_first - 1}",
            field="source_first_page" if source.field == "source_pages" else source.field,
        )
