"""``kvferry plan``: a dry run of the daemon's own pairing and planning."""

from __future__ import annotations

import argparse

import msgspec

from kvferry.clients.cli.dry_run import DryRun, dry_run
from kvferry.clients.cli.exit_codes import BAD_INPUT, WORKED
from kvferry.clients.cli.explain import explain, lines_of
from kvferry.clients.cli.json_input import print_json, read_json, refuse, shown
from kvferry.clients.cli.plan_input import PlanInput
from kvferry.protocol.errors import KvferryError


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
    blocks = [block for part in run.parts if part.plan for block in part.plan.blocks().tolist()]
    return PlanOutput(blocks, run.pairing.skipped_source_entries)


def _print_explanation(given: PlanInput, run: DryRun, *, as_json: bool) -> int:
    explanation = explain(given, run, shown(run.error) if run.error else None)
    if as_json:
        print_json(explanation)
    else:
        print("\n".join(lines_of(explanation)).lstrip("\n"))
    return BAD_INPUT if run.error else WORKED
