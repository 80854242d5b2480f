"""Fuzzing guided by coverage: ``python -m tests.fuzz [TARGET …] [--minutes 10]``; see ``make fuzz``.

What reaches new code is kept in ``build/fuzz``, and the next run begins with it. An input that breaks a target is
written to ``tests/fuzz/crashes``, where the tests find it: commit it with the fix.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.fuzz.inputs import CRASHES, MAX_INPUT_BYTES, TARGETS, target

BUILD: Final = Path("build/fuzz")
SCRATCH: Final = Path("/dev/shm")  # noqa: S108  files of targets are in memory; each run has a folder of its own
MAX_INPUT_S: Final = 20
PROCESS_MINUTES: Final = 10
MAX_MEMORY_MB: Final = 4096
"""Of a process: atheris keeps the result of each comparison of arrays, some 10 KB an input where there are many."""

HEADINGS: Final = ("target", "minutes", "executions", "edges", "features", "inputs kept", "found")


class Row(NamedTuple):
    """What a run was; ``edges`` and ``features`` are libFuzzer's: branches taken, and how often, in the product."""

    target: str
    minutes: float
    executions: int
    edges: int
    features: int
    kept: int
    found: int


def run(name: str, minutes: float) -> Row:
    """Fuzz a target, to the first input that breaks it, by one process after another."""
    executions, left = 0, minutes
    while True:
        part = _run_once(name, min(left, PROCESS_MINUTES))
        executions, left = executions + part.executions, left - PROCESS_MINUTES
        if part.found or left <= 0:
            return part._replace(minutes=minutes, executions=executions)


def _run_once(name: str, minutes: float) -> Row:
    corpus, crashes, log = BUILD / name / "corpus", CRASHES / name, BUILD / name / "log"
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    before = set(crashes.iterdir())
    options = {
        "max_total_time": round(60 * minutes),
        "max_len": MAX_INPUT_BYTES,
        "timeout": MAX_INPUT_S,
        "rss_limit_mb": MAX_MEMORY_MB,
        "artifact_prefix": f"{crashes}/",
        "print_final_stats": 1,
    }
    command = [sys.executable, "-m", "tests.fuzz.guided", name, *(f"-{key}={value}" for key, value in options.items())]
    with log.open("w") as file, tempfile.TemporaryDirectory(dir=SCRATCH if SCRATCH.is_dir() else None) as scratch:
        seeds = Path(scratch, "seeds")
        seeds.mkdir()
        for number, data in enumerate(target(name).seeds()):
            (seeds / str(number)).write_bytes(data)
        environ = {**os.environ, "TMPDIR": scratch}
        code = subprocess.run(
            [*command, str(corpus), str(seeds)], stdout=file, stderr=file, env=environ, check=False
        ).returncode
    said = log.read_text(errors="replace")
    found = set(crashes.iterdir()) - before
    if not before | found:
        crashes.rmdir()
    if code:
        sys.stderr.write(f"{name}: see {log}; {' '.join(map(str, found)) or 'it did not run'}\n{said[-3000:]}\n")
    progress = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said) or [(0, 0, 0)]
    edges, features, kept = map(int, progress[-1])
    executions = [int(one) for one in re.findall(r"^#(\d+)\t", said, re.MULTILINE)] or [0]
    return Row(name, minutes, executions[-1], edges, features, kept, len(found) or int(code != 0))


def main(arguments: list[str]) -> int:
    """Run the targets one after another and print a table; fail where one of them broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz what reads bytes from outside.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"one of {', '.join(TARGETS)}; by default all")
    parser.add_argument("--minutes", type=float, default=10, help="of each target; by default 10")
    chosen = parser.parse_args(arguments)
    if wrong := set(chosen.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(wrong))}")
    print_row(HEADINGS)
    print_row(["---"] * len(HEADINGS))
    broken = False
    for name in chosen.targets or TARGETS:
        row = run(name, chosen.minutes)
        print_row([f"{one:,}" if isinstance(one, int) else f"{one}" for one in row])
        broken |= row.found > 0
    return int(broken)


def print_row(cells: Sequence[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
