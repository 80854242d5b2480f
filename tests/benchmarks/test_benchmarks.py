"""Every benchmark runs and leaves well-formed rows. How fast anything is, is not tested: that is what they are for."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Final

import msgspec
import pytest

from benchmarks.__main__ import main
from benchmarks.catalogue import BENCHMARKS, BY_NAME_ONLY, TRACE
from benchmarks.measure import Limit, Row, Target, Unit, compare
from benchmarks.measure import row_of as row_of_rounds
from benchmarks.on_device import SIMULATED
from benchmarks.report import Report, is_beyond, summary, table
from tests.cann_simulator.build import COMPILER, NPU_PYTHON, built_simulator
from tests.kit.mooncake import mooncake_works

ROOT: Final = Path(__file__).resolve().parents[2]
TRACED: Final = (
    (300, [0, 1, 2, 3]),
    (128, [0, 1, 4]),
    (1, [0, 1, 2, 5]),
    (1, [0, 1, 4]),
    (1, [6, 7, 8]),
    (1, [0, 1, 2]),
    (1, [6, 9]),
    (1, [0, 1, 4]),
)
"""Prompts by their tokens and blocks. Each policy and each size has another hit rate."""


NEEDS_MOONCAKE: Final = ("network",)
MOONCAKE: Final = "mooncake-transfer-engine-non-cuda and libibverbs1"
WITHOUT_TARGET: Final = ("transfer", "prefix_cache", "npu_tables", "npu_transfer", "flood", "huge_pages")
"""The prefix cache's are against LMCache, which does not run here."""

ON_A_DEVICE: Final = ("device_overlap", "npu_tables", "npu_transfer")
SIMULATOR: Final = "the environment .venv-npu and g++"

ENGINES: Final = ("sglang", "vllm")
ON_THE_HOST: Final = [name for name in BENCHMARKS if name not in (*ON_A_DEVICE, *BY_NAME_ONLY)]
"""Those of SGLang and vLLM run in ``make test-sglang-full`` and ``make test-vllm-full``; robustness in its own test."""

Require = Callable[[object, str], None]
RUN_TIMEOUT_S: Final = 840
"""All benchmarks in one process, which takes two minutes of processor, while other tests have the cores."""


