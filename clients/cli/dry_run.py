"""A hand-off between two manifests, planned by the daemon's own functions and not carried out.

Knows the input of ``kvferry plan``, not how its result is shown.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.pools.manifest import check_entry
from kvferry.pools.pairing import Pairing, check_covered, pair_entries
from kvferry.pools.plan import Plan, make_plan
from kvferry.pools.runs import PageIds
from kvferry.protocol.errors import IncompleteError, InvalidFieldError, KvferryError, LengthMismatchError
from kvferry.protocol.manifests import Entry

LogicalPage = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object; unknown fields are mistakes."""


class PlanSource(_Strict, frozen=True, kw_only=True):
    """The sending side."""

    entries: tuple[Entry, ...]


class PlanDestination(_Strict, frozen=True, kw_only=True):
    """The receiving side; no source has to cover its optional components."""

    entries: tuple[Entry, ...]
    optional_components: tuple[str, ...] = ("draft",)


class PlanInput(_Strict, frozen=True, kw_only=True):
    """``partial``: this source is one of several, so destination entries may stay uncovered.

    ``source_first_page`` and ``destination_first_page`` are the logical numbers of the lists' first pages. Source pages
    before the destination's first one are dropped.
    """

    source: PlanSource
    destination: PlanDestination
    source_pages: tuple[int, ...]
    destination_pages: tuple[int, ...]
    source_first_page: LogicalPage = 0
    destination_first_page: LogicalPage = 0
    partial: bool = False


class DryRun(msgspec.Struct, frozen=True):
    """What came of it; where a rule refused, ``error`` says which, and what was not reached is None.

    ``dropped_source_pages`` are the first pages of the source's list: the destination has that prefix already.
    """

    pairing: Pairing
    dropped_source_pages: int = 0
    plan: Plan | None = None
    error: KvferryError | None = None


def dry_run(given: PlanInput) -> DryRun:
    """Pair the entries, align the pages, check and plan.

    Raises:
        InvalidFieldError, DuplicateEntryError, GeometryMismatchError: the entries do not make a pairing at all.
    """
    for side, entries in (("source", given.source.entries), ("destination", given.destination.entries)):
        for index, entry in enumerate(entries):
            check_entry(entry, f"{side}.entries[{index}]")
    pairing = pair_entries(given.source.entries, given.destination.entries)
    source_ids = _page_ids(given.source_pages, "source_pages")
    destination_ids = _page_ids(given.destination_pages, "destination_pages")
    dropped = min(max(given.destination_first_page - given.source_first_page, 0), len(source_ids))
    try:
        if not given.partial:
            check_covered(pairing, given.destination.optional_components)
        _check_logical_pages(given)
        return DryRun(pairing, dropped, make_plan(pairing, source_ids[dropped:], destination_ids))
    except KvferryError as error:
        return DryRun(pairing, dropped, error=error)


def _check_logical_pages(given: PlanInput) -> None:
    source_first, destination_first = given.source_first_page, given.destination_first_page
    source_end = source_first + len(given.source_pages)
    destination_end = destination_first + len(given.destination_pages)
    if source_end > destination_end and (source_first or destination_first):
        raise LengthMismatchError(
            f"source pages {source_first}..{source_end - 1} go past the destination's "
            f"{destination_first}..{destination_end - 1}",
            field="source_pages",
        )
    if source_first > destination_first:
        raise IncompleteError(
            f"the source starts at logical page {source_first}: nothing fills the destination's pages "
            f"{destination_first}..{min(source_first, destination_end) - 1}",
            field="source_first_page",
        )


def _page_ids(pages: tuple[int, ...], field: str) -> PageIds:
    try:
        return np.array(pages, np.int64)
    except OverflowError as cause:
        raise InvalidFieldError("a page id does not fit in 64 bits", field=field) from cause
