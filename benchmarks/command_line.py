"""What an operator's command costs a busy host: CPU time, children and interpreter included, as getrusage counts it."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.measure import MILLISECONDS, Contender, Effort, Row, Target, compare
from benchmarks.processes import running_daemon

MOST = Target(1.5)
COMMAND = (sys.executable, "-P", "-c", "import sys; from kvferry.clients.cli.main import main; sys.exit(main())")
BARE = (sys.executable, "-P", "-c", "import zmq, msgspec")


def measure(effort: Effort) -> list[Row]:
    """Compare each quick command with the bare import of what it stands on."""
    with running_daemon() as runtime_dir:
        daemon = ("--runtime-dir", str(runtime_dir))
        commands: dict[str, Sequence[str]] = {
            "version": ("--version",),
            "help": ("--help",),
            "ping": ("ping", *daemon),
            "status": ("status", *daemon),
            "probe": ("probe", "STATUS", *daemon),
            "probe_in_session": ("probe", "SNAPSHOTS", *daemon),
        }
        return [
            compare(
                f"command_line/{name}",
                MILLISECONDS,
                ours=_cpu_of([*COMMAND, *arguments]),
                peer=_cpu_of(BARE),
                peer_is="python -c 'import zmq, msgspec'",
                rounds=effort.pick(21, 1),
                target=MOST,
            )
            for name, arguments in commands.items()
        ]


def _cpu_of(command: Sequence[str]) -> Contender:
    def run() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)  # noqa: S603  our own command
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    return run
