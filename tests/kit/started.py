"""Python programs as processes of their own, started in the quickest way: see ``forked``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from kvferry.protocol.ids import HOST
from tests.kit.devices import DEVICE
from tests.kit.forked import Forked

Started: TypeAlias = subprocess.Popen[str] | Forked
REPOSITORY: Final = Path(__file__).resolve().parents[2]


def started(
    program: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    python: Path | None = None,
    stderr: int | None = None,
    pipes: bool = True,
    new_session: bool = False,
) -> Started:
    """Start ``[FILE.py, ARGUMENT …]`` or ``["-m", MODULE, ARGUMENT …]``; ``environment`` is added to this process's.

    Args:
        program: see above.
        environment: added to this process's.
        prefix: a command that runs it, in another network namespace say.
        python: another environment's interpreter.
        stderr: a descriptor; None: this process's.
        pipes: to its standard input and from its standard output, in text mode.
        new_session: let it lead a session of its own.
    """
    variables = {**os.environ, **(environment or {})}
    is_simulated = DEVICE.name.startswith("npu:") and "CANN_SIMULATOR_DIR" in os.environ
    is_script_on_host = DEVICE.name == HOST and program[0] != "-m"
    if (is_simulated or is_script_on_host) and not prefix and python is None:
        return Forked(program, variables, stderr=stderr, pipes=pipes, new_session=new_session)
    is_ours = program[0] == "-m" and program[1].startswith("kvferry.")  # no folder of this checkout on its path
    return subprocess.Popen(
        [*prefix, os.fspath(python or sys.executable), *(["-P"] if is_ours else []), *program],
        env=variables,
        cwd=None if prefix else REPOSITORY,
        stdin=subprocess.PIPE if pipes else None,
        stdout=subprocess.PIPE if pipes else None,
        stderr=stderr,
        text=True,
        start_new_session=new_session,
    )
