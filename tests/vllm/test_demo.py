"""The demo with vLLM's servers, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.kit.folders import REPOSITORY

NEW_TOKENS: Final = 4

pytestmark = pytest.mark.long


def test_the_demo_is_identical_and_its_kv_went_through_the_daemon(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "examples.demo", "--engine", "vllm", "--max-new-tokens", str(NEW_TOKENS)]
    variables = {**os.environ, "PYTHONPATH": os.fspath(REPOSITORY / "src"), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [*command, "--json", file], cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"demo: ok prompts=8 tokens={8 * NEW_TOKENS} identical=true"
    assert lines[-2].startswith("demo: 8 requests handed over by the daemon")
    requests = json.loads(file.read_bytes())["requests"]
    assert [len(one["tokens"]) for one in requests] == [NEW_TOKENS] * 8
    assert [one["tokens"] for one in requests] == [one["reference"] for one in requests]
