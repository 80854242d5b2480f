"""The demo on several hosts: whole runs whose daemons and engines are on hosts of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from examples.demo.hosts import NAMESPACES
from tests.demo.demo_process import END_S, demo, lines_until
from tests.kvferry_command import run_kvferry

NEW_TOKENS: Final = 2
HOSTS: Final = 3
"""Two stages of prefill, and decode: with two hosts there is a stage less."""


@pytest.fixture(autouse=True)
def _possible(require: Callable[[object, str], None]) -> None:
    """Make sure that there can be hosts."""
    require(os.geteuid() == 0 and shutil.which("ip"), "root and iproute2, for network namespaces")
    require(importlib.util.find_spec("mooncake"), "mooncake-transfer-engine-non-cuda")


def test_a_run_on_several_hosts_is_identical_and_leaves_nothing(tmp_path: Path, small_model: dict[str, str]) -> None:
    file = tmp_path / "figures.json"
    arguments = ("--transport", "mooncake", "--hosts", str(HOSTS), "--max-new-tokens", str(NEW_TOKENS))
    with demo(*arguments, "--keep", "--json", file, environment=small_model) as process:
        lines = lines_until(process.stdout, "demo: (ok|failed)")
        assert lines[-1] == f"demo: ok prompts=8 tokens={8 * NEW_TOKENS} identical=true"
        folders = [found[1] for line in lines if (found := re.search(r"--runtime-dir (\S+)", line))]
        reports = [json.loads(run_kvferry("status", "--json", "--runtime-dir", one).stdout) for one in folders]
        process.terminate()
        assert process.wait(END_S) == 0
        own = f"kvferry-{process.pid}-"
    check(reports)
    assert json.loads(file.read_bytes())["ok"]
    assert not [file for file in NAMESPACES.iterdir() if file.name.startswith(own)]


def check(reports: list[dict[str, Any]]) -> None:
    """Check that each daemon has its own pool, and that no page of them is owned any more."""
    expected = ["demo-prefill"] * (HOSTS - 1) + ["demo-decode"]
    assert [[pool["pool"] for pool in report["pools"]] for report in reports] == [[name] for name in expected]
    for report in reports:
        assert all(pool["free"] == pool["pages"] for pool in report["pools"])
        assert (report["sessions"], report["transfers"]) == ([], [])
    assert reports[-1]["counters"]["transfers.receive.ok"] == 8
    assert [report["counters"]["transfers.send.ok"] for report in reports[:-1]] == [8] * (HOSTS - 1)
