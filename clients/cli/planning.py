"""``kvferry plan``: the daemon's own pairing and planning, dry."""

from __future__ import annotations

import argparse

import msgspec

from kvferry.clients.cli.dry_run import DryRun, dry_run
from kvferry.clients.cli.explain import explain, lines_of, refusal_line
from kvferry.clients.cli.json_input import REFUSED, print_json, print_refusal, read_json, shown
from kvferry.clients.cli.plan_input import PlanInput
from kvferry.protocol.errors import KvferryError


class PlanOutput(msgspec.Struct, frozen=True):
    """``blocks``: [source address, destination address, bytes], list by list, entry by entry in its order."""

    blocks: list[list[int]]
    skipped_source_entries: int


def plan(options: argparse.Namespace) -> int:
    """Print the copies between two manifests for two page lists, or with ``--explain`` how they come about."""
    try:
        given = read_json(options.file, PlanInput)
        run = dry_run(given)
        if options.explain:
            return _print_explanation(given, run, as_json=options.json)
        return print_json(_planned(run))
    except KvferryError as error:
        if options.explain and not options.json:
            print(refusal_line(shown(error)))
            return REFUSED
        return print_refusal(error)


def _planned(run: DryRun) -> PlanOutput:
    if run.error is not None:
        raise run.error
    blocks = [block for part in run.parts if part.plan for block in part.plan.blocks().tolist()]
    return PlanOutput(blocks, run.pairing.skipped_source_entries)


def _print_explanation(given: PlanInput, run: DryRun, *, as_json: bool) -> int:
    explanation = explain(given, run, shown(run.error) if run.error else None)
    if as_json:
        print_json(explanation)
    else:
        print("\n".join(lines_of(explanation)).lstrip("\n"))
    return REFUSED if run.error else 0