def run_benchmarks(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    variables = {**os.environ, **(environment or {})}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S, env=variables
    )


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Run all benchmarks, quickly, and return what each has written."""
    folder = tmp_path_factory.mktemp("bench")
    trace = folder / "trace.jsonl"
    lines = [{"timestamp": 0, "input_length": tokens, "hash_ids": blocks} for tokens, blocks in TRACED]
    trace.write_text("".join(json.dumps(one) + "\n" for one in lines))
    names = [name for name in ON_THE_HOST if name not in NEEDS_MOONCAKE or mooncake_works()]
    done = run_benchmarks(*names, "--quick", "--trace", trace, "--output", folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted((folder / "out").glob("*.json"))
    assert sorted(one.stem for one in files) == sorted([*names, TRACE])
    assert (folder / "out" / "hit_rate_trace.svg").exists()
    found = [msgspec.json.decode(one.read_bytes(), type=Report) for one in files]
    assert all(row.name in done.stdout for report in found for row in report.rows)
    return {report.benchmark: report for report in found}


@pytest.mark.full
@pytest.mark.parametrize("name", [*ON_THE_HOST, TRACE])
def test_a_benchmark_leaves_well_formed_rows(reports: dict[str, Report], name: str, require: Require) -> None:
    require(name in reports, MOONCAKE)
    check_report(reports[name], name)


def check_report(report: Report, name: str) -> None:
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
    assert name in WITHOUT_TARGET or any(row.target is not None for row in report.rows)


@pytest.mark.full
def test_the_daemons_cache_hits_what_the_simulated_one_does(reports: dict[str, Report]) -> None:
    rows = [
        row for row in reports[TRACE].rows if row.name.startswith("trace/replay/") and row.name.endswith("hit_rate")
    ]
    assert {row.name.split("/")[2] for row in rows} == {"reuse", "lru"}
    assert all(row.ratio == pytest.approx(1) for row in rows), rows


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--strict"], 1)])
def test_a_missed_target_is_a_failure_only_when_asked(
    arguments: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> list[Row]:
        one = compare("x", LOWER, ours=lambda: 2.0, peer=lambda: 1.0, peer_is="one", rounds=1, target=Target(1.5))
        return [one, msgspec.structs.replace(one, met=True), msgspec.structs.replace(one, met=None)]

    monkeypatch.setattr("benchmarks.__main__.run_apart", measure)
    assert main(["plan", "--output", str(tmp_path), *arguments]) == status
    beyond = msgspec.structs.replace(measure()[0], limit_meets=False)
    monkeypatch.setattr("benchmarks.__main__.run_apart", lambda *_: [beyond, *measure()[1:]])
    assert main(["plan", "--output", str(tmp_path), *arguments]) == 0


def test_what_cannot_be_measured_is_said_and_does_not_stop_the_others(tmp_path: Path) -> None:
    broken = tmp_path / "mooncake"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libibverbs.so.1: no such file')")
    found = run_benchmarks(
        "network", "allocation", "--quick", "--output", tmp_path / "out", environment={"PYTHONPATH": str(tmp_path)}
    )
    assert found.returncode == 1, found.stderr
    assert "not measured: " in found.stdout
    assert "libibverbs.so.1: no such file; install kvferry[mooncake]" in found.stdout
    assert [one.stem for one in (tmp_path / "out").iterdir()] == ["allocation"]


@pytest.mark.parametrize("name", ENGINES)
def test_without_an_engine_its_benchmark_says_how_to_get_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"benchmarks.{name}.PYTHON", tmp_path / "python")
    assert main([name, "--quick", "--output", str(tmp_path)]) == 1
    assert f"not measured: there is no {tmp_path / 'python'}: `make bench NAMES={name}`" in capsys.readouterr().out


@pytest.mark.full
def test_benchmarks_of_a_device_run_on_the_simulator_and_say_so(tmp_path: Path, require: Require) -> None:
    require(NPU_PYTHON.exists() and shutil.which(COMPILER), SIMULATOR)
    built_simulator()  # minutes, the first time
    done = run_benchmarks(*ON_A_DEVICE, "--quick", "--output", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ON_A_DEVICE:
        report = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=Report)
        check_report(report, name)
        assert all(SIMULATED in row.note for row in report.rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([TRACE], "'trace' needs --trace FILE"),
        (["no_such_thing"], "no benchmark 'no_such_thing'"),
        (["--trace", "no/such/file"], "no file no/such/file"),
        (["--trace", "README.md"], "README.md, line 1: "),
        (["--fast"], "--fast"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


LOWER: Final = Unit("us", "lower")
HIGHER: Final = Unit("GB/s", "higher")


def row_of(ours: float, unit: Unit, target: Target | None, limits: Sequence[float] = ()) -> Row:
    """Return a row of one round, whose limit has these ways."""
    limit = Limit(tuple(partial(float, one) for one in limits), "bare") if limits else None
    return compare(
        "one", unit, ours=lambda: ours, peer=lambda: 10.0, peer_is="a number", rounds=1, target=target, limit=limit
    )


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
    row = row_of(ours, unit, target)
    assert (row.ours, row.peer, row.ratio) == (ours, 10.0, ours / 10.0)
    assert row.met is met


@pytest.mark.parametrize(
    ("limits", "unit", "meets"),
    [
        ([20.0, 14.0], LOWER, False),
        ([20.0, 13.0], LOWER, True),
        ([5.0, 5.9], HIGHER, False),
        ([5.0, 6.0], HIGHER, True),
        ([], HIGHER, None),
    ],
)
def test_a_target_is_out_of_reach_where_no_way_to_the_limit_meets_it(
    limits: list[float],
    unit: Unit,
    meets: bool | None,  # noqa: FBT001  a column of the table
) -> None:
    row = row_of(100.0, unit, Target(1.3), limits) if unit is LOWER else row_of(1.0, unit, Target(0.6), limits)
    assert row.met is False
    assert row.limit_meets is meets
    assert is_beyond(row) is (meets is False)
    assert ("out of reach" in table([row])) is (meets is False)
    assert "limit: bare" in table([row]) or not limits
    named = "; out of reach here: one" if meets is False else "; missed: one"
    assert summary([row]) == "bench: 0 of 1 targets met" + named


@pytest.mark.parametrize(("unit", "limit"), [(LOWER, 2.0), (HIGHER, 4.0)])
def test_a_limit_is_what_a_quarter_of_its_rounds_reaches(unit: Unit, limit: float) -> None:
    rounds = [5.0, 1.0, 2.0, 4.0, 3.0]
    assert row_of_rounds("one", unit, rounds, rounds, peer_is="they", limits=[rounds]).limit == limit


def test_figures_are_medians_of_interleaved_rounds() -> None:
    turns: list[str] = []
    figures = {"ours": [99.0, 1.0, 5.0, 3.0], "peer": [99.0, 2.0, 2.0, 50.0]}

    def take(name: str) -> float:
        turns.append(name)
        return figures[name][turns.count(name) - 1]

    row = compare("x", LOWER, ours=lambda: take("ours"), peer=lambda: take("peer"), peer_is="a list", rounds=3)
    assert (row.ours, row.peer, row.rounds) == (3.0, 2.0, 3)
    assert turns == ["ours", "peer"] * 4
