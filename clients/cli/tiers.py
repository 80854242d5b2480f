"""``kvferry tiers``: what each tier has, what it finds and how fast it is, and the operations that are under way."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Final

import msgspec

from kvferry.clients.cli.console import WORKED, add_daemon, show, table
from kvferry.clients.cli.inspect import ask
from kvferry.protocol.printable import json_line
from kvferry.protocol.session_messages import Status, StatusReport, TierStatus

GIB: Final = 1 << 30
TIERS: Final = ("host", "disk", "remote")


def add_tiers(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command)
    command.add_argument("--json", action="store_true", help="for programs")


def tiers(options: argparse.Namespace) -> int:
    """Print the tiers, what LOOKUPs found in them, and their operations."""
    report, boot_id = ask(options, "tiers", Status())
    if options.json:
        said = {"tiers": report.tiers, "found": found_in(report.counters), "operations": report.operations}
        print(json_line({"boot_id": boot_id, **msgspec.to_builtins(said)}))
    else:
        show(tier_lines(report))
    return WORKED


def found_in(counters: dict[str, int]) -> dict[str, int]:
    """Return how many blocks LOOKUPs asked for, found in each tier and nowhere, and would find without bounds."""
    found = {where: counters.get(f"cache.found.{where}", 0) for where in (*TIERS, "nowhere")}
    asked, unbounded = counters.get("cache.asked_blocks", 0), counters.get("cache.unbounded_hit_blocks", 0)
    return {"asked": asked, **found, "unbounded": unbounded}


def hit_rates(counters: dict[str, int]) -> dict[str, str]:
    """Return for each tier the part that it has of the blocks that those above it lack, as text."""
    found, rates = found_in(counters), {}
    came = found["asked"]
    for tier in TIERS:
        rates[tier] = percent(found[tier], came)
        came -= found[tier]
    return rates


def percent(part: int, whole: int) -> str:
    """Return a part as text; a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def tier_lines(report: StatusReport) -> Iterable[str]:
    """Yield the lines that ``kvferry tiers`` prints."""
    head = ("tier", "GiB", "used GiB", "pinned GiB", "blocks", "snapshots", "hit rate", "write", "read", "state")
    rates = hit_rates(report.counters)
    yield from table("tiers", head, [_row(tier, rates.get(tier.tier, "-")) for tier in report.tiers])
    found = found_in(report.counters)
    if found["asked"]:
        yield ""
        asked = found["asked"]
        hits, unbounded = percent(asked - found["nowhere"], asked), percent(found["unbounded"], asked)
        yield f"of {asked} blocks that were asked for, {hits} were found; without bounds {unbounded} would be"
    of_operations = ("session", "operation", "kind", "pool", "pages", "age ms", "waits for")
    operations = [
        (one.session, one.operation, one.kind, one.pool, one.pages, one.age_ms, one.waits_for or "copies")
        for one in report.operations
    ]
    yield from table("operations of the tiers", of_operations, operations)


def _row(tier: TierStatus, rate: str) -> tuple[object, ...]:
    """Return a tier's row; only the store's master knows the size of a store across nodes."""
    sizes = (tier.total_bytes, tier.used_bytes, tier.pinned_bytes)
    total, used, pinned = (f"{size / GIB:.2f}" if tier.total_bytes else "?" for size in sizes)
    write, read = (f"{us / 1000:.1f} ms" if us else "-" for us in (tier.write_us, tier.read_us))
    return (tier.tier, total, used, pinned, tier.blocks, tier.snapshots, rate, write, read, tier.state)
