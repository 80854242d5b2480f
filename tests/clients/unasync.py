"""Makes the synchronous client's requests from the asynchronous client's: ``make sync-client``.

Not by the package ``unasync``: it replaces names in whole folders of files, but can drop neither a line nor a thread.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "clients/async_requests.py"
MADE: Final = ROOT / "clients/sync_requests.py"

FIRST_LINE: Final = "# Made from async_requests.py by `make sync-client`: change that one.\n"
ASYNC_ONLY: Final = re.compile(r"^.*# async only\n", re.MULTILINE)
IN_THREAD: Final = re.compile(r"await asyncio\.to_thread\(([\w.]+)(?:, )?")
NAMES: Final = {"AsyncIterator": "Iterator", "AsyncRequests": "SyncRequests"}
FIXES: Final = "F401,I001,UP028"
"""Imports that nothing needs any more or that are out of order, and loops that ``yield from`` does alone."""


def made(source: str) -> str:
    """Return a module whose calls wait instead of being awaited; what runs in a thread there runs where it stands."""
    source = IN_THREAD.sub(r"\1(", ASYNC_ONLY.sub("", source))
    lines = source.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        if token.type != tokenize.NAME:
            continue
        row, (start, end) = token.start[0] - 1, (token.start[1], token.end[1])
        before, after = lines[row][:start], lines[row][end:]
        if token.string in {"async", "await"}:
            lines[row] = before + after.lstrip(" ")
        else:
            lines[row] = before + NAMES.get(token.string, token.string) + after
    fixed = _ruff("check", FIRST_LINE + "".join(lines), "--quiet", "--fix-only", "--unsafe-fixes", "--select", FIXES)
    return _ruff("format", fixed)


def _ruff(command: str, source: str, *options: str) -> str:
    called = [sys.executable, "-m", "ruff", command, *options, "--no-cache", "--stdin-filename", str(MADE), "-"]
    return subprocess.run(called, input=source, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    MADE.write_text(made(SOURCE.read_text()))
