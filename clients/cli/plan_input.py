"""The input of ``kvferry plan``: two sides, each with its entries or its pool's spec, and their page lists."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.attention.state_windows import StateList
from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.planning.manifest import OPTIONAL_COMPONENTS, check_optional
from kvferry.pools.planning.page_ids import PageIds, check_range
from kvferry.protocol.errors import InvalidFieldError, UnknownComponentError
from kvferry.protocol.ids import ComponentName
from kvferry.protocol.manifests import Component, Entry, PoolSpec

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
