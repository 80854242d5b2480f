"""``python -m benchmarks [NAMES…]``: measure, show a table, write ``build/bench/NAME.json``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.catalogue import BENCHMARKS, BY_NAME_ONLY, TRACE, run_apart, run_here
from benchmarks.measure import Effort, MissingPeerError, Row
from benchmarks.report import is_beyond, summary, table, write_report
from benchmarks.traces import NoTraceError, read_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks named, or all; return the exit status: 1 where a peer is missing, or with --strict a miss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure kvferry against its peers.")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of: {', '.join(BENCHMARKS)}; all but {' and '.join(BY_NAME_ONLY)} by default",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help=f"replay a trace, named {TRACE!r}; alone unless others are named"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds in one process, to see that all works; figures mean nothing"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 where a target is missed that was within reach"
    )
    parser.add_argument("--output", type=Path, default=Path("build/bench"), metavar="DIR", help="for the JSON files")
    parser.add_argument(
        "--device", default="npu:0", help="of device_overlap, npu_tables and npu_transfer; simulated if none"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in (*BENCHMARKS, TRACE)]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}")
    if TRACE in options.names and not options.trace:
        parser.error(f"{TRACE!r} needs --trace FILE")
    if options.trace:
        if not options.trace.is_file():
            parser.error(f"no file {options.trace}")
        try:
            read_trace(options.trace)
        except (OSError, NoTraceError) as cause:
            parser.error(f"--trace: {cause}")
    names = [name for name in options.names if name != TRACE] or (
        [] if options.trace else [name for name in BENCHMARKS if name not in BY_NAME_ONLY]
    )
    if options.trace:
        names.append(TRACE)
    run = run_here if options.quick else run_apart
    rows: list[Row] = []
    skipped = 0
    for name in names:
        print(f"== {name}", flush=True)
        try:
            found = run(name, Effort(options.quick, options.device), options.trace, options.output)
        except MissingPeerError as missing:
            print(f"not measured: {missing}", flush=True)
            skipped += 1
            continue
        write_report(options.output, name, found, quick=options.quick)
        print(table(found), flush=True)
        rows += found
    print(summary(rows))
    missed = options.strict and any(row.met is False and not is_beyond(row) for row in rows)
    return 1 if skipped or missed else 0


if __name__ == "__main__":
    sys.exit(main())
