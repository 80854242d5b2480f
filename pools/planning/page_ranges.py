"""The page lists of a SEND or RECEIVE with their page ids, checked against their pool's manifest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np

from kvferry.pools.planning.geometry import Units
from kvferry.pools.planning.manifest import component_of, space_of
from kvferry.pools.planning.page_ids import check_distinct, check_range
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    DuplicatePageError,
    EmptyStateError,
    InvalidFieldError,
    LengthMismatchError,
    PageGapError,
    PageOverlapError,
    UnknownComponentError,
    WindowMismatchError,
)
from kvferry.protocol.manifests import Component, Entry, Manifest


class PageRange(msgspec.Struct, frozen=True):
    """Logical pages of one component, from ``first_page`` on, and the page ids that hold them.

    The logical pages are consecutive, unless the message had several lists of the component: then ``extents`` has the
    logical pages of each list, ascending, and ``ids`` the ids of all lists. ``end_token`` is the position after the
    last token, if the client gave it; ``field`` names the (first) list in errors. ``kind`` is the component's; only a
    window or state may have an unknown ``first_page``, an empty list, or ``none`` (the client does not want it). A
    ``shared`` list has the same pages as another list of the message, which holds them; an ``implied`` list is shared
    too, but was not in the message.
    """

    component: str
    first_page: int | None
    ids: PageIds
    end_token: int | None
    field: str
    kind: str = "paged"
    none: bool = False
    shared: bool = False
    extents: tuple[range, ...] = ()
    implied: bool = False

    @property
    def logical_pages(self) -> tuple[range, ...]:
        """Return the logical pages, ascending, as ranges between gaps."""
        return self.extents or (range(self.start_page, self.start_page + len(self.ids)),)

    @property
    def start_page(self) -> int:
        """Return the first logical page, 0 where it is unknown."""
        return self.first_page or 0

    @property
    def end_page(self) -> int:
        """Return the logical page after the last one."""
        return self.extents[-1].stop if self.extents else self.start_page + len(self.ids)

    def held_tokens(self, page_tokens: int) -> int | None:
        """Return how many tokens the pages hold, or None where the client did not say where they end."""
        return None if self.end_token is None else self.end_token - (self.end_page - len(self.ids)) * page_tokens


class Span(NamedTuple):
    """Which part of a source's page list goes into which part of a destination's; indexes into the lists.

    Where the pages of both sides are cut into units, all of these count units, but for ``skipped_source_pages``.
    """

    source_start: int
    destination_start: int
    pages: int
    skipped_source_pages: int
    trimmed: bool = False


def page_ranges(
    lists: Sequence[PageList],
    ids: Sequence[PageIds],
    manifest: Manifest,
    *,
    may_end_inside: bool,
    may_lack: bool = False,
    may_be_in_place: bool = False,
) -> tuple[PageRange, ...]:
    """Return a message's page lists with their ids.

    A paged component without a list, but on the pages of a listed one, gets that list. A message without lists, or with
    only empty ones, moves no pages.

    Args:
        lists: the message's lists.
        ids: the page ids of each list, in the same order.
        manifest: the manifest of the message's pool.
        may_end_inside: whether the last page may be partly filled; false in a chunk that others follow.
        may_lack: whether required components may have no list; true in a chunk of several.
        may_be_in_place: whether a paged component's list may be empty after a prefix, beside filled ones of others:
            all its pages are in place.

    Raises:
        UnknownComponentError: a list names a component that the pool lacks, or a required component has no list.
        EmptyPagesError, PageOutOfRangeError, LengthMismatchError, PageGapError, PageOverlapError, InvalidFieldError: a
            list is invalid.
    """
    no_pages = not any(map(len, ids))
    last = {one.component: index for index, one in enumerate(lists)}
    of_component: dict[str, list[PageRange]] = {}
    for index, (one, its_ids) in enumerate(zip(lists, ids, strict=True)):
        inside = may_end_inside and index == last[one.component]
        may_be_empty = no_pages or (may_be_in_place and bool(one.first_page))
        found = _page_range(one, its_ids, manifest, f"lists[{index}]", may_end_inside=inside, may_be_empty=may_be_empty)
        of_component.setdefault(one.component, []).append(found)
    ranges = [_in_one(one) for one in of_component.values()]
    ranges = [*_with_shared(ranges, manifest), *_implied(ranges, manifest)]
    if not (may_lack or no_pages):
        given = {*manifest.optional_components, *[one.component for one in ranges]}
        missing = [one.name for one in manifest.components if one.name not in given]
        if missing:
            raise UnknownComponentError(f"no list for component {min(missing)!r}", field="lists")
    return tuple(ranges)


def split(one: PageRange, page_tokens: int | None) -> Iterator[tuple[PageList, PageIds]]:
    """Yield the lists of a message that a range was made of, each with its ids."""
    at = 0
    for extent in one.logical_pages:
        ids = one.ids[at : at + len(extent)]
        at += len(extent)
        tokens = None
        if one.end_token is not None and page_tokens is not None and at == len(one.ids):
            tokens = one.end_token - extent.start * page_tokens
        first_page = None if one.first_page is None else extent.start
        yield (
            PageList(component=one.component, first_page=first_page, pages=len(ids), tokens=tokens, none=one.none),
            ids,
        )


def lists_with_pages(ranges: Iterable[PageRange]) -> list[PageRange]:
    """Return the lists that hold pages: neither empty ones nor those whose pages another list holds."""
    return [one for one in ranges if len(one.ids) and not one.shared]


def units_of(one: PageRange, each: int, tokens: int) -> list[range]:
    """Return the logical units of a range, of so many tokens and ``each`` in a page, up to the last token."""
    units = [range(pages.start * each, pages.stop * each) for pages in one.logical_pages]
    if one.end_token is not None:
        units[-1] = range(units[-1].start, min(units[-1].stop, -(-one.end_token // tokens)))
    return units


def paged_spans(one: PageRange, destination: PageRange, *, last: bool, units: Units | None = None) -> list[Span]:
    """Return the logical pages that both lists have, as spans without gaps; the first span counts the surplus pages.

    ``units``: into which the pages are cut, where those of both sides hold different numbers of tokens.

    Source pages before the destination's first are skipped: it has that prefix already. ``last``: nothing follows, so
    both lists must end at the same token.

    Raises:
        LengthMismatchError: the source goes past the destination's end, or the last tokens differ.
    """
    ours, theirs = one.logical_pages, destination.logical_pages
    if units is not None:
        ours, theirs = (
            tuple(units_of(its, each, units.tokens))
            for its, each in ((one, units.source), (destination, units.destination))
        )
    if ours[-1].stop > theirs[-1].stop:
        what = "pages" if units is None else f"units of {units.tokens} tokens"
        raise LengthMismatchError(
            f"{one.component}: source {what} {ours[0].start}..{ours[-1].stop - 1} go past the receive request's "
            f"{theirs[0].start}..{theirs[-1].stop - 1}",
            field=one.field,
        )
    ends_known = one.end_token is not None and destination.end_token is not None
    if last and ends_known and one.end_token != destination.end_token:
        raise LengthMismatchError(
            f"{one.component}: the source ends after token {one.end_token}, the destination after "
            f"{destination.end_token}",
            field=f"{one.field}.tokens",
        )
    spans = []
    source_at = 0
    for its in ours:
        destination_at = 0
        for wanted in theirs:
            start, stop = max(its.start, wanted.start), min(its.stop, wanted.stop)
            if start < stop:
                at = (source_at + start - its.start, destination_at + start - wanted.start)
                spans.append(Span(*at, stop - start, 0))
            destination_at += len(wanted)
        source_at += len(its)
    if not spans:
        return [Span(source_at, 0, 0, len(one.ids))]
    surplus = (source_at - sum(span.pages for span in spans)) // (1 if units is None else units.source)
    return [spans[0]._replace(skipped_source_pages=surplus), *spans[1:]]


def state_span(source: PageRange, destination: PageRange, transfer: str) -> Span:
    """Return which part of a window's or state's list goes into which part of the destination's.

    Both ends of a sliding window move with the length of the sequence, so where the two sides disagree by a token,
    lists of equal length can be shifted against each other and lists of unequal length can differ at either end. Only
    logical pages resolve that: if both sides give a ``first_page``, they are paired by logical page, and source pages
    outside the destination's are skipped. Otherwise both are cut to the shorter length, keeping the head, as engines do
    today: ``trimmed``, and the caller logs a warning. A destination with ``none`` skips the whole source list.

    Raises:
        EmptyStateError: one side is empty and the other is not, and the destination did not set ``none``.
        WindowMismatchError: the destination wants logical pages that the source does not have.
    """
    ours, theirs = len(source.ids), len(destination.ids)
    if destination.none or not (ours or theirs):
        return Span(0, 0, 0, ours)
    if not (ours and theirs):
        _refuse_empty(source, destination, transfer)
    if source.first_page is None or destination.first_page is None:
        return Span(0, 0, min(ours, theirs), 0, ours != theirs)
    if destination.first_page < source.first_page or destination.end_page > source.end_page:
        raise WindowMismatchError(
            f"{source.component} of transfer {transfer}: the destination wants pages "
            f"{destination.first_page}..{destination.end_page - 1}, the source has "
            f"{source.first_page}..{source.end_page - 1}",
            field="first_page",
        )
    return Span(destination.first_page - source.first_page, 0, theirs, ours - theirs)


def _refuse_empty(source: PageRange, destination: PageRange, transfer: str) -> NoReturn:
    ours, theirs = len(source.ids), len(destination.ids)
    if ours:
        said = f"the source gives {ours} ids, the destination's list is empty"
    else:
        what = "the source says none" if source.none else "the source's list is empty"
        said = f"the destination wants {theirs} ids, {what}"
    raise EmptyStateError(f"{source.component} of transfer {transfer}: {said}", field="lists")


def check_apart(lists: Iterable[PageRange], manifest: Manifest) -> None:
    """Check that no page is named twice: components of one page space (groups, for instance) must use distinct ids.

    Raises:
        DuplicatePageError: a page is; the error names the list that repeats it, of several of a component the first.
    """
    of_spaces: dict[str, list[PageRange]] = {}
    for one in lists:
        of_spaces.setdefault(space_of(manifest, one.component), []).append(one)
    for together in of_spaces.values():
        try:
            check_distinct(np.concatenate([one.ids for one in together]), "pages")
        except DuplicatePageError:
            for count, one in enumerate(together, 1):  # a list may also repeat a page of its own
                check_distinct(np.concatenate([one.ids for one in together[:count]]), f"{one.field}.pages")


def entries_of(manifest: Manifest, component: str) -> tuple[Entry, ...]:
    """Return the entries of one component, in manifest order."""
    return tuple(entry for entry in manifest.entries if entry.component == component)


def page_tokens_of(manifest: Manifest, component: str) -> int | None:
    """Return the tokens per page of a component, or None where it is not paged by tokens.

    ``main`` of a pipeline stage may have only draft layers on its pages, and no entry of its own: theirs is used then.
    """
    space = space_of(manifest, component)
    inside = {one.name for one in manifest.components if one.space == space}
    return next((entry.page_tokens for entry in manifest.entries if entry.component in inside), None)


def _page_range(
    one: PageList, ids: PageIds, manifest: Manifest, field: str, *, may_end_inside: bool, may_be_empty: bool
) -> PageRange:
    component = component_of(manifest, one.component)
    if component is None:
        raise UnknownComponentError(f"the pool has no component {one.component!r}", field=f"{field}.component")
    _check_form(one, component, field)
    if len(ids) or (component.kind == "paged" and not may_be_empty):
        check_range(ids, component.pages, f"{field}.pages")
    first_page = 0 if component.kind == "paged" and one.first_page is None else one.first_page
    end_token = None
    if one.tokens is not None:
        page_tokens = page_tokens_of(manifest, one.component)
        if page_tokens is None or first_page is None:
            raise InvalidFieldError(f"{one.component!r} is not paged by tokens", field=f"{field}.tokens")
        _check_tokens(one.tokens, len(ids), page_tokens, field, may_end_inside=may_end_inside)
        end_token = first_page * page_tokens + one.tokens
    return PageRange(one.component, first_page, ids, end_token, field, component.kind, one.none)


def _in_one(lists: Sequence[PageRange]) -> PageRange:
    """Return one range for all lists of a component.

    Raises:
        InvalidFieldError: several lists of a window or state.
        PageOverlapError: the lists do not ascend, or overlap.
    """
    first = lists[0]
    if len(lists) == 1:
        return first
    for before, one in itertools.pairwise(lists):
        if one.kind != "paged":
            raise InvalidFieldError(f"{one.component!r} is not a paged component: give it one list", field=one.field)
        if one.start_page < before.end_page:
            raise PageOverlapError(
                f"{one.component}: the list begins at page {one.start_page}, the one before ends at "
                f"{before.end_page}: give each page once, in ascending order",
                field=f"{one.field}.first_page",
            )
    return msgspec.structs.replace(
        first,
        ids=np.concatenate([one.ids for one in lists]),
        end_token=lists[-1].end_token,
        extents=tuple(range(one.start_page, one.end_page) for one in lists),
    )


def _check_form(one: PageList, component: Component, field: str) -> None:
    if component.kind == "paged" and one.none:
        raise InvalidFieldError(f"{one.component!r} is neither a window nor a state", field=f"{field}.none")
    if one.none and one.pages:
        raise InvalidFieldError("a list with none=true names pages", field=f"{field}.pages")


def _with_shared(ranges: Sequence[PageRange], manifest: Manifest) -> Iterator[PageRange]:
    """Mark lists with the same ids as an earlier list of a component that lies on the same pages as shared."""
    before: list[PageRange] = []
    for one in ranges:
        twin = any(
            _pages_of(manifest, other.component) == _pages_of(manifest, one.component)
            and np.array_equal(other.ids, one.ids)
            for other in before
        )
        yield msgspec.structs.replace(one, shared=True) if twin else one
        before.append(one)


def _implied(ranges: Sequence[PageRange], manifest: Manifest) -> Iterator[PageRange]:
    """Yield lists for paged components that lie on a listed component's pages, such as draft layers on main's."""
    named = {one.component for one in ranges}
    for component in manifest.components:
        if component.name in named or component.kind != "paged" or component.group:
            continue
        leader = next((one for one in ranges if one.component == component.space), None)
        if leader is not None and leader.kind == "paged":
            yield msgspec.structs.replace(leader, component=component.name, shared=True, implied=True)


def _pages_of(manifest: Manifest, name: str) -> str:
    """Return the component whose pages a component lies on: its space's first, or itself if it is a group."""
    component = component_of(manifest, name)
    assert component is not None, name
    return component.name if component.group else component.space


def _check_tokens(tokens: int, pages: int, page_tokens: int, field: str, *, may_end_inside: bool) -> None:
    needed = -(-tokens // page_tokens)
    if needed != pages:
        raise LengthMismatchError(f"{tokens} tokens fill {needed} pages, not {pages}", field=f"{field}.tokens")
    if tokens % page_tokens and not may_end_inside:
        raise PageGapError(
            f"{tokens} tokens end inside a page of {page_tokens}, and more pages follow", field=f"{field}.tokens"
        )
