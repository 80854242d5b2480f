"""Every benchmark runs and leaves well-formed rows. How fast anything is, is not tested: that is what they are for."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from benchmarks.catalogue import BENCHMARKS, TRACE
from benchmarks.measure import Effort, Row, Target, Unit, compare
from benchmarks.report import Report, summary, table

ROOT: Final = Path(__file__).resolve().parents[2]
TRACED_TOKENS: Final = (300, 128, 1)


def run_benchmarks(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Run all benchmarks, quickly, and return what each has written."""
    folder = tmp_path_factory.mktemp("bench")
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": 0, "input_length": n}) + "\n" for n in TRACED_TOKENS))
    done = run_benchmarks(*BENCHMARKS, "--quick", "--trace", trace, "--output", folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted((folder / "out").glob("*.json"))
    assert sorted(one.stem for one in files) == sorted([*BENCHMARKS, TRACE])
    found = [msgspec.json.decode(one.read_bytes(), type=Report) for one in files]
    assert all(row.name in done.stdout for report in found for row in report.rows)
    return {report.benchmark: report for report in found}


@pytest.mark.parametrize("name", [*BENCHMARKS, TRACE])
def test_a_benchmark_leaves_well_formed_rows(reports: dict[str, Report], name: str) -> None:
    report = reports[name]
    assert report.quick
    assert report.rows
    assert len({row.name for row in report.rows}) == len(report.rows)
    for row in report.rows:
        assert row.name.startswith(name)
        assert row.peer_is
        assert row.unit
        assert row.rounds > 0
        assert math.isfinite(row.ours)
        assert row.ours > 0
        assert row.peer > 0
        assert row.ratio == pytest.approx(row.ours / row.peer)
        assert (row.target is None) == (row.met is None)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_of_the_issue_has_a_target(reports: dict[str, Report], name: str) -> None:
    assert name == "hand_off" or any(row.target is not None for row in reports[name].rows)


def test_an_unknown_name_is_refused() -> None:
    done = run_benchmarks("no_such_thing")
    assert done.returncode == 2
    assert "no benchmark 'no_such_thing'" in done.stderr


def row_of(ours: float, peer: float, *, target: Target | None, better: Unit) -> Row:
    return compare(
        "one", better, ours=lambda: ours, peer=lambda: peer, peer_is="a number", rounds=3, target=target, note="why"
    )


LOWER: Final = Unit("us", "lower")
HIGHER: Final = Unit("GB/s", "higher")


@pytest.mark.parametrize(
    ("ours", "unit", "target", "met"),
    [
        (13.0, LOWER, Target(1.3), True),
        (13.1, LOWER, Target(1.3), False),
        (6.0, HIGHER, Target(0.6), True),
        (5.9, HIGHER, Target(0.6), False),
        (20.0, LOWER, Target(20, "ours"), True),
        (20.1, LOWER, Target(20, "ours"), False),
        (1.0, LOWER, None, None),
    ],
)
def test_a_target_bounds_what_it_names(ours: float, unit: Unit, target: Target | None, met: bool | None) -> None:  # noqa: FBT001  a column of the table
    row = row_of(ours, 10.0, target=target, better=unit)
    assert (row.ours, row.peer, row.ratio) == (ours, 10.0, ours / 10.0)
    assert row.met is met


def test_figures_are_medians_of_interleaved_rounds() -> None:
    turns: list[str] = []
    figures = {"ours": [99.0, 1.0, 5.0, 3.0], "peer": [99.0, 2.0, 2.0, 50.0]}

    def take(name: str) -> float:
        turns.append(name)
        return figures[name][turns.count(name) - 1]

    row = compare("x", LOWER, ours=lambda: take("ours"), peer=lambda: take("peer"), peer_is="a list", rounds=3)
    assert (row.ours, row.peer, row.rounds) == (3.0, 2.0, 3)
    assert turns == ["ours", "peer"] * 4


def test_the_table_shows_targets_and_what_was_missed() -> None:
    rows = [row_of(1.0, 10.0, target=Target(1.3), better=LOWER), row_of(1.0, 10.0, target=Target(0.6), better=HIGHER)]
    shown = table(rows)
    assert "ratio <= 1.3" in shown
    assert "ratio >= 0.6" in shown
    assert shown.count("peer: a number") == 1
    assert "one: why" in shown
    assert summary(rows) == "bench: 1 of 2 targets met; missed: one"


def test_quick_picks_the_small_number() -> None:
    assert (Effort().pick(100, 1), Effort(quick=True).pick(100, 1)) == (100, 1)
