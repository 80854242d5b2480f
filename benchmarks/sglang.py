"""SGLang's servers by kvferry and by SGLang's own backends: runs ``benchmarks.sglang_servers`` where SGLang is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.measure import Effort, MissingPeerError, Row

ROOT: Final = Path(__file__).parents[1]
PYTHON: Final = ROOT / ".venv-sglang" / "bin" / "python"
TIMEOUT_S: Final = 1800


def measure(effort: Effort) -> list[Row]:
    """Return the rows of ``benchmarks.sglang_servers``.

    Raises:
        MissingPeerError: SGLang is not there, or its servers do not serve; says why.
    """
    if not PYTHON.exists():
        raise MissingPeerError(f"there is no {PYTHON}: `make bench NAMES=sglang` sets it up")
    command = [os.fspath(PYTHON), "-m", "benchmarks.sglang_servers", msgspec.json.encode(effort).decode()]
    done = subprocess.run(  # noqa: S603  our own module
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise MissingPeerError("SGLang's servers were not measured; above is why")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Row])
