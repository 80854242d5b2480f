"""``make mutants``: try the catalogue's faults on the tests and say which of them nobody notices.

python -m tests.mutation map           runs the suite under coverage: which test reaches which line
python -m tests.mutation run           tries the mutants; exit status 1 where one lives on without a reason
python -m tests.mutation pick SEED     writes a new catalogue
python -m tests.mutation compare A B   what the one result kills and the other does not
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import coverage
import msgspec

from tests.mutation.catalogue import CATALOGUE, Mutant, read_catalogue, write_catalogue
from tests.mutation.picking import pick
from tests.mutation.reaching import Reach, write_settings
from tests.mutation.running import Device, Outcome, Workplace

ROOT: Final = Path(__file__).resolve().parents[2]
SEED: Final = 12
EACH: Final = 7
BUDGET_S: Final = 150.0


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", choices=("map", "run", "pick", "compare"))
    parser.add_argument(
        "rest", nargs="*", help="of map: host, npu; of run: mutants; of pick: the seed; of compare: two results"
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout, to be tried with our catalogue")
    parser.add_argument("--maps", type=Path, default=ROOT / "build" / "mutants", help="where the maps are, and go")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants" / "results.json")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of tests for one mutant and device")
    options = parser.parse_args()
    if options.command == "pick":
        write_catalogue(pick(ROOT, seed=int(options.rest[0]) if options.rest else SEED, each=EACH))
        return 0
    if options.command == "map":
        return make_maps(options.maps, options.rest)
    if options.command == "compare":
        return compare(*(_read(Path(one)) for one in options.rest))
    return run(options)


def make_maps(folder: Path, names: Sequence[str]) -> int:
    """Run the suite under coverage, on both devices at the same time, or on those named."""
    runs = {}
    for name, python, arguments, environment in _runs(ROOT):
        if names and name not in names:
            continue
        settings = write_settings(folder / name, ROOT)
        for old in (folder / name).glob(".coverage*"):
            old.unlink()
        log = folder / name / "test.log"
        print(f"==> the tests under coverage: {name}, into {log}", flush=True)
        command = [str(python), "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", *arguments]
        started = {**os.environ, **environment, "COVERAGE_PROCESS_START": str(settings), "CI": "true"}
        with log.open("wb") as output:
            runs[settings] = subprocess.Popen(
                [*command, "-p", "tests.mutation.reaching"], cwd=ROOT, env=started, stdout=output, stderr=output
            )
    statuses = [one.wait() for one in runs.values()]
    for settings in runs:
        combined = coverage.Coverage(config_file=str(settings))
        combined.combine([str(settings.parent)])
        combined.save()
    return max(statuses)


def run(options: argparse.Namespace) -> int:
    """Try the mutants, several at a time, and report."""
    mutants = [one for one in read_catalogue() if not options.rest or one.name in options.rest]
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for one in mutants:
        waiting.put(one)
    outcomes: dict[str, Outcome] = {}
    workers = [
        threading.Thread(target=_work, args=(number, waiting, outcomes, options)) for number in range(options.workers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_bytes(msgspec.json.format(msgspec.json.encode([outcomes[one] for one in sorted(outcomes)])))
    return report(mutants, outcomes)


def _work(
    number: int, waiting: queue.SimpleQueue[Mutant], outcomes: dict[str, Outcome], options: argparse.Namespace
) -> None:
    workplace = Workplace(options.tree, options.results.resolve().with_suffix("") / f"worker-{number}")
    devices = [
        Device(name, python, arguments, environment, Reach(options.maps / name, options.tree))
        for name, python, arguments, environment in _runs(workplace.folder)
    ]
    while True:
        try:
            mutant = waiting.get_nowait()
        except queue.Empty:
            return
        outcome = workplace.try_out(mutant, devices, options.budget)
        outcomes[mutant.name] = outcome
        print(f"{mutant.name} {outcome.verdict:11} {outcome.seconds:6.1f} s  {mutant.file}  {outcome.by}", flush=True)


def report(mutants: Sequence[Mutant], outcomes: dict[str, Outcome]) -> int:
    """Print what lives on, and the sums; return the exit status."""
    alive = [one for one in mutants if _lives(outcomes[one.name])]
    for one in alive:
        print(f"\n{one.name} {outcomes[one.name].verdict}: {one.file}, {one.function}\n- {one.before}\n+ {one.after}")
        print(f"  {one.harmless or 'needs a test, or a reason in ' + CATALOGUE.name}")
    sums = Counter(outcome.verdict for outcome in outcomes.values())
    print(f"\nmutants: {len(mutants)}, " + ", ".join(f"{count} {verdict}" for verdict, count in sums.most_common()))
    return int(any(not one.harmless for one in alive))


def compare(before: dict[str, Outcome], after: dict[str, Outcome]) -> int:
    """Say which mutants the first run kills and the second does not."""
    lost = [name for name, one in before.items() if one.verdict == "killed" and _lives(after.get(name))]
    won = [name for name, one in before.items() if _lives(one) and not _lives(after.get(name))]
    print(f"killed before and alive now: {' '.join(lost) or 'none'}")
    print(f"alive before and killed now: {' '.join(won) or 'none'}")
    return int(bool(lost))


def _lives(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.verdict in {"survived", "not reached", "unclear"}


def _read(file: Path) -> dict[str, Outcome]:
    return {one.name: one for one in msgspec.json.decode(file.read_bytes(), type=list[Outcome])}


def _runs(tree: Path) -> Iterator[tuple[str, Path, tuple[str, ...], dict[str, str]]]:
    """Yield the two runs of ``make test`` as this tree has them."""
    yield "host", tree / ".venv" / "bin" / "python", (), {}
    npu = tree / ".venv-npu" / "bin" / "python"
    library = subprocess.run(
        [npu, "-m", "tests.cann_simulator.build"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()
    yield "npu", npu, ("--device", "npu:0"), {"LD_LIBRARY_PATH": library}


if __name__ == "__main__":
    sys.exit(main())
