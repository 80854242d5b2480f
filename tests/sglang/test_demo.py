"""The demo with SGLang's servers, and the benchmark of them, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from benchmarks.measure import Effort, Row
from tests.kit.folders import REPOSITORY

NEW_TOKENS: Final = 4

pytestmark = pytest.mark.long


def run(*arguments: str | Path) -> list[str]:
    """Run a module of this repository to its end, and return its lines."""
    variables = {**os.environ, "PYTHONPATH": os.fspath(REPOSITORY / "src"), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_demo_is_identical_and_its_kv_went_through_the_daemon(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    lines = run("examples.demo", "--engine", "sglang", "--max-new-tokens", str(NEW_TOKENS), "--json", file)
    assert lines[-1] == f"demo: ok prompts=8 tokens={8 * NEW_TOKENS} identical=true"
    assert lines[-2].startswith("demo: 8 requests handed over by the daemon")
    requests = json.loads(file.read_bytes())["requests"]
    assert [len(one["tokens"]) for one in requests] == [NEW_TOKENS] * 8
    assert [one["tokens"] for one in requests] == [one["reference"] for one in requests]


def test_the_benchmark_measures_both_backends() -> None:
    lines = run("benchmarks.sglang_servers", msgspec.json.encode(Effort(quick=True)).decode())
    rows = msgspec.json.decode(lines[-1], type=list[Row])
    assert {row.name.rpartition("/")[2] for row in rows} >= {"last_chunk", "first_token"}
    assert all(row.ours > 0 and row.peer > 0 for row in rows), rows
