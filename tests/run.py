"""``python -m tests.run [ARGUMENT …]``: the tests, on the host and meanwhile on a simulated NPU.

A line says how far both are. Arguments are pytest's; with some beside ``--full`` the host's run has the terminal for
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.cann_simulator.build import built_simulator

REPOSITORY: Final = Path(__file__).resolve().parents[1]
WORKERS: Final = max(2, len(os.sched_getaffinity(0)))
SPREAD: Final = ("--numprocesses", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder")
"""The tests of a file stay together: they share daemons."""
PROGRESS_FD: Final = "KVFERRY_TESTS_PROGRESS_FD"
EVERY_S: Final = 10.0
"""How often a line is written where no terminal shows one in place."""
LAST_WORDS_S: Final = 1.0
NO_TEST: Final = 5
CLOSING: Final = re.compile(r"=+ .* in [0-9.]+s.* =+$")


class Run:
    """One run of pytest, in an environment of its own: what it does, and how far it is."""

    def __init__(self, name: str, environment: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        self.name = name
        self.log = REPOSITORY / environment / "test.log"
        self.at = "collects"
        self.total = self.done = 0
        self.failed: list[str] = []
        self._command = [os.fspath(REPOSITORY / environment / "bin" / "python"), "-m", "pytest", *arguments]
        self._variables = {**os.environ, **variables}

    def __str__(self) -> str:
        """Say how far it is."""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{self.name} {self.done}/{self.total or '?'}{failed} {self.at}"

    async def ends(self) -> int:
        """Run it, its output into the log, and return its exit status."""
        read, write = os.pipe()
        reader = asyncio.StreamReader()
        pipe = os.fdopen(read, "rb")
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        variables = {**self._variables, PROGRESS_FD: str(write)}
        with self.log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command, cwd=REPOSITORY, env=variables, pass_fds=[write], stdout=log, stderr=log
            )
        os.close(write)
        try:
            hearing = asyncio.ensure_future(self._hear(reader))
            status = await process.wait()
            await asyncio.wait([hearing], timeout=LAST_WORDS_S)  # a process that is left running may have the other end
            transport.close()
            hearing.cancel()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            raise
        self.at = f"ended in {status}" if status else "passed"
        return status

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        while line := (await reader.readline()).decode().rstrip("\n"):
            kind, _, rest = line.partition(" ")
            if kind == "total":
                self.total = int(rest)
            elif kind == "at":
                self.at = rest
            elif kind == "done":
                self.done += 1
            else:
                self.failed.append(rest)
                _write(f"FAILED on {self.name}: {rest}\n")

    def closing(self) -> str:
        """Return pytest's last words: its closing line, after the failures if there are any."""
        lines = self.log.read_text(errors="replace").splitlines()
        if self.at == "passed":
            return [line for line in lines if CLOSING.match(line)][-1] + "\n"  # a library may have the last word
        failures = [number for number, line in enumerate(lines) if re.match("=+ (FAILURES|ERRORS) =+$", line)]
        return "\n".join(lines[failures[0] if failures else -40 :]) + "\n"


def _write(text: str) -> None:
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    sys.stdout.write(clear + text)
    sys.stdout.flush()


async def show(runs: Sequence[Run]) -> None:
    """Say how far the runs are until cancelled: in one line of a terminal, else in a line now and then."""
    began = time.monotonic()
    on_terminal = sys.stdout.isatty()
    while True:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        line = f"{minutes}:{seconds:02d}  " + "  |  ".join(map(str, runs))
        _write(line[: shutil.get_terminal_size().columns - 1] if on_terminal else line + "\n")
        await asyncio.sleep(0.5 if on_terminal else EVERY_S)


async def run_all(full: Sequence[str]) -> int:
    """Run both whole suites at the same time, so that no core waits."""
    runs = [
        Run("host", ".venv", [*SPREAD, *full], {}),
        Run("simulated NPU", ".venv-npu", ["--device", "npu:0", *full], npu_variables()),
    ]
    showing = asyncio.ensure_future(show(runs))
    statuses = await asyncio.gather(*(one.ends() for one in runs))
    showing.cancel()
    for one in runs:
        _write(f"==> {one.name}, {one.log.relative_to(REPOSITORY)}\n{one.closing()}")
    return max(statuses)


async def run_some(arguments: Sequence[str]) -> int:
    """Run what was selected: the host's part shows what pytest shows; one of both may have no test of it."""
    npu = Run("simulated NPU", ".venv-npu", ["--device", "npu:0", *arguments], npu_variables())
    meanwhile = asyncio.ensure_future(npu.ends())
    python = REPOSITORY / ".venv" / "bin" / "python"
    process = await asyncio.create_subprocess_exec(python, "-m", "pytest", *arguments, cwd=REPOSITORY)
    statuses = [await process.wait(), await meanwhile]
    if statuses[1] != NO_TEST:
        _write(f"==> {npu.name}, {npu.log.relative_to(REPOSITORY)}\n{npu.closing()}")
    ran = [status for status in statuses if status != NO_TEST]
    return max(ran, default=NO_TEST)


def npu_variables() -> Mapping[str, str]:
    """Return what lets torch_npu find the simulator."""
    return {"LD_LIBRARY_PATH": os.fspath(built_simulator())}


def main() -> int:
    """Run the tests; return 0 if all passed."""
    arguments = sys.argv[1:]
    some = [one for one in arguments if one != "--full"]
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(run_some(arguments) if some else run_all(arguments))
    return 130


if __name__ == "__main__":
    sys.exit(main())
