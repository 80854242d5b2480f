"""Running commands that may hang, crash or leave children behind, each with a time limit that always holds.

A hanging driver leaves processes that not even SIGKILL ends; ``subprocess.run`` would wait for them forever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

OUTPUT_BYTES: Final = 1 << 20
_END_S: Final = 1.0


class Outcome(msgspec.Struct, frozen=True):
    """How a command ended. ``status`` is None if it exceeded the time limit, and negative for a signal."""

    status: int | None
    output: str
    errors: str

    @property
    def last_error(self) -> str:
        """Return the last line on standard error that is not empty."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run_child(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Outcome:
    """Run a command without input, and return how it ended; one that cannot be started has status 127."""
    # Files, not pipes: a process that inherits a pipe can keep it open forever.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(  # noqa: S603  fixed commands, no shell
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(127, "", f"{command[0]}: {error.strerror}")
        status = _wait(process, timeout_s)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(OUTPUT_BYTES).decode(errors="replace"))
        return Outcome(status, *texts)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        return None
