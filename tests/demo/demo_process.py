"""The demo as a process for tests: started, read line by line, and known to have ended with all it started."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

import psutil

END_S: Final = 30.0


@contextlib.contextmanager
def demo(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run the demo; on leaving it and all that it started must have ended. ``environment`` is added to ours."""
    variables = {**os.environ, **(environment or {}), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.demo", *arguments], stdout=subprocess.PIPE, text=True, env=variables
    )
    with process:
        try:
            yield process
        finally:
            started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            process.wait(END_S)
    assert psutil.wait_procs(started, END_S)[1] == []


def lines_until(output: IO[str] | None, pattern: str) -> list[str]:
    """Read lines up to one that matches."""
    assert output is not None
    lines: list[str] = []
    for line in output:
        lines.append(line.rstrip("\n"))
        if re.match(pattern, line):
            return lines
    raise AssertionError("\n".join([f"no line matches {pattern}:", *lines]))
