"""The demo and the benchmark with SGLang's servers, and SGLang's own tests over kvferry (own_tests.py), as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.measure import Effort, Row
from tests.kit.daemons import Daemon
from tests.kit.folders import MODELS, SMOLLM2, TINY_MLA
from tests.kit.servers import assert_demo_is_identical, output_of
from tests.sglang.servers import ENVIRONMENT

pytestmark = pytest.mark.long


def test_the_demo_is_identical_and_its_kv_went_through_the_daemon(tmp_path: Path) -> None:
    assert_demo_is_identical("sglang", tmp_path / "figures.json")


def test_the_benchmark_measures_both_backends() -> None:
    lines = output_of("benchmarks.sglang_servers", msgspec.json.encode(Effort(quick=True)).decode())
    rows = msgspec.json.decode(lines[-1], type=list[Row])
    assert {row.name.rpartition("/")[2] for row in rows} >= {"last_chunk", "first_token"}
    assert all(row.ours > 0 and row.peer > 0 for row in rows), rows


@pytest.mark.parametrize(
    "name", ["TestParity", "TestParityOfMla", "TestAbort", "TestPlainAbort", "TestRecovery", "TestConversations"]
)
def test_of_sglang_passes(kept_daemon: Daemon, name: str) -> None:
    """They start their servers and SGLang's small router themselves."""
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SGLANG_TEST_PD_DISAGG_BACKEND": "kvferry",
        "KVFERRY_RUNTIME_DIR": os.fspath(kept_daemon.runtime_dir),
        "MODEL": os.fspath(MODELS / SMOLLM2),
        "MLA_MODEL": os.fspath(MODELS / TINY_MLA),
    }
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "unittest", "-v"]
    done = subprocess.run(
        [*command, f"tests.sglang.own_tests.{name}"],
        cwd=MODELS.parent,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-20000:]
