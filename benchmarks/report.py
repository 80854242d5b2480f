"""What a run leaves: a table on stdout for people, a JSON file a benchmark for machines."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.measure import Row

HEADINGS = ("name", "ours", "peer", "unit", "ratio", "limit", "target", "met")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's file. ``quick`` rows show that it works, not how fast anything is."""

    benchmark: str
    quick: bool
    cpus: int
    python: str
    rows: tuple[Row, ...]


def write_report(folder: Path, name: str, rows: Sequence[Row], *, quick: bool) -> None:
    """Write ``NAME.json`` into the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(
        benchmark=name,
        quick=quick,
        cpus=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        rows=tuple(rows),
    )
    (folder / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text, then what the peers are, then the notes."""
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    peers = dict.fromkeys(f"peer: {row.peer_is}" for row in rows)
    limits = dict.fromkeys(
        f"limit: {row.limit_is}; the best quarter of its rounds, as a ratio to the same peer"
        for row in rows
        if row.limit_is
    )
    notes = [f"{row.name}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, *peers, *limits, *notes, ""])


def summary(rows: Sequence[Row]) -> str:
    """Return one line that counts the targets."""
    aimed, met = (sum(row.met is not None for row in rows), sum(row.met is True for row in rows))
    line = f"bench: {met} of {aimed} targets met"
    missed, beyond = ([row.name for row in rows if row.met is False and is_beyond(row) is one] for one in (False, True))
    line += f"; out of reach here: {', '.join(beyond)}" if beyond else ""
    return line + (f"; missed: {', '.join(missed)}" if missed else "")


def is_beyond(row: Row) -> bool:
    """Return whether a row's target was out of reach: not even its limit meets it."""
    return row.limit_meets is False


def _cells(row: Row) -> tuple[str, ...]:
    sign = "<=" if row.better == "lower" else ">="
    target = "" if row.target is None else f"{row.target_on} {sign} {row.target:g}"
    met = "" if row.met is None else "yes" if row.met else "out of reach" if is_beyond(row) else "NO"
    return (
        row.name,
        f"{row.ours:.4g}",
        f"{row.peer:.4g}",
        f"{row.unit}, {row.better} is better",
        f"{row.ratio:.3g}",
        "" if row.limit is None else f"{row.limit / row.peer:.3g}",
        target,
        met,
    )
