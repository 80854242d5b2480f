"""Running ``kvferry`` as a user does: the installed command, in a process of its own."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path
from typing import Final

COMMAND: Final = Path(sysconfig.get_path("scripts")) / "kvferry"


def run_kvferry(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command to its end and return its status and what it printed."""
    return subprocess.run([COMMAND, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=60)
