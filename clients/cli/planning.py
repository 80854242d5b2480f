"""``kvferry plan``: a dry run of the daemon's own pairing and planning."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from kvferry.clients.cli.console import BAD_INPUT, WORKED, print_json, read_json, refuse, show, shown, table
from kvferry.clients.cli.dry_run import DryRun, Part, PlanInput, dry_run
from kvferry.pools.planning.pairing import Pair
from kvferry.pools.planning.plan import Plan
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.manifests import Entry

# -- ``kvferry plan --explain``: what a dry run decided and why, for people and as JSON.


SHOWN_PAGES = 8

Coverage = Literal["optional", "other source", "missing"]
"""Why a destination entry may stay uncovered; ``missing``: it may not."""


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry in one side's list. ``head_start`` and ``heads``: the model's heads that it holds."""

    index: int
    base: int
    page_bytes: int
    head_start: int | None = None
    heads: int | None = None


class ExplainedPair(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pair. ``heads``: the model's heads exchanged, [first, end), if known; ``sliced``: not all that are held."""

    entry: str
    source: Place
    destination: Place
    heads: tuple[int, int] | None = None
    sliced: bool = False


class Skipped(msgspec.Struct, frozen=True):
    """A source entry that is not copied."""

    entry: str
    index: int
    reason: str


class Uncovered(msgspec.Struct, frozen=True):
    """A destination entry that this source does not fill."""

    entry: str
    index: int
    coverage: Coverage


class DroppedPages(msgspec.Struct, frozen=True, omit_defaults=True):
    """Pages of a list that are not copied: their first logical page, if known, their ids, and why.

    ``component`` is missing if all entries share the lists.
    """

    side: Literal["source", "destination"]
    pages: tuple[int, ...]
    reason: str
    first_page: int | None = None
    component: str | None = None


class Blocks(msgspec.Struct, frozen=True):
    """How much is copied.

    ``before``: one block per page of each pair, or per token if heads are sliced. ``after``: with the runs coalesced,
    as ``kvferry plan`` lists them.
    """

    pages: int
    runs: int
    before: int
    after: int
    of_sliced_heads: int
    total_bytes: int


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole explanation. If the transfer is refused, ``blocks`` is missing and ``error`` is set."""

    pairs: tuple[ExplainedPair, ...]
    skipped_source_entries: tuple[Skipped, ...]
    uncovered_destination_entries: tuple[Uncovered, ...]
    dropped_pages: tuple[DroppedPages, ...]
    blocks: Blocks | None = None
    error: dict[str, str] | None = None


def explain(given: PlanInput, run: DryRun, error: dict[str, str] | None = None) -> Explanation:
    """Return what the dry run decided; ``error``: the refusal as it is shown, if any."""
    return Explanation(
        pairs=tuple(_pairs(run)),
        skipped_source_entries=tuple(_skipped(run)),
        uncovered_destination_entries=tuple(_uncovered(given, run)),
        dropped_pages=tuple(dropped for part in run.parts for dropped in _dropped(part)),
        blocks=None if run.error else _blocks([plan for part in run.parts for plan in part.plans]),
        error=error,
    )


def lines_of(explanation: Explanation) -> Iterable[str]:
    """Yield the explanation as text; bases are those in the manifests and in the blocks."""
    yield from table(
        "pairs",
        ("entry", "source", "base", "page bytes", "destination", "base", "page bytes", "heads"),
        [_row(pair) for pair in explanation.pairs],
    )
    yield from table(
        "skipped source entries",
        ("source", "entry", "why"),
        [(one.index, one.entry, one.reason) for one in explanation.skipped_source_entries],
    )
    yield from table(
        "uncovered destination entries",
        ("destination", "entry", "coverage"),
        [(one.index, one.entry, one.coverage) for one in explanation.uncovered_destination_entries],
    )
    yield from table(
        "dropped pages",
        ("side", "component", "logical", "pages", "why"),
        [
            (one.side, one.component or "all", _logical(one), _shortened(one.pages), one.reason)
            for one in explanation.dropped_pages
        ],
    )
    yield ""
    if explanation.blocks:
        yield from _block_lines(explanation.blocks)
    if explanation.error:
        yield refusal_line(explanation.error)


def refusal_line(error: dict[str, str]) -> str:
    """Return a refusal as one line of text."""
    field, remedy = error.get("field"), error.get("remedy")
    return f"refused: {error['code']}{f' [{field}]' if field else ''}: {error['detail']}{f' ({remedy})' * bool(remedy)}"


def _pairs(run: DryRun) -> Iterable[ExplainedPair]:
    index_of = {entry.name: index for index, entry in enumerate(run.source_entries)}
    for pair in run.pairing.pairs:
        yield ExplainedPair(
            entry=pair.destination.name,
            source=_place(index_of[pair.source.name], pair.source),
            destination=_place(pair.destination_index, pair.destination),
            heads=_heads(pair),
            sliced=pair.heads is not None,
        )


def _heads(pair: Pair) -> tuple[int, int] | None:
    if pair.source.head_start is None or pair.source.heads is None:
        return None
    if pair.heads is None:
        return (pair.source.head_start, pair.source.head_start + pair.source.heads)
    first = pair.source.head_start + pair.heads.source
    return (first, first + pair.heads.count)


def _place(index: int, entry: Entry) -> Place:
    return Place(index, entry.base, entry.page_bytes, entry.head_start, entry.heads)


def _skipped(run: DryRun) -> Iterable[Skipped]:
    used = {pair.source.name for pair in run.pairing.pairs}
    names = {entry.name for entry in run.destination_entries}
    components = {entry.component for entry in run.destination_entries}
    for index, entry in enumerate(run.source_entries):
        if entry.name in used:
            continue
        if entry.name in names and entry.name in run.unlisted:
            reason = f"one side gives no pages of component {entry.component}"
        elif entry.name in names:
            reason = "the destination's entry of that name holds other heads"
        elif entry.component in components:
            reason = "the destination has no such entry"
        else:
            reason = f"the destination has no component {entry.component}"
        yield Skipped(entry.name, index, reason)


def _uncovered(given: PlanInput, run: DryRun) -> Iterable[Uncovered]:
    paired = {pair.destination_index for pair in run.pairing.pairs}
    for index, entry in enumerate(run.destination_entries):
        if index in paired:
            continue
        coverage: Coverage = "other source" if given.partial else "missing"
        if entry.component in given.destination.optional:
            coverage = "optional"
        yield Uncovered(entry.name, index, coverage)


def _dropped(part: Part) -> Iterable[DroppedPages]:
    source, destination = part.source, part.destination
    if destination.none:
        before = after = "the destination wants none of them"
    elif part.trimmed:
        before = after = "the sides give no logical pages, and the lists were cut to one length"
    else:
        before = f"the destination starts at logical page {destination.first_page}: it has them already"
        after = "they are past the destination's last page"
    at = 0
    for span in part.spans:
        reason = before if at == 0 else "the destination does not list them"
        yield from _dropped_span(part, "source", (at, span.source_start), reason)
        at = span.source_start + span.pages
    yield from _dropped_span(part, "source", (at, len(source.ids)), after)
    if part.trimmed:
        yield from _dropped_span(part, "destination", (part.spans[0].pages, len(destination.ids)), after)


def _dropped_span(
    part: Part, side: Literal["source", "destination"], span: tuple[int, int], reason: str
) -> Iterable[DroppedPages]:
    """Yield what lies between two indexes of a list, piece by piece where its logical pages have gaps."""
    listed, at = part.source if side == "source" else part.destination, 0
    for extent in listed.logical_pages:
        start, stop = max(span[0], at), min(span[1], at + len(extent))
        if start < stop:
            first = None if listed.first_page is None else extent.start + start - at
            yield DroppedPages(side, tuple(listed.ids[start:stop].tolist()), reason, first, part.component)
        at += len(extent)


def _blocks(plans: Sequence[Plan]) -> Blocks:
    return Blocks(
        pages=sum(plan.pages for plan in plans),
        runs=sum(len(plan.runs.pages) for plan in plans),
        before=sum(_whole(plan) * plan.pages + _slices(plan) for plan in plans),
        after=sum(_whole(plan) * len(plan.runs.pages) + _slices(plan) for plan in plans),
        of_sliced_heads=sum(_slices(plan) for plan in plans),
        total_bytes=sum(plan.total_bytes for plan in plans),
    )


def _whole(plan: Plan) -> int:
    """Return the number of entries that exchange whole pages."""
    return int((~plan.sliced).sum())


def _slices(plan: Plan) -> int:
    """Return the number of blocks of entries that exchange only some heads of each token."""
    return int(np.maximum(plan.source.rows, plan.destination.rows)[plan.sliced].sum()) * plan.pages


def _block_lines(blocks: Blocks) -> Iterable[str]:
    yield f"copied: pages {blocks.pages}, runs {blocks.runs}, bytes {blocks.total_bytes}"
    yield f"blocks: {blocks.before} before coalescing, {blocks.after} after"
    if blocks.of_sliced_heads:
        yield f"of these, heads of single tokens: {blocks.of_sliced_heads} (the sides hold different heads)"


def _row(pair: ExplainedPair) -> tuple[object, ...]:
    ours, theirs = pair.source, pair.destination
    heads = _span(pair.heads[0], pair.heads[1] - pair.heads[0]) if pair.heads else "-"
    if pair.sliced:
        heads += f" of {_held(ours)} -> {_held(theirs)}"
    return (pair.entry, ours.index, ours.base, ours.page_bytes, theirs.index, theirs.base, theirs.page_bytes, heads)


def _logical(dropped: DroppedPages) -> str:
    return "-" if dropped.first_page is None else _span(dropped.first_page, len(dropped.pages))


def _held(place: Place) -> str:
    return _span(place.head_start or 0, place.heads or 0)


def _span(first: int, count: int) -> str:
    return f"{first}..{first + count - 1}"


def _shortened(pages: Sequence[int]) -> str:
    shown = " ".join(str(page) for page in pages[:SHOWN_PAGES])
    return shown if len(pages) <= SHOWN_PAGES else f"{shown} and {len(pages) - SHOWN_PAGES} more"


class PlanOutput(msgspec.Struct, frozen=True):
    """``blocks``: [source address, destination address, bytes], list by list, entry by entry."""

    blocks: list[list[int]]
    skipped_source_entries: int


def add_plan(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    command.add_argument("file", metavar="FILE", help="a JSON file with both sides, or - for standard input")
    command.add_argument("--explain", action="store_true", help="show what pairs with what, what is left out, and why")
    command.add_argument("--json", action="store_true", help="for programs: errors and the explanation as JSON")


def plan(options: argparse.Namespace) -> int:
    """Print the copies between two manifests for two page lists, or with ``--explain`` how they were derived."""
    try:
        given = read_json(options.file, PlanInput)
        run = dry_run(given)
        if options.explain:
            return _print_explanation(given, run, as_json=options.json)
        return print_json(_planned(run))
    except KvferryError as error:
        return refuse("plan", error, as_json=options.json)


def _planned(run: DryRun) -> PlanOutput:
    if run.error is not None:
        raise run.error
    blocks = [block for part in run.parts for plan in part.plans for block in plan.blocks().tolist()]
    return PlanOutput(blocks, run.pairing.skipped_source_entries)


def _print_explanation(given: PlanInput, run: DryRun, *, as_json: bool) -> int:
    explanation = explain(given, run, shown(run.error) if run.error else None)
    if as_json:
        print_json(explanation)
    else:
        show(lines_of(explanation))
    return BAD_INPUT if run.error else WORKED
