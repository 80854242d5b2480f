"""Runs the tests that reach a mutant's line, in a copy of the checkout with that mutant in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from tests.mutation.catalogue import GoneError, Mutant, apply, find
from tests.mutation.reaching import SAME_LAYER, Reach, distance

TEST_TIMEOUT_S: Final = 60
FIRST_TESTS: Final = 40
"""Most mutants fall to the nearest tests; the others are started for those that did not."""

NOTHING_TO_DO: Final = 5

Verdict = Literal["killed", "survived", "not reached", "gone", "unclear"]


class Device(NamedTuple):
    """One way to run the suite: the interpreter, what it is given, and which test reaches what."""

    name: str
    python: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    reach: Reach


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a mutant.

    Attributes:
        by: the first test that failed; of what is unclear, how pytest ended.
        tests: how many were selected.
        left_out: how many of those there was no time for.
    """

    name: str
    verdict: Verdict
    by: str = ""
    tests: int = 0
    left_out: int = 0
    seconds: float = 0.0


class UnknownEndingError(Exception):
    """Pytest ended otherwise than by its tests: that says nothing of the mutant."""


class Workplace:
    """A copy of a checkout in which one mutant at a time lives."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._temporary = Path(tempfile.gettempdir()) / f"kvferry-mutants-{os.getpid()}-{folder.name}"
        self._unsound: set[str] = set()
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=tree, capture_output=True, check=True
        ).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (tree / name).is_file() or (tree / name).is_symlink():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, folder / name, follow_symlinks=False)
        for name in (".venv", ".venv-npu"):
            if not (folder / name).exists():
                (folder / name).symlink_to((tree / name).resolve())
        simulator = Path("build", "cann_simulator")
        if (tree / simulator).exists():
            shutil.copytree(tree / simulator, folder / simulator, symlinks=True)

    def __repr__(self) -> str:
        """Show where it is."""
        return f"<Workplace {self.folder}>"

    def try_out(self, mutant: Mutant, devices: Sequence[Device], budget_s: float) -> Outcome:
        """Put a mutant in, run what reaches it until a test fails, and take it out again.

        Args:
            mutant: the fault.
            devices: the runs whose tests are tried, in this order.
            budget_s: what the tests tried may take, by their durations without the mutant.
        """
        file = self.folder / mutant.file
        source = file.read_text() if file.exists() else ""
        try:
            place, changed = find(mutant, source), apply(mutant, source)
        except GoneError:
            return Outcome(name=mutant.name, verdict="gone")
        started = time.monotonic()
        tests = left_out = 0
        file.write_text(changed)
        try:
            for device in devices:
                reached = device.reach.tests(mutant.file, place.statement)
                tests += len(reached)
                chosen = _within(reached, device.reach, budget_s)
                left_out += len(reached) - len(chosen)
                for batch in _batches(mutant.file, chosen):
                    by = self.run(device, batch, budget_s)
                    while by and not self._is_sound(device, mutant, source, batch, by, budget_s):
                        by = self.run(device, [one for one in batch if one not in self._unsound], budget_s)
                    if by:
                        return _outcome(mutant, "killed", started, tests, left_out, by)
        except UnknownEndingError as ending:
            return _outcome(mutant, "unclear", started, tests, left_out, str(ending))
        finally:
            file.write_text(source)
        return _outcome(mutant, "survived" if tests else "not reached", started, tests, left_out)

    def _is_sound(
        self, device: Device, mutant: Mutant, source: str, batch: Sequence[str], test: str, budget_s: float
    ) -> bool:
        """Return whether a test that failed passes without the mutant, after the same tests; else it proves nothing."""
        if test.startswith("("):  # a hang: there is no name
            return True
        upto = batch[: batch.index(test) + 1] if test in batch else [test]
        before = [one for one in upto if one not in self._unsound]
        file = self.folder / mutant.file
        changed = file.read_text()
        file.write_text(source)
        try:
            fails = self.run(device, before, budget_s)
        finally:
            file.write_text(changed)
        if fails:
            self._unsound.add(fails)
        return not fails

    def run(self, device: Device, tests: Sequence[str], budget_s: float) -> str:
        """Run tests until one fails; return its name, or nothing."""
        if not tests:
            return ""
        _unmount_below(self._temporary)
        shutil.rmtree(self._temporary, ignore_errors=True)
        listed = self.folder / "build" / "mutant-tests.txt"
        listed.parent.mkdir(exist_ok=True)
        listed.write_text("\n".join(tests))
        command = [str(device.python), "-m", "pytest", *device.arguments, "-x", "-q", "--no-header", "--tb=no", "-rfE"]
        limits = [
            "-p",
            "no:cacheprovider",
            f"--basetemp={self._temporary}",
            f"--timeout={TEST_TIMEOUT_S}",
            f"@{listed}",
        ]
        environment = {**os.environ, **device.environment, "PYTHONPATH": str(self.folder / "src"), "CI": "true"}
        try:
            done = subprocess.run(
                [*command, *limits],
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=3 * budget_s + 2 * TEST_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return "(the run had no end)"
        return _noticed_by(done)


def _noticed_by(done: subprocess.CompletedProcess[str]) -> str:
    """Return the first test that failed, or what else became of the run; nothing where all passed."""
    if done.returncode in {0, NOTHING_TO_DO}:
        return ""
    said = done.stdout + done.stderr
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if failed:
        return failed[0].split(" ", 1)[1]
    if "+ Timeout +" in said:
        return "(a test hangs)"
    if done.returncode < 0 or "ImportError" in said or "Error" in said.rpartition("conftest")[2]:
        return f"(no test can run: {done.returncode})"
    raise UnknownEndingError(f"pytest ended with {done.returncode}: {said[-2000:]}")


def _unmount_below(folder: Path) -> None:
    """Let go of what tests that were killed had mounted: pytest could not empty its folder."""
    mounted = [line.split(" ")[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for one in mounted:
        if one.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", one], check=True)


def _batches(file: str, tests: Sequence[str]) -> list[Sequence[str]]:
    """Return the tests of the mutant's layer, the nearest by themselves, then those from afar, which take longest."""
    near = [one for one in tests if distance(file, one) <= SAME_LAYER]
    return [near[:FIRST_TESTS], near[FIRST_TESTS:], [one for one in tests if distance(file, one) > SAME_LAYER]]


def _within(tests: Sequence[str], reach: Reach, budget_s: float) -> list[str]:
    chosen: list[str] = []
    for test in tests:
        budget_s -= reach.seconds(test)
        if budget_s >= 0:
            chosen.append(test)
    return chosen


def _outcome(mutant: Mutant, verdict: Verdict, started: float, tests: int, left_out: int, by: str = "") -> Outcome:
    seconds = round(time.monotonic() - started, 1)
    return Outcome(name=mutant.name, verdict=verdict, by=by, tests=tests, left_out=left_out, seconds=seconds)
