"""A transfer between two pools, planned with the daemon's own functions but not executed."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvferry.attention.state_windows import match_state
from kvferry.clients.cli.plan_input import (
    ListedPages,
    PlanInput,
    check_no_shared_lists,
    component_lists,
    destination_entries_of,
    entries_of,
    shared_lists,
)
from kvferry.pools.planning.coverage import Coverage, cells_of
from kvferry.pools.planning.page_ids import check_distinct, check_equal_length
from kvferry.pools.planning.pairing import Pairing, check_covered, pair_entries
from kvferry.pools.planning.plan import Plan, make_plan
from kvferry.protocol.errors import IncompleteError, KvferryError, LengthMismatchError
from kvferry.protocol.manifests import Entry


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
