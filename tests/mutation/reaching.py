"""Which tests reach a line: a run of the suite under coverage, with the test's name as context. Knows no mutants.

Processes that a test starts count too: they take the name from PYTEST_CURRENT_TEST. One that a fixture starts for
several tests counts for all tests of that file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import coverage
import pytest

LAYERS: Final = ("attention", "clients", "daemon", "pools", "protocol")
DURATIONS: Final = "durations.json"
SAME_LAYER: Final = 2
CONTEXT: Final = re.compile(r"(?P<test>.+?)(?P<phase>\|\w+| \(\w+\))")
"""Of this process ``test|run``, of one that it started ``test (call)``."""


class Reach:
    """The tests of one run, by the lines that they execute and with the seconds that they take."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self._tree = tree
        self._data = coverage.CoverageData(basename=str(folder / ".coverage"))
        self._data.read()
        self._seconds: dict[str, float] = json.loads((folder / DURATIONS).read_text())
        self._lines: dict[str, dict[int, list[str]]] = {}
        self._by_file: dict[str, set[str]] = {}
        for test in self._seconds:
            self._by_file.setdefault(test.split("::", 1)[0], set()).add(test)

    def __repr__(self) -> str:
        """Show where it comes from."""
        return f"<Reach {self._data.data_filename()} {len(self._seconds)} tests>"

    def tests(self, file: str, lines: Iterable[int]) -> list[str]:
        """Return the tests that execute any of these lines, the nearest and quickest first."""
        if file not in self._lines:
            self._lines[file] = self._data.contexts_by_lineno(str((self._tree / file).resolve()))
        found: set[str] = set()
        for line in lines:
            for context in self._lines[file].get(line, ()):
                found |= self._of(context)
        return sorted(found, key=lambda test: (distance(file, test), self.seconds(test)))

    def seconds(self, test: str) -> float:
        """Return how long a test took."""
        return self._seconds[test]

    def _of(self, context: str) -> set[str]:
        said = CONTEXT.fullmatch(context)
        if said is None:
            return set()
        test = said["test"]
        if said["phase"] == " (setup)":  # a process that a fixture started
            return self._by_file.get(test.split("::", 1)[0], set())
        return {test} & self._seconds.keys()


def distance(file: str, test: str) -> int:
    """Return 0 for the module's own test file, 1 for those beside it, 2 for the layer's, 3 for others."""
    path = Path(file)
    if test.startswith(f"tests/{path.parent}/test_{path.stem}.py"):
        return 0
    if test.startswith(f"tests/{path.parent}/"):
        return 1
    return 2 if test.startswith(f"tests/{path.parts[0]}/") else 3


def write_settings(folder: Path, tree: Path) -> Path:
    """Write what coverage needs to know and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "coverage.ini"
    sources = "".join(f"\n    {(tree / layer).resolve()}" for layer in LAYERS)
    file.write_text(
        "[run]\nparallel = true\nsigterm = true\n"
        "context = ${PYTEST_CURRENT_TEST-}\n"
        f"data_file = {folder / '.coverage'}\nsource ={sources}\n"
        "disable_warnings = no-data-collected,module-not-imported,module-not-measured,no-sysmon\n"
    )
    return file


# -- as a pytest plugin: names the contexts, notes the durations


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterable[None]:
    """Count what runs from here on for this test."""
    running = coverage.Coverage.current()
    if running is not None:
        running.switch_context(f"{item.nodeid}|run")
    return (yield)


class Durations:
    """Adds up what each test takes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<Durations {len(self._seconds)}>"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """Write them down."""
        self._file.write_text(json.dumps(self._seconds))


def pytest_configure(config: pytest.Config) -> None:
    """Note durations where all reports arrive, beside the coverage."""
    settings = os.environ.get("COVERAGE_PROCESS_START")
    if settings and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Durations(Path(settings).with_name(DURATIONS)))
