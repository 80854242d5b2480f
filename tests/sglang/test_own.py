"""SGLang's own tests over kvferry, see own_tests.py: they start their servers and SGLang's small router themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.daemons import Daemon
from tests.kit.folders import MODELS, SMOLLM2, TINY_MLA
from tests.sglang.servers import ENVIRONMENT

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "name", ["TestParity", "TestParityOfMla", "TestAbort", "TestPlainAbort", "TestRecovery", "TestConversations"]
)
def test_of_sglang_passes(kept_daemon: Daemon, name: str) -> None:
    folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SGLANG_TEST_PD_DISAGG_BACKEND": "kvferry",
        "KVFERRY_RUNTIME_DIR": os.fspath(kept_daemon.runtime_dir),
        "MODEL": os.fspath(MODELS / SMOLLM2),
        "MLA_MODEL": os.fspath(MODELS / TINY_MLA),
    }
    done = subprocess.run(
        ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "unittest", "-v", f"tests.sglang.own_tests.{name}"],
        cwd=MODELS.parent,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-20000:]
