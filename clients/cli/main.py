"""``kvferry``: the command line. A command's module is imported only when it is run, so that ``ping`` starts fast.

Exit status 0 for success, 1 for failure, 2 for invalid input: see ``console.status_of``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

from kvferry.protocol import VERSION

PIPE_COLUMNS = 80


class Help(argparse.RawDescriptionHelpFormatter):
    """argparse's help, as wide as the terminal; argparse itself imports shutil and four compressors for that."""

    def __init__(self, prog: str) -> None:
        """Ask the terminal for its width."""
        try:
            columns = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size().columns
        except (OSError, ValueError):
            columns = PIPE_COLUMNS
        super().__init__(prog, width=columns - 2)


DESCRIPTION: Final = "The KV-cache daemon of a node, and tools to inspect it."
DAEMON: Final = "daemon"
KEEPER: Final = "keeper"
PURPOSES: Final = {
    DAEMON: "run the daemon of this node",
    KEEPER: "keep the NPU memory of this node's pools from one daemon to the next",
    "ping": "ask whether the daemon answers",
    "status": "show what the daemon holds and does",
    "top": "show live in the terminal what the daemon does",
    "transfers": "show what transfers wait for, which are slow or stuck, and how the last ones ended",
    "pools": "show the holders of each pool's pages, and how old these are",
    "tiers": "show what the tiers have, find and take, and their operations",
    "probe": "send any messages, written as JSON, and print the replies and events",
    "layout": "print the manifest of a pool spec, or the memory a model's pool needs",
    "events": "show what has happened at the daemon, or to cached blocks, and go on as more does",
    "cache": "list, pin and evict cached blocks, and snapshots",
    "keys": "make, show, allow and revoke the keys by which daemons of other hosts know each other",
    "config": "show each value of the configuration and where it comes from, or check it",
    "drain": "let no new transfers begin, and go on with those under way",
    "undrain": "let transfers begin again",
    "upgrade": "let the daemon that is installed by now take the running one's place, without a stop",
    "verify": "check the daemon's books: pages, tiers and index against all that holds them",
    "plan": "print the copies of a transfer, without a daemon",
    "doctor": "check what this host has and lacks, with fixes",
    "dump": "write one file for a bug report: what the daemon and the host say, without tensors, tokens and secrets",
    "completion": "print the script by which bash or zsh completes this command",
    "systemd": "install the units of the daemon for this installation",
}
MODULES: Final = {
    "ping": "kvferry.clients.cli.inspect",
    "status": "kvferry.clients.cli.inspect",
    "top": "kvferry.clients.cli.top",
    "transfers": "kvferry.clients.cli.transfers",
    "pools": "kvferry.clients.cli.pools",
    "tiers": "kvferry.clients.cli.tiers",
    "probe": "kvferry.clients.cli.probing",
    "layout": "kvferry.clients.cli.layouts",
    "events": "kvferry.clients.cli.events",
    "cache": "kvferry.clients.cli.cache",
    "keys": "kvferry.clients.cli.keys",
    "config": "kvferry.clients.cli.configuration",
    "drain": "kvferry.clients.cli.draining",
    "undrain": "kvferry.clients.cli.draining",
    "upgrade": "kvferry.clients.cli.upgrade",
    "verify": "kvferry.clients.cli.verify",
    "plan": "kvferry.clients.cli.planning",
    "doctor": "kvferry.clients.cli.doctor.command",
    "dump": "kvferry.clients.cli.dump",
    "completion": "kvferry.clients.cli.completion",
    "systemd": "kvferry.clients.cli.units",
}
"""The module of each command, with two functions: ``add_NAME`` declares its arguments, ``NAME`` runs it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. Without ``console`` it may change process-wide state."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else ""
    if name == DAEMON:
        return _become_daemon(given[1:])
    if name == KEEPER:
        program = [sys.executable, "-P", "-m", "kvferry.daemon.process.keeper_command", *given[1:]]
        os.execv(sys.executable, program)  # noqa: S606  ourselves, no shell
    if name not in MODULES:
        _front_parser().parse_args(given)  # --help, --version, or an error: each ends the process
        raise AssertionError(given)
    if arguments is not None:
        return _run(importlib.import_module(MODULES[name]), name, given[1:])
    if sys.stdin is None:  # closed: open an empty one, before a socket gets its descriptor
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115  stays open for the process's life
    gc.disable()  # imports create no garbage; collecting would take a fifth of a ping's time
    module = importlib.import_module(MODULES[name])
    gc.freeze()
    gc.enable()
    try:
        return _run(module, name, given[1:])
    finally:
        gc.freeze()


def _run(module: ModuleType, name: str, arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"kvferry {name}", description=PURPOSES[name], formatter_class=Help)
    run: Callable[[argparse.Namespace], int] = getattr(module, name)
    getattr(module, f"add_{name}")(parser)
    options = parser.parse_args(arguments)

    from kvferry.clients.cli.console import FAILED, INTERRUPTED, status_of  # noqa: PLC0415  --help does not need it
    from kvferry.protocol.errors import KvferryError  # noqa: PLC0415  the same
    from kvferry.protocol.printable import printable  # noqa: PLC0415  the same

    try:
        return run(options)
    except KvferryError as error:
        print(printable(f"kvferry {name}: {error}"), file=sys.stderr)
        return status_of(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _become_daemon(arguments: Sequence[str]) -> int:
    import signal  # noqa: PLC0415  the quick commands do not need it

    classic = "HUP", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "IO", "PWR", "XCPU", "STKFLT"
    ignored = {*(signal.Signals[f"SIG{name}"] for name in classic), *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)}
    for number in ignored:  # the same ones as in the daemon's own module
        signal.signal(number, signal.SIG_IGN)  # threads of imported libraries receive signals as well
    signal.pthread_sigmask(signal.SIG_BLOCK, ignored)  # until the daemon can log them
    os.execv(sys.executable, [sys.executable, "-P", "-m", "kvferry.daemon", *arguments])  # noqa: S606  ourselves, no shell


def _front_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry",
        description=DESCRIPTION,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"kvferry {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in PURPOSES.items():
        commands.add_parser(name, help=purpose, add_help=False, formatter_class=Help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
